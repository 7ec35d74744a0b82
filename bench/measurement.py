"""Times engines in turn on one workload, so that whatever else the machine does meets all of them alike."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from bench.workloads import Workload


class Engine(Protocol):
    """Something that answers a whole workload."""

    @property
    def name(self) -> str:
        """Its name in tables."""
        ...

    def run(self, workload: Workload) -> list[list[int]]:
        """The generated ids of each request, in order, exactly as many as asked."""
        ...


@dataclasses.dataclass(slots=True)
class Measurement:
    """One engine on one workload."""

    engine: str
    workload: str
    num_counted_tokens: int
    rounds_s: list[float] = dataclasses.field(default_factory=list)
    outputs: list[list[int]] = dataclasses.field(default_factory=list)

    @property
    def median_s(self) -> float:
        """Median over the rounds."""
        return statistics.median(self.rounds_s)

    @property
    def tokens_per_s(self) -> float:
        """Counted tokens a second in the median round."""
        return self.num_counted_tokens / self.median_s

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median of the rounds."""
        return (max(self.rounds_s) - min(self.rounds_s)) / self.median_s


class WrongOutputLength(Exception):
    """An engine generated more or fewer tokens than asked; its time would compare nothing."""


def _check(engine: str, workload: Workload, outputs: list[list[int]]) -> None:
    got, asked = [len(ids) for ids in outputs], [request.num_output_tokens for request in workload.requests]
    if got != asked:
        raise WrongOutputLength(f"{engine} on {workload.name}: generated {got} tokens, asked {asked}")


def measure_in_turn(
    engines: Sequence[Engine],
    workload: Workload,
    num_rounds: int,
    after: Callable[[Engine, float], None] = lambda engine, seconds: None,
) -> list[Measurement]:
    """Runs every engine once per round, in the given order: A B C, A B C, ...

    `after` is told each run's engine and seconds.
    """
    measurements = [Measurement(engine.name, workload.name, workload.num_counted_tokens) for engine in engines]
    for _ in range(num_rounds):
        for engine, measurement in zip(engines, measurements, strict=True):
            start = time.perf_counter()
            measurement.outputs = engine.run(workload)
            seconds = time.perf_counter() - start
            _check(engine.name, workload, measurement.outputs)
            measurement.rounds_s.append(seconds)
            after(engine, seconds)
    return measurements


def share_of_equal(left: Measurement, right: Measurement) -> float:
    """Share of requests for which two engines generated the very same ids."""
    pairs = list(zip(left.outputs, right.outputs, strict=True))
    return sum(a == b for a, b in pairs) / len(pairs)
