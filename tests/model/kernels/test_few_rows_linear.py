import pytest
import torch

from model.kernels import few_rows_linear
from tests.model.kernels.paged import columns

NAN = float("nan")


@pytest.mark.parametrize("num_rows", [1, 3, 17])
@pytest.mark.parametrize(("depth", "split_k"), [(128, 1), (200, 1), (256, 4), (200, 3)])
@pytest.mark.parametrize("has_residual", [True, False])
def test_product_plus_residual(num_rows: int, depth: int, split_k: int, has_residual: bool) -> None:
    x, weight = columns(num_rows, depth), torch.randn(70, depth)
    residual = columns(num_rows, 70) if has_residual else None
    out = columns(num_rows, 70, fill=NAN)
    workspace = (torch.full((split_k * num_rows * 70,), NAN), torch.zeros(3, dtype=torch.int32))
    for _ in range(2):
        out.fill_(NAN)
        few_rows_linear(x, weight, out, residual, workspace, split_k, block_n=32, block_k=64)
    expected = x.double() @ weight.double().t() + (0 if residual is None else residual.double())
    torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=1e-5)
    assert not workspace[1].any()


def test_bfloat16_sums_in_float32() -> None:
    x, weight = torch.randn(2, 512).bfloat16(), torch.randn(40, 512).bfloat16()
    out = torch.full((2, 40), NAN, dtype=torch.bfloat16)
    few_rows_linear(x, weight, out, block_k=64)
    torch.testing.assert_close(out.double(), x.double() @ weight.double().t(), atol=0.3, rtol=1e-2)
