"""A matrix times one row of activations, bound by reading the matrix once; tensor cores would not help with that."""

from __future__ import annotations

import dataclasses

import torch
import triton.language as tl

from model.kernels.jit import LAUNCH, ceil_div, jit, next_power_of_2, wait_for_inputs

SHORT_PROGRAM_COLUMNS = 16384
"""Columns above which programs of two columns fill the device many times over."""
LANE_PAIRS = tl.constexpr(4)
"""Pairs of numbers in a thread's widest load, 16 bytes."""


@jit
def _tile(
    weight_rows: tl.tensor, is_column: tl.tensor, pair: tl.tensor, NUM_PAIRS: tl.constexpr, IS_MASKED: tl.constexpr
) -> tl.tensor:
    """Weights `[BLOCK_N, BLOCK_P]`, which no one reads again before the next step: they leave the caches first."""
    places = weight_rows + pair[None, :]
    if IS_MASKED:
        inside = is_column[:, None] & (pair < NUM_PAIRS)[None, :]
        weights = tl.load(places, mask=inside, other=0, eviction_policy="evict_first")
    else:
        weights = tl.load(places, eviction_policy="evict_first")
    return weights


@jit
def _piece(x: tl.tensor, pair: tl.tensor, NUM_PAIRS: tl.constexpr, BLOCK_P: tl.constexpr) -> tl.tensor:
    """The activations `[BLOCK_P]` that a tile of weights is multiplied with."""
    return tl.load(x + pair) if NUM_PAIRS % BLOCK_P == 0 else tl.load(x + pair, mask=pair < NUM_PAIRS, other=0)


@jit
def _low(pairs: tl.tensor) -> tl.tensor:
    """The first of two bfloat16, which are the upper halves of float32."""
    return (pairs << 16).to(tl.float32, bitcast=True)


@jit
def _high(pairs: tl.tensor) -> tl.tensor:
    """The second of two bfloat16."""
    return (pairs & -65536).to(tl.float32, bitcast=True)


@jit
def _products(piece: tl.tensor, weights: tl.tensor, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr) -> tl.tensor:
    """Sums `[BLOCK_N, BLOCK_P / LANE_PAIRS]` of the products that lie in one thread, in float32."""
    products = _low(weights) * _low(piece)[None, :] + _high(weights) * _high(piece)[None, :]
    return tl.sum(tl.reshape(products, [BLOCK_N, BLOCK_P // LANE_PAIRS, LANE_PAIRS]), 2)


@jit
def _one_row_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    weight_stride: tl.tensor,
    NUM_COLUMNS: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
) -> None:
    """BLOCK_N columns of the result. A tile of weights is always on its way while the one before is multiplied.

    x and the weights come as pairs of bfloat16 in an int32, which wait in half the registers. Weights come from no
    kernel before this one, so the first tile is asked for before the inputs are waited for.
    """
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    pair = tl.arange(0, BLOCK_P)
    is_column = column < NUM_COLUMNS
    is_masked: tl.constexpr = NUM_COLUMNS % BLOCK_N != 0 or NUM_PAIRS % BLOCK_P != 0
    weight_rows = weight + column.to(tl.int64)[:, None] * weight_stride
    weights = _tile(weight_rows, is_column, pair, NUM_PAIRS, is_masked)
    wait_for_inputs()
    piece = _piece(x, pair, NUM_PAIRS, BLOCK_P)
    acc = tl.zeros([BLOCK_N, BLOCK_P // LANE_PAIRS], tl.float32)
    for start in range(BLOCK_P, NUM_PAIRS, BLOCK_P):
        next_weights = _tile(weight_rows, is_column, start + pair, NUM_PAIRS, is_masked)
        next_piece = _piece(x, start + pair, NUM_PAIRS, BLOCK_P)
        acc += _products(piece, weights, BLOCK_N, BLOCK_P)
        weights = next_weights
        piece = next_piece
    acc += _products(piece, weights, BLOCK_N, BLOCK_P)
    result = tl.sum(acc, 1)
    if HAS_RESIDUAL:
        result += tl.load(residual + column, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out + column, result.to(out.dtype.element_ty), mask=is_column)


@dataclasses.dataclass(frozen=True, slots=True)
class OneRowTiling:
    """Columns and depth of a tile (powers of two), warps a program, and registers a thread (None: the compiler's)."""

    block_n: int
    block_k: int
    num_warps: int
    max_registers: int | None = None


def one_row_tiling(num_columns: int, depth: int) -> OneRowTiling:
    """Some 64 KiB on their way to each multiprocessor, and no few programs left over at the end.

    Either there are many short programs, or just as many long ones as run at once: 64 registers a thread let 1024
    threads run on a multiprocessor, so 1024 programs of 4 warps or 2048 of 2 fit a Hopper GPU.
    """
    if num_columns > SHORT_PROGRAM_COLUMNS:
        return OneRowTiling(block_n=2, block_k=min(4096, next_power_of_2(depth)), num_warps=4)
    if num_columns > SHORT_PROGRAM_COLUMNS // 4:
        return OneRowTiling(block_n=4, block_k=512, num_warps=2, max_registers=64)
    return OneRowTiling(block_n=4, block_k=1024, num_warps=4, max_registers=64)


def has_one_row_form(weight: torch.Tensor) -> bool:
    """Whether `one_row_linear` takes this weight: bfloat16 whose rows are made of aligned pairs."""
    is_paired = weight.shape[1] % 2 == 0 and weight.stride(0) % 2 == 0 and weight.storage_offset() % 2 == 0
    return weight.dtype == torch.bfloat16 and weight.stride(1) == 1 and is_paired


def one_row_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    residual: torch.Tensor | None = None,
    tiling: OneRowTiling | None = None,
) -> None:
    """out = x weight^T + residual, products and sums in float32, cast once; the same bits for the same numbers.

    Args:
        x: bfloat16 `[1, K]`, contiguous.
        weight: bfloat16 `[N, K]` that `has_one_row_form`; written by no kernel that lets this one start early.
        out: `[1, N]` of any float type, contiguous; may be `residual` itself.
        residual: `[1, N]`, contiguous, or None.
        tiling: None takes `one_row_tiling`.
    """
    num_columns, depth = weight.shape
    assert x.shape[0] == 1 and x.dtype == torch.bfloat16 and has_one_row_form(weight)
    chosen = one_row_tiling(num_columns, depth) if tiling is None else tiling
    pairs = weight.view(torch.int32)
    _one_row_kernel[(ceil_div(num_columns, chosen.block_n),)](
        x.view(torch.int32),
        pairs,
        residual,
        out,
        pairs.stride(0),
        NUM_COLUMNS=num_columns,
        NUM_PAIRS=depth // 2,
        HAS_RESIDUAL=residual is not None,
        BLOCK_N=chosen.block_n,
        BLOCK_P=chosen.block_k // 2,
        num_warps=chosen.num_warps,
        maxnreg=chosen.max_registers,
        **LAUNCH,
    )
