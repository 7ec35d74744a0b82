"""Times of work on the GPU, its inputs drawn at random, and how far its results lie from what they should be."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
import triton

BF16 = torch.bfloat16


def replay_s(action: Callable[[int], object], inner: int = 20, tries: int = 11) -> float:
    """Seconds of one action within a CUDA graph of `inner` of them; it is given 0, 1, ... to rotate its inputs."""
    action(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(inner):
            action(number)
    times: list[float] = []
    event: Any = torch.cuda.Event  # torch leaves it without types
    for _ in range(tries):
        start, end = event(enable_timing=True), event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / inner)
    return statistics.median(times)


def bench_s(action: Callable[[], object]) -> float:
    """Seconds of one long action, the L2 cache cleared before each run."""
    return float(triton.testing.do_bench(action, warmup=15, rep=60, return_mode="median")) / 1e3


def timed(action: Callable[[int], object], is_small: bool) -> float:
    """Replays for small actions, single runs else."""
    return replay_s(action) if is_small else bench_s(lambda: action(0))


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """|actual - expected| / |expected|, with NaN if any entry is."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def normal(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Random numbers on the GPU."""
    return torch.randn(shape, dtype=dtype, device="cuda")
