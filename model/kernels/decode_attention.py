"""Attention of single-token rows over the paged cache, contexts split over programs (Dao et al. 2023, Flash-Decoding).

All query heads of one KV head share a program, so K and V are read once. How many programs share a row is fixed by the
caller; what each of them reads follows from the context length on the device, so one CUDA graph serves any length.
The program of a row's head that finishes last adds up the parts, which saves a kernel.
"""

from __future__ import annotations

import dataclasses

import torch
import triton.language as tl

from model.kernels.jit import LAUNCH, ceil_div, dot, jit, jit_loosely, next_power_of_2, wait_for_inputs

LOG2_E = 1.4426950408889634
MAX_SPLITS = 64
COMBINED_NUMBERS = 8192
"""Numbers of several parts that one program adds up at once, in registers."""
SMALLEST_PART = 64
"""Keys below which a part costs more than it saves."""
NUM_PROGRAMS = 264
"""Programs that fill the device: two for each of a Hopper GPU's 132 multiprocessors."""


@jit_loosely(["table_stride"], ["block_tables", "context_lengths"])
def _decode_kernel(
    query: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    block_tables: tl.tensor,
    context_lengths: tl.tensor,
    out: tl.tensor,
    partial_out: tl.tensor,
    partial_max: tl.tensor,
    partial_sum: tl.tensor,
    arrivals: tl.tensor,
    query_stride: tl.tensor,
    out_stride: tl.tensor,
    slot_stride: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COMBINE_G: tl.constexpr,
    COMBINE_S: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
) -> None:
    """Program (sequence, kv head, split). `scale` is log2(e) / sqrt(D); powers are of two throughout.

    keys   0 ........ first ................................ context
                      |= split 0 =|= split 1 =| ... =|= last =|
    first is 0, or with a window the multiple of BLOCK_N at or before context - WINDOW.
    """
    wait_for_inputs()
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    context = tl.load(context_lengths + sequence)
    first = 0
    visible = 0
    if WINDOW > 0:
        visible = tl.maximum(context - WINDOW, 0)
        first = (visible // BLOCK_N) * BLOCK_N
    length = tl.cdiv(tl.cdiv(context - first, BLOCK_N), num_splits) * BLOCK_N
    begin = first + split * length
    end = tl.minimum(begin + length, context)

    group = tl.arange(0, BLOCK_G)
    column = tl.arange(0, BLOCK_D)
    is_head = group < GROUP
    is_column = column < HEAD_DIM
    inside = is_head[:, None] & is_column[None, :]
    heads = (kv_head * GROUP + group)[:, None] * HEAD_DIM + column[None, :]
    q = tl.load(query + sequence.to(tl.int64) * query_stride + heads, mask=inside, other=0.0)

    largest = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    table = block_tables + sequence.to(tl.int64) * table_stride
    head_column = kv_head * HEAD_DIM + column
    for start in tl.range(begin, end, BLOCK_N, num_stages=NUM_STAGES):
        position = start + tl.arange(0, BLOCK_N)
        is_key = position < end
        if WINDOW > 0:
            is_key = is_key & (position >= visible)
        if BLOCK_SIZE % BLOCK_N == 0:  # a tile lies in one block
            block = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
            slot = block * BLOCK_SIZE + start % BLOCK_SIZE + tl.arange(0, BLOCK_N)
        else:
            block = tl.load(table + position // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
            slot = block * BLOCK_SIZE + position % BLOCK_SIZE
        places = slot[:, None] * slot_stride + head_column[None, :]
        is_place = is_key[:, None] & is_column[None, :]  # masked places read as zero: they may hold NaN
        keys = tl.load(k_cache + places, mask=is_place, other=0.0)
        scores = dot(q, tl.trans(keys), tl.zeros([BLOCK_G, BLOCK_N], tl.float32)) * scale
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_largest[:, None])
        shrink = tl.exp2(largest - new_largest)
        total = total * shrink + tl.sum(weights, 1)
        values = tl.load(v_cache + places, mask=is_place, other=0.0)
        acc = acc * shrink[:, None]
        acc = dot(weights.to(values.dtype), values, acc)
        largest = new_largest

    if not IS_SPLIT:
        places = out + sequence.to(tl.int64) * out_stride + heads
        tl.store(places, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)
    else:
        row = sequence * tl.num_programs(1) + kv_head
        part = (row * num_splits + split) * BLOCK_G + group
        tl.store(partial_max + part, largest, mask=is_head)
        if begin < end:
            tl.store(partial_sum + part, total, mask=is_head)
            tl.store(partial_out + part[:, None] * BLOCK_D + column[None, :], acc, mask=inside)
        tl.debug_barrier()  # every thread's part is written before the arrival is counted
        num_before = tl.atomic_add(arrivals + row, 1, sem="acq_rel")
        if num_before == num_splits - 1:
            tl.store(arrivals + row, 0)
            head_out = out + sequence.to(tl.int64) * out_stride + kv_head * GROUP * HEAD_DIM
            _add_up(partial_out, partial_max, partial_sum, head_out, row, num_splits,
                    GROUP, HEAD_DIM, BLOCK_G, BLOCK_D, COMBINE_G, COMBINE_S, MAX_PARTS)  # fmt: skip


@jit
def _add_up(
    partial_out: tl.tensor,
    partial_max: tl.tensor,
    partial_sum: tl.tensor,
    out: tl.tensor,
    row: tl.tensor,
    num_splits: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COMBINE_G: tl.constexpr,
    COMBINE_S: tl.constexpr,
    MAX_PARTS: tl.constexpr,
) -> None:
    """Weighs a row's parts, COMBINE_S at a time, by their largest score; parts without a key count nothing.

    Loads pass by the first-level cache, which does not see what other multiprocessors write.
    """
    group = tl.arange(0, COMBINE_G)
    column = tl.arange(0, BLOCK_D)
    is_head = group < GROUP
    split = tl.arange(0, MAX_PARTS)
    part = (row * num_splits + split)[:, None] * BLOCK_G + group[None, :]
    inside = (split < num_splits)[:, None] & is_head[None, :]
    part_max = tl.load(partial_max + part, mask=inside, other=float("-inf"), cache_modifier=".cg")
    largest = tl.max(part_max, 0)
    largest = tl.where(is_head, largest, 0.0)
    part_sum = tl.load(partial_sum + part, mask=part_max > float("-inf"), other=0.0, cache_modifier=".cg")
    total = tl.sum(tl.exp2(part_max - largest[None, :]) * part_sum, 0)
    total = tl.where(is_head, total, 1.0)
    acc = tl.zeros([COMBINE_G, BLOCK_D], tl.float32)
    for first in range(0, num_splits, COMBINE_S):
        some = first + tl.arange(0, COMBINE_S)
        some_part = (row * num_splits + some)[:, None] * BLOCK_G + group[None, :]
        some_inside = (some < num_splits)[:, None] & is_head[None, :]
        some_max = tl.load(partial_max + some_part, mask=some_inside, other=float("-inf"), cache_modifier=".cg")
        has_key = (some_max > float("-inf"))[:, :, None] & (column < HEAD_DIM)[None, None, :]
        some_places = some_part[:, :, None] * BLOCK_D + column[None, None, :]
        parts = tl.load(partial_out + some_places, mask=has_key, other=0.0, cache_modifier=".cg")
        acc += tl.sum(tl.exp2(some_max - largest[None, :])[:, :, None] * parts, 0)
    places = group[:, None] * HEAD_DIM + column[None, :]
    is_place = is_head[:, None] & (column < HEAD_DIM)[None, :]
    tl.store(out + places, (acc / total[:, None]).to(out.dtype.element_ty), mask=is_place)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SplitWorkspace:
    """Where splits leave their parts; one serves all layers, since layers run one after the other."""

    partial_out: torch.Tensor
    partial_max: torch.Tensor
    partial_sum: torch.Tensor
    arrivals: torch.Tensor

    @classmethod
    def create(cls, group: int, head_dim: int, device: torch.device | str) -> SplitWorkspace:
        """Room for what `num_decode_splits` gives, with `group` query heads to a KV head."""
        num_entries = 2 * NUM_PROGRAMS * _padded_group(group)
        return cls(
            partial_out=torch.empty(
                num_entries * max(16, next_power_of_2(head_dim)), dtype=torch.float32, device=device
            ),
            partial_max=torch.empty(num_entries, dtype=torch.float32, device=device),
            partial_sum=torch.empty(num_entries, dtype=torch.float32, device=device),
            arrivals=torch.zeros(NUM_PROGRAMS, dtype=torch.int32, device=device),  # every launch leaves zeros
        )


def _padded_group(group: int) -> int:
    return max(16, next_power_of_2(group))  # a tensor core multiplies 16 rows at least


def num_decode_splits(num_sequences: int, num_kv_heads: int, max_context_len: int) -> int:
    """Parts per row so that at least NUM_PROGRAMS programs run, each with a tile of keys or more.

    More than one part means fewer than NUM_PROGRAMS rows, so there are never 2 NUM_PROGRAMS parts in all.
    """
    wanted = ceil_div(NUM_PROGRAMS, max(num_sequences * num_kv_heads, 1))
    return max(1, min(wanted, ceil_div(max_context_len, SMALLEST_PART), MAX_SPLITS))


def decode_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lengths: torch.Tensor,
    window: int | None,
    out: torch.Tensor,
    num_splits: int,
    workspace: SplitWorkspace | None,
    block_n: int = 64,
    num_warps: int = 4,
    num_stages: int = 3,
) -> None:
    """out = softmax(q k^T / sqrt(D)) v of rows with one token each, in float32 inside.

    Args:
        query: `[S, Hq * D]` columns, float32 or bfloat16.
        k_cache, v_cache: `[num_blocks, block_size, Hkv, D]`, contiguous blocks of equal strides, query's type.
        block_tables: int32 `[S, max_blocks]`.
        context_lengths: int32 `[S]`, at least 1; the query is the last position.
        window: keys a query sees, itself included; None sees all.
        out: `[S, Hq * D]` columns.
        num_splits: programs that share one row's context, at most what `num_decode_splits` gives.
        workspace: where splits leave their parts; may be None if num_splits is 1.
        block_n, num_warps, num_stages: keys a tile, warps a program, tiles in flight.
    """
    num_sequences = query.shape[0]
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    assert k_cache.stride() == v_cache.stride() and k_cache.stride(0) == block_size * k_cache.stride(1)
    group = query.shape[1] // (num_kv_heads * head_dim)
    block_d = max(16, next_power_of_2(head_dim))
    parts: list[torch.Tensor | None] = [None] * 4
    if num_splits > 1:
        assert workspace is not None
        assert num_sequences * num_kv_heads * num_splits * _padded_group(group) <= workspace.partial_max.numel()
        assert num_sequences * num_kv_heads <= workspace.arrivals.numel()
        parts = [workspace.partial_out, workspace.partial_max, workspace.partial_sum, workspace.arrivals]
    _decode_kernel[(num_sequences, num_kv_heads, num_splits)](
        query,
        k_cache,
        v_cache,
        block_tables,
        context_lengths,
        out,
        *parts,
        query.stride(0),
        out.stride(0),
        k_cache.stride(1),
        block_tables.stride(0),
        LOG2_E / head_dim**0.5,
        WINDOW=window or 0,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        IS_SPLIT=num_splits > 1,
        BLOCK_G=_padded_group(group),
        BLOCK_D=block_d,
        BLOCK_N=block_n,
        COMBINE_G=next_power_of_2(group),
        COMBINE_S=max(1, min(MAX_SPLITS, COMBINED_NUMBERS // (next_power_of_2(group) * block_d))),
        MAX_PARTS=MAX_SPLITS,
        NUM_STAGES=num_stages,
        num_warps=num_warps,
        **LAUNCH,
    )
