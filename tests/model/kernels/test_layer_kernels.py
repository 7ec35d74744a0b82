"""Norms, rotary with the cache write, and the gated activation, against float64 maths."""

import pytest
import torch

from model.kernels import head_norm, layer_norm, rotary_and_cache, silu_and_mul
from model.kernels.rotary import RotaryTiling
from tests.model.kernels.paged import columns

DTYPES = [(torch.float32, 3e-6), (torch.bfloat16, 1.6e-2)]
NAN = float("nan")


def plain_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("size", [64, 200, 1024])
def test_layer_norm_subtracts_the_mean(size: int, dtype: torch.dtype, tolerance: float) -> None:
    x = columns(3, size, dtype) + 5
    weight = torch.randn(size).to(dtype)
    out = columns(3, size, dtype, NAN)
    layer_norm(x, weight, 1e-5, out)
    torch.testing.assert_close(out.double(), plain_norm(x, weight, 1e-5), atol=tolerance, rtol=tolerance)


def test_layer_norm_of_a_constant_row_is_zero() -> None:
    x, out = torch.full((1, 100), 3.0), torch.full((1, 100), NAN)
    layer_norm(x, torch.ones(100), 1e-5, out)
    assert not out.any()


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize(("num_heads", "head_dim"), [(4, 64), (10, 96)])
def test_head_norm_has_a_weight_row_per_head(
    num_heads: int, head_dim: int, dtype: torch.dtype, tolerance: float
) -> None:
    heads, weight = columns(3, num_heads * head_dim, dtype), torch.randn(num_heads, head_dim).to(dtype)
    expected = plain_norm(heads.view(3, num_heads, head_dim), weight, 1e-5)
    head_norm(heads, weight, 1e-5)
    torch.testing.assert_close(heads.reshape(expected.shape).double(), expected, atol=tolerance, rtol=tolerance)


def turned(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Pairs (2i, 2i+1) of heads `[T, H, D]` turned by angles `[T, D / 2]`, in float64."""
    pairs = torch.view_as_complex(heads.double().reshape(*heads.shape[:2], -1, 2))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None]).flatten(2)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("head_dim", [64, 96])
@pytest.mark.parametrize("num_q_heads", [2, 12])
@pytest.mark.parametrize("has_rope", [True, False])
@pytest.mark.parametrize("tiling", [None, RotaryTiling(block_t=2, block_h=4, num_warps=1)])
def test_rotary_and_cache(
    tiling: RotaryTiling | None, num_q_heads: int, head_dim: int, has_rope: bool, dtype: torch.dtype, tolerance: float
) -> None:
    positions, slots = torch.tensor([0, 7, 30]), torch.tensor([47, 0, 18])
    angles = torch.rand(32, head_dim // 2, dtype=torch.float64) * 6
    cos_sin = torch.stack((angles.cos(), angles.sin()), -1).flatten(1).float() if has_rope else None
    qkv = columns(3, (num_q_heads + 4) * head_dim, dtype)
    k_cache, v_cache = torch.full((2, 3, 16, 2, head_dim), NAN, dtype=dtype)
    q, k, v = qkv.reshape(3, -1, head_dim).clone().split((num_q_heads, 2, 2), dim=1)
    rotary_and_cache(qkv, positions, cos_sin, slots, k_cache, v_cache, num_q_heads, tiling)

    expected_q, expected_k = (turned(x, angles[positions]) if has_rope else x.double() for x in (q, k))
    actual_q = qkv.reshape(3, -1, head_dim)[:, :num_q_heads].double()
    torch.testing.assert_close(actual_q, expected_q, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(k_cache.flatten(0, 1)[slots].double(), expected_k, atol=tolerance, rtol=tolerance)
    assert torch.equal(v_cache.flatten(0, 1)[slots], v)
    untouched = [slot for slot in range(48) if slot not in slots.tolist()]
    assert k_cache.flatten(0, 1)[untouched].isnan().all()
    assert v_cache.flatten(0, 1)[untouched].isnan().all()


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("size", [64, 1500])
def test_silu_and_mul_reads_and_writes_columns(size: int, dtype: torch.dtype, tolerance: float) -> None:
    gate_up, out = columns(3, 2 * size, dtype), columns(3, size, dtype, NAN)
    gate, up = gate_up.double().chunk(2, dim=-1)
    silu_and_mul(gate_up, out)
    torch.testing.assert_close(out.double(), gate * gate.sigmoid() * up, atol=tolerance, rtol=tolerance)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
def test_silu_and_mul_of_very_negative_gates_is_zero() -> None:
    gate_up, out = torch.tensor([[-1000.0, -100.0, 2.0, 3.0]]), torch.full((1, 2), NAN)
    silu_and_mul(gate_up, out)
    assert not out.any()
