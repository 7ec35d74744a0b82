"""LayerNorm over the hidden size, and over each head of q or k."""

from __future__ import annotations

import torch
import triton.language as tl

from model.kernels.jit import LAUNCH, ceil_div, jit, next_power_of_2, wait_for_inputs


@jit
def _layer_norm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    centred = tl.where(inside, values - tl.sum(values, 0) / SIZE, 0.0)
    variance = tl.sum(centred * centred, 0) / SIZE
    normed = centred * tl.rsqrt(variance + eps) * scale
    tl.store(out + row * out_stride + columns, normed.to(out.dtype.element_ty), mask=inside)


@jit
def _head_norm_kernel(
    heads: tl.tensor,
    weight: tl.tensor,
    row_stride: tl.tensor,
    eps: tl.tensor,
    num_heads: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    column = tl.arange(0, BLOCK_D)
    inside = (head < num_heads)[:, None] & (column < HEAD_DIM)[None, :]
    offsets = head[:, None] * HEAD_DIM + column[None, :]
    places = heads + row * row_stride + offsets
    values = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + offsets, mask=inside, other=0.0).to(tl.float32)
    centred = tl.where(inside, values - (tl.sum(values, 1) / HEAD_DIM)[:, None], 0.0)
    variance = tl.sum(centred * centred, 1) / HEAD_DIM
    normed = centred * tl.rsqrt(variance + eps)[:, None] * scale
    tl.store(places, normed.to(heads.dtype.element_ty), mask=inside)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """Mean-subtracting LayerNorm without bias: one pass in float32, cast once.

    Args:
        x: `[T, H]`, last dimension contiguous.
        weight: `[H]`.
        eps: added to the variance.
        out: `[T, H]` of any float type, last dimension contiguous; may be `x` itself.
    """
    num_rows, size = x.shape
    block = next_power_of_2(size)
    num_warps = min(max(block // 512, 1), 16)
    if num_rows:
        _layer_norm_kernel[(num_rows,)](
            x, weight, out, x.stride(0), out.stride(0), eps, SIZE=size, BLOCK=block, num_warps=num_warps, **LAUNCH
        )


def head_norm(heads: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """LayerNorm over each head of q or k in place, one weight row per head; float32 maths, cast once.

    Args:
        heads: `[T, num_heads * D]` columns of the fused projection.
        weight: `[num_heads, D]`, contiguous.
        eps: added to the variance.
    """
    num_heads, head_dim = weight.shape
    block_h = min(8, next_power_of_2(num_heads))
    if heads.shape[0]:
        _head_norm_kernel[(heads.shape[0], ceil_div(num_heads, block_h))](
            heads,
            weight,
            heads.stride(0),
            eps,
            num_heads,
            HEAD_DIM=head_dim,
            BLOCK_H=block_h,
            BLOCK_D=next_power_of_2(head_dim),
            num_warps=4,
            **LAUNCH,
        )
