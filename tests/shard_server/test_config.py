"""Flags of a shard server, and how many KV blocks they give."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from model.errors import ModelError
from shard_server import kv_cache
from shard_server.config import ShardConfig, load_config
from shard_server.errors import StartError

REQUIRED = ["--model", "m", "--listen", "unix:s"]
CPU = torch.device("cpu")


def test_every_field_is_a_flag_and_keeps_its_default() -> None:
    assert load_config(REQUIRED) == ShardConfig(model="m", listen="unix:s")
    for field in dataclasses.fields(ShardConfig):
        if isinstance(field.default, bool):
            assert getattr(load_config([*REQUIRED, f"--{field.name.replace('_', '-')}"]), field.name) is True
    ranks = ["--rank", "1", "--world-size", "2", "--rendezvous", "h:1", "--collective-timeout", "2.5"]
    config = load_config([*REQUIRED, *ranks])
    assert (config.rank, config.world_size, config.collective_timeout) == (1, 2, 2.5)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--model", ""], "--model is required"),
        (["--rank", "1"], "--rank must be below --world-size 1, not 1"),
        (["--world-size", "2"], "--rendezvous must be HOST:PORT"),
        (["--listen", "nowhere"], "--listen must be HOST:PORT"),
        (["--listen", "host:70000"], "port below 65536"),
        (["--max-num-seqs", "0"], "--max-num-seqs must be at least 1, not 0"),
        (["--num-threads", "-1"], "--num-threads must be at least 0, not -1"),
        (["--collective-timeout", "nan"], "--collective-timeout must be at least"),
        (["--dtype", "float16"], "--dtype"),
        (["--max-num", "3"], "unrecognized arguments: --max-num 3"),
    ],
)
def test_a_flag_that_breaks_a_rule_is_named(flags: list[str], text: str) -> None:
    with pytest.raises(StartError, match=text):
        load_config([*REQUIRED, *flags])


def blocks(**values: int) -> int:
    config = ShardConfig(model="m", listen="unix:s", max_num_seqs=4, **values)
    return kv_cache.choose_num_blocks(config, 1000, 16, 100)


def test_blocks_are_those_asked_for_or_what_memory_allows_but_no_more_than_rows_can_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert blocks(num_blocks_override=77) == 77
    assert blocks(kv_cache_memory_bytes=9_999) == 9
    assert blocks() == blocks(kv_cache_memory_bytes=10**9) == 1 + 4 * 7, "four rows of 100 tokens have 7 blocks each"
    monkeypatch.setattr(kv_cache, "_free_bytes", lambda: 40_000)
    assert blocks() == 10, "a quarter of what is free"


def test_too_little_memory_is_an_error_that_names_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="--num-blocks-override allows 1 KV blocks"):
        blocks(num_blocks_override=1)
    with pytest.raises(ModelError, match="--kv-cache-memory-bytes allows 0"):
        blocks(kv_cache_memory_bytes=999)
    monkeypatch.setattr(kv_cache, "_free_bytes", lambda: 4_000)
    with pytest.raises(ModelError, match="free memory allows 1"):
        blocks()
