"""The random masks of DARE: a function of (seed, part, layer, module, factor, place) alone, the same on every rank.

Philox4x64 with the key (seed, stream), a stream for each factor of each module; its raw words are fixed for all
releases of numpy. Word number n belongs to the n-th value of the whole factor in row order, so that ranks draw on the
full tensor and slice afterwards. The upper 53 bits of a word give a uniform number in [0, 1).
"""

from __future__ import annotations

import numpy as np
import torch

from model.lora_adapter import MODULES

FACTORS = ("a", "b")
LOW_64 = (1 << 64) - 1


def dare_mask(
    shape: torch.Size, density: float, seed: int, part: int, layer: int, module: str, factor: str
) -> torch.Tensor:
    """float32 `shape`: 1 with probability `density`, else 0; `part` is the adapter's place in the merge."""
    stream = part << 32 | layer << 8 | MODULES.index(module) << 1 | FACTORS.index(factor)
    words = np.random.Philox(key=np.array([seed & LOW_64, stream], dtype=np.uint64)).random_raw(shape.numel())
    uniform = (words >> np.uint64(11)) * 2.0**-53
    return torch.from_numpy(uniform < density).to(torch.float32).view(shape)
