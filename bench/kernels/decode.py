"""Decode attention: single-token rows over long contexts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from bench.kernels.clock import BF16, distance, normal, replay_s
from bench.kernels.inputs import HEAD_DIM, KV_HEADS, Cache, halved_tables, seqlen_of
from bench.kernels.peers import flash_decode, packed
from bench.kernels.report import Report, tried
from model.attention.triton import SplitDecode
from model.kernels.decode_attention import SplitWorkspace, decode_attention, num_decode_splits

L2_BYTES = 60 * 2**20
CASES = [(1, 256), (1, 1024), (8, 384), (64, 384), (64, 4096), (16, 6000), (256, 384)]
"""Rows and context."""
TILINGS = [(64, 4, 3), (128, 8, 3)]
"""Keys a tile, warps, tiles in flight, beside the default: the plain one, and what leads on 64 rows of 4096."""


def decode(report: Report) -> None:
    """Every case with both head counts, and a window once."""
    cache = Cache(3000)
    for heads in (32, 64):
        for rows, context in CASES:
            for window in (None, 4096) if context > 4096 and heads == 32 else (None,):
                what = f"Hq={heads} {rows}x{context}" + (f" W={window}" if window else "")
                tried(what, partial(one_decode, report, cache, heads, rows, context, window, what))


def one_decode(
    report: Report, cache: Cache, heads: int, rows: int, context: int, window: int | None, case: str
) -> None:
    """Ours in several tilings, and flash-attn's both ways."""
    width, pools = heads * HEAD_DIM, (cache.k, cache.v)
    query = normal(rows, width + 2048)[:, :width]
    out = torch.full((rows, width + 4096), float("nan"), dtype=BF16, device="cuda")[:, :width]
    seen = min(context, window or context)
    num_bytes = rows * seen * KV_HEADS * HEAD_DIM * 4
    sets = [cache.tables(rows, context) for _ in range(max(1, min(20, 4 * L2_BYTES // num_bytes)))]
    cache.poison_tails(sets[0], context)
    seqlen = seqlen_of(rows, context - 1, 1)
    lengths = seqlen.context_lengths
    # the same row of every set: timing leaves the last set's result in `out`
    expected = cache.plain(query[-1:], sets[0][-1], context, window)
    inner = max(20 // len(sets), 1) * len(sets)

    def measure(variant: str, call: Callable[[torch.Tensor], object], tables: list[torch.Tensor] = sets) -> None:
        def action() -> None:
            out.fill_(float("nan"))
            call(tables[0])
            error = distance(out[-1:], expected) if not out.isnan().any() else float("nan")
            seconds = replay_s(lambda number: call(tables[number % len(tables)]), inner)
            report.add("decode", case, variant, seconds, num_bytes, "TB/s", error)

        tried(f"{case} {variant}", action)

    default = SplitDecode()
    measure("triton default", lambda t: default.forward(query, *pools, t, seqlen, window, out))
    halves = cache.halved()
    measure(
        "triton default, half blocks",
        lambda t: default.forward(query, *halves, t, seqlen, window, out),
        [halved_tables(tables) for tables in sets],
    )
    workspace = SplitWorkspace.create(heads // KV_HEADS, HEAD_DIM, "cuda")
    splits = num_decode_splits(rows, KV_HEADS, seen)

    def ours(tiling: tuple[int, int, int], t: torch.Tensor) -> None:
        decode_attention(query, *pools, t, lengths, window, out, splits, workspace, *tiling)

    for tiling in TILINGS:
        measure("triton {} w{} s{}".format(*tiling) + f" x{splits}", partial(ours, tiling))
    if window is None:  # flash-attn's causal mask is of the packed queries too, so no window goes with them
        measure("flash packed, in place", lambda t: flash_decode(packed(query), pools, t, lengths, None, packed(out)))
    plain = query.view(rows, 1, heads, HEAD_DIM)
    measure(
        "flash public, copied", lambda t: out.copy_(flash_decode(plain, pools, t, lengths, window, None).view(rows, -1))
    )
