"""A PEFT adapter's folder: its safetensors file, every tensor of which must have its place in the model."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from model.config import ModelConfig
from model.errors import AdapterError
from model.lora_adapter import MODULES, Adapter, LoraPair, LoraSlices, ModuleSizes, Place, slice_pairs
from model.lora_config import CONFIG_FILE, LoraConfig, read_lora_config
from model.lora_targets import module_name, parent_of
from model.parallel import TensorParallel
from model.precision import STORED_DTYPES

WEIGHTS_FILE = "adapter_model.safetensors"
PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
NAME = re.compile(
    r"(?:base_model\.model\.)?(?:language_model\.)?(?:model\.)?(?:language_model\.)?"
    r"layers\.(?P<layer>\d+)\.(?P<parent>\w+)\.(?P<module>\w+)\.lora_(?P<side>[AB])(?:\.[^.]+)?\.weight"
)
# What a name has in it, and why it is refused.
STRANGERS = {
    "lora_magnitude_vector": "it belongs to DoRA, which is not supported",
    "modules_to_save": "modules_to_save is not supported, as it would replace base weights for every request",
    "lora_embedding": "adapters of embeddings are not supported",
    "embed_tokens": "adapters of embeddings are not supported, nor is an embedding of its own",
    "lm_head": "adapters of the head are not supported, nor is a head of its own",
    ".bias": "biases are not supported",
}


@dataclasses.dataclass(frozen=True, slots=True)
class PairPlan:
    """Where a module's pair lies in the file."""

    a_name: str
    b_name: str
    rank: int
    scale: float


class AdapterFile:
    """An adapter whose names, shapes and types have been checked against model and configuration; tensors are lazy."""

    def __init__(self, folder: Path, config: ModelConfig, max_rank: int) -> None:
        """Reads configuration and header.

        Raises:
            AdapterError: anything that could not be applied exactly, with the tensor or key.
        """
        self._path = weights_path(folder)
        lora = read_lora_config(folder)
        try:
            self._file: Any = safe_open(self._path, framework="pt", device="cpu")
        except (OSError, SafetensorError) as error:
            raise AdapterError(f"{WEIGHTS_FILE} cannot be read: {error}; fetch the adapter again.") from None
        self._plans = self._plan(lora, config, max_rank)
        self.is_rslora = lora.use_rslora

    @property
    def ranks(self) -> tuple[int, ...]:
        """The largest rank over the layers of each of MODULES; 0: none."""
        ranks = dict.fromkeys(MODULES, 0)
        for (_, module), plan in self._plans.items():
            ranks[module] = max(ranks[module], plan.rank)
        return tuple(ranks.values())

    def pairs(self) -> Iterator[tuple[Place, LoraPair]]:
        """Reads one pair after another; raises AdapterError for numbers that are not finite."""
        for place, plan in self._plans.items():
            yield place, LoraPair(self._read(plan.a_name), self._read(plan.b_name), plan.scale)

    def _read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file.get_tensor(name).float()
        if not bool(tensor.isfinite().all()):
            raise AdapterError(f"{name} has numbers that are not finite (NaN or infinity).")
        return tensor

    def _plan(self, lora: LoraConfig, config: ModelConfig, max_rank: int) -> dict[Place, PairPlan]:
        found: dict[Place, dict[str, str]] = {}
        for name in sorted(self._file.keys()):
            layer, module, side = _place_of(name, config)
            sides = found.setdefault((layer, module), {})
            if side in sides:
                raise AdapterError(f"{sides[side]} and {name} are the same matrix; the file must have it once.")
            sides[side] = name
        targets = lora.targets.resolve(config)
        if not found and not targets:
            raise AdapterError("The adapter changes nothing: it has no tensors and chooses no module of this model.")
        if extra := sorted(found.keys() - targets):
            name = next(iter(found[extra[0]].values()))
            raise AdapterError(f"{name} is of no module that target_modules and layers_to_transform choose.")
        if lacking := sorted(targets - found.keys()):
            name, more = module_name(*lacking[0]), f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
            raise AdapterError(f"The adapter has no tensors for {name}{more}, which {CONFIG_FILE} makes a target.")
        sizes = ModuleSizes.whole(config)
        return {place: self._pair(place, found[place], lora, sizes, max_rank) for place in sorted(found)}

    def _pair(
        self, place: Place, sides: dict[str, str], lora: LoraConfig, sizes: ModuleSizes, max_rank: int
    ) -> PairPlan:
        for side, other in (("A", "B"), ("B", "A")):
            if side not in sides:
                raise AdapterError(f"{sides[other]} has no lora_{side} beside it.")
        name = module_name(*place)
        rank, (num_in, num_out) = lora.rank_of(name), sizes.shape(place[1])
        if rank > max_rank:
            raise AdapterError(f"{name} has rank {rank}, over --max-lora-rank {max_rank}.")
        self._check(sides["A"], [rank, num_in])
        self._check(sides["B"], [num_out, rank])
        return PairPlan(sides["A"], sides["B"], rank, lora.scale_of(name))

    def _check(self, name: str, shape: list[int]) -> None:
        lazy = self._file.get_slice(name)
        if list(lazy.get_shape()) != shape:
            raise AdapterError(
                f"{name} has the shape {list(lazy.get_shape())}, but this model and the adapter's rank ask for {shape}."
            )
        if lazy.get_dtype() not in STORED_DTYPES:
            raise AdapterError(f"{name} is stored as {lazy.get_dtype()}; supported are {', '.join(STORED_DTYPES)}.")


def read_adapter(folder: Path, config: ModelConfig, max_rank: int) -> Adapter:
    """The whole adapter in float32; raises AdapterError as `AdapterFile` does."""
    file = AdapterFile(folder, config, max_rank)
    return Adapter(dict(file.pairs()), file.is_rslora)


def load_adapter(
    folder: Path,
    config: ModelConfig,
    parallel: TensorParallel,
    max_rank: int,
    dtype: torch.dtype,
    is_pinned: bool = False,
) -> LoraSlices:
    """One rank's slices, made from one pair after another, so that the whole adapter is never in memory.

    Every rank reads all of the file, as all must come to the same judgement about it.

    Raises:
        AdapterError: the adapter cannot be applied exactly.
    """
    file = AdapterFile(folder, config, max_rank)
    return slice_pairs(file.pairs(), file.ranks, config, parallel, dtype, is_pinned)


def adapter_version(folder: Path) -> str:
    """Hex sha256 of what the adapter is: its configuration and its weights; raises AdapterError without them."""
    digest = hashlib.sha256()
    for path in (folder / CONFIG_FILE, weights_path(folder)):
        try:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise AdapterError(f"{path.name} cannot be read: {error.strerror}.") from None
    return digest.hexdigest()


def weights_path(folder: Path) -> Path:
    """The adapter's safetensors file; raises AdapterError where there is none, with what to do about a pickle."""
    path = folder / WEIGHTS_FILE
    if path.is_file():
        return path
    for pickle in PICKLES:
        if (folder / pickle).is_file():
            raise AdapterError(
                f"{pickle} is a pickle, which can run code when it is read, and is refused; convert it once: "
                f"safetensors.torch.save_file(torch.load('{pickle}', weights_only=True), '{WEIGHTS_FILE}')."
            )
    raise AdapterError(f"The adapter's folder has no {WEIGHTS_FILE}.")


def _place_of(name: str, config: ModelConfig) -> tuple[int, str, str]:
    """Layer, module and side (A or B) that a tensor's whole name says."""
    for part, reason in STRANGERS.items():
        if part in name:
            raise AdapterError(f"The adapter has the tensor {name}: {reason}.")
    match = NAME.fullmatch(name)
    if match is None or match["module"] not in MODULES or match["parent"] != parent_of(match["module"]):
        raise AdapterError(f"The model has no place for the adapter's tensor {name}.")
    if int(match["layer"]) >= config.num_hidden_layers:
        raise AdapterError(f"{name} is of a layer that the model, with {config.num_hidden_layers}, does not have.")
    return int(match["layer"]), match["module"], match["side"]
