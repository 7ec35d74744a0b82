"""The requests of a run and when each is due: random token ids, and arrivals all at once or as a Poisson process."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

RESERVED_IDS = 16  # At both ends of the vocabulary, where special tokens tend to lie.


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A prompt, the number of tokens to generate, and the seconds after the start at which it is due."""

    prompt: list[int]
    output_len: int
    due_s: float


def draw_lengths(rng: np.random.Generator, length: int, range_ratio: float, count: int) -> list[int]:
    """`count` lengths drawn evenly from [length × (1 - ratio), length × (1 + ratio)], each at least 1."""
    low = max(1, math.floor(length * (1 - range_ratio)))
    high = math.ceil(length * (1 + range_ratio))
    return [int(value) for value in rng.integers(low, high, size=count, endpoint=True)]


def draw_arrivals(rng: np.random.Generator, rate: float, burstiness: float, count: int) -> list[float]:
    """Arrival times in seconds, the first at 0.

    Gaps follow a gamma distribution of shape `burstiness` and mean 1 / rate; shape 1 is the exponential distribution of
    a Poisson process. An infinite rate is all at once.
    """
    if math.isinf(rate):
        return [0.0] * count
    gaps = rng.gamma(burstiness, 1 / (rate * burstiness), size=count - 1)
    return [0.0, *np.cumsum(gaps).tolist()]


def plan_requests(
    *,
    seed: int,
    count: int,
    input_len: int,
    output_len: int,
    range_ratio: float,
    prefix_len: int,
    vocab_size: int,
    rate: float,
    burstiness: float,
) -> list[PlannedRequest]:
    """The same plan for the same arguments. Every prompt starts with the same `prefix_len` tokens."""
    rng = np.random.default_rng(seed)
    reserved = RESERVED_IDS if vocab_size > 4 * RESERVED_IDS else 0
    input_lens = draw_lengths(rng, input_len, range_ratio, count)
    output_lens = draw_lengths(rng, output_len, range_ratio, count)
    arrivals = draw_arrivals(rng, rate, burstiness, count)
    prefix: list[int] = rng.integers(reserved, vocab_size - reserved, size=prefix_len).tolist()
    return [
        PlannedRequest(prefix + rng.integers(reserved, vocab_size - reserved, size=length).tolist(), num_output, due_s)
        for length, num_output, due_s in zip(input_lens, output_lens, arrivals, strict=True)
    ]


def deal(requests: list[PlannedRequest], num_processes: int) -> list[list[PlannedRequest]]:
    """Deals requests out in turn, so that every process has its share of early and late ones."""
    return [requests[index::num_processes] for index in range(num_processes)]


def split_concurrency(max_concurrency: int | None, num_processes: int) -> list[int | None]:
    """Each process's share of the requests under way, differing by one at most."""
    if max_concurrency is None:
        return [None] * num_processes
    share, rest = divmod(max_concurrency, num_processes)
    return [share + (index < rest) for index in range(num_processes)]
