"""Where a rank's parameters come from: a checkpoint's tensors read by slices, or random numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from model.checkpoint import Checkpoint
from model.config import ModelConfig
from model.errors import ModelError
from model.parallel import TensorParallel
from model.precision import STORED_DTYPES

Progress = Callable[[int, int], None]
# Buffers that old checkpoints carry along; they follow from the configuration.
IGNORED_SUFFIX = "rotary_emb.inv_freq"
DUMMY_STD = 0.02


class WeightSource(Protocol):
    """What the model's layers fill their parameters from, each exactly once."""

    parallel: TensorParallel
    dtype: torch.dtype
    device: torch.device

    def has(self, name: str) -> bool:
        """Whether the source holds this tensor."""

    def take(
        self, name: str, shape: tuple[int, ...], rows: slice | None = None, columns: slice | None = None
    ) -> torch.Tensor:
        """The slice `[rows, columns]` of a tensor that must have `shape` as a whole, in `dtype` on `device`."""

    def finish(self) -> None:
        """Raises ModelError if the source holds tensors that nobody took."""

    def fingerprint(self) -> str:
        """Identifies the source; equal on all ranks that serve one model."""


class Weights:
    """The checkpoint in `model_dir`. `progress(done, total)` is called after each tensor taken."""

    def __init__(
        self,
        model_dir: Path,
        config: ModelConfig,
        parallel: TensorParallel,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        progress: Progress | None = None,
    ) -> None:
        """Opens the files, reads no weight yet; raises ModelError for a checkpoint whose files are broken."""
        self.config = config
        self.parallel = parallel
        self.dtype = dtype
        self.device = torch.device(device)
        self._progress = progress
        self._checkpoint = Checkpoint(model_dir)
        self._left = {name for name in self._checkpoint.names if not name.endswith(IGNORED_SUFFIX)}
        self._total = len(self._left)

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds this tensor."""
        return name in self._checkpoint.names

    def take(
        self, name: str, shape: tuple[int, ...], rows: slice | None = None, columns: slice | None = None
    ) -> torch.Tensor:
        """See WeightSource.take; raises ModelError for a missing tensor, another shape or an unknown stored type."""
        if not self.has(name):
            raise ModelError(f"The checkpoint lacks the tensor {name}; it must have the shape {list(shape)}.")
        lazy = self._checkpoint.slice(name)
        if tuple(lazy.get_shape()) != shape:
            raise ModelError(f"{name} has the shape {list(lazy.get_shape())}, but config.json asks for {list(shape)}.")
        if lazy.get_dtype() not in STORED_DTYPES:
            raise ModelError(f"{name} is stored as {lazy.get_dtype()}; supported are {', '.join(STORED_DTYPES)}.")
        index = (rows or slice(None), columns or slice(None))[: len(shape)]
        tensor: torch.Tensor = lazy[index]
        self._left.discard(name)
        if self._progress:
            self._progress(self._total - len(self._left), self._total)
        return tensor.to(self.device, self.dtype)

    def finish(self) -> None:
        """Raises ModelError naming tensors that no layer took: the configuration then describes another model."""
        if self._left:
            names = sorted(self._left)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ModelError(f"The model has no place for the checkpoint's tensors {', '.join(names[:3])}{more}.")

    def fingerprint(self) -> str:
        """Hex digest over the checkpoint's files."""
        return self._checkpoint.fingerprint()


class DummyWeights:
    """Random weights of a configuration: normal with deviation 0.02, norms one. For measuring without a checkpoint."""

    def __init__(
        self, config: ModelConfig, parallel: TensorParallel, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        """Makes numbers on `device` as they are taken."""
        self.config = config
        self.parallel = parallel
        self.dtype = dtype
        self.device = torch.device(device)

    def has(self, name: str) -> bool:
        """True for all but an lm_head that is tied."""
        return not (self.config.tie_word_embeddings and name == "lm_head.weight")

    def take(
        self, name: str, shape: tuple[int, ...], rows: slice | None = None, columns: slice | None = None
    ) -> torch.Tensor:
        """A slice drawn by itself: the same for the same name and slice, whatever was taken before."""
        parts = (rows or slice(None), columns or slice(None))[: len(shape)]
        bounds = [part.indices(size)[:2] for part, size in zip(parts, shape, strict=True)]
        sizes = [max(0, stop - start) for start, stop in bounds]
        if "norm" in name:
            return torch.ones(sizes, dtype=self.dtype, device=self.device)
        seed = hashlib.sha256(f"{name}{bounds}".encode()).digest()[:8]
        generator = torch.Generator(self.device).manual_seed(int.from_bytes(seed) >> 1)
        return torch.empty(sizes, dtype=self.dtype, device=self.device).normal_(0, DUMMY_STD, generator=generator)

    def finish(self) -> None:
        """Nothing can be left over."""

    def fingerprint(self) -> str:
        """Hex digest of the configuration."""
        return hashlib.sha256(f"dummy {self.config}".encode()).hexdigest()[:32]


def stored_dtype(model_dir: Path) -> str | None:
    """The type that the checkpoint's embedding is stored in, such as "bfloat16"; None where it has another name."""
    checkpoint = Checkpoint(model_dir)
    for name in sorted(checkpoint.names):
        if name.endswith("embed_tokens.weight"):
            return STORED_DTYPES.get(checkpoint.slice(name).get_dtype())
    return None
