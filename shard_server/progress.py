"""How far a phase of the start has come."""

from __future__ import annotations

import logging
import sys
import time

from tqdm import tqdm

logger = logging.getLogger(__name__)

PERIOD_S = 1.0


class Progress:
    """A bar on a terminal, else a line each second: `title: n of total`. A phase that is over sooner says nothing."""

    def __init__(self, title: str, total: int) -> None:
        self._title, self._total, self._done = title, total, 0
        self._bar = tqdm(desc=title, total=total) if sys.stderr.isatty() else None
        self._last_s = time.perf_counter()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self) -> None:
        """One more is done."""
        self._done += 1
        if self._bar is not None:
            self._bar.update()
        elif time.perf_counter() - self._last_s > PERIOD_S:
            self._last_s = time.perf_counter()
            logger.info("%s: %d of %d", self._title, self._done, self._total)
