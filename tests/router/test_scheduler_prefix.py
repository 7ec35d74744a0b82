"""Shared prefixes in the scheduler: what is computed once, and that no answer ever shows it."""

from __future__ import annotations

import dataclasses
import random

import pytest

from router.messages import AdapterRef, StoppingParams, Submission
from router.scheduler import Scheduler
from router.step import ShardInfo
from tests.fake_shards import INFO
from tests.router.adapter_harness import AdapterHarness, adapted
from tests.router.test_scheduler import SMALL_POOL, Harness, Words, expected, submission

BLOCK = INFO.block_size
WIDE = dataclasses.replace(INFO, block_size=16, num_blocks=40)


def request(key: int, prompt: list[int], max_tokens: int = 2, **fields: object) -> Submission:
    return dataclasses.replace(submission(key, 1, max_tokens, **fields), prompt_token_ids=tuple(prompt))


def cached(harness: Harness, key: int) -> int:
    return harness.done(key).cached_tokens


def run_one(harness: Harness, asked: Submission) -> int:
    """Runs a request alone; how many tokens were computed for it."""
    before = harness.shards.num_computed_tokens
    harness.scheduler.add(asked)
    harness.run()
    assert [harness.tokens(asked.key, index) for index in range(asked.n)] == [
        expected(asked, index) for index in range(asked.n)
    ]
    return harness.shards.num_computed_tokens - before


@pytest.mark.parametrize(("length", "num_cached"), [(1, 0), (15, 0), (16, 0), (17, 16), (32, 16), (33, 32)])
def test_at_least_the_last_token_is_computed_and_only_whole_blocks_are_shared(length: int, num_cached: int) -> None:
    """Public bug vllm-project/vllm#11186: a prompt that was cached as a whole broke the chain of blocks."""
    harness = Harness(WIDE)
    prompt = list(range(length))
    cold = run_one(harness, request(1, prompt))
    warm = run_one(harness, request(2, prompt))
    assert (cached(harness, 1), cached(harness, 2)) == (0, num_cached)
    assert warm == cold - num_cached


def test_tokens_that_were_generated_are_shared_too() -> None:
    harness = Harness()
    first = request(1, list(range(6)), max_tokens=7)
    run_one(harness, first)
    whole = [*first.prompt_token_ids, *expected(first)]  # 13 tokens; the last one was never computed.
    assert run_one(harness, request(2, [*whole, 1, 2])) == 15 - 12 + 1
    assert cached(harness, 2) == 12


def test_a_text_that_differs_in_one_token_shares_what_comes_before_its_block() -> None:
    harness = Harness()
    prompt = list(range(20))
    run_one(harness, request(1, prompt))
    run_one(harness, request(2, [*prompt[:9], 999, *prompt[10:]]))
    run_one(harness, request(3, [999, *prompt[1:]]))
    assert [cached(harness, key) for key in (2, 3)] == [8, 0]


def test_only_requests_with_the_same_salt_share() -> None:
    harness = Harness()
    prompt = list(range(10))
    for key, salt in enumerate(["", "a", "a", "b", ""], start=1):
        run_one(harness, request(key, prompt, cache_salt=salt))
    assert [cached(harness, key) for key in range(1, 6)] == [0, 0, 8, 0, 8]


def test_adapters_versions_and_salts_do_not_share() -> None:
    """Public bug vllm-project/vllm#3264: an answer came from the blocks of another adapter.

    The fake shards' cache knows whose keys it holds, so a wrong share fails there, too.
    """
    harness = AdapterHarness(max_loras=2)
    prompt = tuple(range(40))
    reloaded = AdapterRef("a", "v-a2")
    asked = [
        adapted(1, None),
        adapted(2, "a"),
        adapted(3, "b"),
        adapted(4, None),
        adapted(5, "a"),
        dataclasses.replace(adapted(6, "a"), adapter=reloaded),
        dataclasses.replace(adapted(7, "a"), adapter=reloaded),
        adapted(8, None, cache_salt=AdapterRef("a", "v-a").key),
    ]
    for one in asked:
        one = dataclasses.replace(one, prompt_token_ids=prompt)
        harness.add(one)
        harness.run()
        assert harness.tokens(one.key) == expected(one)
    assert [cached(harness, key) for key in range(1, 9)] == [0, 0, 0, 36, 36, 0, 36, 0]


def test_a_request_that_was_cancelled_before_its_step_was_answered_leaves_nothing_to_hit() -> None:
    """Public bug vllm-project/vllm#43569: blocks were registered when they were scheduled, and never written."""
    harness = Harness()
    prompt = list(range(20))
    harness.scheduler.add(request(1, prompt))
    step = harness.scheduler.schedule(1.0)
    assert step is not None
    harness.collect(harness.scheduler.cancel(1))
    harness.answers.append(harness.shards.execute(step))
    harness.scheduler.add(request(2, prompt))
    harness.run()
    assert cached(harness, 2) == 0 and harness.tokens(2) == expected(request(2, prompt))
    run_one(harness, request(3, prompt))
    assert cached(harness, 3) == 16


def test_steps_without_finite_numbers_or_memory_leave_nothing_to_hit() -> None:
    """Public bug vllm-project/vllm#43569, seen from the device."""
    prompt = list(range(20))
    harness = Harness()
    harness.shards.poison = lambda row, scheduled: row.seed == 1
    harness.scheduler.add(request(1, prompt))
    harness.run()
    run_one(harness, request(2, prompt))
    assert cached(harness, 2) == 0
    harness = Harness(run_ahead=0)
    harness.shards.out_of_memory_at = {1}
    harness.scheduler.add(request(1, prompt))
    harness.tick()
    assert harness.scheduler._places._blocks.cache.num_idle == 0
    harness.run()
    assert harness.tokens(1) == expected(request(1, prompt))


def test_what_the_shards_lost_is_not_found_any_more() -> None:
    harness = Harness()
    prompt = list(range(20))
    run_one(harness, request(1, prompt))
    harness.lose_epoch()
    run_one(harness, request(2, prompt))
    run_one(harness, request(3, prompt))
    assert [cached(harness, key) for key in (2, 3)] == [0, 16]


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_answers_of_one_request_wait_for_the_prompt_and_share_it(run_ahead: int) -> None:
    harness = Harness(run_ahead=run_ahead)
    num_prompt, n = 41, 4  # two steps of at most 32 tokens
    assert run_one(harness, request(1, list(range(num_prompt)), max_tokens=3, n=n)) == (
        num_prompt + 2 + (n - 1) * (num_prompt - 40 + 2)
    )
    assert cached(harness, 1) == 0, "it tells of the first answer"
    tally = harness.scheduler.take_tally()
    assert (tally.num_prompt_tokens, tally.num_cached_prompt_tokens) == (41, 0)
    assert (tally.num_looked_up_tokens, tally.num_found_tokens) == (4 * 41, 3 * 40)


def test_those_behind_a_waiting_sibling_go_on() -> None:
    harness = Harness(run_ahead=2)
    harness.scheduler.add(request(1, list(range(9)), n=2))
    harness.scheduler.add(request(2, list(range(50, 60))))
    harness.tick()
    first = harness.shards.steps[0]
    assert [row.seed for row in first.opened] == [1, 2]
    harness.run()
    assert [harness.tokens(1, index) for index in (0, 1)] == [expected(request(1, list(range(9))), i) for i in (0, 1)]


def test_a_sibling_does_not_wait_for_one_that_has_ended_or_waits_itself() -> None:
    harness = Harness(dataclasses.replace(SMALL_POOL, max_num_batched_tokens=4), run_ahead=2)
    group = request(1, list(range(9)), max_tokens=20, n=3)
    harness.scheduler.add(group)
    harness.scheduler.add(request(2, list(range(70, 90)), max_tokens=12, priority=-1))
    harness.run()
    for index in range(3):
        assert harness.tokens(1, index) == expected(group, index)


def test_a_preempted_sequence_starts_again_after_the_blocks_that_are_left_of_it() -> None:
    harness = Harness(SMALL_POOL, run_ahead=0)
    asked = [submission(1, num_prompt=6, max_tokens=12), submission(2, num_prompt=6, max_tokens=20)]
    for one in asked:
        harness.scheduler.add(one)
    harness.run()
    tally = harness.scheduler.take_tally()
    assert (tally.num_preemptions, tally.num_found_tokens, tally.num_cached_prompt_tokens) == (1, 12, 0)
    *_, again = [row for step in harness.shards.steps for row in step.opened]
    assert again.num_cached_tokens == 12, "of 16 tokens; the first one's last block took the place of the tail"
    assert [harness.tokens(one.key) for one in asked] == [expected(one) for one in asked]
    assert [cached(harness, one.key) for one in asked] == [0, 0], "the first start counts"


def test_cached_blocks_do_not_count_as_used_and_give_way() -> None:
    harness = Harness(SMALL_POOL)
    for key in range(1, 8):
        run_one(harness, request(key, [100 * key + i for i in range(20)], max_tokens=12))
        assert harness.scheduler.load().kv_cache_usage == 0
    assert harness.scheduler._places._blocks.cache.num_idle == 7


def test_what_is_shared_is_taken_before_others_are_evicted() -> None:
    harness = Harness(SMALL_POOL)
    shared = list(range(12))
    run_one(harness, request(1, shared))
    run_one(harness, request(2, [*shared, *range(50, 62)], max_tokens=8))  # All 8 blocks of the pool.
    assert cached(harness, 2) == 12


def test_switched_off_nothing_is_shared_or_looked_up() -> None:
    harness = Harness()
    harness.scheduler = Scheduler(INFO, lambda skip: Words(), enable_prefix_caching=False)
    prompt = list(range(20))
    assert run_one(harness, request(1, prompt, n=2)) == run_one(harness, request(2, prompt, n=2)) == 42
    tally = harness.scheduler.take_tally()
    assert (tally.num_looked_up_tokens, tally.num_found_tokens, tally.num_cached_prompt_tokens) == (0, 0, 0)


class Conversations:
    """Turns over few beginnings: each goes on from a random text of before, with the answer or a part of it."""

    def __init__(self, rng: random.Random, longest: int) -> None:
        self.rng = rng
        self.longest = longest
        self.texts: list[list[int]] = [[rng.randrange(3) for _ in range(rng.randint(1, 14))] for _ in range(2)]

    def turn(self, key: int) -> Submission:
        rng = self.rng
        text = rng.choice(self.texts)
        kept = text if rng.random() < 0.6 else text[: rng.randint(1, len(text))]
        prompt = [*kept, *(rng.randrange(3) for _ in range(rng.randint(0, 6)))][: self.longest - 1]
        max_tokens = rng.randint(1, min(9, self.longest - len(prompt)))
        salt, priority, n = rng.choice(["", "", "", "s"]), rng.choice([0, 0, 1]), rng.choice([1, 1, 1, 2, 3])
        name = rng.choice([None, None, "a", "b"])
        adapter = None if name is None else AdapterRef(name, f"v-{name}")
        fields = {"cache_salt": salt, "priority": priority, "n": n, "adapter": adapter}
        asked = request(key, prompt, max_tokens, **fields)
        if rng.random() < 0.3:
            eos = frozenset({rng.choice(expected(asked))})
            asked = dataclasses.replace(asked, stopping=StoppingParams(max_tokens, eos_token_ids=eos))
        self.texts.append([*prompt, *expected(asked, rng.randrange(n))])
        return asked


def make_info(rng: random.Random, num_blocks: int) -> ShardInfo:
    return dataclasses.replace(
        INFO, num_blocks=num_blocks, max_num_seqs=rng.randint(1, 6), max_num_batched_tokens=rng.choice([3, 8, 32])
    )


def check_answers(harness: Harness, asked: list[Submission], given_up: set[int]) -> None:
    for one in asked:
        for index in range(one.n):
            wanted = expected(one, index)
            if wanted[-1] in one.stopping.eos_token_ids:
                wanted = wanted[:-1]
            got = harness.tokens(one.key, index)
            assert got == wanted if one.key not in given_up else got == wanted[: len(got)]


@pytest.mark.parametrize("seed", range(20))
def test_random_turns_in_a_small_pool_give_the_tokens_of_cold_runs(seed: int) -> None:
    """Each seed has 25 sets of turns that overlap, are cancelled, preempted and evicted, with two adapters."""
    rng = random.Random(seed)
    num_found = num_preempted = 0
    for _ in range(25):
        info = make_info(rng, num_blocks=rng.randint(10, 16))
        harness = AdapterHarness(max_loras=rng.randint(1, 2), info=info, run_ahead=rng.randint(0, 2))
        conversations, asked, given_up = Conversations(rng, longest=36), [], set()
        for key in range(1, 13):
            asked.append(conversations.turn(key))
            harness.add(asked[-1])
            if rng.random() < 0.1 and (ended := harness.scheduler.cancel(rng.choice(asked).key)):
                given_up.add(ended[0].key)
                harness.collect(ended)
            for _ in range(rng.choice([0, 1, 3, 10, 40])):
                harness.tick()
        harness.run()
        check_answers(harness, asked, given_up)
        tally = harness.scheduler.take_tally()
        num_found += tally.num_found_tokens
        num_preempted += tally.num_preemptions
    assert num_found > 0 and num_preempted > 0, "the sets did not try what they are for"


@pytest.mark.parametrize("seed", range(10))
def test_without_evictions_no_token_of_a_shared_block_is_computed_twice(seed: int) -> None:
    """Each seed has 10 sets of turns, one after another, in a pool that holds everything."""
    rng = random.Random(1000 + seed)
    for _ in range(10):
        harness = AdapterHarness(info=make_info(rng, num_blocks=400), run_ahead=rng.randint(0, 2))
        conversations = Conversations(rng, longest=60)
        held: set[tuple[object, ...]] = set()  # texts up to the end of a full block, with adapter and salt
        for key in range(1, 13):
            asked = conversations.turn(key)
            before = len(harness.shards.steps)
            harness.add(asked)
            harness.run()
            check_answers(harness, [asked], set())
            starts = [row.num_cached_tokens for step in harness.shards.steps[before:] for row in step.opened]
            assert len(starts) == asked.n, "nothing was preempted"
            prompt = asked.prompt_token_ids
            for index, start in enumerate(starts):
                ends = [end for end in range(BLOCK, len(prompt), BLOCK) if ends_of(asked, prompt, end) <= held]
                assert start == max(ends, default=0)
                if index == 0:  # The prompt is all that its siblings wait for.
                    held |= ends_of(asked, prompt, len(prompt))
            for index in range(asked.n):
                text = (*prompt, *expected(asked, index))
                held |= ends_of(asked, text, len(text) - 1)  # Nobody computed the last token.


def ends_of(asked: Submission, text: tuple[int, ...], length: int) -> set[tuple[object, ...]]:
    """What the cache holds of the first `length` tokens of a text, if it holds all of it."""
    return {(asked.adapter, asked.cache_salt, *text[:end]) for end in range(BLOCK, length + 1, BLOCK)}
