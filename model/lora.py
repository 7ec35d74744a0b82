"""The adapters of a step: which token goes through which slot of the stacks."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch

from model.lora_stacks import LoraStacks

BASE = -1
"""The slot of a token that no adapter touches."""


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterBatchData:
    """Which slot each of a step's T tokens uses, also ordered by slot, so that a product serves a whole segment.

    The columns are on the device of the stacks; in a CUDA graph they are views of one buffer that each step fills by
    `pack`, and `segments` is not read.
    """

    token_slots: torch.Tensor
    """int32 `[T]`: the slot of each token, -1 for the base model."""
    token_order: torch.Tensor
    """int32 `[T]`: token indices ordered by slot, those of a slot in their order, base tokens last."""
    segment_starts: torch.Tensor
    """int32 `[max_loras + 1]`: slot s owns `token_order[segment_starts[s] : segment_starts[s + 1]]`."""
    segments: tuple[tuple[int, int, int], ...]
    """(slot, start, stop) in token_order of slots that have tokens, for paths that run from the host."""
    stacks: LoraStacks

    @classmethod
    def build(cls, token_slots: Sequence[int] | torch.Tensor, stacks: LoraStacks) -> AdapterBatchData | None:
        """From the slots of all tokens on the host (-1: base); None if no token has one: then nothing is to be done."""
        slots = torch.as_tensor(token_slots, dtype=torch.int32)
        packed = pack(slots, stacks.max_loras)
        num_tokens = slots.numel()
        starts = packed[2 * num_tokens :].tolist()
        segments = tuple(
            (slot, start, stop) for slot, (start, stop) in enumerate(itertools.pairwise(starts)) if start < stop
        )
        if not segments:
            return None
        device = stacks.ranks.device
        if device.type == "cuda":
            packed = packed.pin_memory().to(device, non_blocking=True)
        return cls.of_columns(packed, num_tokens, segments, stacks)

    @classmethod
    def of_columns(
        cls,
        packed: torch.Tensor,
        num_tokens: int,
        segments: tuple[tuple[int, int, int], ...],
        stacks: LoraStacks,
    ) -> AdapterBatchData:
        """Views of a buffer that `pack` fills, int32 `[2 * num_tokens + max_loras + 1]` on the stacks' device."""
        slots, order, starts = torch.split(packed, [num_tokens, num_tokens, stacks.max_loras + 1])
        return cls(slots, order, starts, segments, stacks)


def pack(token_slots: torch.Tensor, max_loras: int) -> torch.Tensor:
    """The columns token_slots, token_order and segment_starts one after another, int32 on the host.

    Args:
        token_slots: int32 `[T]` on the host, each -1 or below max_loras.
    """
    assert not bool((token_slots >= max_loras).any()), "a token's slot is beyond the stacks"
    keys = torch.where(token_slots < 0, max_loras, token_slots)
    order = torch.argsort(keys, stable=True)
    counts = torch.bincount(keys, minlength=max_loras + 1)
    starts = counts.cumsum(0).roll(1)
    starts[0] = 0
    return torch.cat([token_slots, order.to(torch.int32), starts.to(torch.int32)])
