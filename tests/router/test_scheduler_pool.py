"""What a full pool does: preemption, replay, reuse of rows, requests as large as the pool."""

from __future__ import annotations

import dataclasses

import pytest

from router.messages import Finish, FinishReason, OutputParams, SequenceDelta, StoppingParams
from router.sequence import member_seed
from tests.fake_shards import INFO, hashed_token
from tests.router.test_scheduler import SMALL_POOL, Harness, expected, submission


def finishes(harness: Harness, key: int) -> dict[int, Finish]:
    return {e.index: e.finish for e in harness.events[key] if isinstance(e, SequenceDelta) and e.finish}


def test_one_member_that_ends_leaves_its_preempted_sibling_untouched() -> None:
    plain = submission(1, num_prompt=10, max_tokens=20, n=2)
    eos = expected(plain)[2]
    assert eos not in expected(plain, 1)
    request = dataclasses.replace(plain, stopping=StoppingParams(20, eos_token_ids=frozenset({eos})))
    harness = Harness(SMALL_POOL)
    harness.scheduler.add(request)
    harness.scheduler.add(submission(2, num_prompt=4, max_tokens=20, priority=-1))
    harness.run()
    assert harness.scheduler.take_tally().num_preemptions > 0
    assert harness.tokens(1, 0) == expected(plain)[:2] and harness.tokens(1, 1) == expected(plain, 1)
    assert finishes(harness, 1) == {0: Finish(FinishReason.STOP, eos), 1: Finish(FinishReason.LENGTH)}


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_seeds_log_probabilities_and_usage_do_not_show_a_preemption(run_ahead: int) -> None:
    requests = [
        submission(key, num_prompt=6, max_tokens=20, output=OutputParams(num_logprobs=1)) for key in range(1, 4)
    ]
    seen = []
    for pool in (INFO, dataclasses.replace(SMALL_POOL, num_blocks=8)):
        harness = Harness(pool, run_ahead)
        for request in requests:
            harness.scheduler.add(request)
        harness.run()
        deltas = {r.key: [e for e in harness.events[r.key] if isinstance(e, SequenceDelta)] for r in requests}
        usage = {r.key: harness.done(r.key).completion_tokens for r in requests}
        seen.append((deltas, usage, harness.scheduler.take_tally().num_preemptions))
    assert seen[0][:2] == seen[1][:2]
    assert seen[0][2] == 0 < seen[1][2]


def test_a_token_on_its_way_when_its_sequence_is_preempted_counts_and_can_end_it() -> None:
    harness = Harness(dataclasses.replace(INFO, num_blocks=5), run_ahead=2)
    first, second = submission(1, num_prompt=4, max_tokens=8), submission(2, num_prompt=3, max_tokens=4)
    for request in (first, second):
        harness.scheduler.add(request)
    harness.run()
    assert harness.scheduler.take_tally().num_preemptions == 1
    assert harness.tokens(2) == expected(second)
    opened = [row.seed for step in harness.shards.steps for row in step.opened]
    assert opened == [1, 2], "it was not computed again"


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_a_prompt_that_fills_its_blocks_goes_on_and_its_row_is_used_again_by_a_shorter_one(num_blocks: int) -> None:
    harness = Harness(dataclasses.replace(INFO, max_num_seqs=1))
    full = submission(1, num_prompt=num_blocks * INFO.block_size, max_tokens=3)
    short = submission(2, num_prompt=3, max_tokens=3)
    harness.scheduler.add(full)
    harness.scheduler.add(short)
    harness.run()
    assert harness.tokens(1) == expected(full) and harness.tokens(2) == expected(short)
    rows = [row for step in harness.shards.steps for row in step.scheduled]
    assert [len(row.new_block_ids) for row in rows] == [num_blocks, 1, 0, 1, 0, 1]
    assert {row.slot for row in rows} == {0}


def test_every_request_may_be_as_large_as_the_pool_and_none_waits_for_ever() -> None:
    harness = Harness(dataclasses.replace(SMALL_POOL, max_num_batched_tokens=5), run_ahead=2)
    requests = [submission(key, num_prompt=1 + 3 * key, max_tokens=32 - 1 - 3 * key) for key in range(1, 9)]
    for request in requests:
        harness.scheduler.add(request)
    harness.run()
    assert [harness.tokens(request.key) for request in requests] == [expected(request) for request in requests]


def test_a_slot_changes_hands_within_one_step() -> None:
    harness = Harness(dataclasses.replace(INFO, max_num_seqs=1), run_ahead=0)
    for key in (1, 2):
        harness.scheduler.add(submission(key, max_tokens=2))
    harness.run()
    changed = [step for step in harness.shards.steps if step.closed_slots]
    assert [(step.closed_slots, [row.slot for row in step.opened]) for step in changed] == [([0], [0])]


def test_a_step_carries_at_most_the_budget_in_prompt_tokens_also_in_a_replay() -> None:
    harness = Harness(dataclasses.replace(SMALL_POOL, max_num_batched_tokens=4))
    requests = [submission(key, num_prompt=9, max_tokens=12) for key in (1, 2, 3)]
    for request in requests:
        harness.scheduler.add(request)
    harness.run()
    assert harness.scheduler.take_tally().num_preemptions > 0
    assert max(sum(len(f.token_ids) for f in step.filled) for step in harness.shards.steps) == 4


def test_cancelled_requests_behind_a_long_one_leave_nothing_behind() -> None:
    harness = Harness(dataclasses.replace(INFO, max_num_seqs=1))
    harness.scheduler.add(submission(1, max_tokens=100))
    harness.tick()
    for key in range(2, 1000):
        harness.scheduler.add(submission(key, deadline_s=1e9))
        harness.scheduler.cancel(key)
    harness.scheduler.check_integrity()
    assert len(harness.scheduler._deadlines) < 100 and harness.scheduler.load().num_waiting == 0


def test_the_fake_shards_token_is_the_hash_that_the_tests_expect() -> None:
    request = submission(3, n=2)
    first = hashed_token(member_seed(3, 1), request.prompt_token_ids)
    assert expected(request, 1)[0] == first
