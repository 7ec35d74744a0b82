"""Steps that fail: whoever is not to blame gets the answer of an undisturbed run, whoever is ends alone."""

from __future__ import annotations

import dataclasses

import pytest

from router.errors import InternalError, ResourceExhausted
from router.messages import SamplingParams
from router.quarantine import MAX_TOKENS
from router.step import Step
from tests.fake_shards import INFO, ShardsBroke
from tests.router.test_scheduler import Harness, expected, submission

# One block for each token of the longest row, and as long as INFO allows.
ROOMY = dataclasses.replace(INFO, num_blocks=257)


def has_seed(harness: Harness, step: Step, seed: int) -> bool:
    """Whether a row of this seed computes in the step."""
    seeds = {slot: row.seed for slot, row in harness.shards.rows.items()}
    return any(seeds.get(row.slot) == seed for row in step.scheduled)


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
@pytest.mark.parametrize("at", [1, 3])
def test_a_step_that_ran_out_of_memory_once_changes_no_answer(run_ahead: int, at: int) -> None:
    """huggingface/text-generation-inference#2744: the server recovers; here not even the requests notice."""
    harness = Harness(ROOMY, run_ahead)
    requests = [submission(key, max_tokens=8, n=1 + key % 2) for key in range(1, 5)]
    for request in requests:
        harness.scheduler.add(request)
    harness.shards.out_of_memory_at = {at}
    harness.run()
    for request in requests:
        for index in range(request.n):
            assert harness.tokens(request.key, index) == expected(request, index)


def test_a_request_that_runs_out_of_memory_alone_ends_and_the_others_go_on() -> None:
    harness = Harness(ROOMY)
    requests = [submission(key, max_tokens=8) for key in range(1, 5)]
    harness.shards.is_too_large = lambda step: has_seed(harness, step, 3) and step.step_id > 2
    for request in requests:
        harness.scheduler.add(request)
    harness.run()
    assert isinstance(harness.error(3), ResourceExhausted)
    for request in requests:
        if request.key != 3:
            assert harness.tokens(request.key) == expected(request)


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
@pytest.mark.parametrize("num_ticks", [0, 1, 2, 5])
def test_a_lost_epoch_changes_no_answer_and_repeats_no_delta(run_ahead: int, num_ticks: int) -> None:
    harness = Harness(dataclasses.replace(INFO, num_blocks=14), run_ahead)
    requests = [submission(key, num_prompt=9, max_tokens=12, n=1 + key % 2) for key in range(1, 6)]
    for request in requests:
        harness.scheduler.add(request)
    for _ in range(num_ticks):
        harness.tick()
    harness.lose_epoch()
    harness.run()
    for request in requests:
        for index in range(request.n):
            assert harness.tokens(request.key, index) == expected(request, index)
        assert harness.done(request.key).completion_tokens == 12 * request.n


def run_with_poison(harness: Harness, seed: int, blames_rows: bool, max_epochs: int) -> int:
    """Runs while any step with a row of this seed beyond its prompt breaks the shards; the number of epochs lost."""
    num_lost = 0
    while True:
        harness.shards.break_at = lambda step: (
            has_seed(harness, step, seed) and any(row.start >= 4 for row in step.scheduled)
        )
        try:
            harness.run()
        except ShardsBroke:
            num_lost += 1
            assert num_lost <= max_epochs
            harness.lose_epoch(blames_rows)
        else:
            return num_lost


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_a_request_that_breaks_the_shards_ends_after_two_epochs_and_nobody_else_does(run_ahead: int) -> None:
    harness = Harness(ROOMY, run_ahead)
    requests = [submission(key, max_tokens=8) for key in range(1, 6)]
    for request in requests:
        harness.scheduler.add(request)
    assert run_with_poison(harness, seed=2, blames_rows=True, max_epochs=2) == 2
    assert isinstance(harness.error(2), InternalError)
    for request in requests:
        if request.key != 2:
            assert harness.tokens(request.key) == expected(request)


def test_a_shard_that_somebody_keeps_killing_is_no_requests_fault() -> None:
    harness = Harness(ROOMY)
    request = submission(1, max_tokens=8)
    harness.scheduler.add(request)
    for _ in range(10):
        harness.tick()
        harness.lose_epoch(blames_rows=False)
    harness.run()
    assert harness.tokens(1) == expected(request)


def test_a_suspect_is_computed_alone_in_small_steps_until_it_has_a_token() -> None:
    info = dataclasses.replace(INFO, num_blocks=513, max_model_len=1024, max_num_batched_tokens=1024)
    harness = Harness(info)
    long, short = submission(1, num_prompt=600, max_tokens=4), submission(2, max_tokens=4)
    harness.scheduler.add(long)
    harness.scheduler.add(short)
    harness.tick()
    harness.lose_epoch()
    late = submission(3, max_tokens=4, sampling=SamplingParams(seed=3))
    harness.scheduler.add(late)
    harness.run()
    sizes = [[row.num_tokens for row in step.scheduled] for step in harness.shards.steps]
    assert sizes[:6] == [[MAX_TOKENS], [MAX_TOKENS], [601 - 2 * MAX_TOKENS], [1], [6], [1]]
    assert len(sizes[6]) == 3
    for request in (long, short, late):
        assert harness.tokens(request.key) == expected(request)
