"""The gated activation between the two products of a layer."""

from __future__ import annotations

import torch
import triton.language as tl

from model.kernels.jit import LAUNCH, ceil_div, jit, wait_for_inputs


@jit
def _silu_and_mul_kernel(
    gate_up: tl.tensor,
    out: tl.tensor,
    gate_up_stride: tl.tensor,
    out_stride: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gate_row = gate_up + row * gate_up_stride
    gate = tl.load(gate_row + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_row + size + columns, mask=inside, other=0.0).to(tl.float32)
    active = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * out_stride + columns, active.to(out.dtype.element_ty), mask=inside)


def silu_and_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """out = gate * sigmoid(gate) * up in float32, cast once.

    Args:
        gate_up: `[T, 2 I]` columns of the fused projection, gate first; left as they are.
        out: `[T, I]` columns, for instance of the output product's input.
    """
    num_rows, size = out.shape
    block = 1024 if num_rows <= 256 else 2048
    if num_rows:
        _silu_and_mul_kernel[(num_rows, ceil_div(size, block))](
            gate_up, out, gate_up.stride(0), out.stride(0), size, BLOCK=block, num_warps=4, **LAUNCH
        )
