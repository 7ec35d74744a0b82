"""Sequences of steps that failed: one of them may be the cause, so each is computed apart from all others."""

from __future__ import annotations

import bisect

from router.sequence import Sequence

MAX_TOKENS = 256
"""Most tokens of a step of a suspect: small steps, since a large one may have been the cause."""
MAX_LOST_EPOCHS = 2
"""A sequence that was under way at the end of so many epochs, without having been cleared between them, ends."""
NUM_PROOFS = 2
"""Tokens that clear a suspect: one from a step over its whole text, and one from a step that decodes."""


class Quarantine:
    """Suspects in their order. The first one runs, alone in its steps, until it is cleared by new tokens."""

    def __init__(self) -> None:
        self._suspects: list[Sequence] = []

    @property
    def head(self) -> Sequence | None:
        """Whose turn it is."""
        return self._suspects[0] if self._suspects else None

    @property
    def num_waiting(self) -> int:
        """Suspects without a slot."""
        return sum(suspect.slot is None for suspect in self._suspects)

    def enter(self, sequence: Sequence) -> None:
        """`sequence`, which neither runs nor waits, was in a step that failed."""
        sequence.is_suspect, sequence.num_proofs = True, 0
        bisect.insort(self._suspects, sequence, key=lambda suspect: suspect.order)

    def prove(self, sequence: Sequence) -> None:
        """A sequence that was under way in an epoch that ended has a new token."""
        sequence.num_proofs += 1
        if sequence.num_proofs >= NUM_PROOFS:
            sequence.num_lost_epochs = sequence.num_proofs = 0
            if sequence.is_suspect:
                self.leave(sequence)

    def leave(self, sequence: Sequence) -> None:
        """It is cleared, or has ended."""
        sequence.is_suspect = False
        self._suspects.remove(sequence)

    def check_integrity(self, members: list[Sequence]) -> None:
        """Asserts that exactly the marked ones of `members`, all sequences there are, stand here."""
        marked = sorted(id(member) for member in members if member.is_suspect)
        assert marked == sorted(map(id, self._suspects)), "a suspect is lost or stands here twice"
        assert sum(suspect.slot is not None for suspect in self._suspects) <= 1, "suspects run one at a time"
