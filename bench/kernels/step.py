"""A whole decode step of the 8b geometry in one CUDA graph, by the parts of which it can be made."""

from __future__ import annotations

from functools import partial

import torch

from bench.kernels.clock import normal, replay_s
from bench.kernels.inputs import BLOCK_SIZE, GEOMETRIES, HEAD_DIM, VOCABULARY, Cache, seqlen_of
from bench.kernels.peers import flash_decode, packed
from bench.kernels.report import Report, tried
from model import kernels
from model.attention.triton import SplitDecode
from model.kernels.few_rows import one_row_linear
from model.kernels.jit import LAUNCH
from model.kernels.lora import LoraTilings, add_lora_input, add_lora_output
from model.kernels.sampling import Samples
from model.lora import AdapterBatchData


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

    def attend(self, is_flash: bool, layer: int) -> None:
        """Attention of one layer, written into the output product's input."""
        g = self.geometry
        query, out, tables = self.projected[:, : g.hidden], self.joined[:, : g.hidden], self.tables[layer]
        if not is_flash:
            self.decode.forward(query, self.cache.k, self.cache.v, tables, self.seqlen, None, out)
            return
        pools, lengths = (self.cache.k, self.cache.v), self.seqlen.context_lengths
        flash_decode(packed(query), pools, tables, lengths, None, packed(out))

    def multiply(
        self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, has_residual: bool, is_one_row: bool
    ) -> None:
        """By cuBLAS or by our kernel for one row; the residual is `out` itself."""
        if is_one_row:
            one_row_linear(x, weight, out, out if has_residual else None)
        elif has_residual:
            out.addmm_(x, weight.t())
        else:
            torch.mm(x, weight.t(), out=out)

    def run(
        self,
        is_flash: bool,
        is_one_row: bool = False,
        adapters: tuple[AdapterBatchData, LoraTilings] | None = None,
    ) -> None:
        """One step: six kernels a layer, seven where flash-attn splits, four more with adapters."""
        g = self.geometry
        for layer in range(self.NUM_LAYERS):
            kernels.layer_norm(self.x, self.weight, 1e-5, self.normed)
            self.multiply(self.normed, self.into[layer], self.projected, False, is_one_row)
            if adapters is not None:
                data, tilings = adapters
                add_lora_input(self.normed, self.projected, data, layer, tilings)
            qkv = self.projected[:, : g.qkv]
            k, v = self.cache.k, self.cache.v
            kernels.rotary_and_cache(qkv, self.positions, self.cos_sin, self.slots[layer], k, v, g.heads)
            self.attend(is_flash, layer)
            kernels.silu_and_mul(self.projected[:, g.qkv :], self.joined[:, g.hidden :])
            self.multiply(self.joined, self.back[layer], self.x, True, is_one_row)
            if adapters is not None:
                add_lora_output(self.joined, self.x, data, layer, tilings)
        kernels.layer_norm(self.x, self.weight, 1e-5, self.normed)
        self.multiply(self.normed, self.head, self.logits, False, is_one_row)
        kernels.sample(self.logits, self.heat, self.positions, self.positions, self.samples)


def step(report: Report) -> None:
    """Our attention and flash-attn's, each with and without kernels that are set up while the one before runs."""
    whole = Step()
    for num_rows in (1, 8, 64, 256):
        whole.prepare(num_rows)
        for is_flash in (False, True):
            for is_dependent in (True, False):
                name = ("flash" if is_flash else "triton") + (" dependent" if is_dependent else "")
                for is_one_row in (False, True)[: 2 if num_rows == 1 else 1]:
                    whole_name = name + (" one-row" if is_one_row else "")
                    composition = (is_flash, is_dependent, is_one_row, whole_name)
                    tried(f"step {num_rows} {whole_name}", partial(one_step, report, whole, *composition))


def one_step(report: Report, whole: Step, is_flash: bool, is_dependent: bool, is_one_row: bool, name: str) -> None:
    """Times one composition."""
    num_rows = len(whole.positions)
    before = LAUNCH["launch_pdl"]
    LAUNCH["launch_pdl"] = is_dependent and before
    try:
        seconds = replay_s(lambda _: whole.run(is_flash, is_one_row), inner=1, tries=15)
    finally:
        LAUNCH["launch_pdl"] = before
    report.add("step", f"8b rows={num_rows}", name, seconds, num_rows, "row/s", None)
