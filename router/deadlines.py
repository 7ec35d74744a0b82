"""Which requests' deadlines pass when."""

from __future__ import annotations

import heapq
from collections.abc import Container

# Deadlines of ended requests that may be kept, beside twice as many as there are requests.
MAX_STALE = 64


class Deadlines:
    """Deadlines in time.monotonic() seconds, the next one first; ended requests leave theirs behind for a while."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next_s(self) -> float | None:
        """The first deadline to pass, or None."""
        return self._heap[0][0] if self._heap else None

    def add(self, key: int, deadline_s: float) -> None:
        """Request `key` ends then."""
        heapq.heappush(self._heap, (deadline_s, key))

    def take_passed(self, now_s: float) -> list[int]:
        """Requests whose deadline has passed, ended ones among them; they are forgotten."""
        passed = []
        while self._heap and self._heap[0][0] <= now_s:
            passed.append(heapq.heappop(self._heap)[1])
        return passed

    def tidy(self, alive: Container[int], num_alive: int) -> None:
        """Forgets deadlines of ended requests once they are many: they may not pile up until they pass."""
        if len(self._heap) > 2 * num_alive + MAX_STALE:
            self._heap = [entry for entry in self._heap if entry[1] in alive]
            heapq.heapify(self._heap)
