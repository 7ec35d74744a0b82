"""Draws from the whole vocabulary on a CUDA device: the Triton sampler, and what several ranks need of its winners."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shard_server import candidates

if TYPE_CHECKING:
    from model.kernels.sampling import Samples

SMALLEST_QUAD = 4  # tokens that share one call of the noise's generator


def sample(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, vocab_start: int
) -> Samples:
    """Each row's winner of logits / temperature + noise, or of the logits where the temperature is 0.

    Args:
        logits: float32 `[R, V_local]`; column 0 is the token `vocab_start`.
        temperature: float32 `[R]`.
        seeds, positions: int64 `[R]`.
        vocab_start: token id of column 0.
    """
    from model.kernels import sampling  # not at the top: a CPU needs no Triton

    out = sampling.Samples.create(len(logits), False, logits.device)
    # A slice that is all padding may start anywhere: none of its tokens wins.
    sampling.sample(logits, temperature, seeds, positions, out, vocab_start // SMALLEST_QUAD * SMALLEST_QUAD)
    return out


def draw(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, vocab_start: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The winners as sortable keys `[R]`, their logits, and a number that is finite where the row is, NaN where a
    logit is; arguments as in `sample`."""
    drawn = sample(logits, temperature, seeds, positions, vocab_start)
    token_ids = drawn.tokens.long()
    columns = (token_ids - vocab_start).clamp_(min=0)
    raw = logits.gather(1, columns.unsqueeze(1)).squeeze(1)
    largest = torch.where(drawn.is_finite, raw, logits.amax(dim=1))
    return candidates.pack(drawn.values, token_ids), raw, largest
