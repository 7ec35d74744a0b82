"""From a private copy of the router's to slices: both sides mean the same content by a version."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import CohereConfig, CohereForCausalLM

from model.config import load_model_config
from model.errors import AdapterError
from model.parallel import TensorParallel
from router.adapter_folders import AdapterCopy, AdapterFolders
from shard_server.adapter_reader import AdapterReader
from shard_server.adapters import AdapterRecipe, AdapterSource
from shard_server.link import decode_step
from tests.adapter_folders import write_adapter
from tests.shard_server import checkpoints
from tests.shard_server.ranks import run_ranks
from tests.shard_server.steps import Open, Run, step
from tests.shard_server.test_model_runner import make_runner

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


def with_vocabulary(folder: Path, size: int) -> Path:
    """A tied checkpoint with that many tokens and an adapter of rank 8 for q_proj alone."""
    torch.manual_seed(5)
    geometry = checkpoints.GEOMETRY | {"vocab_size": size, "hidden_size": 32, "num_hidden_layers": 1}
    CohereForCausalLM(CohereConfig(**geometry)).eval().save_pretrained(folder / "model")
    write_adapter(folder / "adapters" / "a", folder / "model", seed=2, rank=8, strength=8.0, modules=["q_proj"])
    return folder


def base_and_adapted(parallel: TensorParallel, folder: str) -> list[list[int]]:
    """Two tokens of the base model and two of the adapter, in one batch."""
    copy = AdapterFolders([Path(folder, "adapters")]).copy(Path(folder, "adapters", "a"))
    runner = make_runner(Path(folder, "model"), parallel, enable_lora=True, max_loras=1, max_lora_rank=8)
    assert runner.adapters is not None
    asyncio.run(runner.adapters.staged.load(recipe(copy)))
    opens = [Open(slot, [5, 9, 30, 17], adapter_slot=slot - 1) for slot in (0, 1)]
    prefills = [Run(slot, 0, 4, True, (slot + 1,)) for slot in (0, 1)]
    first = runner.step(decode_step(step(1, prefills, opens, bindings={0: copy.version}))).rows
    second = runner.step(decode_step(step(2, [Run(slot, 4) for slot in (0, 1)]))).rows
    assert first is not None and second is not None
    return [first.token_ids.tolist(), second.token_ids.tolist()]


def test_a_vocabulary_of_256000_takes_an_adapter_of_attention(tmp_path: Path) -> None:
    """Public bug vllm-project/vllm#4742: adapters were refused for the head's size, which they do not touch."""
    tokens = base_and_adapted(TensorParallel(), str(with_vocabulary(tmp_path, 256_000)))
    assert [row[0] for row in tokens] != [row[1] for row in tokens], "the adapter changes the output"


def test_an_odd_vocabulary_on_two_ranks_takes_adapters(tmp_path: Path) -> None:
    """Public bug vllm-project/vllm#20843: padded sizes of embedding and head differed with LoRA on."""
    folder = str(with_vocabulary(tmp_path, 263))
    expected = base_and_adapted(TensorParallel(), folder)
    assert run_ranks(base_and_adapted, 2, tmp_path, folder) == [expected, expected]
    assert max(token for row in expected for token in row) < 263
