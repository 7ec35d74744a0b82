"""The sequences that wait for a slot."""

from __future__ import annotations

import heapq

from router.sequence import Sequence

# Entries of ended sequences that the heap may hold, beside as many as it has live ones.
MAX_STALE = 64


class WaitingQueue:
    """Waiting sequences in their order. One that ends while it waits leaves its entry behind, to be dropped later."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, int, int], Sequence]] = []
        self._num_live = 0

    def __len__(self) -> int:
        return self._num_live

    def push(self, sequence: Sequence) -> None:
        """`sequence` waits from now on."""
        heapq.heappush(self._heap, (sequence.order, sequence))
        self._num_live += 1

    def head(self) -> Sequence | None:
        """Whose turn is next."""
        while self._heap and self._heap[0][1].is_finished:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> None:
        """Takes the head out."""
        heapq.heappop(self._heap)
        self._num_live -= 1

    def leave(self) -> None:
        """A waiting sequence was marked as finished."""
        self._num_live -= 1
        if len(self._heap) > 2 * self._num_live + MAX_STALE:  # Nothing piles up behind a head that stays for long.
            self._heap = [entry for entry in self._heap if not entry[1].is_finished]
            heapq.heapify(self._heap)

    def check_integrity(self, waiting: list[Sequence]) -> None:
        """Asserts that exactly the sequences in `waiting` stand here, once each, beside few ended ones."""
        live = [entry[1] for entry in self._heap if not entry[1].is_finished]
        assert sorted(map(id, live)) == sorted(map(id, waiting)), "a waiting sequence is lost or stands here twice"
        assert len(live) == self._num_live, "the number of waiting sequences is wrong"
        assert len(self._heap) <= 2 * self._num_live + MAX_STALE + 1, "ended sequences pile up"
