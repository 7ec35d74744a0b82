"""The kernels between a layer's products: norms, rotary with the cache write, activation; and the GPU's own speed."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from bench.kernels.clock import BF16, bench_s, distance, normal, timed
from bench.kernels.inputs import GEOMETRIES, HEAD_DIM, Geometry
from bench.kernels.report import Report, tried
from model import kernels
from model.kernels.rotary import RotaryTiling, rotary_and_cache, rotary_tiling

ROTARY_TILINGS = (RotaryTiling(1, 8, 4), RotaryTiling(1, 16, 4), RotaryTiling(1, 16, 8), RotaryTiling(4, 16, 8))


def machine(report: Report) -> None:
    """What this GPU does at best."""
    left, right = normal(8192, 8192), normal(8192, 8192)
    report.add("machine", "8192^3", "matmul", bench_s(lambda: left @ right), 2 * 8192**3, "TFLOP/s", None)
    source = normal(2**31)
    target = torch.empty_like(source)
    report.add("machine", "copy", "copy_", bench_s(lambda: target.copy_(source)), 2 * 2**32, "TB/s", None)
    # bytes read: a sum writes nothing to speak of
    report.add("machine", "read", "sum", bench_s(lambda: source.view(torch.float32).sum()), 2**32, "TB/s", None)


def layers(report: Report) -> None:
    """The kernels between a layer's products."""
    for geometry in GEOMETRIES:
        for num_rows in (1, 64, 256, 16384):
            tried(f"layers {geometry.name} {num_rows}", partial(one_layer, report, geometry, num_rows))


def one_layer(report: Report, g: Geometry, num_rows: int) -> None:
    """Norm, rotary with the cache write and activation at one size."""
    case = f"{g.name} T={num_rows}"
    is_small = num_rows <= 256
    x, weight = normal(num_rows, g.hidden), normal(g.hidden)
    normed = torch.full_like(x, float("nan"))
    seconds = timed(lambda _: kernels.layer_norm(x, weight, 1e-5, normed), is_small)
    expected = F.layer_norm(x.float(), (g.hidden,), weight.float(), None, 1e-5)
    report.add("norm", case, "triton", seconds, 4 * x.numel(), "TB/s", distance(normed, expected))
    variant = timed(lambda _: F.layer_norm(x, (g.hidden,), weight, None, 1e-5), is_small)
    report.add("norm", case, "torch", variant, 4 * x.numel(), "TB/s", None)

    projected = normal(num_rows, g.qkv + 2 * g.intermediate)
    joined = torch.full((num_rows, g.hidden + g.intermediate), float("nan"), dtype=BF16, device="cuda")
    gate_up, active = projected[:, g.qkv :], joined[:, g.hidden :]
    seconds = timed(lambda _: kernels.silu_and_mul(gate_up, active), is_small)
    expected = F.silu(gate_up[:, : g.intermediate].float()) * gate_up[:, g.intermediate :].float()
    report.add("silu", case, "triton", seconds, 6 * active.numel(), "TB/s", distance(active, expected))

    qkv = projected[:, : g.qkv]
    one_rotary(report, g, qkv, case)
    norm_weight = normal(g.heads, HEAD_DIM)
    query = qkv[:, : g.heads * HEAD_DIM]
    seconds = timed(lambda _: kernels.head_norm(query, norm_weight, 1e-5), is_small)
    report.add("headnorm", case, "triton", seconds, 4 * query.numel(), "TB/s", None)


def one_rotary(report: Report, g: Geometry, qkv: torch.Tensor, case: str) -> None:
    """Rotary with the cache write, in several tilings."""
    num_rows = len(qkv)
    positions = torch.randint(0, 8192, (num_rows,), device="cuda")
    slots = torch.randperm(65536, device="cuda")[:num_rows]
    angles = torch.rand(8192, HEAD_DIM // 2, device="cuda") * 6.28
    cos_sin = torch.stack((angles.cos(), angles.sin()), -1).flatten(1).contiguous()
    k_cache, v_cache = torch.full((2, 256, 256, g.kv_heads, HEAD_DIM), float("nan"), dtype=BF16, device="cuda")
    arguments = (positions, cos_sin, slots, k_cache, v_cache, g.heads)
    turn = torch.polar(torch.ones_like(angles), angles)[positions][:, None]

    def turn_all(tiling: RotaryTiling, _: int) -> None:
        rotary_and_cache(qkv, *arguments, tiling)

    default = rotary_tiling(num_rows)
    for tiling in [default, *(tiling for tiling in ROTARY_TILINGS if tiling != default)]:
        heads = qkv.float().reshape(num_rows, -1, HEAD_DIM).clone()
        k_cache.fill_(float("nan"))
        v_cache.fill_(float("nan"))
        rotary_and_cache(qkv, *arguments, tiling)
        turned = torch.view_as_real(torch.view_as_complex(heads.view(num_rows, -1, HEAD_DIM // 2, 2)) * turn).flatten(2)
        error = distance(qkv[:, : g.heads * HEAD_DIM], turned[:, : g.heads].flatten(1))
        error += distance(k_cache.flatten(0, 1)[slots], turned[:, g.heads : -g.kv_heads])
        error += distance(v_cache.flatten(0, 1)[slots], heads[:, -g.kv_heads :])
        seconds = timed(partial(turn_all, tiling), num_rows <= 256)
        variant = f"{tiling.block_t}x{tiling.block_h} w{tiling.num_warps}" + (" default" if tiling == default else "")
        report.add("rotary", case, variant, seconds, 4 * qkv.numel(), "TB/s", error)
