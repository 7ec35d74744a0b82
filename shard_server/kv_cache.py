"""The paged KV cache: how many blocks fit, and their memory."""

from __future__ import annotations

import torch

from model.config import ModelConfig
from model.errors import ModelError
from model.parallel import TensorParallel
from shard_server.config import ShardConfig

# Share of free memory that the blocks may take on a CPU when nothing else is asked for.
CPU_SHARE = 0.25

KVCache = list[tuple[torch.Tensor, torch.Tensor]]


def block_bytes(config: ModelConfig, parallel: TensorParallel, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers on this rank."""
    heads = parallel.kv_share(config.num_key_value_heads)
    num_numbers = 2 * config.num_hidden_layers * block_size * (heads.stop - heads.start) * config.head_dim
    size: int = num_numbers * dtype.itemsize
    return size


def choose_num_blocks(
    config: ShardConfig, bytes_per_block: int, block_size: int, max_model_len: int, measured_bytes: int | None = None
) -> int:
    """Blocks of this rank, block 0 included: as asked for, else as free memory and the rows' longest contexts allow.

    `measured_bytes` is what a GPU has left for them; None: a share of the host's free memory.

    Raises:
        ModelError: fewer than two, as block 0 holds no sequence.
    """
    useful = 1 + config.max_num_seqs * -(-max_model_len // block_size)
    if config.num_blocks_override:
        num_blocks, flag = config.num_blocks_override, "--num-blocks-override"
    elif config.kv_cache_memory_bytes:
        num_blocks, flag = min(useful, config.kv_cache_memory_bytes // bytes_per_block), "--kv-cache-memory-bytes"
    else:
        budget = int(_free_bytes() * CPU_SHARE / config.world_size) if measured_bytes is None else measured_bytes
        num_blocks, flag = min(useful, budget // bytes_per_block), "free memory"
    if num_blocks < 2:
        raise ModelError(
            f"{flag} allows {num_blocks} KV blocks of {bytes_per_block} bytes, but at least 2 are needed; "
            "give more memory, or use a smaller dtype or more shards."
        )
    return num_blocks


def allocate(
    config: ModelConfig,
    parallel: TensorParallel,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KVCache:
    """Per layer k and v, each zeros `[num_blocks, block_size, num_kv_heads_local, head_dim]`."""
    heads = parallel.kv_share(config.num_key_value_heads)
    shape = (num_blocks, block_size, heads.stop - heads.start, config.head_dim)
    return [
        (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
        for _ in range(config.num_hidden_layers)
    ]


def _free_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        facts = dict(line.split(":", 1) for line in file)
    return int(facts["MemAvailable"].split()[0]) * 1024
