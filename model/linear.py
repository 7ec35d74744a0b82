"""Matrix products whose weight is stacked from a checkpoint's parts and, on a CPU, prepacked for oneDNN."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from model.products import TunedProducts

HAS_ONE_ROW_KERNEL = True
"""Whether a CUDA device multiplies a single row by our own kernel instead of cuBLAS."""


class Linear:
    """y = x W^T + b, with one copy of W: on a CPU in oneDNN's blocked layout, elsewhere as it comes."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Takes `weight [out, in]` and `bias [out]`; the caller should keep no reference to `weight`."""
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.is_packed = can_pack(weight)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self.is_packed else weight
        self.has_one_row_form = weight.is_cuda and _has_one_row_form(weight)
        self.products: TunedProducts | None = None  # set once the device has been measured

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """`x [T, in]` gives a new `[T, out]`, plus `residual [T, out]` in the same pass.

        On a CUDA device the sum is made in `residual` itself, which is returned: a product that adds to a new matrix
        has to copy it first.
        """
        if not self.is_packed:
            return self._plain(x, residual)
        if residual is None:
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        else:
            out = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, self.bias, "add")
        return out

    def to_float32(self, x: torch.Tensor) -> torch.Tensor:
        """As forward, on a CUDA device, but float32 whatever the weight's type is, written at once."""
        if self._is_one_row(x):
            return self._multiply_one_row(x, None, torch.float32)
        out = x.new_empty((x.shape[0], self.out_features), dtype=torch.float32)
        if not self._multiply_tuned(x, out):
            self.multiply(x, out)
        return out if self.bias is None else out.add_(self.bias)

    def multiply(self, x: torch.Tensor, out: torch.Tensor, is_added: bool = False) -> None:
        """out = x W^T, or out += x W^T, by torch; `out` may be float32 where the weight is not."""
        if is_added:
            out.addmm_(x, self.weight.t())
        elif out.dtype == x.dtype:
            torch.mm(x, self.weight.t(), out=out)
        else:
            torch.mm(x, self.weight.t(), out_dtype=out.dtype, out=out)

    def _plain(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        if self._is_one_row(x):
            return self._multiply_one_row(x, residual, x.dtype)
        if not x.is_cuda:
            if residual is None:
                return F.linear(x, self.weight, self.bias)
            out = residual.addmm(x, self.weight.t())
        else:
            out = x.new_empty((x.shape[0], self.out_features)) if residual is None else residual
            if not self._multiply_tuned(x, out):
                self.multiply(x, out, residual is not None)
        return out if self.bias is None else out.add_(self.bias)

    def _multiply_tuned(self, x: torch.Tensor, out: torch.Tensor) -> bool:
        product = None if self.products is None else self.products.find(x.shape[0])
        if product is None:
            return False
        product.run(x, self.weight, out)
        return True

    def _is_one_row(self, x: torch.Tensor) -> bool:
        return self.has_one_row_form and HAS_ONE_ROW_KERNEL and x.shape[0] == 1

    def _multiply_one_row(self, x: torch.Tensor, residual: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        from model.kernels.few_rows import one_row_linear  # Triton is there on a CUDA device only

        out = x.new_empty((1, self.out_features), dtype=dtype) if residual is None else residual
        one_row_linear(x, self.weight, out, residual)
        return out if self.bias is None else out.add_(self.bias)


def can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN multiplies with this weight here: on a CPU, in a type that the processor has instructions for."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return weight.dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _has_one_row_form(weight: torch.Tensor) -> bool:
    from model.kernels.few_rows import has_one_row_form

    return has_one_row_form(weight)
