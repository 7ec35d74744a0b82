"""The second product of adapters: a rank's few numbers of each token times B, added to the base model's columns."""

from __future__ import annotations

import dataclasses

import torch
import triton.language as tl

from model.kernels.jit import LAUNCH, dot, jit, jit_loosely, next_power_of_2, wait_for_inputs
from model.kernels.lora_shrink import Shrunk
from model.kernels.lora_tiles import count_column_tiles, find_columns, find_tile, most_tiles
from model.lora import AdapterBatchData

CHUNK = 16
"""Ranks that are multiplied at once: the least that tensor cores take, and a sector of memory in bfloat16."""


@jit
def _add_up(
    sums: tl.tensor, part_stride: tl.tensor, mask: tl.tensor, BEGIN: tl.constexpr, END: tl.constexpr
) -> tl.tensor:
    """The parts BEGIN to END of the shrunk numbers at `sums`, in order; other multiprocessors just wrote them."""
    total = tl.load(sums + BEGIN * part_stride, mask=mask, other=0.0, cache_modifier=".cg")
    for part in tl.static_range(BEGIN + 1, END):
        total += tl.load(sums + part * part_stride, mask=mask, other=0.0, cache_modifier=".cg")
    return total


@jit
def _expand_row(
    acc: tl.tensor,
    weights: tl.tensor,
    sums: tl.tensor,
    b_rows: tl.tensor,
    part_stride: tl.tensor,
    rank: tl.tensor,
    is_column: tl.tensor,
    RANK: tl.constexpr,
    BEGIN: tl.constexpr,
    END: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """acc `[BLOCK_N]` plus one module's product for one token; `weights` are B's first CHUNK columns."""
    number = tl.arange(0, CHUNK)
    low = _add_up(sums + number, part_stride, number < RANK, BEGIN, END)
    acc += tl.sum(weights.to(tl.float32) * low[None, :], 1)
    if RANK > CHUNK:
        for first in range(CHUNK, rank, CHUNK):
            is_number = first + number < RANK
            low = _add_up(sums + first + number, part_stride, is_number, BEGIN, END)
            is_weight = is_column[:, None] & is_number[None, :]
            weights = tl.load(b_rows + first + number[None, :], mask=is_weight, other=0.0)
            acc += tl.sum(weights.to(tl.float32) * low[None, :], 1)
    return acc


@jit
def _expand_tile(
    acc: tl.tensor,
    weights: tl.tensor,
    sums: tl.tensor,
    b_rows: tl.tensor,
    part_stride: tl.tensor,
    rank: tl.tensor,
    is_token: tl.tensor,
    is_column: tl.tensor,
    RANK: tl.constexpr,
    BEGIN: tl.constexpr,
    END: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """acc `[BLOCK_T, BLOCK_N]` plus one module's product; `weights` are B's first CHUNK columns, transposed."""
    number = tl.arange(0, CHUNK)
    inside = is_token[:, None] & (number < RANK)[None, :]
    low = _add_up(sums + number[None, :], part_stride, inside, BEGIN, END)
    acc = dot(low.to(weights.dtype), weights, acc)
    if RANK > CHUNK:
        for first in range(CHUNK, rank, CHUNK):
            is_number = first + number < RANK
            is_low = is_token[:, None] & is_number[None, :]
            low = _add_up(sums + first + number[None, :], part_stride, is_low, BEGIN, END)
            is_weight = is_number[:, None] & is_column[None, :]
            weights = tl.load(b_rows + first + number[:, None], mask=is_weight, other=0.0)
            acc = dot(low.to(weights.dtype), weights, acc)
    return acc


@jit_loosely(["num_tokens"], ["token_slots", "ranks"])
def _expand_rows_kernel(
    sums: tl.tensor,
    b: tl.tensor,
    out: tl.tensor,
    token_slots: tl.tensor,
    ranks: tl.tensor,
    out_stride: tl.tensor,
    slot_stride: tl.tensor,
    num_tokens: tl.tensor,
    FIRST: tl.constexpr,
    PAIR: tl.constexpr,
    LAST_PAIR: tl.constexpr,
    RANK: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    NUM_MODULES: tl.constexpr,
    MODULE: tl.constexpr,
    FIRST_PARTS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Program (tile of columns, token). The first weights are asked for before the inputs are waited for."""
    has_second: tl.constexpr = NUM_PARTS > FIRST_PARTS
    token = tl.program_id(1)
    slot = tl.load(token_slots + token)
    module, start, end = find_columns(tl.program_id(0), FIRST, PAIR, LAST_PAIR, BLOCK_N)
    own_ranks = ranks + slot * NUM_MODULES + MODULE + module
    rank = tl.load(own_ranks, mask=slot >= 0, other=0)
    other_rank = tl.load(own_ranks + 1, mask=slot >= 0, other=0) if has_second else 0
    column = start + tl.arange(0, BLOCK_N)
    is_column = column < end
    number = tl.arange(0, CHUNK)
    b_rows = b + slot.to(tl.int64) * slot_stride + column[:, None] * (2 * RANK if has_second else RANK)
    inside = is_column[:, None] & (number < tl.where(rank > 0, RANK, 0))[None, :]
    weights = tl.load(b_rows + number[None, :], mask=inside, other=0.0)
    other_weights = weights
    if has_second:
        inside = is_column[:, None] & (number < tl.where(other_rank > 0, RANK, 0))[None, :]
        other_weights = tl.load(b_rows + RANK + number[None, :], mask=inside, other=0.0)
    wait_for_inputs()
    if (rank > 0) | (other_rank > 0):
        places = out + token.to(tl.int64) * out_stride + column
        before = tl.load(places, mask=is_column, other=0.0)
        part_stride = num_tokens.to(tl.int64) * NUM_ROWS
        own_sums = sums + token * NUM_ROWS + module * RANK
        acc = _expand_row(tl.zeros([BLOCK_N], tl.float32), weights, own_sums, b_rows, part_stride, rank, is_column,
                          RANK, 0, FIRST_PARTS, CHUNK)  # fmt: skip
        if has_second:
            acc = _expand_row(acc, other_weights, own_sums, b_rows + RANK, part_stride, other_rank, is_column,
                              RANK, FIRST_PARTS, NUM_PARTS, CHUNK)  # fmt: skip
        tl.store(places, (before.to(tl.float32) + acc).to(out.dtype.element_ty), mask=is_column)


@jit_loosely(["num_tokens"], ["token_order", "segment_starts", "ranks"])
def _expand_tiles_kernel(
    sums: tl.tensor,
    b: tl.tensor,
    out: tl.tensor,
    token_order: tl.tensor,
    segment_starts: tl.tensor,
    ranks: tl.tensor,
    out_stride: tl.tensor,
    slot_stride: tl.tensor,
    num_tokens: tl.tensor,
    FIRST: tl.constexpr,
    PAIR: tl.constexpr,
    LAST_PAIR: tl.constexpr,
    RANK: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    NUM_MODULES: tl.constexpr,
    MODULE: tl.constexpr,
    FIRST_PARTS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    MAX_LORAS: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> None:
    """Program (tile of columns, tile of tokens), so that programs side by side work on the same rows of `out`."""
    has_second: tl.constexpr = NUM_PARTS > FIRST_PARTS
    slot, first, stop = find_tile(tl.program_id(1), segment_starts, MAX_LORAS, BLOCK_L, BLOCK_T)
    place = first + tl.arange(0, BLOCK_T)
    is_token = place < stop
    token = tl.load(token_order + place, mask=is_token, other=0)
    module, start, end = find_columns(tl.program_id(0), FIRST, PAIR, LAST_PAIR, BLOCK_N)
    own_ranks = ranks + slot * NUM_MODULES + MODULE + module
    rank = tl.load(own_ranks, mask=first < stop, other=0)
    other_rank = tl.load(own_ranks + 1, mask=first < stop, other=0) if has_second else 0
    column = start + tl.arange(0, BLOCK_N)
    is_column = column < end
    number = tl.arange(0, CHUNK)
    b_rows = b + slot.to(tl.int64) * slot_stride + column[None, :] * (2 * RANK if has_second else RANK)
    inside = (number < tl.where(rank > 0, RANK, 0))[:, None] & is_column[None, :]
    weights = tl.load(b_rows + number[:, None], mask=inside, other=0.0)
    other_weights = weights
    if has_second:
        inside = (number < tl.where(other_rank > 0, RANK, 0))[:, None] & is_column[None, :]
        other_weights = tl.load(b_rows + RANK + number[:, None], mask=inside, other=0.0)
    wait_for_inputs()
    if (rank > 0) | (other_rank > 0):
        places = out + token[:, None].to(tl.int64) * out_stride + column[None, :]
        is_place = is_token[:, None] & is_column[None, :]
        before = tl.load(places, mask=is_place, other=0.0)
        part_stride = num_tokens.to(tl.int64) * NUM_ROWS
        own_sums = sums + place[:, None] * NUM_ROWS + module * RANK
        acc = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
        acc = _expand_tile(acc, weights, own_sums, b_rows, part_stride, rank, is_token, is_column,
                           RANK, 0, FIRST_PARTS, CHUNK)  # fmt: skip
        if has_second:
            acc = _expand_tile(acc, other_weights, own_sums, b_rows + RANK, part_stride, other_rank, is_token,
                               is_column, RANK, FIRST_PARTS, NUM_PARTS, CHUNK)  # fmt: skip
        tl.store(places, (before.to(tl.float32) + acc).to(out.dtype.element_ty), mask=is_place)


@dataclasses.dataclass(frozen=True, slots=True)
class ExpandTiling:
    """How `lora_expand` cuts its work.

    Attributes:
        block_t: tokens a program, 16 or more; 1 takes plain sums. As that of the shrink before it is 1 or not.
        block_n: columns a program, a power of two; 16 or more with block_t.
        num_warps: warps a program.
    """

    block_t: int
    block_n: int
    num_warps: int = 4


def lora_expand(
    shrunk: Shrunk,
    b: torch.Tensor,
    out: torch.Tensor,
    sizes: tuple[int, int, int],
    first_module: int,
    data: AdapterBatchData,
    tiling: ExpandTiling,
) -> None:
    """out += (sums' parts added up) B^T for tokens with an adapter; products and sums in float32, cast once.

    On tensor cores the shrunk numbers are cast to B's type before they are multiplied.

    Args:
        shrunk: what `lora_shrink` returned.
        b: `[max_loras, columns, k * max_rank]`, k = 2 where `shrunk` has parts of two depths, else 1; written by no
            kernel that lets this one start early.
        out: `[T, columns]`, last dimension contiguous.
        sizes: columns of the first module, of each of the two after it and of each of the last two, each with its
            block of shrunk rows; `(columns, 0, 0)` for the modules of two depths, which add to the same columns.
        first_module: place of the first module in `data.stacks.ranks`.
        data: the tokens' slots.
        tiling: how to cut.
    """
    sums, first_parts = shrunk.sums, shrunk.first_parts
    num_parts, num_tokens, num_rows = sums.shape
    assert shrunk.is_in_order == (tiling.block_t > 1), "rows and tiles do not go together"
    stacks, num_columns = data.stacks, out.shape[1]
    assert sizes[0] + 2 * sizes[1] + 2 * sizes[2] == num_columns == b.shape[1]
    assert b.stride()[1:] == (b.shape[2], 1) and b.shape[2] == stacks.max_rank * (2 if num_parts > first_parts else 1)
    shared = {
        "FIRST": sizes[0],
        "PAIR": sizes[1],
        "LAST_PAIR": sizes[2],
        "RANK": stacks.max_rank,
        "NUM_ROWS": num_rows,
        "NUM_MODULES": stacks.ranks.shape[1],
        "MODULE": first_module,
        "FIRST_PARTS": first_parts,
        "NUM_PARTS": num_parts,
        "BLOCK_N": tiling.block_n,
        "CHUNK": CHUNK,
        "num_warps": tiling.num_warps,
    }
    column_tiles = count_column_tiles(sizes, tiling.block_n)
    if tiling.block_t == 1:
        _expand_rows_kernel[(column_tiles, num_tokens)](
            sums, b, out, data.token_slots, stacks.ranks, out.stride(0), b.stride(0), num_tokens, **shared, **LAUNCH
        )
        return
    tiles = most_tiles(num_tokens, stacks.max_loras, tiling.block_t)
    _expand_tiles_kernel[(column_tiles, tiles)](
        sums, b, out, data.token_order, data.segment_starts, stacks.ranks, out.stride(0), b.stride(0), num_tokens,
        MAX_LORAS=stacks.max_loras, BLOCK_L=next_power_of_2(stacks.max_loras), BLOCK_T=tiling.block_t,
        **shared, **LAUNCH,
    )  # fmt: skip
