"""Causal attention of many-token rows over the paged cache, in tiles (Dao 2023, FlashAttention-2)."""

from __future__ import annotations

import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from model.kernels.decode_attention import LOG2_E
from model.kernels.jit import ceil_div, dot, jit, jit_loosely, next_power_of_2


@jit
def _attend(
    acc: tl.tensor,
    total: tl.tensor,
    largest: tl.tensor,
    q: tl.tensor,
    query_position: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    table: tl.tensor,
    first_column: tl.tensor,
    column: tl.tensor,
    slot_stride: tl.tensor,
    context: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    scale: tl.tensor,
    WINDOW: tl.constexpr,
    IS_MASKED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    IS_DESCRIPTOR: tl.constexpr,
    NUM_STAGES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Adds the keys of tiles [begin, end) to a running softmax; unmasked tiles are seen whole by every query."""
    for start in tl.range(begin, end, BLOCK_N, num_stages=NUM_STAGES):
        position = start + tl.arange(0, BLOCK_N)
        is_key = position < context
        if IS_DESCRIPTOR:
            row = tl.load(table + start // BLOCK_SIZE) * BLOCK_SIZE + start % BLOCK_SIZE
            keys = k_cache.load([row, first_column])
        else:
            if BLOCK_SIZE % BLOCK_N == 0:  # a tile lies in one block
                tile = tl.load(table + start // BLOCK_SIZE).to(tl.int64) * BLOCK_SIZE + start % BLOCK_SIZE
                slot = tile + tl.arange(0, BLOCK_N)
            else:
                block = tl.load(table + position // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
                slot = block * BLOCK_SIZE + position % BLOCK_SIZE
            places = slot[:, None] * slot_stride + (first_column + column)[None, :]
            is_place = (column < HEAD_DIM)[None, :]
            if IS_MASKED:  # masked places read as zero: they may hold NaN
                is_place = is_place & is_key[:, None]
            keys = tl.load(k_cache + places, mask=is_place, other=0.0)
        scores = dot(q, tl.trans(keys), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
        if IS_MASKED:
            is_seen = position[None, :] <= query_position[:, None]
            if WINDOW > 0:
                is_seen = is_seen & (position[None, :] > query_position[:, None] - WINDOW)
            scores = tl.where(is_seen, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1) * scale)
        # a query that has seen no key yet keeps -inf; 0 instead of it keeps NaN out of its powers
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest) if IS_MASKED else new_largest
        weights = tl.exp2(scores * scale - base[:, None])
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        if IS_DESCRIPTOR:
            values = v_cache.load([row, first_column])
            if IS_MASKED:
                values = tl.where(is_key[:, None], values, 0.0)
        else:
            values = tl.load(v_cache + places, mask=is_place, other=0.0)
        acc = dot(weights.to(values.dtype), values, acc)
        largest = new_largest
    return acc, total, largest


@jit_loosely(["table_stride"], ["block_tables", "cu_seqlens_q", "context_lengths"])
def _prefill_kernel(
    query: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    block_tables: tl.tensor,
    cu_seqlens_q: tl.tensor,
    context_lengths: tl.tensor,
    out: tl.tensor,
    query_stride: tl.tensor,
    out_stride: tl.tensor,
    slot_stride: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_DESCRIPTOR: tl.constexpr,
    NUM_STAGES: tl.constexpr,
) -> None:
    """Program (tile of queries, the longest contexts first; query head; sequence). `scale` is log2(e) / sqrt(D).

    keys   | unseen | window's edge | seen by every query of the tile | the causal edge | unseen |
           0      first        full_begin                         full_end             end
    """
    sequence = tl.program_id(2)
    head = tl.program_id(1)
    row_begin = tl.load(cu_seqlens_q + sequence)
    num_queries = tl.load(cu_seqlens_q + sequence + 1) - row_begin
    tile = tl.cdiv(num_queries, BLOCK_M) - 1 - tl.program_id(0)
    if tile < 0:
        return
    context = tl.load(context_lengths + sequence)
    index = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    cached = context - num_queries
    query_position = cached + index
    first_query = cached + tile * BLOCK_M
    end = tl.minimum(first_query + BLOCK_M, context)
    full_end = tl.maximum((first_query + 1) // BLOCK_N * BLOCK_N, 0)
    first = 0
    full_begin = 0
    if WINDOW > 0:
        first = tl.maximum(first_query - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        full_begin = tl.cdiv(tl.maximum(end - WINDOW, 0), BLOCK_N) * BLOCK_N
        full_begin = tl.minimum(full_begin, full_end)
        full_begin = tl.maximum(full_begin, first)

    column = tl.arange(0, BLOCK_D)
    is_column = column < HEAD_DIM
    inside = (index < num_queries)[:, None] & is_column[None, :]
    rows = (row_begin + index).to(tl.int64)[:, None]
    q = tl.load(query + rows * query_stride + head * HEAD_DIM + column[None, :], mask=inside, other=0.0)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    table = block_tables + sequence.to(tl.int64) * table_stride
    first_column = (head // GROUP) * HEAD_DIM
    if WINDOW > 0:
        acc, total, largest = _attend(
            acc, total, largest, q, query_position, k_cache, v_cache, table, first_column, column, slot_stride,
            context, first, full_begin, scale, WINDOW, True, BLOCK_SIZE, BLOCK_M, BLOCK_N, HEAD_DIM, IS_DESCRIPTOR, 1,
        )  # fmt: skip
    acc, total, largest = _attend(
        acc, total, largest, q, query_position, k_cache, v_cache, table, first_column, column, slot_stride,
        context, full_begin, full_end, scale, WINDOW, False, BLOCK_SIZE, BLOCK_M, BLOCK_N, HEAD_DIM, IS_DESCRIPTOR,
        NUM_STAGES,
    )  # fmt: skip
    acc, total, largest = _attend(
        acc, total, largest, q, query_position, k_cache, v_cache, table, first_column, column, slot_stride,
        context, tl.maximum(full_begin, full_end), end, scale, WINDOW, True, BLOCK_SIZE, BLOCK_M, BLOCK_N, HEAD_DIM,
        IS_DESCRIPTOR, 1,
    )  # fmt: skip
    total = tl.where(total == 0.0, 1.0, total)  # rows past the last query may have seen no key
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + rows * out_stride + head * HEAD_DIM + column[None, :], result, mask=inside)


def prefill_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lengths: torch.Tensor,
    max_input_len: int,
    window: int | None,
    out: torch.Tensor,
    block_m: int = 128,
    block_n: int = 64,
    num_warps: int = 8,
    num_stages: int = 3,
    use_descriptors: bool = False,
    max_registers: int | None = None,
) -> None:
    """out = softmax(q k^T / sqrt(D)) v under the causal mask, in float32 inside.

    Args:
        query: `[T, Hq * D]` columns, float32 or bfloat16; only rows that cu_seqlens_q names are read.
        k_cache, v_cache: `[num_blocks, block_size, Hkv, D]`, contiguous blocks of equal strides, query's type.
        block_tables: int32 `[S, max_blocks]`.
        cu_seqlens_q: int32 `[S + 1]`, row borders of the sequences in `query` and `out`.
        context_lengths: int32 `[S]`; a sequence's queries are its last positions.
        max_input_len: most queries of a sequence.
        window: keys a query sees, itself included; None sees all.
        out: `[T, Hq * D]` columns.
        block_m, block_n, num_warps, num_stages: queries and keys a tile, warps a program, tiles in flight.
        use_descriptors: reads tiles with Hopper's copy engine; a tile lies in one block then, and the head size is a
            power of two.
        max_registers: bound on a thread's registers, so that more programs fit a multiprocessor.
    """
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    assert k_cache.stride() == v_cache.stride() and k_cache.stride(0) == block_size * k_cache.stride(1)
    num_heads = query.shape[1] // head_dim
    block_m = min(block_m, max(16, next_power_of_2(max_input_len)))
    keys: torch.Tensor | TensorDescriptor = k_cache
    values: torch.Tensor | TensorDescriptor = v_cache
    if use_descriptors:
        assert block_size % block_n == 0 and head_dim == next_power_of_2(head_dim)
        tile = [block_n, head_dim]
        keys = TensorDescriptor.from_tensor(k_cache.view(-1, num_kv_heads * head_dim), tile)
        values = TensorDescriptor.from_tensor(v_cache.view(-1, num_kv_heads * head_dim), tile)
    grid = (ceil_div(max_input_len, block_m), num_heads, block_tables.shape[0])
    _prefill_kernel[grid](
        query,
        keys,
        values,
        block_tables,
        cu_seqlens_q,
        context_lengths,
        out,
        query.stride(0),
        out.stride(0),
        k_cache.stride(1),
        block_tables.stride(0),
        LOG2_E / head_dim**0.5,
        WINDOW=window or 0,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_D=max(16, next_power_of_2(head_dim)),
        IS_DESCRIPTOR=use_descriptors,
        NUM_STAGES=num_stages,
        num_warps=num_warps if block_m > 64 else 4,
        maxnreg=max_registers,
    )
