"""Counters, gauges and histograms that cost a dictionary or list access to feed.

prometheus_client's own take a lock and walk the buckets at every observation; with thousands of token latencies a
second that would be a visible part of a step. These are fed from the event loop only and read by the thread that
answers a scrape, which sees each number whole.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

Extra = Sequence[tuple[str, str]]  # labels with a fixed value


class Counter:
    """A value per label combination that only grows. `name` has no `_total`; the exposition adds it."""

    def __init__(self, name: str, help: str, labels: Sequence[str] = ()) -> None:
        self.name, self.help, self.labels = name, help, tuple(labels)
        self.values: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}

    def add(self, amount: float = 1, labels: tuple[str, ...] = ()) -> None:
        """Adds `amount` to the series of these label values."""
        self.values[labels] = self.values.get(labels, 0.0) + amount

    def remove(self, labels: tuple[str, ...]) -> None:
        """Ends the series of these label values."""
        self.values.pop(labels, None)

    def family(self, name: str = "", extra: Extra = (), labels: Sequence[str] = ()) -> Metric:
        """The series for an exposition; `name` and `labels` rename, `extra` labels go in front."""
        family = CounterMetricFamily(name or self.name, self.help, labels=_names(extra, labels or self.labels))
        for own, value in list(self.values.items()):
            family.add_metric(_values(extra, own), value)
        return family


class Gauge:
    """A value per label combination that goes up and down."""

    def __init__(self, name: str, help: str, labels: Sequence[str] = ()) -> None:
        self.name, self.help, self.labels = name, help, tuple(labels)
        self.values: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}

    def set(self, value: float, labels: tuple[str, ...] = ()) -> None:
        """Sets the series of these label values."""
        self.values[labels] = value

    def family(self, name: str = "", extra: Extra = (), labels: Sequence[str] = ()) -> Metric:
        """As Counter.family."""
        family = GaugeMetricFamily(name or self.name, self.help, labels=_names(extra, labels or self.labels))
        for own, value in list(self.values.items()):
            family.add_metric(_values(extra, own), value)
        return family


class Histogram:
    """Counts per bucket; `bounds` are the buckets' upper ends, which belong to them."""

    def __init__(self, name: str, help: str, bounds: Sequence[float], labels: Sequence[str] = ()) -> None:
        self.name, self.help, self.labels = name, help, tuple(labels)
        self.bounds = tuple(bounds)
        self._series: dict[tuple[str, ...], _Buckets] = {}
        if not labels:
            self._series[()] = _Buckets(len(self.bounds))

    def observe(self, value: float, labels: tuple[str, ...] = ()) -> None:
        """Counts one value."""
        series = self._series.get(labels)
        if series is None:
            series = self._series[labels] = _Buckets(len(self.bounds))
        series.counts[bisect.bisect_left(self.bounds, value)] += 1
        series.sum += value

    def family(self, name: str = "", extra: Extra = (), labels: Sequence[str] = ()) -> Metric:
        """As Counter.family."""
        family = HistogramMetricFamily(name or self.name, self.help, labels=_names(extra, labels or self.labels))
        ends = [*(f"{bound:g}" for bound in self.bounds), "+Inf"]
        for own, series in list(self._series.items()):
            cumulative = itertools.accumulate(list(series.counts))
            family.add_metric(_values(extra, own), list(zip(ends, cumulative, strict=True)), series.sum)
        return family


class _Buckets:
    __slots__ = ("counts", "sum")

    def __init__(self, num_bounds: int) -> None:
        self.counts = [0] * (num_bounds + 1)
        self.sum = 0.0


def _names(extra: Extra, labels: Sequence[str]) -> list[str]:
    return [name for name, _ in extra] + list(labels)


def _values(extra: Extra, labels: Sequence[str]) -> list[str]:
    return [value for _, value in extra] + list(labels)
