"""The shard's configuration: one dataclass, from which the flags are derived."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence
from typing import Any, NoReturn

from shard_server.errors import StartError
from shard_server.graph_sizes import ladder


def _flag(
    default: Any,  # noqa: ANN401 - as in dataclasses.field
    help: str,
    *,
    choices: tuple[str, ...] = (),
    minimum: float = 0,
) -> Any:  # noqa: ANN401
    return dataclasses.field(default=default, metadata={"help": help, "choices": choices, "minimum": minimum})


@dataclasses.dataclass(frozen=True, slots=True)
class ShardConfig:
    """What one shard needs to know. Field `x_y` is the flag `--x-y`."""

    model: str = _flag("", "checkpoint folder; required")
    rank: int = _flag(0, "this shard's rank")
    world_size: int = _flag(1, "number of shards", minimum=1)
    listen: str = _flag("", "unix:PATH or HOST:PORT; required")
    dtype: str = _flag("auto", "type of weights and cache", choices=("auto", "float32", "bfloat16"))
    device: str = _flag("cpu", "where to compute", choices=("cpu", "cuda"))
    max_model_len: int = _flag(0, "most tokens of one sequence; 0: the model's own limit")
    max_num_seqs: int = _flag(128, "most sequences that run at once", minimum=1)
    max_num_batched_tokens: int = _flag(2048, "most tokens computed in one step", minimum=1)
    num_blocks_override: int = _flag(0, "KV blocks, block 0 included; 0: as many as the memory allows")
    kv_cache_memory_bytes: int = _flag(0, "memory for the KV blocks; 0: chosen from what is free")
    gpu_memory_utilization: float = _flag(0.9, "share of a GPU's memory to use, weights included", minimum=0.01)
    enforce_eager: bool = _flag(False, "launch every step kernel by kernel, without CUDA graphs")
    cuda_graph_sizes: str = _flag("", "batch sizes to capture, with commas; empty: a ladder up to max-num-seqs")
    attention_backend: str = _flag("auto", "attention kernels", choices=("auto", "torch", "triton", "flash"))
    load_format: str = _flag("auto", "dummy: random weights, no checkpoint file", choices=("auto", "dummy"))
    enable_lora: bool = _flag(False, "make room for LoRA adapters")
    max_loras: int = _flag(8, "adapter slots on the device", minimum=1)
    max_lora_rank: int = _flag(16, "largest rank that a slot holds", minimum=1)
    rendezvous: str = _flag("", "HOST:PORT where rank 0 lets the ranks find each other; required with several ranks")
    collective_timeout: float = _flag(60.0, "seconds after which a rank gives up waiting for another", minimum=0.1)
    num_threads: int = _flag(0, "threads for products on a CPU; 0: the machine's share of one rank")
    log_format: str = _flag("text", "form of a log record", choices=("text", "json"))
    log_level: str = _flag("info", "least level that is logged", choices=("debug", "info", "warning", "error"))
    exit_with_parent: bool = _flag(False, "end when standard input does")

    @property
    def graph_sizes(self) -> list[int]:
        """Batch sizes to capture as CUDA graphs, as asked for or the ladder; none on a CPU or with enforce_eager."""
        if self.device == "cpu" or self.enforce_eager:
            return []
        if not self.cuda_graph_sizes:
            return ladder(self.max_num_seqs)
        return sorted({int(size) for size in self.cuda_graph_sizes.split(",")})

    @property
    def threads(self) -> int:
        """Threads that this rank may use for a product."""
        return self.num_threads or max(1, len(os.sched_getaffinity(0)) // self.world_size)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise StartError(message)


def load_config(argv: Sequence[str]) -> ShardConfig:
    """The configuration of these arguments; raises StartError for an unknown flag or a value that breaks a rule."""
    parser = _Parser(prog="python -m shard_server", allow_abbrev=False)
    for field in dataclasses.fields(ShardConfig):
        name, text = f"--{field.name.replace('_', '-')}", f"{field.metadata['help']} (default: {field.default})"
        if isinstance(field.default, bool):
            parser.add_argument(name, action="store_true", help=text)
        else:
            choices = field.metadata["choices"] or None
            parser.add_argument(name, type=type(field.default), default=field.default, choices=choices, help=text)
    config = ShardConfig(**vars(parser.parse_args(list(argv))))
    _check(config)
    return config


def _check(config: ShardConfig) -> None:
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), field.name.replace("_", "-")
        if isinstance(value, int | float) and not value >= field.metadata["minimum"]:
            raise StartError(f"--{name} must be at least {field.metadata['minimum']}, not {value}")
    for name in ("model", "listen"):
        if not getattr(config, name):
            raise StartError(f"--{name} is required")
    if config.gpu_memory_utilization > 1:
        raise StartError(f"--gpu-memory-utilization must be at most 1, not {config.gpu_memory_utilization}")
    for size in config.cuda_graph_sizes.split(",") if config.cuda_graph_sizes else ():
        if not (size.isdecimal() and 1 <= int(size) <= config.max_num_seqs):
            limit = config.max_num_seqs
            raise StartError(f"--cuda-graph-sizes must be numbers from 1 to --max-num-seqs {limit}, not {size!r}")
    if config.rank >= config.world_size:
        raise StartError(f"--rank must be below --world-size {config.world_size}, not {config.rank}")
    if config.world_size > 1:
        split_address(config.rendezvous, "--rendezvous")
    if not config.listen.startswith("unix:"):
        split_address(config.listen, "--listen")


def split_address(address: str, flag: str) -> tuple[str, int]:
    """Host and port of HOST:PORT; raises StartError naming `flag`."""
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal() and int(port) < 65536):
        raise StartError(f"{flag} must be HOST:PORT with a port below 65536, not {address!r}")
    return host, int(port)
