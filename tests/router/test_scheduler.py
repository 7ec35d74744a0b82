"""The scheduler alone, stepped by hand against shards that check the cache."""

from __future__ import annotations

import collections
import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.adapter_places import AdapterPlaces
from router.errors import Cancelled, DeadlineExceeded, InternalError, ResourceExhausted, Unavailable
from router.messages import (
    Event,
    FinishReason,
    OutputParams,
    RequestDone,
    RequestFailed,
    SamplingParams,
    SequenceDelta,
    StoppingParams,
    Submission,
)
from router.scheduler import Scheduler
from router.sequence import member_seed
from router.step import ShardInfo
from tests.fake_shards import INFO, FakeShards, hashed_token


class Words:
    """A detokenizer that writes each id as a word."""

    def push(self, token_id: int) -> str:
        return f"<{token_id}>"

    def flush(self) -> str:
        return ""


def submission(key: int, num_prompt: int = 5, max_tokens: int = 4, **fields: object) -> Submission:
    stopping = fields.pop("stopping", None) or StoppingParams(max_tokens=max_tokens)
    prompt = tuple(random.Random(key).choices(range(INFO.vocab_size), k=num_prompt))
    values = {"sampling": SamplingParams(seed=key), "arrival_s": float(key), **fields}
    return Submission(key, f"r{key}", prompt, stopping=stopping, **values)  # type: ignore[arg-type]


def expected(request: Submission, index: int = 0) -> list[int]:
    """What an undisturbed run gives, by the definition of the fake shards' tokens."""
    seed = member_seed(request.sampling.seed, index)
    tokens = list(request.prompt_token_ids)
    for _ in range(request.stopping.max_tokens):
        tokens.append(hashed_token(seed, tuple(tokens), request.adapter.version if request.adapter else ""))
        if tokens[-1] in request.stopping.eos_token_ids and len(tokens) > request.stopping.min_tokens:
            break
    return tokens[len(request.prompt_token_ids) :]


class Harness:
    """Steps a scheduler with `run_ahead` unanswered steps and collects what each request got."""

    def __init__(self, info: ShardInfo = INFO, run_ahead: int = 1, adapters: AdapterPlaces | None = None) -> None:
        self.shards = FakeShards(info)
        self.scheduler = Scheduler(info, lambda skip: Words(), adapters)
        self.run_ahead = run_ahead
        self.answers: collections.deque[object] = collections.deque()
        self.events: dict[int, list[Event]] = collections.defaultdict(list)
        self.now_s = 0.0

    def collect(self, events: list[Event]) -> None:
        for event in events:
            self.events[event.key].append(event)

    def tick(self) -> bool:
        """Sends what can be sent, takes one answer; whether anything happened."""
        self.now_s += 1.0
        self.collect(self.scheduler.expire(self.now_s))
        while len(self.answers) <= self.run_ahead and (step := self.scheduler.schedule(self.now_s)):
            self.answers.append(self.shards.execute(step))
        self.scheduler.check_integrity()
        if not self.answers:
            return False
        self.collect(self.scheduler.postprocess(self.answers.popleft(), self.now_s))  # type: ignore[arg-type]
        self.scheduler.check_integrity()
        return True

    def run(self, max_ticks: int = 3000) -> None:
        for _ in range(max_ticks):
            if not self.tick():
                break
        assert self.scheduler.is_idle, "the scheduler is stuck"
        load = self.scheduler.load()
        assert (load.num_running, load.num_waiting, load.kv_cache_usage) == (0, 0, 0.0)

    def tokens(self, key: int, index: int = 0) -> list[int]:
        deltas = [e for e in self.events[key] if isinstance(e, SequenceDelta) and e.index == index]
        assert "".join(delta.text for delta in deltas) == "".join(f"<{t}>" for delta in deltas for t in delta.token_ids)
        return [token for delta in deltas for token in delta.token_ids]

    def error(self, key: int) -> Exception:
        last = self.events[key][-1]
        assert isinstance(last, RequestFailed)
        return last.error

    def done(self, key: int) -> RequestDone:
        last = self.events[key][-1]
        assert isinstance(last, RequestDone), last
        return last


SMALL_POOL = dataclasses.replace(INFO, num_blocks=9)  # 8 blocks of 4 tokens for up to 8 rows


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_tokens_are_those_of_an_undisturbed_run_at_every_depth(run_ahead: int) -> None:
    harness = Harness(run_ahead=run_ahead)
    requests = [submission(key, num_prompt=3 * key, max_tokens=key + 2) for key in range(1, 13)]
    for request in requests:
        harness.scheduler.add(request)
    harness.run()
    for request in requests:
        assert harness.tokens(request.key) == expected(request)
        done = harness.done(request.key)
        assert (done.prompt_tokens, done.completion_tokens) == (3 * request.key, request.key + 2)


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_preemption_changes_nothing_that_the_caller_sees(run_ahead: int) -> None:
    harness = Harness(SMALL_POOL, run_ahead)
    requests = [submission(key, num_prompt=6, max_tokens=20) for key in range(1, 5)]
    for request in requests:
        harness.scheduler.add(request)
    harness.run()
    assert harness.scheduler.take_tally().num_preemptions > 0
    for request in requests:
        assert harness.tokens(request.key) == expected(request)
        done = harness.done(request.key)
        assert (done.prompt_tokens, done.completion_tokens) == (6, 20)


def test_a_replay_keeps_the_border_between_prompt_and_answer() -> None:
    harness = Harness(SMALL_POOL)
    for key in range(1, 5):
        harness.scheduler.add(submission(key, num_prompt=6, max_tokens=20))
    harness.run()
    opened = [row for step in harness.shards.steps for row in step.opened]
    assert len(opened) > 4 and {row.num_prompt_tokens for row in opened} == {6}


@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 8, 31, 32, 33, 64, 100])
def test_prompts_are_computed_in_chunks_up_to_the_budget_and_each_token_once(num_prompt: int) -> None:
    harness = Harness()
    request = submission(1, num_prompt=num_prompt, max_tokens=2)
    harness.scheduler.add(request)
    harness.run()
    assert harness.tokens(1) == expected(request)
    chunks = [row.num_tokens for step in harness.shards.steps for row in step.scheduled]
    full, rest = divmod(num_prompt, INFO.max_num_batched_tokens)
    assert chunks == [INFO.max_num_batched_tokens] * full + [rest] * bool(rest) + [1]
    assert harness.shards.num_computed_tokens == num_prompt + 1


def test_running_rows_come_first_and_prompts_fill_the_rest_of_the_budget() -> None:
    harness = Harness()
    harness.scheduler.add(submission(1, num_prompt=4, max_tokens=30))
    harness.tick()
    harness.scheduler.add(submission(2, num_prompt=100, max_tokens=2))
    for _ in range(3):
        harness.tick()
    mixed = [step for step in harness.shards.steps if len(step.scheduled) == 2]
    assert [row.num_tokens for row in mixed[0].scheduled] == [1, 31]


def test_a_lower_priority_value_starts_first_and_ties_go_by_arrival() -> None:
    harness = Harness(dataclasses.replace(INFO, max_num_seqs=1))
    for key, priority in [(1, 0), (2, 5), (3, 0), (4, -1)]:
        harness.scheduler.add(submission(key, priority=priority))
    order = []
    while harness.tick():
        order += [key for key, events in harness.events.items() if events and key not in order]
    assert order == [4, 1, 3, 2]


def test_the_lowest_priority_and_latest_arrival_is_preempted() -> None:
    harness = Harness(SMALL_POOL, run_ahead=0)
    harness.scheduler.add(submission(1, num_prompt=8, max_tokens=20, priority=1))
    harness.scheduler.add(submission(2, num_prompt=8, max_tokens=20))
    harness.run()
    slots = [row.slot for step in harness.shards.steps for row in step.opened]
    assert slots[0] != slots[1] and set(slots[2:]) == {slots[0]}, "only the first one was opened again"
    assert harness.tokens(1) == expected(submission(1, num_prompt=8, max_tokens=20))


def test_a_request_as_large_as_the_pool_runs_and_the_one_behind_it_too() -> None:
    harness = Harness(SMALL_POOL)
    large, small = submission(1, num_prompt=20, max_tokens=12), submission(2, num_prompt=5)
    harness.scheduler.add(large)
    harness.scheduler.add(small)
    harness.run()
    assert harness.tokens(1) == expected(large) and harness.tokens(2) == expected(small)


def test_members_of_a_request_are_independent_and_seeded_apart() -> None:
    harness = Harness(SMALL_POOL)
    request = submission(1, num_prompt=5, max_tokens=20, n=3)
    harness.scheduler.add(request)
    harness.run()
    answers = [harness.tokens(1, index) for index in range(3)]
    assert answers == [expected(request, index) for index in range(3)]
    assert len({tuple(answer) for answer in answers}) == 3
    assert harness.done(1).completion_tokens == 60 and harness.done(1).prompt_tokens == 5


def test_an_end_token_ends_early_and_what_run_ahead_overshot_is_dropped() -> None:
    harness = Harness(run_ahead=2)
    plain = submission(1, max_tokens=10)
    eos = expected(plain)[3]
    request = dataclasses.replace(plain, stopping=StoppingParams(max_tokens=10, eos_token_ids=frozenset({eos})))
    harness.scheduler.add(request)
    harness.run()
    assert harness.tokens(1) == expected(plain)[:3]
    assert harness.done(1).completion_tokens == 4
    finish = next(e.finish for e in harness.events[1] if isinstance(e, SequenceDelta) and e.finish)
    assert (finish.reason, finish.matched_stop) == (FinishReason.STOP, eos)


def test_length_is_known_ahead_so_nothing_is_computed_past_it() -> None:
    harness = Harness(run_ahead=2)
    harness.scheduler.add(submission(1, num_prompt=5, max_tokens=4))
    harness.run()
    assert harness.shards.num_computed_tokens == 5 + 3


def test_a_row_that_is_not_finite_ends_its_request_alone() -> None:
    harness = Harness()
    requests = [submission(key, max_tokens=8) for key in (1, 2, 3)]
    for request in requests:
        harness.scheduler.add(request)
    harness.shards.poison = lambda row, scheduled: row.seed == 2 and scheduled.start > 6
    harness.run()
    assert isinstance(harness.error(2), InternalError)
    for request in (requests[0], requests[2]):
        assert harness.tokens(request.key) == expected(request)


def test_a_step_out_of_memory_ends_its_requests_and_later_ones_are_served() -> None:
    harness = Harness(run_ahead=1)
    harness.scheduler.add(submission(1))
    harness.shards.out_of_memory_at = {1}
    harness.run()
    assert isinstance(harness.error(1), ResourceExhausted)
    later = submission(2)
    harness.scheduler.add(later)
    harness.run()
    assert harness.tokens(2) == expected(later)


def test_a_cancelled_request_frees_its_blocks_at_once_even_between_a_step_and_its_answer() -> None:
    harness = Harness()
    harness.scheduler.add(submission(1, max_tokens=40))
    harness.tick()
    assert harness.scheduler.num_unanswered_steps and harness.scheduler.load().kv_cache_usage > 0
    harness.collect(harness.scheduler.cancel(1))
    assert harness.scheduler.load().kv_cache_usage == 0
    assert isinstance(harness.error(1), Cancelled)
    again = submission(2)
    harness.scheduler.add(again)
    harness.run()
    assert harness.tokens(2) == expected(again)


@pytest.mark.parametrize("is_started", [False, True])
def test_a_deadline_ends_a_request_in_the_queue_and_while_it_runs(is_started: bool) -> None:
    harness = Harness(dataclasses.replace(INFO, max_num_seqs=1))
    if not is_started:
        harness.scheduler.add(submission(1, max_tokens=20))
    harness.scheduler.add(submission(2, max_tokens=50, deadline_s=6.0))
    harness.run()
    assert isinstance(harness.error(2), DeadlineExceeded)
    assert bool(harness.tokens(2)) == is_started


def test_when_the_shards_are_lost_every_request_gets_one_end() -> None:
    harness = Harness(dataclasses.replace(INFO, max_num_seqs=2))
    for key in (1, 2, 3, 4):
        harness.scheduler.add(submission(key, max_tokens=50))
    harness.tick()
    harness.collect(harness.scheduler.fail_all("a shard was lost"))
    assert harness.scheduler.is_idle
    for key in (1, 2, 3, 4):
        assert isinstance(harness.error(key), Unavailable)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_random_interleavings_lose_nothing(data: st.DataObject) -> None:
    pool = data.draw(st.integers(8, 20))
    info = dataclasses.replace(
        INFO,
        num_blocks=pool + 1,
        max_num_seqs=data.draw(st.integers(1, 5)),
        max_num_batched_tokens=data.draw(st.sampled_from([1, 3, 8, 32])),
    )
    harness = Harness(info, run_ahead=data.draw(st.integers(0, 2)))
    requests: dict[int, Submission] = {}
    cancelled = set()
    for key in range(1, data.draw(st.integers(1, 10)) + 1):
        length = data.draw(st.integers(1, 4 * 8 - 1))
        requests[key] = submission(
            key,
            num_prompt=length,
            max_tokens=data.draw(st.integers(1, 4 * 8 - length)),
            n=data.draw(st.integers(1, 2)),
            priority=data.draw(st.integers(-1, 1)),
            output=OutputParams(num_logprobs=data.draw(st.sampled_from([None, 0, 2]))),
        )
        harness.scheduler.add(requests[key])
        for _ in range(data.draw(st.integers(0, 4))):
            harness.tick()
        if data.draw(st.integers(0, 4)) == 0:
            victim = data.draw(st.sampled_from(sorted(requests)))
            ended = harness.scheduler.cancel(victim)
            harness.collect(ended)
            cancelled |= {victim} if ended else set()
    harness.run()
    for key, request in requests.items():
        ends = [event for event in harness.events[key] if not isinstance(event, SequenceDelta)]
        assert len(ends) == 1
        for index in range(request.n):
            tokens, full = harness.tokens(key, index), expected(request, index)
            assert tokens == full[: len(tokens)] if key in cancelled else tokens == full
