"""A step's products of a single row: our kernel in several tilings beside cuBLAS, weights larger than the L2 cache."""

from __future__ import annotations

from functools import partial

import torch

from bench.kernels.clock import BF16, distance, normal, replay_s
from bench.kernels.inputs import GEOMETRIES, VOCABULARY
from bench.kernels.report import Report, tried
from model.kernels.few_rows import OneRowTiling, one_row_linear, one_row_tiling

TILINGS = {
    "8b in": ((2, 4096, 4, None), (1, 4096, 4, None), (4, 1024, 4, 72), (4, 1024, 4, None), (2, 2048, 4, None)),
    "8b out": ((4, 1024, 4, 64), (4, 1024, 4, None), (8, 1024, 4, None), (4, 2048, 8, 64), (2, 2048, 8, None)),
    "8b head": ((2, 4096, 4, None), (1, 4096, 4, None), (4, 1024, 4, 72)),
    "32b in": ((2, 4096, 4, None), (1, 8192, 4, None), (4, 1024, 4, 64), (2, 2048, 4, None)),
    "32b out": ((4, 512, 2, 64), (4, 512, 2, None), (8, 512, 2, None), (4, 1024, 4, 64), (2, 2048, 8, None)),
    "32b head": ((2, 4096, 4, None), (1, 8192, 4, None), (2, 2048, 4, None)),
}
"""Columns and depth of a tile, warps, registers; the default is always measured."""


def one_row(report: Report) -> None:
    """The layer's two products and the head."""
    for g in GEOMETRIES:
        for name, columns, depth in (
            ("in", g.qkv + 2 * g.intermediate, g.hidden),
            ("out", g.hidden, g.hidden + g.intermediate),
            ("head", VOCABULARY, g.hidden),
        ):
            case = f"{g.name} {name}"
            tried(case, partial(one_shape, report, columns, depth, case))


def one_shape(report: Report, columns: int, depth: int, case: str) -> None:
    """cuBLAS, then every tiling; the residual is added in place where the model does so."""
    weights = [normal(columns, depth) for _ in range(2 if columns * depth < 2**28 else 1)]
    x, residual = normal(1, depth), normal(1, columns) if case.endswith("out") else None
    num_bytes = 2.0 * (columns * depth + columns + depth)
    out = torch.empty(1, columns, dtype=BF16, device="cuda") if residual is None else residual
    inner = 16 if columns * depth < 2**30 else 4

    def cublas(number: int) -> None:
        weight = weights[number % len(weights)].t()
        torch.mm(x, weight, out=out) if residual is None else residual.addmm_(x, weight)

    report.add("one row", case, "cublas", replay_s(cublas, inner, 9), num_bytes, "TB/s", None)
    default = one_row_tiling(columns, depth)
    tilings = [OneRowTiling(*numbers) for numbers in TILINGS[case]]
    for tiling in [default, *(tiling for tiling in tilings if tiling != default)]:
        variant = f"{tiling.block_n}x{tiling.block_k} w{tiling.num_warps} r{tiling.max_registers}"
        variant += " default" if tiling == default else ""

        def measure(tiling: OneRowTiling, variant: str) -> None:
            error = error_of(x, weights[0], tiling)
            seconds = replay_s(lambda n: one_row_linear(x, weights[n % len(weights)], out, residual, tiling), inner, 9)
            report.add("one row", case, variant, seconds, num_bytes, "TB/s", error)

        tried(f"{case} {variant}", partial(measure, tiling, variant))


def error_of(x: torch.Tensor, weight: torch.Tensor, tiling: OneRowTiling) -> float:
    """Distance from float64 in the first and the last columns; every column has to be written, twice the same."""
    columns = len(weight)
    residual = normal(1, columns)
    first, second = torch.full((2, 1, columns), float("nan"), dtype=BF16, device="cuda")
    for out in (first, second):
        one_row_linear(x, weight, out, residual, tiling)
    assert torch.equal(first, second), "not the same twice, or not written"
    some = torch.cat((torch.arange(512), torch.arange(columns - 512, columns))).to("cuda")
    return distance(first[:, some], residual[:, some].double() + x.double() @ weight[some].double().t())
