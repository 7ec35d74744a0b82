"""Prompts, lengths, arrivals and how they are dealt out."""

import math

import numpy as np
import pytest

from router.bench.load import deal, draw_arrivals, draw_lengths, plan_requests, split_concurrency

PLAN = {
    "count": 40,
    "input_len": 20,
    "output_len": 10,
    "range_ratio": 0.5,
    "prefix_len": 3,
    "vocab_size": 1000,
    "rate": math.inf,
    "burstiness": 1.0,
}


def test_the_same_seed_gives_the_same_plan_and_another_seed_another() -> None:
    assert plan_requests(seed=1, **PLAN) == plan_requests(seed=1, **PLAN)
    assert plan_requests(seed=1, **PLAN) != plan_requests(seed=2, **PLAN)


def test_prompts_share_their_prefix_and_keep_off_the_ends_of_the_vocabulary() -> None:
    requests = plan_requests(seed=0, **PLAN)
    assert len({tuple(request.prompt[:3]) for request in requests}) == 1
    assert len({tuple(request.prompt[3:]) for request in requests}) == 40
    assert all(16 <= token_id < 1000 - 16 for request in requests for token_id in request.prompt)


def test_a_tiny_vocabulary_is_used_whole() -> None:
    requests = plan_requests(seed=0, **PLAN | {"vocab_size": 4})
    assert {token_id for request in requests for token_id in request.prompt} == {0, 1, 2, 3}


def test_lengths_fill_the_closed_range_around_the_asked_one() -> None:
    lengths = draw_lengths(np.random.default_rng(0), 10, 0.2, 500)
    assert set(lengths) == {8, 9, 10, 11, 12}
    assert set(draw_lengths(np.random.default_rng(0), 10, 0.0, 5)) == {10}
    assert min(draw_lengths(np.random.default_rng(0), 2, 1.0, 200)) == 1


def test_an_infinite_rate_sends_everything_at_once() -> None:
    assert draw_arrivals(np.random.default_rng(0), math.inf, 1.0, 3) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_the_spread_of_a_gamma_distribution(burstiness: float) -> None:
    arrivals = draw_arrivals(np.random.default_rng(0), 50.0, burstiness, 40_001)
    gaps = np.diff(arrivals)
    assert arrivals[0] == 0.0
    # Mean 1 / rate; coefficient of variation 1 / sqrt(shape). 40,000 draws leave about 1 % of error.
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.04)
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.04)


def test_dealing_gives_every_request_to_exactly_one_process() -> None:
    requests = plan_requests(seed=0, **PLAN)
    shares = deal(requests, 3)
    assert [len(share) for share in shares] == [14, 13, 13]
    dealt = {id(request) for share in shares for request in share}
    assert dealt == {id(request) for request in requests}


def test_shares_of_the_concurrency_add_up() -> None:
    assert split_concurrency(10, 4) == [3, 3, 2, 2]
    assert split_concurrency(None, 2) == [None, None]
