"""Latencies, percentiles, throughput and goodput, by hand."""

import pytest

from router.bench.client import Record
from router.bench.summary import describe, max_concurrent, summarise, tpot_s


def record(sent: float, arrivals: list[float], ended: float, tokens: int | None = None, error: str = "") -> Record:
    num_tokens = len(arrivals) if tokens is None else tokens
    return Record(10, sent, sent, ended, arrivals, num_tokens, error)


FAST = record(0.0, [1.0, 1.5, 2.5], 2.75)
SLOW = record(1.0, [4.0, 8.0], 8.0)


def test_measures_of_two_requests() -> None:
    summary = summarise(0.0, [FAST, SLOW], (50.0,), {})
    assert summary.measures["ttft"].mean == (1.0 + 3.0) / 2
    assert summary.measures["tpot"].mean == ((2.5 - 1.0) / 2 + 4.0) / 2
    assert summary.measures["e2el"].max == 7.0
    # Three gaps in all, none across requests.
    assert summary.measures["itl"].count == 3
    assert summary.measures["itl"].median == 1.0
    assert summary.measures["itl"].mean == pytest.approx((0.5 + 1.0 + 4.0) / 3)


def test_rates_are_over_the_time_from_the_start_to_the_last_end() -> None:
    summary = summarise(-2.0, [FAST, SLOW], (50.0,), {})
    assert summary.duration_s == 10.0
    assert summary.output_throughput == 5 / 10
    assert summary.total_throughput == (5 + 20) / 10
    assert summary.request_throughput == 2 / 10


def test_percentiles_interpolate_linearly() -> None:
    figures = describe([1.0, 2.0, 3.0, 4.0, 5.0], (0.0, 25.0, 90.0, 100.0))
    # Rank p / 100 x (count - 1): 0, 1, 3.6, 4.
    assert figures.percentiles == {0.0: 1.0, 25.0: 2.0, 90.0: pytest.approx(4.6), 100.0: 5.0}


def test_goodput_counts_requests_that_met_every_objective() -> None:
    records = [FAST, SLOW]
    assert summarise(0.0, records, (), {"ttft": 3.0}).goodput == 2 / 8.0
    assert summarise(0.0, records, (), {"ttft": 2.9}).goodput == 1 / 8.0
    assert summarise(0.0, records, (), {"ttft": 2.9, "tpot": 0.7}).goodput == 0.0
    assert summarise(0.0, records, (), {}).goodput is None


def test_a_single_token_has_no_time_per_token_and_meets_any_objective_for_it() -> None:
    single = record(0.0, [1.0], 1.0)
    assert tpot_s(single) is None
    assert summarise(0.0, [single], (), {"tpot": 0.0}).goodput == 1.0


def test_tokens_that_share_a_message_are_counted_apart() -> None:
    merged = record(0.0, [1.0, 3.0], 3.0, tokens=5)
    summary = summarise(0.0, [merged], (), {})
    assert (summary.output_tokens, summary.merged_tokens) == (5, 3)
    assert tpot_s(merged) == 2.0 / 4


def test_failed_requests_count_in_nothing_but_their_errors() -> None:
    failed = record(0.0, [1.0], 9.0, error="UNAVAILABLE: gone")
    empty = record(0.0, [], 1.0)
    summary = summarise(0.0, [FAST, failed, empty], (), {})
    assert (summary.completed, summary.failed, summary.output_tokens) == (1, 2, 3)
    assert summary.errors == {"UNAVAILABLE: gone": 1, "the stream ended without a token": 1}


def test_no_completed_request_gives_zeros() -> None:
    summary = summarise(0.0, [record(0.0, [], 1.0, error="x")], (99.0,), {})
    assert summary.measures["itl"].count == 0 and summary.measures["itl"].percentiles == {99.0: 0.0}


def test_requests_under_way_are_counted_at_their_peak() -> None:
    spans = [(0.0, 2.0), (1.0, 3.0), (2.0, 4.0), (5.0, 6.0)]
    assert max_concurrent([record(sent, [], ended) for sent, ended in spans]) == 2
    assert max_concurrent([]) == 0
