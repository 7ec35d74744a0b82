"""After the warm-up no step meets a kernel that Triton would have to compile."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from tests.model.kernels.interpreter import interpret_triton

interpret_triton()

from model import kernels, layers  # noqa: E402
from model.attention.triton import TritonAttention  # noqa: E402
from model.kernels import lora  # noqa: E402
from model.kernels.lora import lora_tilings  # noqa: E402
from model.lora_stacks import LoraStacks  # noqa: E402
from shard_server import device_draw  # noqa: E402
from shard_server.model_runner import ModelRunner  # noqa: E402
from shard_server.sampler import Sampler, Samples  # noqa: E402
from shard_server.warm_up import PaddedStep, padded_steps  # noqa: E402
from tests.shard_server import checkpoints  # noqa: E402
from tests.shard_server.test_model_runner import make_runner  # noqa: E402

MAX_ROWS, MAX_TOKENS, MAX_LEN = 150, 600, 256
WINDOWS = (None, 100, 9)  # the last is too short to be split
KERNELS = {
    "decode_attention": ["_decode_kernel"],
    "gated_activation": ["_silu_and_mul_kernel"],
    "lora_expand": ["_expand_rows_kernel", "_expand_tiles_kernel"],
    "lora_shrink": ["_shrink_rows_kernel", "_shrink_tiles_kernel"],
    "norms": ["_layer_norm_kernel"],
    "prefill_attention": ["_prefill_kernel"],
    "rotary": ["_rotary_and_cache_kernel"],
    "sampling": ["_first_stage", "_second_stage"],
}


class Variant(NamedTuple):
    """All that Triton compiles a kernel apart by."""

    kernel: str
    facts: tuple[object, ...]
    options: tuple[tuple[str, Any], ...]


def fact(value: object, is_loose: bool, is_loosely_aligned: bool) -> object:
    """What Triton sees of an argument."""
    if isinstance(value, torch.Tensor):
        return value.dtype, is_loosely_aligned or value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return "int" if is_loose else ("int", value == 1, value % 16 == 0)
    return value if value is None else type(value).__name__


class Recorder:
    """Stands for a kernel, computes nothing, and notes which variants are launched."""

    def __init__(self, name: str, kernel: Any, variants: set[Variant]) -> None:
        self._name, self._names, self._variants = name, kernel.arg_names, variants
        # The interpreter keeps them in a dictionary, the compiler as attributes.
        options = getattr(kernel, "kwargs", None) or vars(kernel)
        self._loose = options["do_not_specialize"] or []
        self._loosely_aligned = options["do_not_specialize_on_alignment"] or []

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def launch(*arguments: object, **options: object) -> None:
            facts = tuple(
                fact(value, name in self._loose, name in self._loosely_aligned)
                for name, value in zip(self._names, arguments, strict=False)
            )
            self._variants.add(Variant(self._name, facts, tuple(sorted(options.items()))))

        return launch


def layer_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    out = torch.zeros_like(x)
    kernels.layer_norm(x, weight, eps, out)
    return out


def sample(sampler: Sampler, logits: torch.Tensor, *_: object) -> Samples:
    num_rows = len(logits)
    temperature, longs = torch.zeros(num_rows), torch.zeros((2, num_rows), dtype=torch.int64)
    device_draw.sample(logits, temperature, longs[0], longs[1], 0)
    return Samples(torch.zeros(num_rows, dtype=torch.int32), torch.ones(num_rows, dtype=torch.int32), None)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cohere2")
    checkpoints.make(folder, "cohere2")
    return folder


@pytest.fixture(scope="module")
def runner(checkpoint: Path) -> ModelRunner:
    made = make_runner(checkpoint, max_num_seqs=MAX_ROWS, max_num_batched_tokens=MAX_TOKENS, max_model_len=MAX_LEN)
    made._stacks = LoraStacks(made._model.config, made._model.parallel, 3, 8, torch.float32)
    return made


@pytest.fixture(scope="module")
def launched(runner: ModelRunner) -> Iterator[set[Variant]]:
    """Collects variants; the runner does what it does on a GPU, but for the kernels themselves."""
    variants: set[Variant] = set()
    with pytest.MonkeyPatch.context() as patch:
        for module_name, names in KERNELS.items():
            module = importlib.import_module(f"model.kernels.{module_name}")
            for name in names:
                patch.setattr(module, name, Recorder(name, getattr(module, name), variants))
        patch.setattr(layers, "layer_norm", layer_norm)
        # The adapters' kernels as they are for bfloat16, which has one more kind of tiles.
        patch.setattr(lora, "lora_tilings", lambda num_tokens, max_rank, _: lora_tilings(num_tokens, max_rank))
        for name in ("head_norm", "rotary_and_cache", "silu_and_mul", "add_lora_input", "add_lora_output"):
            patch.setattr(layers, name, getattr(kernels, name))
        model = runner._model
        backend = TritonAttention(model.config, runner._tables.block_size)
        for layer, window in zip(model.model.layers, WINDOWS, strict=True):
            patch.setattr(layer.self_attn, "backend", backend)
            patch.setattr(layer.self_attn, "window", window)
        patch.setattr(model.model.rotary, "for_step", lambda positions: (model.model.rotary.cos_sin, positions))
        patch.setattr(Sampler, "sample", sample)
        yield variants


@pytest.fixture(scope="module")
def warmed(runner: ModelRunner, launched: set[Variant]) -> frozenset[Variant]:
    launched.clear()
    runner.compile_kernels()
    return frozenset(launched)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Lengths and starts of rows: some that decode, and prompts whole or in part."""
    num_decode = draw(st.integers(0, MAX_ROWS - 4))
    deepest = draw(st.integers(1, MAX_LEN))
    longest = draw(st.sampled_from([16, 32, 64, MAX_LEN]))  # short prompts alone must be as likely as long ones
    prompts = draw(st.lists(st.integers(2, longest), max_size=4))
    while sum(prompts) + num_decode > MAX_TOKENS:
        prompts.pop()
    lengths = [1] * num_decode + prompts or [1]
    return lengths, [min(deepest, MAX_LEN - length) for length in lengths]


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(drawn=steps(), has_adapters=st.booleans())
def test_no_step_launches_a_kernel_that_the_warm_up_did_not(
    runner: ModelRunner,
    warmed: frozenset[Variant],
    launched: set[Variant],
    drawn: tuple[list[int], list[int]],
    has_adapters: bool,
) -> None:
    launched.clear()
    with torch.inference_mode():
        runner._run_padding(*(np.array(column, np.int32) for column in drawn), has_adapters=has_adapters)
    assert launched and launched <= warmed


def test_the_warm_up_meets_every_kernel_split_contexts_and_every_size_of_prompt(warmed: frozenset[Variant]) -> None:
    assert {variant.kernel for variant in warmed} == {name for names in KERNELS.values() for name in names}

    def values(kernel: str, option: str) -> set[object]:
        return {dict(variant.options)[option] for variant in warmed if variant.kernel == kernel}

    assert values("_decode_kernel", "IS_SPLIT") == {True, False}
    assert values("_decode_kernel", "WINDOW") == {0, 100, 9}
    assert values("_prefill_kernel", "BLOCK_M") == {16, 32, 64, 128}
    assert values("_shrink_tiles_kernel", "BLOCK_T") == {16, 64}


@pytest.mark.parametrize(("rows", "tokens", "length"), [(1, 1, 1), (1, 512, 300), (8, 8, 4096), (400, 8192, 40)])
def test_padded_steps_fit_what_a_step_may_have(rows: int, tokens: int, length: int) -> None:
    found = padded_steps(rows, tokens, length, num_kv_heads=1, has_adapters=True)
    assert found[0] == PaddedStep(1, 1) and len(found) == len(set(found))
    for step in found:
        assert step.num_decode_rows + len(step.prompt_lens) <= rows
        assert step.num_decode_rows + sum(step.prompt_lens) <= tokens
        assert max(step.context_len, *step.prompt_lens, 1) <= length


def test_steps_with_adapters_come_only_where_there_are_any_and_in_every_size_that_makes_a_variant() -> None:
    plain = padded_steps(400, 8192, 512, num_kv_heads=8)
    both = padded_steps(400, 8192, 512, num_kv_heads=8, has_adapters=True)
    assert both[: len(plain)] == plain and not any(step.has_adapters for step in plain)
    assert [step.prompt_lens for step in both[len(plain) :]] == [(1,), (9,), (512, 1)]


def test_wide_steps_have_a_multiple_of_16_tokens_and_another_number() -> None:
    found = [step.prompt_lens for step in padded_steps(400, 300, 250, num_kv_heads=8) if len(step.prompt_lens) > 1]
    assert found == [(250, 38), (250, 49), (250, 50)]
