"""The first product of adapters: each token's activations times its adapter's A, which leaves a rank's few numbers.

The depth is cut into parts, so that enough programs read; a part's sums lie by themselves in float32 and are added up,
always in the same order, by `lora_expand`. Sums of a few tokens are plain ones, a row of activations to a program; of
more, tensor cores multiply a tile of one adapter's tokens (Chen et al. 2023, "Punica"; Sheng et al. 2023, "S-LoRA").
"""

from __future__ import annotations

import dataclasses

import torch
import triton.language as tl

from model.kernels.jit import (
    LAUNCH,
    ceil_div,
    dot,
    jit,
    jit_loosely,
    let_next_start,
    next_power_of_2,
    wait_for_inputs,
    wait_for_previous,
)
from model.kernels.lora_tiles import find_tile, most_tiles
from model.lora import AdapterBatchData


@jit
def _find_part(
    FIRST_DEPTH: tl.constexpr, DEPTH: tl.constexpr, PART: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """This program's module group (0 or 1) and columns of x, from and to; no part reaches into the next group."""
    first_parts: tl.constexpr = (FIRST_DEPTH + PART - 1) // PART
    part = tl.program_id(2)
    is_second = (part >= first_parts).to(tl.int32)
    begin = (part - is_second * first_parts) * PART + is_second * FIRST_DEPTH
    stop = FIRST_DEPTH + is_second * (DEPTH - FIRST_DEPTH)
    return is_second, begin, tl.minimum(begin + PART, stop)


@jit
def _has_row(
    ranks: tl.tensor,
    row: tl.tensor,
    module: tl.tensor,
    num_rows: tl.tensor,
    RANK: tl.constexpr,
) -> tl.tensor:
    """Which of the first `num_rows` rows of A belong to a module's rank; the others are zero and are not read."""
    inside = row < num_rows
    rank = tl.load(ranks + module + row // RANK, mask=inside, other=0)
    return inside & (row % RANK < rank)


@jit_loosely(["num_tokens"], ["token_slots", "ranks"])
def _shrink_rows_kernel(
    x: tl.tensor,
    a: tl.tensor,
    token_slots: tl.tensor,
    ranks: tl.tensor,
    sums: tl.tensor,
    x_stride: tl.tensor,
    slot_stride: tl.tensor,
    num_tokens: tl.tensor,
    NUM_ROWS: tl.constexpr,
    RANK: tl.constexpr,
    NUM_MODULES: tl.constexpr,
    MODULE: tl.constexpr,
    FIRST_DEPTH: tl.constexpr,
    DEPTH: tl.constexpr,
    PART: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    IS_EARLY: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Program (token, rows of A, part of the depth)."""
    if IS_EARLY:
        let_next_start()
    else:
        wait_for_inputs()
    token = tl.program_id(0)
    slot = tl.load(token_slots + token)
    num_rows = tl.where(slot >= 0, NUM_ROWS, 0)
    group, begin, stop = _find_part(FIRST_DEPTH, DEPTH, PART)
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    has_row = _has_row(ranks + slot * NUM_MODULES, row, MODULE + group, num_rows, RANK)
    acc = tl.zeros([BLOCK_N], tl.float32)
    if tl.max(has_row.to(tl.int32), 0) > 0:
        x_row = x + token.to(tl.int64) * x_stride + begin
        a_rows = a + slot.to(tl.int64) * slot_stride + row[:, None].to(tl.int64) * DEPTH + begin
        for start in range(0, PART, BLOCK_K):
            column = start + tl.arange(0, BLOCK_K)
            if IS_WHOLE:
                values = tl.load(x_row + column, cache_modifier=".cg")
                weights = tl.load(a_rows + column[None, :], mask=has_row[:, None], other=0.0)
            else:
                inside = (column < PART) & (begin + column < stop)
                values = tl.load(x_row + column, mask=inside, other=0.0, cache_modifier=".cg")
                weights = tl.load(a_rows + column[None, :], mask=has_row[:, None] & inside[None, :], other=0.0)
            acc += tl.sum(weights.to(tl.float32) * values.to(tl.float32)[None, :], 1)
    if IS_EARLY:
        wait_for_previous()
    place = (tl.program_id(2) * num_tokens + token).to(tl.int64) * NUM_ROWS + row
    tl.store(sums + place, acc, mask=row < num_rows)


@jit_loosely(["num_tokens"], ["token_order", "segment_starts", "ranks"])
def _shrink_tiles_kernel(
    x: tl.tensor,
    a: tl.tensor,
    token_order: tl.tensor,
    segment_starts: tl.tensor,
    ranks: tl.tensor,
    sums: tl.tensor,
    x_stride: tl.tensor,
    slot_stride: tl.tensor,
    num_tokens: tl.tensor,
    MAX_LORAS: tl.constexpr,
    BLOCK_L: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    RANK: tl.constexpr,
    NUM_MODULES: tl.constexpr,
    MODULE: tl.constexpr,
    FIRST_DEPTH: tl.constexpr,
    DEPTH: tl.constexpr,
    PART: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    IS_EARLY: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
) -> None:
    """Program (tile of tokens, rows of A, part of the depth); sums lie in the order of `token_order`."""
    if IS_EARLY:
        let_next_start()
    else:
        wait_for_inputs()
    slot, first, end = find_tile(tl.program_id(0), segment_starts, MAX_LORAS, BLOCK_L, BLOCK_T)
    place = first + tl.arange(0, BLOCK_T)
    is_token = place < end
    token = tl.load(token_order + place, mask=is_token, other=0)
    num_rows = tl.where(first < end, NUM_ROWS, 0)
    group, begin, stop = _find_part(FIRST_DEPTH, DEPTH, PART)
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    has_row = _has_row(ranks + slot * NUM_MODULES, row, MODULE + group, num_rows, RANK)
    acc = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    if tl.max(has_row.to(tl.int32), 0) > 0:
        x_rows = x + token[:, None].to(tl.int64) * x_stride + begin
        a_rows = a + slot.to(tl.int64) * slot_stride + row[None, :].to(tl.int64) * DEPTH + begin
        for start in tl.range(0, PART, BLOCK_K, num_stages=NUM_STAGES):
            column = start + tl.arange(0, BLOCK_K)
            if IS_WHOLE:
                values = tl.load(x_rows + column[None, :], mask=is_token[:, None], other=0.0, cache_modifier=".cg")
                weights = tl.load(a_rows + column[:, None], mask=has_row[None, :], other=0.0)
            else:
                inside = (column < PART) & (begin + column < stop)
                is_value = is_token[:, None] & inside[None, :]
                values = tl.load(x_rows + column[None, :], mask=is_value, other=0.0, cache_modifier=".cg")
                weights = tl.load(a_rows + column[:, None], mask=has_row[None, :] & inside[:, None], other=0.0)
            acc = dot(values, weights, acc)
    if IS_EARLY:
        wait_for_previous()
    places = (tl.program_id(2) * num_tokens + place).to(tl.int64)[:, None] * NUM_ROWS + row[None, :]
    tl.store(sums + places, acc, mask=is_token[:, None] & (row < num_rows)[None, :])


@dataclasses.dataclass(frozen=True, slots=True)
class ShrinkTiling:
    """How `lora_shrink` cuts its work.

    Attributes:
        block_t: tokens a program, 16 or more; 1 takes plain sums, a token at a time.
        block_n, block_k: rows of A and columns of x at once, powers of two; 16 or more with block_t.
        part: columns of x of one program.
        num_warps, num_stages: warps a program, tiles in flight.
        is_early: x is read before the kernel before this one has ended, see `lora_shrink`.
    """

    block_t: int
    block_n: int
    block_k: int
    part: int
    num_warps: int = 4
    num_stages: int = 3
    is_early: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Shrunk:
    """What `lora_shrink` leaves for `lora_expand`.

    `sums` is float32 `[parts, T, rows]`: parts of the first depth, of which there are `first_parts`, then those of the
    second. Rows of tokens without an adapter are not filled. Where `is_in_order`, row t is that of `token_order[t]`,
    else of token t.
    """

    sums: torch.Tensor
    first_parts: int
    is_in_order: bool


def lora_shrink(
    x: torch.Tensor,
    a: torch.Tensor,
    depths: tuple[int, ...],
    first_module: int,
    data: AdapterBatchData,
    tiling: ShrinkTiling,
) -> Shrunk:
    """x times each token's A, cut into parts of the depth that are yet to be added up.

    Nothing is written before the kernel before this one has ended. With `is_early` x is read before that: the kernel
    that wrote x must be a still earlier one, which is complete once the one before this one lets this one start.

    Args:
        x: `[T, sum(depths)]`, float32 or bfloat16, last dimension contiguous.
        a: `[max_loras, rows, sum(depths)]` of x's type. With one depth the rows are blocks of max_rank, one for each
            module; with two the rows are one block, whose columns are the first module's and then the second's.
        depths: columns of x that belong together.
        first_module: place of the first module in `data.stacks.ranks`.
        data: the tokens' slots.
        tiling: how to cut.
    """
    num_tokens, stacks = x.shape[0], data.stacks
    num_rows, depth = a.shape[1:]
    assert depth == sum(depths) == x.shape[1] and a.stride()[1:] == (depth, 1) and len(depths) <= 2
    part = min(tiling.part, next_power_of_2(max(depths)))
    parts = [ceil_div(size, part) for size in depths]
    block_k = min(tiling.block_k, part)
    sums = torch.empty((sum(parts), num_tokens, num_rows), dtype=torch.float32, device=x.device)
    shared = {
        "NUM_ROWS": num_rows,
        "RANK": stacks.max_rank,
        "NUM_MODULES": stacks.ranks.shape[1],
        "MODULE": first_module,
        "FIRST_DEPTH": depths[0],
        "DEPTH": depth,
        "PART": part,
        "IS_WHOLE": part % block_k == 0 and all(size % part == 0 for size in depths),
        "IS_EARLY": tiling.is_early,
        "BLOCK_N": tiling.block_n,
        "BLOCK_K": block_k,
    }
    row_tiles = ceil_div(num_rows, tiling.block_n)
    if tiling.block_t == 1:
        _shrink_rows_kernel[(num_tokens, row_tiles, sum(parts))](
            x, a, data.token_slots, stacks.ranks, sums, x.stride(0), a.stride(0), num_tokens,
            num_warps=tiling.num_warps, **shared, **LAUNCH,
        )  # fmt: skip
        return Shrunk(sums, parts[0], is_in_order=False)
    tiles = most_tiles(num_tokens, stacks.max_loras, tiling.block_t)
    _shrink_tiles_kernel[(tiles, row_tiles, sum(parts))](
        x, a, data.token_order, data.segment_starts, stacks.ranks, sums, x.stride(0), a.stride(0), num_tokens,
        MAX_LORAS=stacks.max_loras, BLOCK_L=next_power_of_2(stacks.max_loras), BLOCK_T=tiling.block_t,
        NUM_STAGES=tiling.num_stages, num_warps=tiling.num_warps, **shared, **LAUNCH,
    )  # fmt: skip
    return Shrunk(sums, parts[0], is_in_order=True)
