"""From a private copy of the router's to slices: both sides mean the same content by a version."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from model.config import load_model_config
from model.errors import AdapterError
from model.parallel import TensorParallel
from router.adapter_folders import AdapterCopy, AdapterFolders
from shard_server.adapter_reader import AdapterReader
from shard_server.adapters import AdapterRecipe, AdapterSource
from tests.adapter_folders import write_adapter
from tests.shard_server import checkpoints

RANK = 3


@pytest.fixture
def copy(tmp_path: Path) -> AdapterCopy:
    """As the router makes it."""
    checkpoints.make(tmp_path / "model")
    write_adapter(tmp_path / "adapters" / "a", tmp_path / "model", seed=1, rank=RANK)
    return AdapterFolders([tmp_path / "adapters"]).copy(tmp_path / "adapters" / "a")


def reader(folder: Path, max_rank: int = 8) -> AdapterReader:
    return AdapterReader(load_model_config(folder / "model"), TensorParallel(), max_rank, torch.float32, False)


def recipe(copy: AdapterCopy) -> AdapterRecipe:
    return AdapterRecipe(copy.version, (AdapterSource(str(copy.folder), copy.version),))


def test_the_routers_version_is_the_hash_that_the_shard_finds(copy: AdapterCopy, tmp_path: Path) -> None:
    slices = reader(tmp_path)(recipe(copy))
    assert slices.rank == RANK


def test_other_content_than_the_version_is_refused(copy: AdapterCopy, tmp_path: Path) -> None:
    config = copy.folder / "adapter_config.json"
    config.write_text(config.read_text() + " ")
    with pytest.raises(AdapterError, match=f"The files have changed: their hash is .*, not {copy.version}"):
        reader(tmp_path)(recipe(copy))


def test_what_the_model_refuses_is_refused_with_its_reason(copy: AdapterCopy, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="rank 3, over --max-lora-rank 2"):
        reader(tmp_path, max_rank=2)(recipe(copy))
