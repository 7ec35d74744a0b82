"""Rotary position angles of the Cohere models."""

from __future__ import annotations

import torch


class CohereRotary:
    """The table of cos and sin that `layers.rotary_and_cache` turns the pairs (2i, 2i+1) with.

    Pair i of a head turns by position / theta^(2i / head_dim) (Su et al. 2021, RoFormer), in float32 throughout, as
    transformers does it.
    """

    def __init__(self, head_dim: int, theta: float, max_positions: int, device: torch.device | str = "cpu") -> None:
        """Computes positions 0 to `max_positions` - 1."""
        pairs = torch.arange(0, head_dim, 2, dtype=torch.int64, device=device).float()
        frequencies = 1.0 / (theta ** (pairs / head_dim))
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32, device=device), frequencies)
        # float32 [max_positions, head_dim]: cos of pair i at 2i, its sin at 2i + 1
        self.cos_sin = torch.stack((angles.cos(), angles.sin()), dim=-1).flatten(1)

    def for_step(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The `cos_sin` and `positions` that each layer passes to `layers.rotary_and_cache`, int64 `[T]` positions.

        A kernel reads the table itself. On a CPU the rows are looked up here, once for all layers.
        """
        if positions.is_cuda:
            return self.cos_sin, positions
        return self.cos_sin.index_select(0, positions), None
