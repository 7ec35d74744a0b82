"""Rounds in turn, medians, and the check of output lengths."""

import itertools

import pytest

from bench import measurement
from bench.measurement import Measurement, WrongOutputLength, measure_in_turn, share_of_equal
from bench.transformers_engine import pad_left
from bench.workloads import Request, Workload

WORKLOAD = Workload("w", "two requests", [Request([1, 2], 1), Request([3], 2)])


class ScriptedEngine:
    def __init__(self, name: str, outputs: list[list[int]], calls: list[str]) -> None:
        self.name = name
        self._outputs = outputs
        self._calls = calls

    def run(self, workload: Workload) -> list[list[int]]:
        self._calls.append(self.name)
        return self._outputs


def test_engines_take_turns_and_are_timed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    # Start and end of each run: A takes 1, 9, 2 seconds, B 10 each.
    readings = itertools.accumulate([0.0, 1.0, 0.0, 10.0, 0.0, 9.0, 0.0, 10.0, 0.0, 2.0, 0.0, 10.0])
    monkeypatch.setattr(measurement.time, "perf_counter", lambda: next(readings))
    seen: list[tuple[str, float]] = []
    engines = [ScriptedEngine(name, [[7], [8, 9]], calls) for name in "AB"]
    a, b = measure_in_turn(engines, WORKLOAD, 3, lambda engine, seconds: seen.append((engine.name, seconds)))
    assert calls == ["A", "B"] * 3
    assert a.rounds_s == [1.0, 9.0, 2.0] and b.rounds_s == [10.0] * 3
    assert a.median_s == 2.0 and a.tokens_per_s == 3 / 2 and a.spread == (9 - 1) / 2
    assert seen[:2] == [("A", 1.0), ("B", 10.0)]


def test_a_wrong_number_of_tokens_is_an_error_that_names_the_engine() -> None:
    with pytest.raises(WrongOutputLength, match=r"A on w: generated \[1, 1\] tokens, asked \[1, 2\]"):
        measure_in_turn([ScriptedEngine("A", [[7], [8]], [])], WORKLOAD, 1)


def test_share_of_equal_counts_whole_requests() -> None:
    left = Measurement("A", "w", 3, [1.0], [[1, 2], [3]])
    right = Measurement("B", "w", 3, [1.0], [[1, 2], [4]])
    assert share_of_equal(left, right) == 0.5


def test_padding_goes_in_front_and_is_masked() -> None:
    ids, mask = pad_left([[5, 6, 7], [8]])
    assert ids.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]
