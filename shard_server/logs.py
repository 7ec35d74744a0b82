"""Log records as text or JSON, one line each, on standard error."""

from __future__ import annotations

import datetime
import json
import logging
import sys


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO shard_server.server rank=0: message`"""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        """One line; a traceback, if there is one, follows it."""
        line = f"{_time(record)} {record.levelname} {record.name} rank={self._rank}: {record.getMessage()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, rank, message, and error for a traceback."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        entry = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "rank": self._rank,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def configure(level: str, form: str, rank: int) -> None:
    """Sends every record of at least `level` to standard error; `form` is text or json."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(rank) if form == "json" else TextFormatter(rank))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("asyncio").setLevel(max(logging.WARNING, logging.getLogger().level))


def fatal(rank: int | None, cause: str) -> None:
    """The line that says why this process ends, in the form that the launcher's reader looks for."""
    where = "" if rank is None else f"rank {rank}: "
    sys.stderr.write(f"FATAL: {where}{' '.join(cause.split())}\n")
    sys.stderr.flush()


def _time(record: logging.LogRecord) -> str:
    moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
