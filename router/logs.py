"""Log records as text or JSON, one line each, on standard error; never a prompt's or an answer's text."""

from __future__ import annotations

import datetime
import json
import logging
import sys
from typing import Any

FIELDS = "cohort_fields"  # the attribute of a LogRecord that holds its structured values


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO router.server: message key=value …`"""

    def format(self, record: logging.LogRecord) -> str:
        """One line; a traceback, if there is one, follows it."""
        values = "".join(f" {name}={_text(value)}" for name, value in _values(record).items())
        line = f"{_time(record)} {record.levelname} {record.name}: {_one_line(record.getMessage())}{values}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, the structured values, and error for a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        entry: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_values(record),
        }
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


def configure(level: str, form: str) -> None:
    """Sends every record of at least `level` to standard error; `form` is text or json."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # Their info lines tell an operator nothing.
    for name in ("httpx", "httpcore", "urllib3", "huggingface_hub", "asyncio"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))


def event(logger: logging.Logger, message: str, **values: object) -> None:
    """Logs `message` with structured values."""
    logger.info(message, extra={FIELDS: values})


def _values(record: logging.LogRecord) -> dict[str, object]:
    values: dict[str, object] = getattr(record, FIELDS, {})
    return values


def _time(record: logging.LogRecord) -> str:
    moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    # A caller's id must not start a line of its own or fake a second value.
    needs_quotes = not text or not text.isprintable() or set(text) & set(' "=')
    return json.dumps(text, ensure_ascii=False) if needs_quotes else text


def _one_line(text: str) -> str:
    return text if text.isprintable() else text.replace("\r", "\\r").replace("\n", "\\n")
