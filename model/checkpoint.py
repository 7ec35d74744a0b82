"""The safetensors files of a checkpoint: which tensor lies where, read lazily and by slices."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from model.errors import ModelError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FINGERPRINT_BYTES = 65536


class Checkpoint:
    """Tensors of `model_dir`; where there is an index, its `weight_map` alone says which tensor is in which file."""

    def __init__(self, model_dir: Path) -> None:
        """Opens every file's header.

        Raises:
            ModelError: no weights, a broken index, or a file that is missing, cut short or lacks a tensor of the map.
        """
        self._dir = model_dir
        index = model_dir / INDEX
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        if index.exists():
            self._file_of = _read_weight_map(index)
            for file_name in sorted(set(self._file_of.values())):
                self._open(file_name)
            self._check_map()
        elif (model_dir / SINGLE).exists():
            self._file_of = dict.fromkeys(self._open(SINGLE), SINGLE)
        else:
            raise ModelError(f"{model_dir} holds neither {SINGLE} nor {INDEX}; only safetensors checkpoints are read.")

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._file_of)

    def slice(self, name: str) -> Any:  # noqa: ANN401
        """A lazy slice object of safetensors: `get_shape()`, `get_dtype()` and reading by `[rows, columns]`."""
        return self._files[self._file_of[name]].get_slice(name)

    def fingerprint(self) -> str:
        """Hex digest of configuration, index, headers and the ends of each file; all ranks must have the same.

        It tells apart checkpoints, not single changed bytes in the middle of one: hashing a whole one takes minutes.
        """
        digest = hashlib.sha256()
        for file_name in ["config.json", INDEX, *sorted(self._files)]:
            path = self._dir / file_name
            if path.exists():
                digest.update(f"{file_name}:{path.stat().st_size}".encode())
                digest.update(_ends(path))
        return digest.hexdigest()[:32]

    def _open(self, file_name: str) -> list[str]:
        path = self._dir / file_name
        try:
            self._files[file_name] = safe_open(path, framework="pt", device="cpu")
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path} cannot be read: {error}; fetch the checkpoint again.") from None
        return list(self._files[file_name].keys())

    def _check_map(self) -> None:
        held = {file_name: set(file.keys()) for file_name, file in self._files.items()}
        for name, file_name in self._file_of.items():
            if name not in held[file_name]:
                raise ModelError(f"{INDEX} says that {name} is in {file_name}, where it is not.")


def _read_weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{index} has no readable weight_map ({type(error).__name__}: {error}).") from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"weight_map in {index} must be an object that names the file of each tensor.")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise ModelError(f"weight_map in {index} gives {file_name!r} for {name}, which is no plain file name.")
    return weight_map


def _ends(path: Path) -> bytes:
    """The file's first and last bytes, which hold a safetensors header and some of its data."""
    with path.open("rb") as file:
        head = file.read(FINGERPRINT_BYTES)
        file.seek(max(0, path.stat().st_size - FINGERPRINT_BYTES))
        return head + file.read()
