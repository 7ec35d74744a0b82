"""Random adapters by name, as values; what a folder holds is the model's matter."""

from __future__ import annotations

import dataclasses

import torch

from model.config import ModelConfig
from model.errors import AdapterError
from model.lora_adapter import MODULES, Adapter, LoraPair, LoraSlices, ModuleSizes
from model.parallel import TensorParallel
from shard_server.adapters import AdapterRecipe

RANKS = {"a": 3, "b": 8, "c": 1}


def adapter(name: str, config: ModelConfig) -> Adapter:
    """All seven modules of every layer, strong enough to change tokens."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    sizes, rank, pairs = ModuleSizes.whole(config), RANKS[name], {}
    for layer in range(config.num_hidden_layers):
        for module in MODULES:
            inputs, outputs = sizes.shape(module)
            a = torch.randn(rank, inputs, generator=generator) / inputs**0.5
            b = torch.randn(outputs, rank, generator=generator) / rank**0.5
            pairs[layer, module] = LoraPair(a, b, 0.7)
    return Adapter(pairs)


@dataclasses.dataclass(frozen=True)
class Reader:
    """Takes the place of AdapterReader; a version is a name."""

    config: ModelConfig
    parallel: TensorParallel
    max_rank: int
    dtype: torch.dtype
    is_pinned: bool

    def __call__(self, recipe: AdapterRecipe) -> LoraSlices:
        if recipe.version not in RANKS:
            raise AdapterError(f"nobody made {recipe.version}")
        return adapter(recipe.version, self.config).slices(self.config, self.parallel, self.dtype, self.is_pinned)
