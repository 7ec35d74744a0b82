"""Slots of adapters and the tokens that use them, against dense products."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from model import layers
from model.config import ModelConfig, parse_model_config
from model.lora import BASE, AdapterBatchData, pack
from model.lora_adapter import INPUT_MODULES, MODULES, OUTPUT_MODULES, Adapter, LoraPair, ModuleSizes
from model.lora_stacks import LoraStacks, stacks_bytes
from model.lora_weights import load_adapter
from model.parallel import TensorParallel
from tests.model.adapters import MAX_RANK, save_adapter
from tests.model.checkpoints import TINY, cohere, save
from tests.model.generation import Row, forward, load, nan_cache
from tests.model.test_layers import CountedParallel


@pytest.fixture
def config() -> ModelConfig:
    return parse_model_config({**TINY, "model_type": "cohere"})


def random_adapter(config: ModelConfig, ranks: dict[str, int], seed: int = 0) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    sizes = ModuleSizes.whole(config)
    pairs = {}
    for layer in range(config.num_hidden_layers):
        for module, rank in ranks.items():
            num_in, num_out = sizes.shape(module)
            a = torch.randn((rank, num_in), generator=generator) * num_in**-0.5
            pairs[layer, module] = LoraPair(a, torch.randn((num_out, rank), generator=generator), 0.5 + layer)
    return Adapter(pairs)


def dense(adapter: Adapter, layer: int, module: str) -> torch.Tensor:
    """scale * B A in float64, `[out, in]`."""
    pair = adapter.pairs[layer, module]
    return pair.scale * (pair.b.double() @ pair.a.double())


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 7, 8, 12, 16, 24, 64])
def test_products_of_any_rank_equal_the_dense_ones(config: ModelConfig, rank: int) -> None:
    """predibase/lorax#256."""
    adapter = random_adapter(config, dict.fromkeys(MODULES, rank))
    stacks = LoraStacks(config, TensorParallel(), 2, MAX_RANK, torch.float32)
    stacks.bind(1, adapter.slices(config, TensorParallel(), torch.float32))
    data = AdapterBatchData.build([1, BASE, 0, 1], stacks)
    assert data is not None
    for layer in range(config.num_hidden_layers):
        normed, mixed = torch.randn(4, 32), torch.randn(4, 32 + 48)
        projected, out = torch.zeros(4, 32 + 16 + 16 + 48 + 48), torch.zeros(4, 32)
        layers.add_lora_input(normed, projected, data, layer)
        layers.add_lora_output(mixed, out, data, layer)
        stacked = torch.cat([dense(adapter, layer, module) for module in INPUT_MODULES])
        joined = torch.cat([dense(adapter, layer, module) for module in OUTPUT_MODULES], dim=1)
        for got, x, weight in ((projected, normed, stacked), (out, mixed, joined)):
            assert torch.equal(got[1:3], torch.zeros_like(got[1:3])), "base rows and empty slots stay as they are"
            assert torch.allclose(got[::3].double(), x[::3].double() @ weight.T, atol=1e-5)


def test_each_module_has_its_own_rank(config: ModelConfig) -> None:
    ranks = {"q_proj": 5, "o_proj": 2, "up_proj": 3}
    adapter = random_adapter(config, ranks)
    slices = adapter.slices(config, TensorParallel(), torch.float32)
    stacks = LoraStacks(config, TensorParallel(), 1, 8, torch.float32)
    stacks.bind(0, slices)
    assert slices.rank == 5
    assert stacks.host_ranks[0] == tuple(stacks.ranks[0].tolist()) == (5, 0, 0, 0, 3, 2, 0)
    for layer, own in enumerate(stacks.layers):
        blocks = own.a_in[0].view(5, 8, 32)
        assert torch.equal(blocks[0, :5], adapter.pairs[layer, "q_proj"].a)
        assert torch.equal(blocks[4, :3], adapter.pairs[layer, "up_proj"].a)
        assert not blocks[1:4].any() and not blocks[0, 5:].any() and not blocks[4, 3:].any()
        assert own.a_in.stride()[1:] == (32, 1) and own.b_out.stride()[1:] == (16, 1)


def test_a_smaller_adapter_leaves_nothing_of_the_larger_one_before_it(config: ModelConfig) -> None:
    large, small = (random_adapter(config, dict.fromkeys(MODULES, rank), rank) for rank in (16, 3))
    used, fresh = (LoraStacks(config, TensorParallel(), 2, 16, torch.float32) for _ in range(2))
    for adapter in (large, small):
        used.bind(1, adapter.slices(config, TensorParallel(), torch.float32))
    fresh.bind(1, small.slices(config, TensorParallel(), torch.float32))
    for mine, theirs in zip(used.layers, fresh.layers, strict=True):
        for name in ("a_in", "b_in", "a_out", "b_out"):
            assert torch.equal(getattr(mine, name), getattr(theirs, name))
    used.clear(1)
    assert not any(bool(own.b_in.any()) for own in used.layers) and not used.ranks.any()


def test_a_rank_over_the_slots_is_refused_and_the_slot_kept(config: ModelConfig) -> None:
    stacks = LoraStacks(config, TensorParallel(), 1, 4, torch.float32)
    stacks.bind(0, random_adapter(config, {"q_proj": 4}).slices(config, TensorParallel(), torch.float32))
    slices = random_adapter(config, {"q_proj": 5}).slices(config, TensorParallel(), torch.float32)
    with pytest.raises(ValueError, match="rank 5"):
        stacks.bind(0, slices)
    assert stacks.host_ranks[0][0] == 4


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_planned_bytes_are_those_of_the_slots(config: ModelConfig, world_size: int) -> None:
    parallel = TensorParallel(world_size - 1, world_size)
    stacks = LoraStacks(config, parallel, 3, 8, torch.bfloat16)
    assert stacks.num_bytes == stacks_bytes(config, parallel, 3, 8, torch.bfloat16)
    held = sum(getattr(own, name).numel() for own in stacks.layers for name in ("a_in", "b_in", "a_out", "b_out"))
    assert stacks.num_bytes == 2 * held


def test_tokens_are_ordered_by_slot_and_base_tokens_come_last(config: ModelConfig) -> None:
    stacks = LoraStacks(config, TensorParallel(), 4, 1, torch.float32)
    slots = [2, BASE, 0, 2, 0, BASE, 2]
    data = AdapterBatchData.build(slots, stacks)
    assert data is not None
    assert data.token_slots.tolist() == slots
    assert data.token_order.tolist() == [2, 4, 0, 3, 6, 1, 5]
    assert data.segment_starts.tolist() == [0, 2, 2, 5, 5]
    assert data.segments == ((0, 0, 2), (2, 2, 5))
    packed = pack(torch.tensor(slots, dtype=torch.int32), 4)
    views = AdapterBatchData.of_columns(packed, len(slots), (), stacks)
    for name in ("token_slots", "token_order", "segment_starts"):
        assert torch.equal(getattr(views, name), getattr(data, name))
        assert getattr(views, name).dtype == torch.int32
        assert getattr(views, name).untyped_storage().data_ptr() == packed.untyped_storage().data_ptr()


def test_a_step_without_adapters_has_no_adapter_data(config: ModelConfig) -> None:
    stacks = LoraStacks(config, TensorParallel(), 4, 1, torch.float32)
    assert AdapterBatchData.build([BASE] * 5, stacks) is None
    with pytest.raises(AssertionError):
        AdapterBatchData.build([4], stacks)


def test_adapters_add_no_collective(tmp_path: Path) -> None:
    base = cohere(num_hidden_layers=3)
    folder, adapter = save(base, tmp_path / "base"), save_adapter(base, tmp_path / "adapter")
    model = load(CountedParallel(0, 2), str(folder))
    stacks = LoraStacks(model.config, model.parallel, 1, 8, torch.float32)
    stacks.bind(0, load_adapter(adapter, model.config, model.parallel, 8, torch.float32))
    CountedParallel.calls.clear()
    forward(model, nan_cache(model, 2), [Row([5, 6, 7], 4, [1], slot=0)], [3], stacks)
    assert CountedParallel.calls == [(3, 32)] * (3 + 1)
