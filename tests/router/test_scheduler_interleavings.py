"""The scheduler under random submissions, cancellations, deadlines, faults and answers: everyone gets what was asked.

FakeShards checks on its side that nothing is computed out of order, that no row attends to another's key or to one that
nobody wrote, and that a slot has one owner.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.errors import Cancelled, DeadlineExceeded, InternalError, RequestError, ResourceExhausted
from router.messages import Event, RequestDone, RequestFailed, SequenceDelta, StoppingParams, Submission
from tests.fake_shards import INFO, Row
from tests.router.test_scheduler import Harness, expected, submission

POOL_BLOCKS = 8
LONGEST = POOL_BLOCKS * INFO.block_size


class Interleavings(RuleBasedStateMachine):
    """Steps are sent and answered in any interleaving with what callers do."""

    @initialize(max_num_seqs=st.integers(1, 5), budget=st.sampled_from([1, 3, 8, 32]), spare=st.integers(0, 8))
    def make(self, max_num_seqs: int, budget: int, spare: int) -> None:
        info = dataclasses.replace(
            INFO, num_blocks=POOL_BLOCKS + spare + 1, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget
        )
        self.harness = Harness(info, run_ahead=0)
        self.requests: dict[int, Submission] = {}
        self.allowed: dict[int, type[RequestError]] = {}  # the error that a request may or must have
        self.poisoned: set[int] = set()
        self.may_fail = False  # A request to which the same happened twice.
        self.harness.shards.poison = lambda row, scheduled: self.is_poisoned(row)

    def is_poisoned(self, row: Row) -> bool:
        return row.seed in self.poisoned

    @rule(
        length=st.integers(1, LONGEST - 1),
        max_tokens=st.integers(1, 20),
        n=st.integers(1, 3),
        priority=st.integers(-1, 1),
        stops_at=st.none() | st.integers(0, 6),
        seconds=st.none() | st.integers(1, 30),
        text=st.none() | st.integers(1, 2),
    )
    def submit(
        self,
        length: int,
        max_tokens: int,
        n: int,
        priority: int,
        stops_at: int | None,
        seconds: int | None,
        text: int | None,
    ) -> None:
        """Prompts of the same `text` begin alike."""
        key = len(self.requests) + 1
        max_tokens = min(max_tokens, LONGEST - length)
        request = submission(key, length, max_tokens, n=n, priority=priority)
        if text is not None:
            request = dataclasses.replace(request, prompt_token_ids=submission(text, length).prompt_token_ids)
        if stops_at is not None and stops_at < max_tokens:
            eos = frozenset({expected(request)[stops_at]})
            request = dataclasses.replace(request, stopping=StoppingParams(max_tokens, eos_token_ids=eos))
        if seconds is not None:
            request = dataclasses.replace(request, deadline_s=self.harness.now_s + seconds)
            self.allowed[key] = DeadlineExceeded
        self.requests[key] = request
        self.harness.scheduler.add(request)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.requests:
            key = data.draw(st.sampled_from(sorted(self.requests)))
            if ended := self.harness.scheduler.cancel(key):
                self.allowed[key] = Cancelled
                self.harness.collect(ended)

    @rule(data=st.data())
    def poison(self, data: st.DataObject) -> None:
        alive = sorted(key for key in self.requests if not self.ends(key))
        if alive:
            key = data.draw(st.sampled_from(alive))
            if key not in self.allowed:
                self.poisoned.add(key)
                self.allowed[key] = InternalError

    @rule()
    def run_out_of_memory(self) -> None:
        """In the next step: whoever is in it may end that way."""
        shards = self.harness.shards
        shards.out_of_memory_at.add(shards.last_step_id + 1)
        self.may_fail = True
        self.send()

    @rule(blames_rows=st.booleans())
    def lose_epoch(self, blames_rows: bool) -> None:
        self.may_fail |= blames_rows
        self.harness.lose_epoch(blames_rows)

    @rule()
    def send(self) -> None:
        harness = self.harness
        harness.now_s += 1.0
        harness.collect(harness.scheduler.expire(harness.now_s))
        if len(harness.answers) < 4 and (step := harness.scheduler.schedule(harness.now_s)):
            harness.answers.append(harness.shards.execute(step))

    @rule(count=st.integers(1, 3))
    def answer(self, count: int) -> None:
        harness = self.harness
        while count and harness.answers:
            harness.collect(harness.scheduler.postprocess(harness.answers.popleft(), harness.now_s))  # type: ignore[arg-type]
            count -= 1

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "harness"):
            self.harness.scheduler.check_integrity()
            for key in self.requests:
                assert len(self.ends(key)) <= 1

    def ends(self, key: int) -> list[Event]:
        return [event for event in self.harness.events[key] if not isinstance(event, SequenceDelta)]

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        self.harness.run()
        self.harness.scheduler.check_integrity()
        for key, request in self.requests.items():
            (end,) = self.ends(key)
            if isinstance(end, RequestFailed):
                others = (ResourceExhausted, InternalError) if self.may_fail else ()
                assert type(end.error) in (self.allowed.get(key), *others)
            self.check_tokens(request, isinstance(end, RequestDone))

    def check_tokens(self, request: Submission, is_done: bool) -> None:
        for index in range(request.n):
            full = list(answer_of(request, index))
            got = self.harness.tokens(request.key, index)
            assert got == full if is_done else got == full[: len(got)]


def answer_of(request: Submission, index: int) -> Iterable[int]:
    """The tokens that the caller should see: an end-of-sequence token is not among them."""
    for token in expected(request, index):
        if token in request.stopping.eos_token_ids:
            return
        yield token


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
