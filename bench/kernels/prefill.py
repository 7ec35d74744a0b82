"""Prefill attention: whole prompts, a chunk behind a cached part, and a window."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from functools import partial

import torch

from bench.kernels.clock import BF16, bench_s, distance, normal
from bench.kernels.inputs import HEAD_DIM, Cache, halved_tables, seqlen_of
from bench.kernels.peers import cudnn, flash_prefill
from bench.kernels.report import Report, tried
from model import kernels
from model.attention.triton import PrefillTiling, tilings_for

CASES = [(8, 0, 2048, None), (1, 0, 6000, None), (1, 3000, 3000, None), (16, 0, 512, None), (1, 0, 6000, 4096)]
"""Rows, cached and new tokens of each, window."""
TILINGS = {"plain": PrefillTiling(), "128x128 tma": PrefillTiling(128, 128, 8, 2, True)}
"""What is timed beside the default."""


def prefill(report: Report) -> None:
    """Every case with both head counts, the window with the lower one."""
    cache = Cache(400)
    for heads in (32, 64):
        for rows, cached, new, window in CASES:
            if heads == 64 and window:
                continue
            what = f"Hq={heads} {rows}x({cached}+{new})" + (f" W={window}" if window else "")
            tried(what, partial(one_prefill, report, cache, heads, rows, cached, new, window, what))


def one_prefill(
    report: Report, cache: Cache, heads: int, rows: int, cached: int, new: int, window: int | None, case: str
) -> None:
    """Ours in several tilings, flash-attn on pages, cuDNN on keys in rows (without the time to line them up)."""
    context, width, pools = cached + new, heads * HEAD_DIM, (cache.k, cache.v)
    query = normal(rows * new, width + 2048)[:, :width]
    out = torch.full((rows * new, width + 4096), float("nan"), dtype=BF16, device="cuda")[:, :width]
    tables, seqlen = cache.tables(rows, context), seqlen_of(rows, cached, new)
    lengths = seqlen.context_lengths
    cache.poison_tails(tables, context)
    borders = torch.arange(0, rows * new + 1, new, dtype=torch.int32, device="cuda")
    expected = cache.plain(query[-300:], tables[-1], context, window)
    pairs = sum(min(window or context, cached + i + 1) for i in range(new))
    flops = 4.0 * rows * heads * HEAD_DIM * pairs

    def measure(variant: str, call: Callable[[], object]) -> None:
        def action() -> None:
            out.fill_(float("nan"))
            start = time.perf_counter()
            call()
            torch.cuda.synchronize()
            first_s = time.perf_counter() - start
            error = distance(out[-300:], expected) if not out.isnan().any() else float("nan")
            report.add("prefill", case, f"{variant} [{first_s:.2f}s]", bench_s(call), flops, "TFLOP/s", error)

        tried(f"{case} {variant}", action)

    def ours(tiling: PrefillTiling, k: torch.Tensor, v: torch.Tensor, t: torch.Tensor) -> None:
        kernels.prefill_attention(
            query, k, v, t, borders, lengths, new, window, out, *dataclasses.astuple(tiling),
        )  # fmt: skip

    default, _ = tilings_for(cache.k)
    measure("triton default", partial(ours, default, *pools, tables))
    measure("triton default, half blocks", partial(ours, default, *cache.halved(), halved_tables(tables)))
    for name, tiling in TILINGS.items():
        measure(f"triton {name}", partial(ours, tiling, *pools, tables))
    measure("flash paged", lambda: flash_prefill(query, pools, tables, borders, lengths, (new, context), window, out))
    if cached or window:
        return
    keys, values = cache.rows(tables, context)
    measure("cudnn by row", lambda: cudnn(query, keys, values, out, rows, 1))
    if rows > 1:
        measure("cudnn one batch", lambda: cudnn(query, keys, values, out, 1, rows))
