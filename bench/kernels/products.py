"""A layer's two products and the head by cuBLAS, called in the ways that torch knows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from bench.kernels.clock import BF16, distance, normal, replay_s
from bench.kernels.inputs import GEOMETRIES, VOCABULARY
from bench.kernels.report import Report, tried


def products(report: Report) -> None:
    """The layer's two products and the head, for few and for many rows."""
    for g in GEOMETRIES:
        for name, columns, depth in (
            ("in", g.qkv + 2 * g.intermediate, g.hidden),
            ("out", g.hidden, g.hidden + g.intermediate),
            ("head", VOCABULARY, g.hidden),
        ):
            weights = [normal(columns, depth) for _ in range(2 if columns * depth < 2**28 else 1)]
            for num_rows in (1, 8, 64, 256):
                case = f"{g.name} {name} M={num_rows}"
                tried(case, partial(one_product, report, num_rows, weights, name == "out", case))


def one_product(report: Report, num_rows: int, weights: list[torch.Tensor], has_residual: bool, case: str) -> None:
    """With the residual added, in a place of its own or where it lies, and without one."""
    columns, depth = weights[0].shape
    x, residual = normal(num_rows, depth), normal(num_rows, columns)
    out = torch.full((num_rows, columns), float("nan"), dtype=BF16, device="cuda")
    expected = x.float() @ weights[0][-512:].float().t() + (residual[:, -512:].float() if has_residual else 0)
    num_bytes = 2.0 * (columns * depth + num_rows * (columns + depth))
    unit, amount = ("TB/s", num_bytes) if num_rows <= 64 else ("TFLOP/s", 2.0 * num_rows * columns * depth)
    kept = residual.clone()

    def measure(variant: str, call: Callable[[torch.Tensor], object]) -> None:
        def action() -> None:
            out.fill_(float("nan"))
            residual.copy_(kept)
            call(weights[0])
            error = distance(out[:, -512:], expected) if not out.isnan().any() else None  # None: not written to out
            seconds = replay_s(lambda number: call(weights[number % len(weights)]), inner=8, tries=7)
            report.add("product", case, variant, seconds, amount, unit, error)

        tried(f"{case} {variant}", action)

    for library in ("cublas", "cublaslt"):
        tried(library, partial(torch.backends.cuda.preferred_blas_library, library))
        if has_residual:
            measure(f"{library} addmm", lambda w: torch.addmm(residual, x, w.t(), out=out))
            measure(f"{library} addmm_ in place", lambda w: residual.addmm_(x, w.t()))
        else:
            measure(f"{library} mm", lambda w: torch.mm(x, w.t(), out=out))
    torch.backends.cuda.preferred_blas_library("cublas")
    if num_rows == 1 and not has_residual:
        measure("cublas mv", lambda w: torch.mv(w, x[0], out=out[0]))
