"""How fast this processor multiplies with prepacked weights: the yardstick between CPU machines.

Twelve products of a 6144 × 768 weight, as a layer stack has them, two threads. Figures measured on another machine are
put beside ours by the ratio of these rates.
"""

from __future__ import annotations

import statistics
import time

import torch

NUM_WEIGHTS = 12
OUT_FEATURES, IN_FEATURES = 6144, 768
ROWS = (1, 16, 512)
ROWS_OF_WORKLOAD = {"b1": 1, "b16": 16, "mixed": 16, "prefill": 512}
"""The number of rows that comes nearest to a workload's products."""
TRIES = 7


def product_rates(dtype: str) -> dict[int, float]:
    """Median GFLOP/s by the number of rows, with oneDNN's prepacked weights and torch's current number of threads."""
    kind = getattr(torch, dtype)
    weights = [_pack(torch.randn(OUT_FEATURES, IN_FEATURES).to(kind)) for _ in range(NUM_WEIGHTS)]
    return {rows: _rate(weights, torch.randn(rows, IN_FEATURES).to(kind)) for rows in ROWS}


def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return packed


def _rate(weights: list[torch.Tensor], x: torch.Tensor) -> float:
    def timed() -> float:
        start = time.perf_counter()
        for weight in weights:
            torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
        return time.perf_counter() - start

    timed()
    seconds = statistics.median(timed() for _ in range(TRIES))
    return 2.0 * NUM_WEIGHTS * OUT_FEATURES * IN_FEATURES * len(x) / seconds / 1e9
