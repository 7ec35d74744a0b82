"""From records to figures: latencies, percentiles, throughput and goodput.

ttft: from sending a request to its first token. tpot: (end of the last token - first token) / (tokens - 1), for
requests of two tokens and more. itl: each gap between messages that carry tokens. e2el: from sending to the stream's
end. All in seconds, measured by the client.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from router.bench.client import Record


@dataclasses.dataclass(frozen=True, slots=True)
class Distribution:
    """A measure over requests, or for itl over gaps; seconds. `percentiles` by percent."""

    count: int
    mean: float
    median: float
    std: float
    max: float
    percentiles: dict[float, float]


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """A run's figures. `goodput` is None without objectives; `merged_tokens` came in a message with an earlier one."""

    duration_s: float
    completed: int
    failed: int
    input_tokens: int
    output_tokens: int
    merged_tokens: int
    request_throughput: float
    output_throughput: float
    total_throughput: float
    goodput: float | None
    max_concurrent: int
    measures: dict[str, Distribution]
    errors: dict[str, int]


def ttft_s(record: Record) -> float:
    """Seconds to the first token."""
    return record.arrivals[0] - record.sent


def tpot_s(record: Record) -> float | None:
    """Mean seconds per token after the first; None for a single token."""
    if record.num_tokens < 2:
        return None
    return (record.arrivals[-1] - record.arrivals[0]) / (record.num_tokens - 1)


def e2el_s(record: Record) -> float:
    """Seconds from sending to the end."""
    return record.ended - record.sent


def is_good(record: Record, objectives_s: dict[str, float]) -> bool:
    """Whether a completed request met every objective; one without a tpot meets any tpot."""
    seen = {"ttft": ttft_s(record), "tpot": tpot_s(record) or 0.0, "e2el": e2el_s(record)}
    return all(seen[name] <= limit for name, limit in objectives_s.items())


def describe(values: list[float], percentiles: tuple[float, ...]) -> Distribution:
    """A distribution's figures; percentiles interpolate linearly. Zeros if there are no values."""
    array = np.asarray(values or [0.0])
    return Distribution(
        count=len(values),
        mean=float(array.mean()),
        median=float(np.median(array)),
        std=float(array.std()),
        max=float(array.max()),
        percentiles={percent: float(np.percentile(array, percent)) for percent in percentiles},
    )


def max_concurrent(records: list[Record]) -> int:
    """Most requests under way at one moment."""
    # At the same instant an end counts before a start.
    changes = sorted([(record.ended, -1) for record in records] + [(record.sent, 1) for record in records])
    return int(np.max(np.cumsum([change for _, change in changes]), initial=0))


def summarise(
    start: float, records: list[Record], percentiles: tuple[float, ...], objectives_s: dict[str, float]
) -> Summary:
    """Figures over the completed requests; a request without a single token has failed."""
    done = [record for record in records if not record.error and record.num_tokens]
    failed = [record for record in records if record.error or not record.num_tokens]
    duration = max([record.ended for record in records], default=start) - start
    output_tokens = sum(record.num_tokens for record in done)
    input_tokens = sum(record.prompt_len for record in done)
    errors: dict[str, int] = {}
    for record in failed:
        text = record.error or "the stream ended without a token"
        errors[text] = errors.get(text, 0) + 1
    return Summary(
        duration_s=duration,
        completed=len(done),
        failed=len(failed),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        merged_tokens=output_tokens - sum(len(record.arrivals) for record in done),
        request_throughput=len(done) / duration if duration else 0.0,
        output_throughput=output_tokens / duration if duration else 0.0,
        total_throughput=(input_tokens + output_tokens) / duration if duration else 0.0,
        goodput=sum(is_good(record, objectives_s) for record in done) / duration if objectives_s and duration else None,
        max_concurrent=max_concurrent(records),
        measures={name: describe(values, percentiles) for name, values in _values(done).items()},
        errors=errors,
    )


def _values(records: list[Record]) -> dict[str, list[float]]:
    tpots = [tpot_s(record) for record in records]
    gaps = [np.diff(record.arrivals) for record in records]
    return {
        "ttft": [ttft_s(record) for record in records],
        "tpot": [tpot for tpot in tpots if tpot is not None],
        "itl": np.concatenate(gaps).tolist() if gaps else [],
        "e2el": [e2el_s(record) for record in records],
    }
