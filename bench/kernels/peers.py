"""Attention by others, to be timed beside ours: flash-attn on the paged cache, cuDNN on keys that lie in rows."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.kernels.inputs import HEAD_DIM, KV_HEADS
from model.attention.flash import load_flash_attn


@cache
def flash_attn() -> Any:  # noqa: ANN401
    """flash-attn's extension, where it is installed."""
    return load_flash_attn()


def flash_decode(
    query: torch.Tensor,
    pools: tuple[torch.Tensor, torch.Tensor],
    tables: torch.Tensor,
    lengths: torch.Tensor,
    window: int | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """One query row `[S, n, H, D]` a sequence; the result, or `out` filled."""
    left = (-1, -1) if window is None else (window - 1, 0)
    result: torch.Tensor = flash_attn().fwd_kvcache(
        query, *pools, None, None, lengths, None, None, None, None, tables, None, out,
        HEAD_DIM**-0.5, False, *left, 0.0, True, 0,
    )[0]  # fmt: skip
    return result


def packed(columns: torch.Tensor) -> torch.Tensor:
    """`[S, Hq * D]` columns as `[S, Hq / Hkv, Hkv, D]`: the heads of a group are that many queries of one head."""
    return columns.view(columns.shape[0], KV_HEADS, -1, HEAD_DIM).transpose(1, 2)


def flash_prefill(
    query: torch.Tensor,
    pools: tuple[torch.Tensor, torch.Tensor],
    tables: torch.Tensor,
    borders: torch.Tensor,
    lengths: torch.Tensor,
    longest: tuple[int, int],
    window: int | None,
    out: torch.Tensor,
) -> None:
    """Causal attention of `[T, Hq * D]` columns; `longest` is the most queries and the most keys of a sequence."""
    left = (-1, -1) if window is None else (window - 1, 0)
    shape = (query.shape[0], -1, HEAD_DIM)
    flash_attn().varlen_fwd(
        query.view(shape), *pools, out.view(shape), borders, borders, lengths, None, tables, None, *longest, 0.0,
        HEAD_DIM**-0.5, False, True, *left, 0.0, False, None,
    )  # fmt: skip


def cudnn(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor, num_calls: int, batch: int
) -> None:
    """cuDNN's attention for `num_calls` parts of the rows, each a batch of equal whole prompts."""
    for q, k, v, o in zip(*(x.chunk(num_calls) for x in (query, keys, values, out)), strict=True):
        q, k, v = (x.reshape(batch, x.shape[0] // batch, -1, HEAD_DIM).transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        o.view(batch, -1, mixed.shape[1], HEAD_DIM).copy_(mixed.transpose(1, 2))
