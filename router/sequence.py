"""One answer in the making, and the request that it belongs to."""

from __future__ import annotations

import dataclasses

from router.messages import RequestDone, Submission, Timing
from router.step import OpenRow
from router.stopping import StopChecker

MASK_64 = 2**64 - 1
GOLDEN_64 = 0x9E3779B97F4A7C15


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """One of a request's n answers.

    Its tokens are the prompt's and the generated ones; a replay after a preemption computes both again, but
    `num_prompt_tokens` stays the border between them. While steps are under way the shard knows up to
    `num_pending_samples` more tokens than we do:

        [0, num_computed_tokens)                            sent to be computed
        [0, num_shard_tokens)                               written or sampled into the shards' token table
        [0, num_tokens)                                     known here
        [num_tokens, num_tokens + num_pending_samples)      sampled in steps that are not answered yet
    """

    group: SequenceGroup
    index: int
    checker: StopChecker
    output_token_ids: list[int] = dataclasses.field(default_factory=list)
    block_table: list[int] = dataclasses.field(default_factory=list)
    slot: int | None = None
    num_computed_tokens: int = 0
    num_shard_tokens: int = 0
    num_unanswered_steps: int = 0
    num_pending_samples: int = 0
    is_finished: bool = False
    last_token_s: float | None = None
    adapter_slot: int = -1  # of the adapter while the sequence runs; -1: none
    is_parked: bool = False  # waits for its adapter, apart from the queue

    @property
    def order(self) -> tuple[int, float, int, int]:
        """Who goes first: lower priority value, then the earlier request, then its earlier member."""
        submission = self.group.submission
        return (submission.priority, submission.arrival_s, submission.key, self.index)

    @property
    def adapter_version(self) -> str | None:
        """The adapter's version; None for the base model."""
        adapter = self.group.submission.adapter
        return None if adapter is None else adapter.version

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.group.submission.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens known here."""
        return len(self.group.submission.prompt_token_ids) + len(self.output_token_ids)

    @property
    def is_decoding(self) -> bool:
        """Whether the next token to compute is one that the shards sampled; otherwise we send it."""
        return self.num_shard_tokens > self.num_computed_tokens

    @property
    def can_sample(self) -> bool:
        """Whether one more token is wanted after those that are on their way."""
        wanted = self.group.submission.stopping.max_tokens
        return len(self.output_token_ids) + self.num_pending_samples < wanted

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """Known tokens at positions [start, stop)."""
        prompt = self.group.submission.prompt_token_ids
        border = len(prompt)
        return (*prompt[start:stop], *self.output_token_ids[max(0, start - border) : max(0, stop - border)])

    def opening(self, slot: int) -> OpenRow:
        """What the shards need to know of this sequence when it gets a slot."""
        submission = self.group.submission
        sampling, stopping = submission.sampling, submission.stopping
        num_logprobs = submission.output.num_logprobs
        stop_ids = stopping.stop_token_ids | stopping.eos_token_ids if stopping.min_tokens else frozenset()
        return OpenRow(
            slot=slot,
            num_prompt_tokens=len(submission.prompt_token_ids),
            seed=member_seed(sampling.seed, self.index),
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_tokens=stopping.min_tokens,
            num_logprobs=-1 if num_logprobs is None else num_logprobs,
            stop_ids=tuple(sorted(stop_ids)),
            adapter_slot=self.adapter_slot,
        )


@dataclasses.dataclass(slots=True, eq=False)
class SequenceGroup:
    """A request: its members run, wait and finish independently."""

    submission: Submission
    members: list[Sequence] = dataclasses.field(default_factory=list)
    first_scheduled_s: float | None = None
    first_token_s: float | None = None

    @property
    def is_finished(self) -> bool:
        """Whether every member is."""
        return all(member.is_finished for member in self.members)

    def waits_for(self, version: str) -> bool:
        """Whether a member waits that needs this version of an adapter."""
        return any(m.adapter_version == version and m.slot is None and not m.is_finished for m in self.members)

    def done(self, now_s: float) -> RequestDone:
        """The event that ends the request."""
        submission = self.submission
        assert self.first_scheduled_s is not None and self.first_token_s is not None
        return RequestDone(
            key=submission.key,
            prompt_tokens=len(submission.prompt_token_ids),
            completion_tokens=sum(len(member.output_token_ids) for member in self.members),
            cached_tokens=0,
            timing=Timing(
                queue_s=self.first_scheduled_s - submission.arrival_s,
                prefill_s=self.first_token_s - self.first_scheduled_s,
                decode_s=now_s - self.first_token_s,
                time_to_first_token_s=self.first_token_s - submission.arrival_s,
                e2e_s=now_s - submission.arrival_s,
            ),
        )


def member_seed(seed: int, index: int) -> int:
    """The seed of member `index`: the request's own for 0, else splitmix64 (Steele et al. 2014) of (seed, index)."""
    if index == 0:
        return seed
    mixed = (seed + index * GOLDEN_64) & MASK_64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK_64
    return mixed ^ (mixed >> 31)
