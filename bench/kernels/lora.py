"""What adapters cost in a layer of the 8b geometry: the four kernels in several tilings, and steps with and without."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench.kernels.clock import distance, normal, replay_s
from bench.kernels.inputs import GEOMETRIES, HEAD_DIM
from bench.kernels.lora_tilings import FIELDS, RANK, ROWS, TILES, in_turn, kind_of, text_of, tilings_of
from bench.kernels.report import Report, tried
from bench.kernels.step import Step
from model import kernels
from model.kernels.lora import LoraTilings, add_lora_input, add_lora_output, lora_tilings
from model.kernels.lora_expand import lora_expand
from model.kernels.lora_shrink import ShrinkTiling, Shrunk, lora_shrink
from model.lora import AdapterBatchData, pack
from model.lora_adapter import INPUT_MODULES, MODULES, ModuleSizes
from model.lora_stacks import LoraLayer

MAX_LORAS = 8
NUM_LAYERS = Step.NUM_LAYERS
DECODE_SIZES = (1, 16, 64, 256)
BORDER_SIZES = (2, 4, 8, 16, 32)
"""Where plain sums and tensor cores are compared."""
PROMPT_TOKENS = 8192
PROMPT_LAYERS = 4


class Stacks:
    """As LoraStacks, full of random adapters of the largest rank, for the 8b geometry."""

    def __init__(self) -> None:
        """0.7 GB."""
        g = GEOMETRIES[0]
        self.max_rank, self.max_loras = RANK, MAX_LORAS
        self.sizes = sizes = ModuleSizes(g.hidden, g.heads * HEAD_DIM, g.kv_heads * HEAD_DIM, g.intermediate)
        self.ranks = torch.full((MAX_LORAS, len(MODULES)), RANK, dtype=torch.int32, device="cuda")
        shapes = [
            (len(INPUT_MODULES) * RANK, sizes.hidden),
            (sum(sizes.inputs), RANK),
            (RANK, sum(sizes.outputs)),
            (sizes.hidden, 2 * RANK),
        ]
        stacks = [normal(MAX_LORAS, NUM_LAYERS, *shape).mul_(0.02) for shape in shapes]
        self.layers = [LoraLayer(*(stack[:, layer] for stack in stacks)) for layer in range(NUM_LAYERS)]


class Case:
    """A step's tokens, of which each has one of `num_adapters`; prompts lie one after another."""

    def __init__(self, stacks: Stacks, num_tokens: int, num_adapters: int) -> None:
        """Inputs and outputs of one layer, which all layers share as they do in a model."""
        sizes = stacks.sizes
        self.num_tokens, self.num_adapters, self.stacks = num_tokens, num_adapters, stacks
        token = torch.arange(num_tokens)
        slots = token * num_adapters // num_tokens if num_tokens > 512 else token % num_adapters
        self.slots = slots.to(torch.int32) if num_adapters > 1 else torch.full((num_tokens,), 3, dtype=torch.int32)
        columns: Any = pack(self.slots, MAX_LORAS).to("cuda")
        lora_stacks: Any = stacks
        self.data = AdapterBatchData.of_columns(columns, num_tokens, (), lora_stacks)
        self.normed, self.projected = normal(num_tokens, sizes.hidden), normal(num_tokens, sum(sizes.inputs))
        self.mixed, self.out = normal(num_tokens, sum(sizes.outputs)), normal(num_tokens, sizes.hidden)
        self.name = f"T={num_tokens} x{num_adapters}"
        self.num_layers = NUM_LAYERS if num_tokens <= 512 else PROMPT_LAYERS

    def shrink(self, is_input: bool, layer: int, tiling: ShrinkTiling) -> Shrunk:
        """One launch."""
        own, sizes = self.stacks.layers[layer], self.stacks.sizes
        if is_input:
            return lora_shrink(self.normed, own.a_in, (sizes.hidden,), 0, self.data, tiling)
        return lora_shrink(self.mixed, own.a_out, sizes.outputs, len(INPUT_MODULES), self.data, tiling)

    def expand(self, is_input: bool, layer: int, shrunk: Shrunk, tiling: Any) -> None:  # noqa: ANN401
        """One launch."""
        own, sizes = self.stacks.layers[layer], self.stacks.sizes
        if is_input:
            lora_expand(shrunk, own.b_in, self.projected, (sizes.q, sizes.kv, sizes.inner), 0, self.data, tiling)
        else:
            columns = (sizes.hidden, 0, 0)
            lora_expand(shrunk, own.b_out, self.out, columns, len(INPUT_MODULES), self.data, tiling)

    def both(self, layer: int, tilings: LoraTilings) -> None:
        """The four launches of a layer."""
        add_lora_input(self.normed, self.projected, self.data, layer, tilings)
        add_lora_output(self.mixed, self.out, self.data, layer, tilings)

    def num_bytes(self, field: str) -> float:
        """What a kernel has to move: weights of the adapters in use, activations once, results there and back."""
        own = self.stacks.layers[0]
        used = len(self.slots.unique())
        stack, x = {
            "shrink_in": (own.a_in, self.normed),
            "expand_in": (own.b_in, self.projected),
            "shrink_out": (own.a_out, self.mixed),
            "expand_out": (own.b_out, self.out),
        }[field]
        return 2.0 * (used * stack[0].numel() + x.numel() * (1 if field.startswith("shrink") else 2))

    def error(self, is_input: bool, tilings: LoraTilings) -> float:
        """Distance of what is added from float64, at some tokens; the same twice to the bit."""
        target, add = (self.projected, add_lora_input) if is_input else (self.out, add_lora_output)
        x, results = self.normed if is_input else self.mixed, []
        kept = target.clone()
        for _ in range(2):
            target.zero_()
            add(x, target, self.data, 0, tilings)
            results.append(target.clone())
        target.copy_(kept)
        assert torch.equal(*results), "not the same twice"
        some = torch.randperm(self.num_tokens)[:16].tolist()
        expected = torch.stack([self._delta(is_input, x[token].double(), int(self.slots[token])) for token in some])
        return distance(results[0][some], expected)

    def _delta(self, is_input: bool, x: torch.Tensor, slot: int) -> torch.Tensor:
        own, sizes = self.stacks.layers[0], self.stacks.sizes
        if is_input:
            lows = (own.a_in[slot].double() @ x).split(RANK)
            return torch.cat([b.double() @ v for b, v in zip(own.b_in[slot].split(sizes.inputs), lows, strict=True)])
        a_parts, x_parts = own.a_out[slot].split(sizes.outputs, 1), x.split(sizes.outputs)
        lows = [a.double() @ part for a, part in zip(a_parts, x_parts, strict=True)]
        result: torch.Tensor = own.b_out[slot].double() @ torch.cat(lows)
        return result


def lora(report: Report) -> None:
    """Kernels apart, the four of a layer one after another, and whole steps."""
    stacks, fastest = Stacks(), {}
    for num_tokens in (*DECODE_SIZES, PROMPT_TOKENS):
        for num_adapters in (1, MAX_LORAS)[: 1 if num_tokens == 1 else 2]:
            case = Case(stacks, num_tokens, num_adapters)
            best = {field: each_tiling(report, case, field) for field in FIELDS}
            fastest[case.name] = LoraTilings(**best)
            tried(case.name, partial(four, report, case, fastest[case.name]))
            del case
    for num_tokens in BORDER_SIZES:
        for num_adapters in (1, min(num_tokens, MAX_LORAS)):
            case = Case(stacks, num_tokens, num_adapters)
            for name, tilings in (("rows", ROWS), ("tiles", TILES)):
                tried(f"{case.name} {name}", partial(one_four, report, case, name, tilings))
    whole = Step()
    for num_tokens in DECODE_SIZES:
        tried(f"step T={num_tokens}", partial(steps, report, whole, stacks, num_tokens, fastest))
    tried("prompt layers", partial(prompt_layers, report, whole, stacks, fastest))


def each_tiling(report: Report, case: Case, field: str) -> Any:  # noqa: ANN401
    """One kernel alone in every tiling; gives the fastest one. Launches overlap more than in a layer."""
    is_input, is_shrink = field.endswith("in"), field.startswith("shrink")
    seconds: dict[Any, float] = {}
    kind = kind_of(case.num_tokens)
    default = lora_tilings(case.num_tokens, RANK)

    def measure(tiling: Any) -> None:  # noqa: ANN401
        error = case.error(is_input, dataclasses.replace(default, **{field: tiling}))
        action: Callable[[int], object] = partial(case.shrink, is_input, tiling=tiling)
        if not is_shrink:
            shrunk = case.shrink(is_input, 0, default.shrink_in if is_input else default.shrink_out)
            action = partial(case.expand, is_input, shrunk=shrunk, tiling=tiling)
        seconds[tiling] = replay_s(action, case.num_layers, 9)
        report.add(field, case.name, text_of(tiling), seconds[tiling], case.num_bytes(field), "TB/s", error)

    for tiling in tilings_of(kind, field):
        tried(f"{case.name} {field} {text_of(tiling)}", partial(measure, tiling))
    return min(seconds, key=lambda tiling: seconds[tiling], default=getattr(default, field))


def four(report: Report, case: Case, fastest: LoraTilings) -> None:
    """All of a layer, one after another, by default and by the fastest tilings."""
    default = lora_tilings(case.num_tokens, RANK)
    for name, tilings in (("default", default), ("default in turn", in_turn(default)), ("fastest apart", fastest)):
        one_four(report, case, name, tilings)


def one_four(report: Report, case: Case, name: str, tilings: LoraTilings) -> None:
    """Checked and timed."""
    error = case.error(True, tilings) + case.error(False, tilings)
    seconds = replay_s(lambda layer: case.both(layer, tilings), case.num_layers, 9)
    report.add("lora 4", case.name, name, seconds, sum(case.num_bytes(field) for field in FIELDS), "TB/s", error)


def steps(report: Report, whole: Step, stacks: Stacks, num_tokens: int, fastest: dict[str, LoraTilings]) -> None:
    """A decode step in one graph, of the base model and with adapters; what a layer pays, and the share of the rate."""
    whole.prepare(num_tokens)
    base_s = replay_s(lambda _: whole.run(False, num_tokens == 1), inner=1, tries=15)
    report.add("lora st.", f"T={num_tokens}", "base", base_s, num_tokens, "row/s", None)
    default = lora_tilings(num_tokens, RANK)
    for num_adapters in (1, MAX_LORAS)[: 1 if num_tokens == 1 else 2]:
        case = Case(stacks, num_tokens, num_adapters)
        choices = {"default": default, "default in turn": in_turn(default), "fastest apart": fastest[case.name]}
        for name, tilings in choices.items():
            adapters = (case.data, tilings)
            seconds = replay_s(partial(_step, whole, num_tokens == 1, adapters), inner=1, tries=15)
            report.add("lora st.", case.name, name, seconds, num_tokens, "row/s", None)
            layer_us = (seconds - base_s) / NUM_LAYERS * 1e6
            sys.stdout.write(f"{'':31} {layer_us:.2f} us a layer, {base_s / seconds:.3f} of the base rate\n")


def _step(whole: Step, is_one_row: bool, adapters: tuple[AdapterBatchData, LoraTilings], _: int) -> None:
    whole.run(False, is_one_row, adapters)


def prompt_layers(report: Report, whole: Step, stacks: Stacks, fastest: dict[str, LoraTilings]) -> None:
    """Norm, products and activation of a step of prompts, without its attention, and with adapters."""
    g = whole.geometry
    default = lora_tilings(PROMPT_TOKENS, RANK)
    x, weight = normal(PROMPT_TOKENS, g.hidden), normal(g.hidden)
    base_s = 0.0
    for num_adapters in (0, 1, MAX_LORAS):
        case = Case(stacks, PROMPT_TOKENS, max(num_adapters, 1))
        choices = {"default": default, "fastest apart": fastest[case.name]} if num_adapters else {"base": default}

        def layer(number: int, tilings: LoraTilings, case: Case = case, has_adapters: bool = num_adapters > 0) -> None:
            kernels.layer_norm(x, weight, 1e-5, case.normed)
            torch.mm(case.normed, whole.into[number].t(), out=case.projected)
            if has_adapters:
                add_lora_input(case.normed, case.projected, case.data, number, tilings)
            kernels.silu_and_mul(case.projected[:, g.qkv :], case.mixed[:, g.hidden :])
            x.addmm_(case.mixed, whole.back[number].t())
            if has_adapters:
                add_lora_output(case.mixed, x, case.data, number, tilings)

        for name, tilings in choices.items():
            seconds = replay_s(partial(layer, tilings=tilings), PROMPT_LAYERS, 7)
            base_s = base_s or seconds
            report.add("lora pr.", f"T={PROMPT_TOKENS} x{num_adapters}", name, seconds, PROMPT_TOKENS, "row/s", None)
            if num_adapters:
                ratio = base_s / seconds
                sys.stdout.write(f"{'':31} {(seconds - base_s) * 1e6:.0f} us a layer, {ratio:.3f} of the base rate\n")
