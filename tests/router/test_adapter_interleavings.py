"""Adapters under random requests, loads, failures, cancellations, pins and restarts: everyone gets the right adapter.

FakeShards refuses a binding of a version that is not staged, of a slot in use, and a row whose cached keys were made
with another adapter. A sequence that nobody would ever start shows as a scheduler that is stuck.
"""

from __future__ import annotations

import dataclasses

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.errors import Cancelled, FailedPrecondition, RequestError
from router.messages import Event, RequestDone, RequestFailed, SequenceDelta, Submission
from tests.fake_shards import INFO
from tests.router.adapter_harness import AdapterHarness, adapted, version_of
from tests.router.test_scheduler import expected

NAMES = ["a", "b", "c", "d", "e"]
POOL_BLOCKS = 8


class Interleavings(RuleBasedStateMachine):
    """Steps are sent and answered, and loads end, in any interleaving with what callers do."""

    @initialize(
        max_loras=st.integers(1, 3),
        more_host=st.integers(0, 2),
        max_num_seqs=st.integers(1, 5),
        budget=st.sampled_from([3, 8, 32]),
    )
    def make(self, max_loras: int, more_host: int, max_num_seqs: int, budget: int) -> None:
        info = dataclasses.replace(
            INFO, num_blocks=POOL_BLOCKS + 1, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget
        )
        self.harness = AdapterHarness(max_loras, max_loras + more_host, info, run_ahead=0, is_auto=False)
        self.requests: dict[int, Submission] = {}
        self.cancelled: set[int] = set()
        self.has_failures = False

    @rule(
        name=st.none() | st.sampled_from(NAMES),
        length=st.integers(1, 12),
        max_tokens=st.integers(1, 8),
        n=st.integers(1, 2),
        priority=st.integers(-1, 1),
    )
    def submit(self, name: str | None, length: int, max_tokens: int, n: int, priority: int) -> None:
        key = len(self.requests) + 1
        self.requests[key] = adapted(key, name, length, max_tokens, n=n, priority=priority)
        self.harness.add(self.requests[key])

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.requests:
            key = data.draw(st.sampled_from(sorted(self.requests)))
            if ended := self.harness.scheduler.cancel(key):
                self.cancelled.add(key)
                self.harness.collect(ended)

    @rule(data=st.data(), fails=st.booleans())
    def end_load(self, data: st.DataObject, fails: bool) -> None:
        self.harness.take_orders()
        if self.harness.loading:
            self.has_failures |= fails
            self.harness.end_load(data.draw(st.sampled_from(self.harness.loading)), "broken" if fails else "")

    @rule(name=st.sampled_from(NAMES))
    def pin(self, name: str) -> None:
        places = self.harness.places
        if places.max_loras > 1 and not any(places._host.is_pinned(version_of(other)) for other in NAMES):
            places.pin(version_of(name))

    @rule(name=st.sampled_from(NAMES))
    def unpin(self, name: str) -> None:
        self.harness.places.unpin(version_of(name))

    @rule(name=st.sampled_from(NAMES))
    def forget(self, name: str) -> None:
        self.harness.places.forget(version_of(name))

    @rule()
    def send(self) -> None:
        self.harness.now_s += 1.0
        if len(self.harness.sent) < 3:
            self.harness.send()

    @rule(count=st.integers(1, 3))
    def answer(self, count: int) -> None:
        while count and self.harness.answer():
            count -= 1

    @rule(survivors=st.sets(st.sampled_from(NAMES)))
    def restart(self, survivors: set[str]) -> None:
        """What was under way is answered first; that steps may be lost is the engine's matter."""
        harness = self.harness
        self.answer(3)
        for sequence in list(harness.scheduler._places.running):
            harness.scheduler._preempt(sequence)
        harness.shards.bound.clear()
        harness.loading.clear()
        harness.staged.intersection_update(map(version_of, survivors))
        harness.places.restart(frozenset(harness.staged))
        harness.staged.intersection_update(harness.places._host.versions)

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "harness"):
            self.harness.scheduler.check_integrity()

    def ends(self, key: int) -> list[Event]:
        return [event for event in self.harness.events[key] if not isinstance(event, SequenceDelta)]

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        harness = self.harness
        harness.is_auto = True
        harness.take_orders()
        for version in list(harness.loading):
            harness.end_load(version)
        harness.run()
        for key, request in self.requests.items():
            (end,) = self.ends(key)
            if isinstance(end, RequestFailed):
                self.check_error(key, end.error)
            for index in range(request.n):
                full, got = expected(request, index), harness.tokens(key, index)
                assert got == full if isinstance(end, RequestDone) else got == full[: len(got)]
        assert harness.places.load.running == harness.places.load.waiting == ()
        assert harness.places.num_parked == 0

    def check_error(self, key: int, error: RequestError) -> None:
        if isinstance(error, FailedPrecondition):
            assert self.has_failures and self.requests[key].adapter is not None
        else:
            assert isinstance(error, Cancelled) and key in self.cancelled


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
