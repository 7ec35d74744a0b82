"""From an adapter's recipe to this rank's slices."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from model.lora_weights import adapter_version, load_adapter

from model.config import ModelConfig
from model.errors import AdapterError
from model.lora_adapter import LoraSlices
from model.parallel import TensorParallel
from shard_server.adapters import AdapterRecipe


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterReader:
    """Reads for one rank of a model, in pinned memory if the slots are on a GPU."""

    config: ModelConfig
    parallel: TensorParallel
    max_rank: int
    dtype: torch.dtype
    is_pinned: bool

    def __call__(self, recipe: AdapterRecipe) -> LoraSlices:
        """Blocks. Raises AdapterError where a folder is not the content that was asked for, or cannot be applied."""
        for source in recipe.sources:
            found = adapter_version(Path(source.path))
            if found != source.sha256:
                raise AdapterError(f"The files have changed: their hash is {found}, not {source.sha256}.")
        if recipe.combination or len(recipe.sources) != 1:
            raise AdapterError("Combinations of adapters are not served.")
        folder = Path(recipe.sources[0].path)
        return load_adapter(folder, self.config, self.parallel, self.max_rank, self.dtype, self.is_pinned)
