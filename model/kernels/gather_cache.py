"""Copies sequences out of the paged cache into contiguous rows, for attention kernels that read no block tables."""

from __future__ import annotations

import torch
import triton.language as tl

from model.kernels.jit import ceil_div, jit, next_power_of_2


@jit
def _gather_cache_kernel(
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    block_tables: tl.tensor,
    context_lengths: tl.tensor,
    starts: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    slot_stride: tl.tensor,
    table_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK_ROW: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> None:
    sequence = tl.program_id(0)
    position = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_context = position < tl.load(context_lengths + sequence)
    block = tl.load(block_tables + sequence * table_stride + position // BLOCK_SIZE, mask=is_context, other=0)
    slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    column = tl.arange(0, BLOCK_ROW)
    inside = is_context[:, None] & (column < ROW)[None, :]
    source = slot[:, None] * slot_stride + column[None, :]
    target = (tl.load(starts + sequence).to(tl.int64) + position)[:, None] * ROW + column[None, :]
    tl.store(keys + target, tl.load(k_cache + source, mask=inside, other=0.0), mask=inside)
    tl.store(values + target, tl.load(v_cache + source, mask=inside, other=0.0), mask=inside)


def gather_cache(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lengths: torch.Tensor,
    starts: torch.Tensor,
    max_context_len: int,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Copies positions 0 to context_lengths[s] - 1 of each sequence to rows starts[s] and following.

    Args:
        k_cache, v_cache: `[num_blocks, block_size, Hkv, D]`, contiguous, of equal strides.
        block_tables: int32 `[S, max_blocks]`.
        context_lengths: int32 `[S]`.
        starts: int32 `[S]` or longer, first row of each sequence in `keys` and `values`.
        max_context_len: the longest of `context_lengths`.
        keys, values: `[sum of context_lengths, Hkv, D]`, contiguous.
    """
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    row = num_kv_heads * head_dim
    block_row = next_power_of_2(row)
    block_t = max(4096 // block_row, 1)
    grid = (block_tables.shape[0], ceil_div(max_context_len, block_t))
    _gather_cache_kernel[grid](
        k_cache,
        v_cache,
        block_tables,
        context_lengths,
        starts,
        keys,
        values,
        k_cache.stride(1),
        block_tables.stride(0),
        BLOCK_SIZE=block_size,
        ROW=row,
        BLOCK_ROW=block_row,
        BLOCK_T=block_t,
        num_warps=4,
    )
