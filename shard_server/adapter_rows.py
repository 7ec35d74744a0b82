"""The adapter slots of a step's tokens, as the model takes them."""

from __future__ import annotations

import numpy as np
import torch

from model.lora import BASE, AdapterBatchData, pack
from model.lora_stacks import LoraStacks
from shard_server.link import Int32


def adapters_of(row_slots: Int32, num_tokens: Int32, stacks: LoraStacks | None) -> AdapterBatchData | None:
    """Of rows with so many tokens each, by their adapter slots `[S]` (-1: base model); None if no row has one."""
    if stacks is None or not (row_slots != BASE).any():
        return None
    return AdapterBatchData.build(torch.from_numpy(np.repeat(row_slots, num_tokens)), stacks)


def pack_adapters(row_slots: Int32, num_rows: int, max_loras: int) -> Int32:
    """int32 `[num_adapter_columns(num_rows, max_loras)]` of rows with one token each, padded with base rows."""
    padded = np.full(num_rows, BASE, np.int32)
    padded[: len(row_slots)] = row_slots
    columns: Int32 = pack(torch.from_numpy(padded), max_loras).numpy()
    return columns


def num_adapter_columns(num_rows: int, max_loras: int) -> int:
    """Numbers that `AdapterBatchData.of_columns` reads for so many tokens."""
    return 2 * num_rows + max_loras + 1
