"""Logits with adapters equal those of PEFT, on 1, 2 and 4 ranks, alone and mixed in a batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from model.lora import BASE
from model.lora_stacks import LoraStacks
from model.lora_weights import load_adapter
from model.parallel import TensorParallel
from tests.model.adapters import ALL, MAX_RANK, generate_adapted, peft_logits, save_adapter
from tests.model.checkpoints import cohere, cohere2, save
from tests.model.generation import generate, generate_with, load
from tests.model.rank_pool import RankPool
from tests.model.test_parity import prompts

TOLERANCE = 1e-4
VISIBLE = 1e-2

Pools = Callable[[int], RankPool]

# rsLoRA with alpha = r scales by sqrt(r): at rank 64 a small alpha keeps the logits in the range of the tolerance.
ADAPTERS: dict[str, dict[str, Any]] = {
    **{f"{module} alone": {"r": 8, "lora_alpha": 16, "target_modules": [module]} for module in ALL},
    **{f"rank {rank}": {"r": rank, "lora_alpha": rank} for rank in (1, 2, 3, 4, 7, 8, 12, 16, 24, 64)},
    "rsLoRA": {"r": 16, "lora_alpha": 8, "use_rslora": True},
    "rsLoRA of rank 3 on some modules": {"r": 3, "use_rslora": True, "target_modules": ["o_proj", "up_proj"]},
    "rank_pattern": {"r": 4, "rank_pattern": {"q_proj": 7, r"layers\.1\.mlp\.up_proj": 12, "^model.*down_proj": 1}},
    "alpha_pattern": {"r": 4, "alpha_pattern": {"self_attn.v_proj": 16, r"layers\.0\..*": 2, "oj": 100}},
    "both patterns with rsLoRA": {
        "r": 8,
        "use_rslora": True,
        "rank_pattern": {"(k|v)_proj": 2, "o_proj": 16},
        "alpha_pattern": {"k_proj": 3, "down_proj": 5},
    },
    "layers_to_transform": {"r": 4, "layers_to_transform": [1]},
    "one layer of a named list": {"r": 4, "layers_to_transform": 0, "layers_pattern": "layers"},
    "targets by expression": {"r": 4, "target_modules": r"model\.layers\.1\.(mlp\.(gate|up)_proj|self_attn\.q_proj)"},
    "all-linear": {"r": 4, "target_modules": "all-linear"},
    "exclude_modules": {"r": 4, "exclude_modules": ["layers.0.mlp.up_proj", "k_proj"]},
    "fan_in_fan_out": {"r": 4, "fan_in_fan_out": True},
    "gaussian start": {"r": 4, "init_lora_weights": "gaussian", "lora_dropout": 0.3},
}
BASES: dict[str, Callable[[], Any]] = {
    "grouped heads": lambda: cohere(),
    "one kv head, q/k norm": lambda: cohere(num_key_value_heads=1, use_qk_norm=True),
    "bias, untied head": lambda: cohere(attention_bias=True, tie_word_embeddings=False),
    "head_dim of its own": lambda: cohere(head_dim=16, num_key_value_heads=4),
    "cohere2": lambda: cohere2(),
}


class Case:
    """A base model with all the adapters and PEFT's logits for each."""

    def __init__(self, name: str, folder: Path) -> None:
        self.reference = BASES[name]()
        self.folder = str(save(self.reference, folder / "base"))
        self.adapters = {
            adapter: str(save_adapter(self.reference, folder / f"adapter{seed}", seed, **keys))
            for seed, (adapter, keys) in enumerate(ADAPTERS.items())
        }
        self.prompt = prompts(9)[0]
        self._expected: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}

    def expected(self, adapter: str, tokens: list[int]) -> torch.Tensor:
        key = adapter, tuple(tokens)
        if key not in self._expected:
            self._expected[key] = peft_logits(self.reference, Path(self.adapters[adapter]), tokens)
        return self._expected[key]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    made: dict[str, Case] = {}

    def get(name: str) -> Case:
        if name not in made:
            made[name] = Case(name, tmp_path_factory.mktemp("lora"))
        return made[name]

    return get


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("name", BASES)
def test_logits_equal_those_of_peft_for_all_adapters_in_one_batch(
    cases: Callable[[str], Case], rank_pools: Pools, name: str, world_size: int
) -> None:
    case = cases(name)
    adapters = list(case.adapters.values())
    asked, slots = [case.prompt] * (len(adapters) + 1), [*range(len(adapters)), BASE]
    answers = rank_pools(world_size).run(generate_adapted, case.folder, adapters, asked, slots, 2)
    *adapted, (_, plain) = answers[0]
    for adapter, (tokens, logits) in zip(case.adapters, adapted, strict=True):
        assert (logits - case.expected(adapter, tokens[:-1])).abs().max() < TOLERANCE, adapter
        assert (logits[: len(case.prompt)] - plain[: len(case.prompt)]).abs().max() > VISIBLE, adapter
    for other in answers[1:]:
        for mine, theirs in zip(answers[0], other, strict=True):
            assert torch.equal(mine[1], theirs[1]), "ranks differ"


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("chunk", [10**6, 5])
@pytest.mark.parametrize("name", ["grouped heads", "cohere2"])
def test_a_batch_of_base_rows_ranks_8_and_64_equals_each_row_alone(
    cases: Callable[[str], Case], rank_pools: Pools, name: str, chunk: int, world_size: int
) -> None:
    """predibase/lorax#64."""
    case = cases(name)
    adapters = [case.adapters["rank 8"], case.adapters["rank 64"]]
    asked, slots = prompts(12, 9, 17, 1, 14), [BASE, 0, BASE, 1, 0]
    run = rank_pools(world_size).run
    mixed = run(generate_adapted, case.folder, adapters, asked, slots, 4, chunk)[0]
    for prompt, slot, (tokens, logits) in zip(asked, slots, mixed, strict=True):
        alone = run(generate_adapted, case.folder, adapters, [prompt], [slot], 4)[0][0]
        assert tokens == alone[0]
        assert (logits - alone[1]).abs().max() < TOLERANCE / 4
        if slot != BASE:
            expected = case.expected(f"rank {(8, 64)[slot]}", tokens[:-1])
            assert (logits - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", BASES)
def test_base_rows_have_the_same_bits_with_lora_on_and_off(cases: Callable[[str], Case], name: str) -> None:
    """Measured with vLLM 0.24.0: a checkpoint with a tied embedding did not start with LoRA on."""
    case = cases(name)
    asked = prompts(12, 9, 3)
    off = generate(TensorParallel(), case.folder, asked, 3)
    unused = generate_adapted(TensorParallel(), case.folder, [], asked, [BASE] * 3)
    beside = generate_adapted(TensorParallel(), case.folder, [case.adapters["rank 8"]], asked, [BASE, 0, BASE])
    for row in range(3):
        assert torch.equal(off[row][1], unused[row][1])
        assert torch.equal(off[row][1], beside[row][1]) == (row != 1)


def test_an_adapter_gives_the_same_bits_after_its_slot_was_another_ones(cases: Callable[[str], Case]) -> None:
    case = cases("grouped heads")
    model = load(TensorParallel(), case.folder)
    stacks = LoraStacks(model.config, model.parallel, 3, MAX_RANK, torch.float32)

    def bind(slot: int, adapter: str) -> None:
        folder = Path(case.adapters[adapter])
        stacks.bind(slot, load_adapter(folder, model.config, model.parallel, MAX_RANK, torch.float32))

    def logits(slot: int) -> torch.Tensor:
        return generate_with(model, [case.prompt], 2, 10**6, stacks, [slot])[0][1]

    bind(1, "rank 3")
    first = logits(1)
    bind(1, "rank 64")
    assert not torch.allclose(logits(1), first, atol=VISIBLE)
    stacks.clear(1)
    assert torch.equal(logits(1), logits(BASE))
    for slot in (1, 2, 0):
        bind(slot, "rank 3")
        assert torch.equal(logits(slot), first)


def test_a_vocabulary_that_the_ranks_do_not_divide_shows_no_padding_with_adapters(
    cases: Callable[[str], Case], rank_pools: Pools
) -> None:
    """vllm-project/vllm#20843."""
    case = cases("grouped heads")
    answers = rank_pools(2).run(generate_adapted, case.folder, [case.adapters["rank 8"]], prompts(4, 6), [0, BASE], 20)
    for tokens, logits in answers[0]:
        assert logits.shape[1] == 263 and bool(logits.isfinite().all())
        assert max(tokens) < 263


def test_a_vocabulary_of_256000_takes_adapters(tmp_path: Path) -> None:
    """vllm-project/vllm#4742."""
    base = cohere(vocab_size=256000, num_hidden_layers=1)
    folder = str(save(base, tmp_path / "base"))
    adapter = save_adapter(base, tmp_path / "adapter", r=8, target_modules=["q_proj"])
    prompt = [5, 255999, 131072]
    ((tokens, logits),) = generate_adapted(TensorParallel(), folder, [str(adapter)], [prompt], [0], 2)
    assert (logits - peft_logits(base, adapter, tokens[:-1])).abs().max() < TOLERANCE
    assert (logits - generate(TensorParallel(), folder, [tokens[:-1]], 1)[0][1]).abs().max() > VISIBLE


def test_bfloat16_with_an_adapter_is_as_close_to_float32_as_pefts_own(cases: Callable[[str], Case]) -> None:
    case = cases("cohere2")
    adapter = Path(case.adapters["rank 16"])
    model = load(TensorParallel(), case.folder, torch.bfloat16)
    stacks = LoraStacks(model.config, model.parallel, 1, 16, torch.bfloat16)
    stacks.bind(0, load_adapter(adapter, model.config, model.parallel, 16, torch.bfloat16))
    ((tokens, logits),) = generate_with(model, prompts(40), 4, 10**6, stacks, [0])
    exact = peft_logits(case.reference, adapter, tokens[:-1])
    rounded = type(case.reference).from_pretrained(case.folder, dtype=torch.bfloat16).eval()
    theirs = (peft_logits(rounded, adapter, tokens[:-1]).float() - exact).abs().mean()
    ours = (logits - exact).abs().mean()
    assert ours < 1.5 * theirs, (ours, theirs)
