"""A step in the making, and the sequences that compute in it."""

from __future__ import annotations

from router.sequence import Sequence
from router.step import FillTokens, ScheduledRow, Step


class PlannedStep:
    """`rows[i]` is the sequence of `step.scheduled[i]`; `budget` is how many tokens more the step may compute."""

    def __init__(self, step_id: int, budget: int) -> None:
        self.step = Step(step_id)
        self.rows: list[Sequence] = []
        self.budget = budget

    def open(self, sequence: Sequence) -> None:
        """Tells the shards of a sequence that has just got its slot."""
        assert sequence.slot is not None
        self.step.opened.append(sequence.opening(sequence.slot))

    def compute(self, sequence: Sequence, num_tokens: int, new_blocks: list[int]) -> None:
        """Takes `num_tokens` more of the sequence into the step, with those of them that the shards do not have."""
        assert sequence.slot is not None
        start = sequence.num_computed_tokens
        end = start + num_tokens
        known = sequence.num_tokens
        if sequence.num_shard_tokens < min(end, known):
            self.step.filled.append(FillTokens(sequence.slot, start, sequence.tokens(start, end)))
        is_sampled = end == known + sequence.num_pending_samples
        self.step.scheduled.append(ScheduledRow(sequence.slot, start, num_tokens, is_sampled, tuple(new_blocks)))
        self.rows.append(sequence)
        self.budget -= num_tokens
        sequence.num_computed_tokens = end
        sequence.num_shard_tokens = end + is_sampled
        sequence.num_unanswered_steps += 1
        sequence.num_pending_samples += is_sampled
