"""Merged adapters equal those of PEFT's add_weighted_adapter."""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import merge_utils
from transformers import CohereConfig, CohereForCausalLM

from model.errors import AdapterError
from model.lora_adapter import Adapter, LoraPair
from model.lora_mask import dare_mask
from model.lora_merge import COMBINATIONS, Merge, Part, merge_adapters

# PEFT asks transformers for a property that this release of transformers renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

PLACE = re.compile(r"layers\.(\d+)\.\w+\.(\w+)$")
EVERY_MODULE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LINEAR_LIKE = [name for name in COMBINATIONS if name != "cat"]
MAX_RANK = 256

Options = dict[str, Any]


def peft_model(*adapters: Options) -> PeftModel:
    """A tiny network with random adapters "0", "1", …; what is not given is PEFT's default, on q and down."""
    torch.manual_seed(0)
    geometry = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    network = CohereForCausalLM(CohereConfig(**geometry, num_hidden_layers=3, vocab_size=40, eos_token_id=3))
    configs = [LoraConfig(**{"target_modules": ["q_proj", "down_proj"]} | options) for options in adapters]
    model = get_peft_model(network, configs[0], adapter_name="0")
    for index, config in enumerate(configs[1:], start=1):
        model.add_adapter(str(index), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    return model


def adapter_of(model: PeftModel, name: str) -> Adapter:
    """One of PEFT's adapters as our value."""
    pairs = {}
    for path, layer in model.named_modules():
        if (match := PLACE.search(path)) and name in getattr(layer, "lora_A", ()):
            a, b = layer.lora_A[name].weight.detach(), layer.lora_B[name].weight.detach()
            pairs[int(match[1]), match[2]] = LoraPair(a.clone(), b.clone(), layer.scaling[name])
    return Adapter(pairs, model.peft_config[name].use_rslora)


def parts_of(model: PeftModel, weights: list[float]) -> list[Part]:
    return [Part(str(index), adapter_of(model, str(index)), weight) for index, weight in enumerate(weights)]


def merged_by_peft(model: PeftModel, weights: list[float], combination: str, **options: object) -> Adapter:
    names = [str(index) for index in range(len(weights))]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The density 1")  # it says that nothing is pruned
        model.add_weighted_adapter(names, weights, "merged", combination, **options)
    return adapter_of(model, "merged")


def assert_equal(ours: Adapter, theirs: Adapter) -> None:
    """The same modules, factors and scales; PEFT pads cat with zeros where a module's ranks are smaller."""
    assert ours.pairs.keys() == theirs.pairs.keys()
    for place, pair in theirs.pairs.items():
        mine = ours.pairs[place]
        rank = mine.rank
        torch.testing.assert_close(mine.a, pair.a[:rank], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(mine.b, pair.b[:, :rank], rtol=1e-6, atol=1e-6)
        assert not pair.a[rank:].any() and not pair.b[:, rank:].any()
        assert mine.scale == pytest.approx(pair.scale)
        torch.testing.assert_close(delta(mine), delta(pair), rtol=1e-5, atol=1e-5)


def delta(pair: LoraPair) -> torch.Tensor:
    return pair.scale * (pair.b @ pair.a)


# Adapters whose merge PEFT allows with every combination, because their ranks are equal.
EQUAL_RANKS: dict[str, list[Options]] = {
    "two alike": [{"r": 4}, {"r": 4}],
    "three with scales": [{"r": 4, "lora_alpha": 16}, {"r": 4, "lora_alpha": 3}, {"r": 4, "use_rslora": True}],
    "every module": [{"r": 3, "target_modules": EVERY_MODULE}, {"r": 3, "target_modules": EVERY_MODULE}],
    "other modules": [{"r": 4}, {"r": 4, "target_modules": ["q_proj", "gate_proj"]}],
    "no module in both": [{"r": 4}, {"r": 4, "target_modules": ["v_proj", "o_proj"]}],
    "fewer layers in the second": [{"r": 4}, {"r": 4, "layers_to_transform": [1]}],
    "patterns": [{"r": 4, "rank_pattern": {"q_proj": 8}, "alpha_pattern": {"q_proj": 32}}] * 2,
    "pattern in one": [{"r": 4, "rank_pattern": {"q_proj": 8}}, {"r": 8, "target_modules": ["q_proj", "k_proj"]}],
    "the first with rsLoRA": [{"r": 4, "use_rslora": True}, {"r": 4}],
}
WEIGHTS = [0.7, -1.3, 0.4]


@pytest.mark.parametrize("adapters", EQUAL_RANKS.values(), ids=EQUAL_RANKS)
@pytest.mark.parametrize("combination", ["cat", "linear"])
def test_sums_equal_pefts(combination: str, adapters: list[Options]) -> None:
    model, weights = peft_model(*adapters), WEIGHTS[: len(adapters)]
    ours = merge_adapters(parts_of(model, weights), Merge(combination), MAX_RANK)
    assert_equal(ours, merged_by_peft(model, weights, combination))


@pytest.mark.parametrize("adapters", EQUAL_RANKS.values(), ids=EQUAL_RANKS)
@pytest.mark.parametrize("majority_sign", ["total", "frequency"])
@pytest.mark.parametrize("density", [0.3, 0.77, 1.0])
def test_ties_equals_pefts(adapters: list[Options], majority_sign: str, density: float) -> None:
    model, weights = peft_model(*adapters), WEIGHTS[: len(adapters)]
    merge = Merge("ties", density=density, majority_sign=majority_sign)
    theirs = merged_by_peft(model, weights, "ties", density=density, majority_sign_method=majority_sign)
    assert_equal(merge_adapters(parts_of(model, weights), merge, MAX_RANK), theirs)


def draw_our_masks(monkeypatch: pytest.MonkeyPatch, parts: list[Part], seed: int) -> None:
    """Lets PEFT draw our masks: it asks module by module, for A of each adapter that has the module, then for B."""
    layers, modules = sorted({layer for part in parts for layer, _ in part.adapter.pairs}), EVERY_MODULE
    wanted = [
        (getattr(pair, factor).shape, number, layer, module, factor)
        for layer in layers
        for module in modules
        for factor in ("a", "b")
        for number, part in enumerate(parts)
        if (pair := part.adapter.pairs.get((layer, module)))
    ]
    queue = iter(wanted)

    def bernoulli(densities: torch.Tensor) -> torch.Tensor:
        shape, *stream = next(queue)
        assert densities.shape == shape
        return dare_mask(shape, densities.flatten()[0].item(), seed, *stream)

    class Torch:
        def __getattr__(self, name: str) -> Any:
            return bernoulli if name == "bernoulli" else getattr(torch, name)

    monkeypatch.setattr(merge_utils, "torch", Torch())


@pytest.mark.parametrize("adapters", EQUAL_RANKS.values(), ids=EQUAL_RANKS)
@pytest.mark.parametrize("combination", ["dare_linear", "dare_ties"])
@pytest.mark.parametrize("density", [0.25, 0.5])
def test_dare_equals_pefts_under_the_same_masks(
    monkeypatch: pytest.MonkeyPatch, adapters: list[Options], combination: str, density: float
) -> None:
    model, weights = peft_model(*adapters), WEIGHTS[: len(adapters)]
    parts = parts_of(model, weights)
    draw_our_masks(monkeypatch, parts, seed=7)
    theirs = merged_by_peft(model, weights, combination, density=density)
    assert_equal(merge_adapters(parts, Merge(combination, density=density, seed=7), MAX_RANK), theirs)


@pytest.mark.parametrize("combination", ["dare_linear", "dare_ties"])
def test_dare_of_density_one_equals_pefts(combination: str) -> None:
    model = peft_model({"r": 4}, {"r": 4})
    ours = merge_adapters(parts_of(model, [1.0, 0.5]), Merge(combination), MAX_RANK)
    assert_equal(ours, merged_by_peft(model, [1.0, 0.5], combination, density=1.0))


@pytest.mark.parametrize("weights", [[-1.0, -2.0], [-0.5, 1.5], [0.0, 1.0], [0.0, 0.0], [1e-3, 40.0]])
@pytest.mark.parametrize("combination", ["cat", "linear", "ties"])
def test_weights_of_every_sign_equal_pefts(combination: str, weights: list[float]) -> None:
    model = peft_model({"r": 4, "lora_alpha": 12}, {"r": 4})
    ours = merge_adapters(parts_of(model, weights), Merge(combination, density=0.5), MAX_RANK)
    assert_equal(ours, merged_by_peft(model, weights, combination, density=0.5))


@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize("weight", [1.0, -0.6])
def test_a_single_adapter_is_merged_as_linear_and_keeps_its_delta(combination: str, weight: float) -> None:
    model = peft_model({"r": 4, "lora_alpha": 10, "target_modules": EVERY_MODULE})
    parts = parts_of(model, [weight])
    ours = merge_adapters(parts, Merge(combination, density=0.5), MAX_RANK)
    assert_equal(ours, merged_by_peft(model, [weight], combination, density=0.5))
    for place, pair in parts[0].adapter.pairs.items():
        torch.testing.assert_close(delta(ours.pairs[place]), weight * delta(pair), rtol=1e-5, atol=1e-5)


def test_cat_takes_any_ranks_and_is_the_exact_weighted_sum() -> None:
    patterned = {"r": 12, "rank_pattern": {"q_proj": 2}, "target_modules": ["q_proj", "k_proj"]}
    model = peft_model({"r": 3}, {"r": 8, "lora_alpha": 1}, patterned)
    parts = parts_of(model, WEIGHTS)
    ours = merge_adapters(parts, Merge("cat"), MAX_RANK)
    assert_equal(ours, merged_by_peft(model, WEIGHTS, "cat"))
    for place, pair in ours.pairs.items():
        having = [(part.weight, part.adapter.pairs[place]) for part in parts if place in part.adapter.pairs]
        expected = sum(weight * delta(source) for weight, source in having)
        torch.testing.assert_close(delta(pair), expected, rtol=1e-5, atol=1e-5)
        assert pair.rank == sum(source.rank for _, source in having)


def test_an_adapter_may_come_twice() -> None:
    model = peft_model({"r": 4})
    part = parts_of(model, [0.5])[0]
    twice = merge_adapters([part, part], Merge("linear"), MAX_RANK)
    for place, pair in part.adapter.pairs.items():
        torch.testing.assert_close(delta(twice.pairs[place]), 4 * 0.5 * delta(pair), rtol=1e-5, atol=1e-5)


def test_a_module_that_no_adapter_has_in_some_layer_stays_without() -> None:
    model = peft_model({"r": 4}, {"r": 4, "target_modules": ["k_proj"], "layers_to_transform": [2]})
    ours = merge_adapters(parts_of(model, [1.0, 1.0]), Merge("linear"), MAX_RANK)
    assert {layer for layer, module in ours.pairs if module == "k_proj"} == {2}


def test_a_merge_can_be_merged_again_as_peft_does() -> None:
    model = peft_model({"r": 4, "use_rslora": True}, {"r": 4})
    first = merge_adapters(parts_of(model, [1.0, 0.5]), Merge("linear"), MAX_RANK)
    assert_equal(first, merged_by_peft(model, [1.0, 0.5], "linear"))
    model.add_weighted_adapter(["merged", "1"], [0.3, 0.9], "again", "ties", density=0.6)
    parts = [Part("merged", first, 0.3), Part("1", adapter_of(model, "1"), 0.9)]
    assert_equal(merge_adapters(parts, Merge("ties", density=0.6), MAX_RANK), adapter_of(model, "again"))


# Masks


def mask(**changes: Any) -> torch.Tensor:
    stream = {"density": 0.3, "seed": 5, "part": 0, "layer": 1, "module": "q_proj", "factor": "a"} | changes
    return dare_mask(torch.Size((64, 512)), **stream)


@pytest.mark.parametrize("density", [0.01, 0.3, 0.5, 0.95])
def test_a_mask_keeps_the_density_and_every_row_and_column_gets_its_part(density: float) -> None:
    kept = mask(density=density)
    assert set(kept.unique().tolist()) == {0.0, 1.0}
    deviation = math.sqrt(density * (1 - density))
    assert abs(kept.mean().item() - density) < 5 * deviation / math.sqrt(kept.numel())
    for dim, size in enumerate(kept.shape):
        means = kept.mean(dim=1 - dim)
        assert (means - density).abs().max().item() < 6 * deviation / math.sqrt(kept.numel() / size)


CHANGES: list[dict[str, object]] = [
    {"seed": 6},
    {"seed": 2**63 + 5},
    {"part": 1},
    {"layer": 2},
    {"module": "down_proj"},
    {"factor": "b"},
]


@pytest.mark.parametrize("changes", CHANGES, ids=[next(iter(change)) for change in CHANGES])
def test_masks_of_other_streams_are_independent(changes: dict[str, object]) -> None:
    kept, other = mask() - 0.3, mask(**changes) - 0.3
    correlation = (kept * other).mean().item() / 0.21
    assert abs(correlation) < 5 / math.sqrt(kept.numel())


def test_a_mask_is_the_same_every_time_and_leaves_torchs_generator_alone() -> None:
    state = torch.get_rng_state()
    assert mask().equal(mask())
    assert torch.get_rng_state().equal(state)


def test_a_denser_mask_of_a_seed_holds_the_thinner_one() -> None:
    assert (mask(density=0.6) >= mask(density=0.3)).all()


def test_dare_keeps_the_expected_delta_of_each_factor() -> None:
    part = Part("x", Adapter({(0, "q_proj"): LoraPair(torch.ones(8, 512), torch.ones(512, 8), 1.0)}), 1.0)
    blank = Part("0", Adapter({(0, "q_proj"): LoraPair(torch.zeros(8, 512), torch.zeros(512, 8), 1.0)}), 1.0)
    pair = merge_adapters([part, blank], Merge("dare_linear", density=0.25, seed=1), MAX_RANK).pairs[0, "q_proj"]
    for factor in (pair.a, pair.b):
        assert set(factor.unique().tolist()) == {0.0, 4.0}
        assert factor.mean().item() == pytest.approx(1, abs=5 * math.sqrt(3 / 4096))


def test_other_seeds_give_other_merges_and_the_same_seed_the_same() -> None:
    parts = parts_of(peft_model({"r": 4}, {"r": 4}), [1.0, 1.0])
    first, same, other = (
        merge_adapters(parts, Merge("dare_linear", density=0.5, seed=seed), MAX_RANK).pairs[0, "q_proj"].a
        for seed in (1, 1, 2)
    )
    assert first.equal(same) and not first.equal(other)


# Refusals


def refusal(adapters: list[Options], weights: list[float], combination: str, max_rank: int = MAX_RANK) -> str:
    parts = parts_of(peft_model(*adapters), weights)
    with pytest.raises(AdapterError) as refused:
        merge_adapters(parts, Merge(combination, density=0.5), max_rank)
    return str(refused.value)


@pytest.mark.parametrize("name", ["svd", "ties_svd", "dare_linear_svd", "magnitude_prune", "Linear", ""])
def test_other_combinations_are_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(AdapterError, match="cat, linear, ties, dare_linear, dare_ties") as refused:
        Merge(name)
    assert repr(name) in str(refused.value)


@pytest.mark.parametrize("density", [0.0, -0.5, 1.5, math.nan, math.inf])
def test_a_density_outside_its_range_is_refused(density: float) -> None:
    with pytest.raises(AdapterError, match="density"):
        Merge("ties", density=density)


def test_an_unknown_election_is_refused() -> None:
    with pytest.raises(AdapterError, match="total, frequency"):
        Merge("ties", majority_sign="loudest")


def test_no_adapters_are_refused() -> None:
    with pytest.raises(AdapterError, match="at least one"):
        merge_adapters([], Merge(), MAX_RANK)


@pytest.mark.parametrize("weight", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_a_weight_that_is_no_finite_number_is_refused(combination: str, weight: float) -> None:
    assert "'1'" in refusal([{"r": 4}, {"r": 4}], [1.0, weight], combination)


@pytest.mark.parametrize("combination", ["cat", "linear"])
def test_an_overflow_is_refused(combination: str) -> None:
    parts = parts_of(peft_model({"r": 4}, {"r": 4}), [1.0, 1.0])
    huge = {place: LoraPair(pair.a * 3e38, pair.b * 3e38, 1.0) for place, pair in parts[1].adapter.pairs.items()}
    with pytest.raises(AdapterError, match="overflow"):
        merge_adapters([parts[0], Part("huge", Adapter(huge), 9.0)], Merge(combination), MAX_RANK)


@pytest.mark.parametrize("combination", LINEAR_LIKE)
def test_unequal_ranks_are_refused_as_by_peft(combination: str) -> None:
    for second in ({"r": 8}, {"r": 8, "target_modules": ["k_proj"]}):
        text = refusal([{"r": 4}, second], [1.0, 1.0], combination)
        assert "'0' 4, '1' 8" in text and "cat" in text
        with pytest.raises(ValueError, match="same r"):
            peft_model({"r": 4}, second).add_weighted_adapter(["0", "1"], [1.0, 1.0], "m", combination, density=0.5)


def test_unequal_ranks_of_one_module_are_refused_as_by_peft() -> None:
    adapters: list[Options] = [{"r": 4, "rank_pattern": {"q_proj": 8}}, {"r": 8}]
    assert "down_proj of layer 0 has 4 in '0' and 8 in '1'" in refusal(adapters, [1.0, 1.0], "ties")
    with pytest.raises(RuntimeError, match="equal size"):
        peft_model(*adapters).add_weighted_adapter(["0", "1"], [1.0, 1.0], "m", "ties", density=0.5)


def test_layers_that_the_first_lacks_are_refused_where_peft_would_leave_them_out() -> None:
    adapters: list[Options] = [{"r": 4, "layers_to_transform": [0]}, {"r": 4}]
    assert "layers 1, 2" in refusal(adapters, [1.0, 1.0], "linear")
    left = merged_by_peft(peft_model(*adapters), [1.0, 1.0], "linear")
    assert {layer for layer, _ in left.pairs} == {0}


@pytest.mark.parametrize(("combination", "rank"), [("cat", 16), ("linear", 8)])
def test_a_merged_rank_over_the_limit_is_refused(combination: str, rank: int) -> None:
    adapters: list[Options] = [{"r": 8}, {"r": 8}]
    assert f"rank {rank}; --max-lora-rank is {rank - 1}" in refusal(adapters, [1.0, 1.0], combination, rank - 1)
    merge_adapters(parts_of(peft_model(*adapters), [1.0, 1.0]), Merge(combination), rank)


def test_the_adapters_that_were_merged_stay_as_they_were() -> None:
    parts = parts_of(peft_model({"r": 4}, {"r": 4}), [0.5, -2.0])
    kept = [{place: (pair.a.clone(), pair.b.clone()) for place, pair in part.adapter.pairs.items()} for part in parts]
    for combination in COMBINATIONS:
        merge_adapters(parts, Merge(combination, density=0.5), MAX_RANK)
    for part, before in zip(parts, kept, strict=True):
        for place, (a, b) in before.items():
            assert part.adapter.pairs[place].a.equal(a) and part.adapter.pairs[place].b.equal(b)
