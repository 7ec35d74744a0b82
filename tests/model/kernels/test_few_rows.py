"""A matrix times one row, against float64 maths."""

import pytest
import torch

from model import linear
from model.kernels.few_rows import OneRowTiling, has_one_row_form, one_row_linear, one_row_tiling

NAN = float("nan")
SMALL = OneRowTiling(block_n=4, block_k=64, num_warps=1)


def drawn(num_columns: int, depth: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A row, a weight with a gap of NaN after each of its rows, and a residual, in bfloat16."""
    wide = torch.full((num_columns, depth + 16), NAN, dtype=torch.bfloat16)
    wide[:, :depth] = torch.randn(num_columns, depth)
    return torch.randn(1, depth).bfloat16(), wide[:, :depth], torch.randn(1, num_columns).bfloat16()


@pytest.mark.parametrize("depth", [64, 200, 256])
@pytest.mark.parametrize("num_columns", [8, 13])
def test_a_product_of_one_row(num_columns: int, depth: int) -> None:
    x, weight, _ = drawn(num_columns, depth)
    out = torch.full((1, num_columns), NAN, dtype=torch.bfloat16)
    one_row_linear(x, weight, out, tiling=SMALL)
    torch.testing.assert_close(out.double(), x.double() @ weight.double().t(), atol=1e-2, rtol=8e-3)


def test_a_float32_result_is_not_rounded_to_the_inputs_type() -> None:
    x, weight, _ = drawn(13, 200)
    out = torch.full((1, 13), NAN)
    one_row_linear(x, weight, out, tiling=SMALL)
    torch.testing.assert_close(out.double(), x.double() @ weight.double().t(), atol=1e-4, rtol=1e-5)


def test_the_sum_may_be_made_in_the_residual_itself() -> None:
    x, weight, residual = drawn(13, 200)
    expected = residual.double() + x.double() @ weight.double().t()
    one_row_linear(x, weight, residual, residual, SMALL)
    torch.testing.assert_close(residual.double(), expected, atol=1e-2, rtol=8e-3)


@pytest.mark.parametrize("depth", [300, 1024])
def test_the_default_tiling_covers_every_column(depth: int) -> None:
    x, weight, residual = drawn(42, depth)
    out = torch.full((1, 42), NAN, dtype=torch.bfloat16)
    one_row_linear(x, weight, out, residual)
    expected = residual.double() + x.double() @ weight.double().t()
    torch.testing.assert_close(out.double(), expected, atol=1e-2, rtol=8e-3)


@pytest.mark.parametrize("num_columns", [1024, 4096, 8192, 34816, 256000])
@pytest.mark.parametrize("depth", [40, 4096, 18432])
def test_default_tilings_are_powers_of_two_with_a_wide_load_for_every_thread(num_columns: int, depth: int) -> None:
    tiling = one_row_tiling(num_columns, depth)
    for number in (tiling.block_n, tiling.block_k, tiling.num_warps):
        assert number & (number - 1) == 0
    assert depth < 1024 or tiling.block_k >= 8 * 32 * tiling.num_warps


def test_only_bfloat16_rows_of_aligned_pairs_have_the_form() -> None:
    whole = torch.zeros(6, 16, dtype=torch.bfloat16)
    assert has_one_row_form(whole) and has_one_row_form(whole[2:, 4:12])
    others = (whole.float(), whole.t(), whole[:, :7], whole[:, 1:9], torch.zeros(6, 15, dtype=torch.bfloat16)[:, :8])
    assert not any(has_one_row_form(other) for other in others)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
def test_a_linear_layer_adds_bias_and_residual(
    has_bias: bool, has_residual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "can_pack", lambda weight: False)
    x, weight, residual = drawn(42, 200)
    bias = torch.randn(42).bfloat16() if has_bias else None
    layer = linear.Linear(weight, bias)
    layer.has_one_row_form = True  # as on a CUDA device
    expected = x.double() @ weight.double().t()
    expected = expected + (bias.double() if bias is not None else 0) + (residual.double() if has_residual else 0)
    out = layer.forward(x, residual if has_residual else None)
    assert (out is residual) == has_residual
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)
