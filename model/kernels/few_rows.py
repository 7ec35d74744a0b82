"""A matrix times one row of activations, bound by reading the matrix once; no tensor core has a use for a single row."""

from __future__ import annotations

import dataclasses

import torch
import triton.language as tl

from model.kernels.jit import LAUNCH, ceil_div, jit, wait_for_inputs

MAX_ROWS = 1
"""Rows from which on tensor cores are as fast."""
THREAD_NUMBERS = 8
"""Numbers of 16 bits in a thread's widest load."""


@jit
def _tile(
    weight_rows: tl.tensor,
    is_column: tl.tensor,
    depth: tl.tensor,
    DEPTH: tl.constexpr,
    IS_MASKED: tl.constexpr,
) -> tl.tensor:
    """Weights `[BLOCK_N, BLOCK_K]`, which no one reads again before the next step: they leave the caches first."""
    places = weight_rows + depth[None, :]
    if IS_MASKED:
        inside = is_column[:, None] & (depth < DEPTH)[None, :]
        weights = tl.load(places, mask=inside, other=0.0, eviction_policy="evict_first")
    else:
        weights = tl.load(places, eviction_policy="evict_first")
    return weights


@jit
def _piece(x: tl.tensor, depth: tl.tensor, DEPTH: tl.constexpr, BLOCK_K: tl.constexpr) -> tl.tensor:
    """The activations `[BLOCK_K]` that a tile of weights is multiplied with."""
    if DEPTH % BLOCK_K == 0:
        piece = tl.load(x + depth)
    else:
        piece = tl.load(x + depth, mask=depth < DEPTH, other=0.0)
    return piece


@jit
def _products(
    piece: tl.tensor, weights: tl.tensor, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, LANE: tl.constexpr
) -> tl.tensor:
    """Sums `[BLOCK_N, BLOCK_K / LANE]` of the products that lie in one thread, in float32."""
    products = weights.to(tl.float32) * piece.to(tl.float32)[None, :]
    return tl.sum(tl.reshape(products, [BLOCK_N, BLOCK_K // LANE, LANE]), 2)


@jit
def _one_row_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    weight_stride: tl.tensor,
    NUM_COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LANE: tl.constexpr,
) -> None:
    """BLOCK_N columns of the result. A tile of weights is always on its way while the one before is multiplied.

    Weights come from no kernel before this one, so the first tile is asked for before the inputs are waited for.
    """
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    is_column = column < NUM_COLUMNS
    is_masked: tl.constexpr = NUM_COLUMNS % BLOCK_N != 0 or DEPTH % BLOCK_K != 0
    last: tl.constexpr = ((DEPTH - 1) // BLOCK_K) * BLOCK_K
    weight_rows = weight + column.to(tl.int64)[:, None] * weight_stride
    weights = _tile(weight_rows, is_column, depth, DEPTH, is_masked)
    wait_for_inputs()
    piece = _piece(x, depth, DEPTH, BLOCK_K)
    acc = tl.zeros([BLOCK_N, BLOCK_K // LANE], tl.float32)
    for start in range(BLOCK_K, last + 1, BLOCK_K):
        next_weights = _tile(weight_rows, is_column, start + depth, DEPTH, is_masked)
        next_piece = _piece(x, start + depth, DEPTH, BLOCK_K)
        acc += _products(piece, weights, BLOCK_N, BLOCK_K, LANE)
        weights = next_weights
        piece = next_piece
    acc += _products(piece, weights, BLOCK_N, BLOCK_K, LANE)
    result = tl.sum(acc, 1)
    if HAS_RESIDUAL:
        result += tl.load(residual + column, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out + column, result.to(out.dtype.element_ty), mask=is_column)


@dataclasses.dataclass(frozen=True, slots=True)
class OneRowTiling:
    """Columns and depth of a tile (powers of two), and warps a program."""

    block_n: int
    block_k: int
    num_warps: int


def one_row_tiling(depth: int) -> OneRowTiling:
    """Four loads of 16 bytes a thread for every tile, and no tile that reaches beyond a depth of the common models."""
    if depth <= 4096:
        return OneRowTiling(block_n=4, block_k=1024, num_warps=4)
    return OneRowTiling(block_n=4, block_k=2048 if depth % 2048 == 0 else 1024, num_warps=8 if depth % 2048 == 0 else 4)


def one_row_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    residual: torch.Tensor | None = None,
    tiling: OneRowTiling | None = None,
) -> None:
    """out = x weight^T + residual, products and sums in float32, cast once; the same bits for the same numbers.

    Args:
        x: `[1, K]`, contiguous.
        weight: `[N, K]`, last dimension contiguous; written by no kernel that lets this one start early.
        out: `[1, N]` of any float type, contiguous; may be `residual` itself.
        residual: `[1, N]`, contiguous, or None.
        tiling: None takes `one_row_tiling`.
    """
    num_columns, depth = weight.shape
    assert x.shape[0] <= MAX_ROWS and weight.stride(1) == 1
    chosen = one_row_tiling(depth) if tiling is None else tiling
    _one_row_kernel[(ceil_div(num_columns, chosen.block_n),)](
        x,
        weight,
        residual,
        out,
        weight.stride(0),
        NUM_COLUMNS=num_columns,
        DEPTH=depth,
        HAS_RESIDUAL=residual is not None,
        BLOCK_N=chosen.block_n,
        BLOCK_K=chosen.block_k,
        LANE=THREAD_NUMBERS,
        num_warps=chosen.num_warps,
        **LAUNCH,
    )
