"""Checks every kernel of the model on the GPU against float32 or float64 maths, and times it beside its alternatives.

`python -m bench.kernels --out kernels.json [--sections layers decode ...]`; inputs are drawn afresh each time, small
kernels are timed as replays of a CUDA graph, and inputs rotate where they would otherwise stay in the L2 cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from functools import cache as remembered
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel

from model import kernels
from model.attention import Seqlen
from model.attention.flash import load_flash_attn
from model.attention.triton import SplitDecode
from model.kernels.decode_attention import SplitWorkspace, decode_attention, num_decode_splits
from model.kernels.jit import LAUNCH
from model.kernels.sampling import Samples

BF16 = torch.bfloat16
HEAD_DIM = 128
VOCABULARY = 256000
BLOCK_SIZE = 256
L2_BYTES = 60 * 2**20


@dataclasses.dataclass(frozen=True)
class Geometry:
    """The widths of one model's layer."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int = 8

    @property
    def qkv(self) -> int:
        """Columns of q, k and v."""
        return (self.heads + 2 * self.kv_heads) * HEAD_DIM


GEOMETRIES = (Geometry("8b", 4096, 14336, 32), Geometry("32b", 8192, 24576, 64))


class Report:
    """Rows of (section, case, variant, microseconds, rate, unit, error)."""

    def __init__(self) -> None:
        """Empty."""
        self.rows: list[dict[str, object]] = []

    def add(
        self, section: str, case: str, variant: str, seconds: float, amount: float, unit: str, error: float | None
    ) -> None:
        """`amount` is what was done in `seconds`: bytes for TB/s, operations for TFLOP/s, rows for row/s."""
        rate = amount / seconds / (1 if unit == "row/s" else 1e12)
        row = {"section": section, "case": case, "variant": variant, "us": seconds * 1e6, "rate": rate, "unit": unit}
        self.rows.append(row | {"error": error})
        self._say(self.rows[-1])

    def _say(self, row: dict[str, object]) -> None:
        error = "" if row["error"] is None else f" error {row['error']:.1e}"
        line = "{section:8} {case:22} {variant:26} {us:10.2f} us {rate:9.3f} {unit}".format(**row)
        sys.stdout.write(line + error + "\n")
        sys.stdout.flush()

    def table(self) -> None:
        """The fastest variant of each case, and the runner-up."""
        sys.stdout.write("\nfastest of each case\n")
        cases: dict[tuple[object, object], list[dict[str, object]]] = {}
        for row in self.rows:
            cases.setdefault((row["section"], row["case"]), []).append(row)
        for rows in cases.values():
            best = sorted(rows, key=lambda row: float(str(row["us"])))[:2]
            self._say(best[0])
            if len(best) > 1:
                sys.stdout.write(f"{'':31} then {best[1]['variant']} {best[1]['us']:.2f} us\n")


def tried(what: str, action: Callable[[], object]) -> None:
    """Runs `action`; an exception is shown and the rest goes on."""
    try:
        action()
        torch.cuda.synchronize()
    except Exception as error:
        text = str(error).splitlines()
        sys.stdout.write(f"FAILED {what}: {type(error).__name__}: {text[0][:200] if text else ''}\n")
        traceback.print_exc(limit=-3, file=sys.stderr)


def replay_s(action: Callable[[int], object], inner: int = 20, tries: int = 11) -> float:
    """Seconds of one action within a CUDA graph of `inner` of them; it is given 0, 1, ... to rotate its inputs."""
    action(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(inner):
            action(number)
    times = []
    for _ in range(tries):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / inner)
    return statistics.median(times)


def bench_s(action: Callable[[], object]) -> float:
    """Seconds of one long action, the L2 cache cleared before each run."""
    return float(triton.testing.do_bench(action, warmup=15, rep=60, return_mode="median")) / 1e3


def timed(action: Callable[[int], object], is_small: bool) -> float:
    """Replays for small actions, single runs else."""
    return replay_s(action) if is_small else bench_s(lambda: action(0))


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """|actual - expected| / |expected|, with NaN if any entry is."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@remembered
def flash_attn() -> Any:  # noqa: ANN401
    """flash-attn's extension, where it is installed."""
    return load_flash_attn()


def normal(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Random numbers on the GPU."""
    return torch.randn(shape, dtype=dtype, device="cuda")


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
    positions = torch.randint(0, 8192, (num_rows,), device="cuda")
    slots = torch.randperm(65536, device="cuda")[:num_rows]
    angles = torch.rand(8192, HEAD_DIM // 2, device="cuda") * 6.28
    cos_sin = torch.stack((angles.cos(), angles.sin()), -1).flatten(1).contiguous()
    k_cache, v_cache = torch.full((2, 256, 256, g.kv_heads, HEAD_DIM), float("nan"), dtype=BF16, device="cuda")
    heads = qkv.float().unflatten(1, (-1, HEAD_DIM)).clone()
    turn = torch.polar(torch.ones_like(angles), angles)[positions][:, None]
    kernels.rotary_and_cache(qkv, positions, cos_sin, slots, k_cache, v_cache, g.heads)
    turned = torch.view_as_real(torch.view_as_complex(heads.unflatten(2, (-1, 2))) * turn).flatten(2)
    error = distance(qkv[:, : g.heads * HEAD_DIM], turned[:, : g.heads].flatten(1))
    error += distance(k_cache.flatten(0, 1)[slots], turned[:, g.heads : -g.kv_heads])
    error += distance(v_cache.flatten(0, 1)[slots], heads[:, -g.kv_heads :])
    seconds = timed(
        lambda _: kernels.rotary_and_cache(qkv, positions, cos_sin, slots, k_cache, v_cache, g.heads), is_small
    )
    report.add("rotary", case, "triton", seconds, 4 * qkv.numel(), "TB/s", error)
    norm_weight = normal(g.heads, HEAD_DIM)
    query = qkv[:, : g.heads * HEAD_DIM]
    seconds = timed(lambda _: kernels.head_norm(query, norm_weight, 1e-5), is_small)
    report.add("headnorm", case, "triton", seconds, 4 * query.numel(), "TB/s", None)


class Cache:
    """A pool of random keys and values, and tables of blocks drawn from it."""

    def __init__(self, num_blocks: int, kv_heads: int = 8) -> None:
        """1 MiB a block of 256 with eight heads."""
        self.k = normal(num_blocks, BLOCK_SIZE, kv_heads, HEAD_DIM)
        self.v = normal(num_blocks, BLOCK_SIZE, kv_heads, HEAD_DIM)

    def tables(self, num_sequences: int, context: int) -> torch.Tensor:
        """Distinct blocks where the pool has enough of them."""
        width = -(-context // BLOCK_SIZE)
        ids = torch.randperm(self.k.shape[0] - 1, device="cuda") + 1
        need = num_sequences * width
        return ids.repeat(-(-need // len(ids)))[:need].int().view(num_sequences, width)

    def poison_tails(self, tables: torch.Tensor, context: int) -> None:
        """NaN behind every sequence's end, as unused places may hold; what an earlier case poisoned is made whole."""
        for pool in (self.k, self.v):
            pool.nan_to_num_()
        if context % BLOCK_SIZE:
            self.k[tables[:, -1].long(), context % BLOCK_SIZE :] = float("nan")
            self.v[tables[:, -1].long(), context % BLOCK_SIZE :] = float("nan")

    def plain(self, query: torch.Tensor, table: torch.Tensor, context: int, window: int | None) -> torch.Tensor:
        """float32 attention of `query [n, Hq * D]`, the last n positions of a sequence."""
        heads = query.float().unflatten(1, (-1, HEAD_DIM)).transpose(0, 1)
        group = heads.shape[0] // self.k.shape[2]
        k, v = (
            x[table.long()].flatten(0, 1)[:context].float().repeat_interleave(group, 1).transpose(0, 1)
            for x in (self.k, self.v)
        )
        q_position = torch.arange(context - query.shape[0], context, device="cuda")[:, None]
        k_position = torch.arange(context, device="cuda")[None]
        is_seen = k_position <= q_position
        if window is not None:
            is_seen &= k_position > q_position - window
        scores = (heads @ k.transpose(1, 2)) * HEAD_DIM**-0.5
        scores.masked_fill_(~is_seen, float("-inf"))
        return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)


def seqlen_of(num_sequences: int, cached: int, new: int) -> Seqlen:
    """A step of equal rows."""
    lengths = [torch.full((num_sequences,), n, dtype=torch.int32, device="cuda") for n in (new, cached, cached + new)]
    num_decode = num_sequences if new == 1 else 0
    context_lens = [cached + new] * num_sequences
    return Seqlen(lengths[0], lengths[1], lengths[2], num_decode, new, cached + new, None, context_lens)


def decode(report: Report) -> None:
    """Single-token rows over long contexts."""
    torch.backends.cuda.matmul.allow_tf32 = False
    cache = Cache(3000)
    cases = [(1, 256), (1, 1024), (8, 384), (64, 384), (64, 4096), (16, 6000), (256, 384)]
    for heads in (32, 64):
        for rows, context in cases:
            for window in (None, 4096) if context > 4096 else (None,):
                if heads == 64 and (window or rows == 8):
                    continue
                what = f"Hq={heads} {rows}x{context}" + (f" W={window}" if window else "")
                tried(what, partial(one_decode, report, cache, heads, rows, context, window, what))


def one_decode(
    report: Report, cache: Cache, heads: int, rows: int, context: int, window: int | None, case: str
) -> None:
    """Ours in several tilings, and flash-attn's both ways."""
    wide = normal(rows, heads * HEAD_DIM + 2048)
    query, width = wide[:, : heads * HEAD_DIM], heads * HEAD_DIM
    out = torch.full((rows, width + 4096), float("nan"), dtype=BF16, device="cuda")[:, :width]
    seen = min(context, window or context)
    num_bytes = rows * seen * 8 * HEAD_DIM * 4
    sets = [cache.tables(rows, context) for _ in range(max(1, min(20, 4 * L2_BYTES // num_bytes)))]
    cache.poison_tails(sets[0], context)
    seqlen = seqlen_of(rows, context - 1, 1)
    # the same row of every set: timing leaves the last set's result in `out`
    expected = cache.plain(query[-1:], sets[0][-1], context, window)
    inner = max(20 // len(sets), 1) * len(sets)

    def measure(variant: str, call: Callable[[torch.Tensor], object]) -> None:
        def action() -> None:
            out.fill_(float("nan"))
            call(sets[0])
            error = distance(out[-1:], expected) if not out.isnan().any() else float("nan")
            seconds = replay_s(lambda number: call(sets[number % len(sets)]), inner)
            report.add("decode", case, variant, seconds, num_bytes, "TB/s", error)

        tried(f"{case} {variant}", action)

    default = SplitDecode()
    measure("triton default", lambda t: default.forward(query, cache.k, cache.v, t, seqlen, window, out))
    workspace = SplitWorkspace.create(heads // 8, HEAD_DIM, "cuda")
    fewest = num_decode_splits(rows, 8, seen)

    def ours(config: tuple[int, int, int], t: torch.Tensor) -> None:
        decode_attention(query, cache.k, cache.v, t, seqlen.context_lengths, window, out, fewest, workspace, *config)

    for config in ((64, 4, 4), (64, 4, 5), (128, 4, 3), (128, 8, 3), (32, 4, 5)):
        measure("triton {} w{} s{}".format(*config) + f" x{fewest}", partial(ours, config))
    left = (-1, -1) if window is None else (window - 1, 0)
    packed = (rows, 8, heads // 8, HEAD_DIM)

    def flash_decode(t: torch.Tensor, q: torch.Tensor, result: torch.Tensor | None, splits: int = 0) -> Any:  # noqa: ANN401
        return flash_attn().fwd_kvcache(
            q, cache.k, cache.v, None, None, seqlen.context_lengths, None, None, None, None, t, None, result,
            HEAD_DIM**-0.5, False, *left, 0.0, True, splits,
        )  # fmt: skip

    if window is None:
        q, o = query.view(packed).transpose(1, 2), out.view(packed).transpose(1, 2)
        measure("flash packed, in place", lambda t: flash_decode(t, q, o))
        for splits in (4, 8, 16) if rows <= 8 else ():
            measure(f"flash packed x{splits}", partial(flash_decode, q=q, result=o, splits=splits))
    plain = query.view(rows, 1, heads, HEAD_DIM)
    measure("flash public, copied", lambda t: out.copy_(flash_decode(t, plain, None)[0].view(rows, -1)))


def prefill(report: Report) -> None:
    """Whole prompts, a chunk behind a cached part, and a window."""
    torch.backends.cuda.matmul.allow_tf32 = False
    cache = Cache(400)
    for heads in (32, 64):
        for rows, cached, new, window in (
            (8, 0, 2048, None), (1, 0, 6000, None), (1, 3000, 3000, None), (16, 0, 512, None), (1, 0, 6000, 4096),
        ):  # fmt: skip
            if heads == 64 and window:
                continue
            what = f"Hq={heads} {rows}x({cached}+{new})" + (f" W={window}" if window else "")
            tried(what, partial(one_prefill, report, cache, heads, rows, cached, new, window, what))


def one_prefill(
    report: Report, cache: Cache, heads: int, rows: int, cached: int, new: int, window: int | None, case: str
) -> None:
    """Ours in several tilings, flash-attn on pages and on gathered rows, cuDNN on gathered rows."""
    context, width = cached + new, heads * HEAD_DIM
    query = normal(rows * new, width + 2048)[:, :width]
    out = torch.full((rows * new, width + 4096), float("nan"), dtype=BF16, device="cuda")[:, :width]
    tables, seqlen = cache.tables(rows, context), seqlen_of(rows, cached, new)
    cache.poison_tails(tables, context)
    borders = torch.arange(0, rows * new + 1, new, dtype=torch.int32, device="cuda")
    key_borders = torch.arange(0, rows * context + 1, context, dtype=torch.int32, device="cuda")
    keys, values = torch.empty((2, rows * context, 8, HEAD_DIM), dtype=BF16, device="cuda")
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

    def ours(m: int, n: int, warps: int, stages: int, is_descriptor: bool, registers: int | None) -> None:
        kernels.prefill_attention(
            query, cache.k, cache.v, tables, borders, seqlen.context_lengths, new, window, out, m, n, warps, stages,
            is_descriptor, registers,
        )  # fmt: skip

    for config in (
        (128, 64, 8, 3, False, None), (128, 128, 8, 2, False, None),
        (128, 64, 8, 3, True, None), (128, 128, 8, 2, True, None), (128, 64, 8, 3, True, 128),
        (128, 64, 8, 2, True, 128), (64, 64, 4, 3, True, 160),
    ):  # fmt: skip
        name = "triton {}x{} w{} s{}".format(*config[:4]) + (" tma" if config[4] else "") + f" r{config[5] or 255}"
        measure(name, partial(ours, *config))

    def gather() -> None:
        kernels.gather_cache(cache.k, cache.v, tables, seqlen.context_lengths, key_borders, context, keys, values)

    gather()
    left = (-1, -1) if window is None else (window - 1, 0)
    q, o = query.view(-1, heads, HEAD_DIM), out.view(-1, heads, HEAD_DIM)

    def flash_prefill(is_paged: bool) -> None:
        k, v, t = (cache.k, cache.v, tables) if is_paged else (keys, values, None)
        flash_attn().varlen_fwd(
            q, k, v, o, borders, key_borders, seqlen.context_lengths, None, t, None, new, context, 0.0,
            HEAD_DIM**-0.5, False, True, *left, 0.0, False, None,
        )  # fmt: skip

    measure("flash paged", partial(flash_prefill, True))
    measure("flash rows", partial(flash_prefill, False))
    if cached or window:
        return

    def gather_and_cudnn() -> None:
        gather()
        cudnn(query, keys, values, out, rows, 1)

    measure("gather + cudnn by row", gather_and_cudnn)
    measure("cudnn by row", lambda: cudnn(query, keys, values, out, rows, 1))
    if rows > 1:
        measure("cudnn one batch", lambda: cudnn(query, keys, values, out, 1, rows))
    measure("torch flash by row", lambda: cudnn(query, keys, values, out, rows, 1, SDPBackend.FLASH_ATTENTION))
    report.add("gather", case, "gather_cache", bench_s(gather), 8 * keys.numel(), "TB/s", None)


def cudnn(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    num_calls: int,
    batch: int,
    backend: SDPBackend = SDPBackend.CUDNN_ATTENTION,
) -> None:
    """torch's attention for `num_calls` parts of the rows, each a batch of equal whole prompts."""
    for q, k, v, o in zip(*(x.chunk(num_calls) for x in (query, keys, values, out)), strict=True):
        heads: Any = [x.reshape(batch, -1, x.shape[-1] // HEAD_DIM, HEAD_DIM) if x.dim() == 2 else x for x in (q, k, v)]
        heads = [x.view(batch, -1, *x.shape[-2:]).transpose(1, 2) for x in heads]
        with sdpa_kernel(backend):
            mixed = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        o.view(batch, -1, mixed.shape[1], HEAD_DIM).copy_(mixed.transpose(1, 2))


def products(report: Report) -> None:
    """The layer's two products and the head, for few and for many rows."""
    for g in GEOMETRIES:
        joined = g.hidden + g.intermediate
        shapes = (
            ("in", g.qkv + 2 * g.intermediate, g.hidden),
            ("out", g.hidden, joined),
            ("head", VOCABULARY, g.hidden),
        )
        for name, columns, depth in shapes:
            weights = [normal(columns, depth) for _ in range(2 if columns * depth < 2**28 else 1)]
            for num_rows in (1, 8, 64, 256):
                case = f"{g.name} {name} M={num_rows}"
                tried(case, partial(one_product, report, num_rows, weights, name == "out", case))


def one_product(report: Report, num_rows: int, weights: list[torch.Tensor], has_residual: bool, case: str) -> None:
    """cuBLAS called in several ways, and ours."""
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
    if num_rows > 64 or (num_rows == 64 and columns == VOCABULARY):
        return
    added = residual if has_residual else None

    def ours(config: tuple[int, ...], space: tuple[torch.Tensor, torch.Tensor], w: torch.Tensor) -> None:
        kernels.few_rows_linear(x, w, out, added, space, *config)

    # parts of the depth, weight rows and depth of a tile, warps, stages
    for config in ((1, 32, 256, 4, 4), (1, 16, 512, 4, 4), (1, 64, 128, 4, 4), (4, 32, 256, 4, 4), (4, 16, 256, 4, 5)):
        if config[0] > 1 and columns > 8192:
            continue
        space = (
            torch.empty(config[0] * num_rows * columns, device="cuda"),
            torch.zeros(columns // config[1] + 1, dtype=torch.int32, device="cuda"),
        )
        measure("triton k{} {}x{} w{} s{}".format(*config), partial(ours, config, space))


def sampling(report: Report) -> None:
    """The sampler over the whole vocabulary."""
    for num_rows in (1, 64, 256):
        tried(f"sampling {num_rows}", partial(one_sampling, report, num_rows))


def one_sampling(report: Report, num_rows: int) -> None:
    """Greedy and drawn tokens, and the torch operations that say the same for greedy rows."""
    logits = normal(num_rows, VOCABULARY, dtype=torch.float32) * 4
    seeds = torch.randint(-(2**63), 2**63 - 1, (num_rows,), device="cuda")
    positions = torch.randint(0, 100000, (num_rows,), device="cuda")
    num_bytes = 4.0 * logits.numel()
    for heat, has_logsumexp in ((0.0, False), (0.7, False), (0.7, True)):
        temperature = torch.full((num_rows,), heat, device="cuda")
        out = Samples.create(num_rows, has_logsumexp, "cuda")

        def draw(_: int, temperature: torch.Tensor = temperature, out: Samples = out) -> None:
            kernels.sample(logits, temperature, seeds, positions, out)

        seconds = replay_s(draw)
        noisy = logits.double()
        if heat:
            noisy = noisy / heat + gumbel(seeds, positions, VOCABULARY)
        winners = noisy.gather(1, out.tokens.long()[:, None])
        error = float((noisy.max(1, keepdim=True).values - winners).max())  # 0 up to near ties
        if out.logsumexp is not None:
            error += distance(out.logsumexp, logits.double().logsumexp(1))
        name = f"triton t={heat}" + (" logsumexp" if has_logsumexp else "")
        report.add("sampling", f"R={num_rows}", name, seconds, num_bytes, "TB/s", error)
        del noisy
    report.add(
        "sampling", f"R={num_rows}", "torch argmax", replay_s(lambda _: logits.argmax(1)), num_bytes, "TB/s", None
    )


def gumbel(seeds: torch.Tensor, positions: torch.Tensor, size: int) -> torch.Tensor:
    """Noise of every token `[R, size]` in float64, by Philox4x32-10 in int64 arithmetic."""
    low = 0xFFFFFFFF
    zero = torch.zeros((len(seeds), size // 4), dtype=torch.int64, device=seeds.device)
    c0, c1, c2, c3 = zero + torch.arange(size // 4, device=seeds.device), zero + positions[:, None], zero, zero
    k0, k1 = (seeds & low)[:, None], (seeds >> 32 & low)[:, None]

    def multiply(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """High and low words of a * b, by halves of b since the product passes 63 bits."""
        upper, lower = a * (b >> 16), a * (b & 0xFFFF)
        total = upper + (lower >> 16)
        return total >> 16, ((total & 0xFFFF) << 16) | (lower & 0xFFFF)

    for _ in range(10):
        (high0, low0), (high1, low1) = multiply(0xD2511F53, c0), multiply(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    words = torch.stack((c0, c1, c2, c3), -1).flatten(1)
    uniform = (((words >> 8).float() + 0.5) * 2.0**-24).clamp_(max=1 - 2.0**-24)
    return -torch.log(-torch.log(uniform.double()))


class Step:
    """Buffers and random weights of a whole decode step on the 8b geometry, context 256, one block a sequence."""

    NUM_LAYERS = 32
    CONTEXT = 256

    def __init__(self) -> None:
        """16 GB of weights, 9 GB of cache."""
        g = self.geometry = GEOMETRIES[0]
        joined = g.hidden + g.intermediate
        self.into = [normal(g.qkv + 2 * g.intermediate, g.hidden).mul_(0.02) for _ in range(self.NUM_LAYERS)]
        self.back = [normal(g.hidden, joined).mul_(0.02) for _ in range(self.NUM_LAYERS)]
        self.head = normal(VOCABULARY, g.hidden).mul_(0.02)
        self.weight = normal(g.hidden)
        self.cache = Cache(256 * self.NUM_LAYERS + 1)
        self.cos_sin = torch.randn(self.CONTEXT, HEAD_DIM, device="cuda")
        self.decode = SplitDecode()
        self.space = (
            torch.empty(4 * 64 * g.hidden, device="cuda"),
            torch.zeros(4096, dtype=torch.int32, device="cuda"),
        )

    def prepare(self, num_rows: int) -> None:
        """Buffers for one batch size."""
        g = self.geometry
        self.x = normal(num_rows, g.hidden)
        self.normed = normal(num_rows, g.hidden)
        self.projected = normal(num_rows, g.qkv + 2 * g.intermediate)
        self.joined = normal(num_rows, g.hidden + g.intermediate)
        self.logits = normal(num_rows, VOCABULARY)
        blocks = torch.arange(1, 256 * self.NUM_LAYERS + 1, dtype=torch.int32, device="cuda")
        self.tables = blocks.view(self.NUM_LAYERS, 256, 1)[:, :num_rows]
        self.seqlen = seqlen_of(num_rows, self.CONTEXT - 1, 1)
        self.positions = torch.full((num_rows,), self.CONTEXT - 1, device="cuda")
        self.slots = [table[:, 0].long() * BLOCK_SIZE + self.CONTEXT - 1 for table in self.tables]
        self.samples = Samples.create(num_rows, False, "cuda")
        self.heat = torch.zeros(num_rows, device="cuda")

    def product(self, is_ours: bool, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, is_added: bool) -> None:
        """out = x w^T, added to what is there if so wished: torch would copy a residual that is not its output."""
        if is_ours:
            kernels.few_rows_linear(x, w, out, out if is_added else None, self.space, 4 if is_added else 1)
        elif is_added:
            out.addmm_(x, w.t())
        else:
            torch.mm(x, w.t(), out=out)

    def attend(self, is_flash: bool, layer: int) -> None:
        """Attention of one layer, written into the output product's input."""
        g, rows = self.geometry, len(self.positions)
        query, out, tables = self.projected[:, : g.hidden], self.joined[:, : g.hidden], self.tables[layer]
        if not is_flash:
            self.decode.forward(query, self.cache.k, self.cache.v, tables, self.seqlen, None, out)
            return
        q, o = (x.view(rows, g.kv_heads, -1, HEAD_DIM).transpose(1, 2) for x in (query, out))
        lengths = self.seqlen.context_lengths
        flash_attn().fwd_kvcache(
            q, self.cache.k, self.cache.v, None, None, lengths, None, None, None, None, tables, None, o,
            HEAD_DIM**-0.5, False, -1, -1, 0.0, True, 0,
        )  # fmt: skip

    def run(self, is_flash: bool, is_ours: bool) -> None:
        """One step: six kernels a layer, seven where flash-attn splits."""
        g = self.geometry
        for layer in range(self.NUM_LAYERS):
            kernels.layer_norm(self.x, self.weight, 1e-5, self.normed)
            self.product(is_ours, self.normed, self.into[layer], self.projected, False)
            qkv = self.projected[:, : g.qkv]
            k, v = self.cache.k, self.cache.v
            kernels.rotary_and_cache(qkv, self.positions, self.cos_sin, self.slots[layer], k, v, g.heads)
            self.attend(is_flash, layer)
            kernels.silu_and_mul(self.projected[:, g.qkv :], self.joined[:, g.hidden :])
            self.product(is_ours, self.joined, self.back[layer], self.x, True)
        kernels.layer_norm(self.x, self.weight, 1e-5, self.normed)
        torch.mm(self.normed, self.head.t(), out=self.logits)
        kernels.sample(self.logits, self.heat, self.positions, self.positions, self.samples)


def step(report: Report) -> None:
    """A whole decode step in one CUDA graph, by parts of which it can be made."""
    whole = Step()
    for num_rows in (1, 8, 64, 256):
        whole.prepare(num_rows)
        for is_flash in (False, True):
            for is_ours in (False, True) if num_rows <= 8 else (False,):
                for is_dependent in (True, False):
                    name = ("flash" if is_flash else "triton") + (" own products" if is_ours else " cublas")
                    name += " dependent" if is_dependent else ""
                    tried(
                        f"step {num_rows} {name}",
                        partial(one_step, report, whole, is_flash, is_ours, is_dependent, name),
                    )


def one_step(report: Report, whole: Step, is_flash: bool, is_ours: bool, is_dependent: bool, name: str) -> None:
    """Times one composition."""
    num_rows = len(whole.positions)
    LAUNCH["launch_pdl"] = is_dependent
    try:
        seconds = replay_s(lambda _: whole.run(is_flash, is_ours), inner=1, tries=15)
    finally:
        LAUNCH["launch_pdl"] = True
    report.add("step", f"8b rows={num_rows}", name, seconds, num_rows, "row/s", None)


SECTIONS: dict[str, Callable[[Report], None]] = {
    "machine": machine,
    "layers": layers,
    "decode": decode,
    "prefill": prefill,
    "sampling": sampling,
    "products": products,
    "step": step,
}


def main() -> None:
    """Runs the chosen sections, then writes the table and the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None, help="JSON file of every measurement")
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    arguments = parser.parse_args()
    report = Report()
    for name in arguments.sections:
        start = time.perf_counter()
        tried(name, partial(SECTIONS[name], report))
        torch.cuda.empty_cache()
        sys.stdout.write(f"-- {name} took {time.perf_counter() - start:.1f} s\n")
        if arguments.out is not None:  # after each section, so that a run cut short leaves what it has
            arguments.out.write_text(json.dumps(report.rows, indent=1))
    report.table()


if __name__ == "__main__":
    main()
