"""A matrix product for few rows, bound by reading the weight once."""

from __future__ import annotations

import torch
import triton.language as tl

from model.kernels.jit import LAUNCH, ceil_div, dot, jit, next_power_of_2, wait_for_inputs

MAX_ROWS = 64


@jit
def _few_rows_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    arrivals: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    x_stride: tl.tensor,
    weight_stride: tl.tensor,
    residual_stride: tl.tensor,
    out_stride: tl.tensor,
    DEPTH: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
) -> None:
    """Program (tile of the weight's rows, part of the depth); the last part to arrive adds all parts in their order."""
    wait_for_inputs()
    tile = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.arange(0, BLOCK_M)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = row < num_rows
    is_column = column < num_columns
    share: tl.constexpr = ((DEPTH + SPLIT_K * BLOCK_K - 1) // (SPLIT_K * BLOCK_K)) * BLOCK_K
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    x_rows = x + row[:, None] * x_stride
    weight_rows = weight + column.to(tl.int64)[:, None] * weight_stride
    for start in tl.range(split * share, tl.minimum(split * share + share, DEPTH), BLOCK_K, num_stages=NUM_STAGES):
        depth = start + tl.arange(0, BLOCK_K)
        if DEPTH % BLOCK_K == 0:
            left = tl.load(x_rows + depth[None, :], mask=is_row[:, None], other=0.0)
            right = tl.load(weight_rows + depth[None, :], mask=is_column[:, None], other=0.0)
        else:
            left = tl.load(x_rows + depth[None, :], mask=is_row[:, None] & (depth < DEPTH)[None, :], other=0.0)
            right = tl.load(weight_rows + depth[None, :], mask=is_column[:, None] & (depth < DEPTH)[None, :], other=0.0)
        acc = dot(left, tl.trans(right), acc)
    inside = is_row[:, None] & is_column[None, :]
    places = row[:, None] * num_columns + column[None, :]
    is_last = True
    if SPLIT_K > 1:
        part = partial + places
        part_stride = num_rows.to(tl.int64) * num_columns
        tl.store(part + split * part_stride, acc, mask=inside)
        tl.debug_barrier()  # every thread's part is written before the arrival is counted
        is_last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLIT_K - 1
        if is_last:
            tl.store(arrivals + tile, 0)
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for other in range(SPLIT_K):
                acc += tl.load(part + other * part_stride, mask=inside, other=0.0, cache_modifier=".cg")
    if is_last:
        if HAS_RESIDUAL:
            added = residual + row[:, None] * residual_stride + column[None, :]
            acc += tl.load(added, mask=inside, other=0.0).to(tl.float32)
        result = acc.to(out.dtype.element_ty)
        tl.store(out + row[:, None] * out_stride + column[None, :], result, mask=inside)


def few_rows_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    residual: torch.Tensor | None = None,
    workspace: tuple[torch.Tensor, torch.Tensor] | None = None,
    split_k: int = 1,
    block_n: int = 32,
    block_k: int = 256,
    num_warps: int = 4,
    num_stages: int = 4,
) -> None:
    """out = x weight^T + residual, summed in float32 and cast once.

    Args:
        x: `[M, K]`, M at most MAX_ROWS, last dimension contiguous.
        weight: `[N, K]`, last dimension contiguous.
        out: `[M, N]`, last dimension contiguous.
        residual: `[M, N]`, or None.
        workspace: (float32 of split_k * M * N entries, int32 zeros of one entry per block_n columns), which a launch
            leaves as zeros; needed if split_k is over 1.
        split_k: programs that share a column's sum.
        block_n, block_k, num_warps, num_stages: columns and depth of a tile, warps a program, tiles in flight.
    """
    num_rows, depth = x.shape
    num_columns = weight.shape[0]
    assert num_rows <= MAX_ROWS
    partial, arrivals = workspace if workspace is not None else (None, None)
    assert split_k == 1 or partial is not None
    _few_rows_kernel[(ceil_div(num_columns, block_n), split_k)](
        x,
        weight,
        residual,
        out,
        partial,
        arrivals,
        num_rows,
        num_columns,
        x.stride(0),
        weight.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        DEPTH=depth,
        HAS_RESIDUAL=residual is not None,
        SPLIT_K=split_k,
        BLOCK_M=max(16, next_power_of_2(num_rows)),
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        NUM_STAGES=num_stages,
        num_warps=num_warps,
        **LAUNCH,
    )
