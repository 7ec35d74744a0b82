"""Selective population of the cache: attention sees the whole prefill, only chosen tokens stay in the cache."""

from __future__ import annotations

import torch

from model.attention import Seqlen


class SelectiveCache:
    """A scratch cache that holds all of a step's K and V while a layer attends, and copies the chosen ones out."""

    def __init__(self, indices: torch.Tensor, slots: torch.Tensor, seqlen: Seqlen, block_size: int) -> None:
        """Lays the step's sequences out in scratch blocks.

        Args:
            indices: int64, the tokens of the step that enter the real cache.
            slots: int64 `[T]`, the real places of all tokens.
            seqlen: the step's lengths; every context must be new.
            block_size: tokens per block.

        Raises:
            ValueError: a sequence has a cached part, which the scratch blocks do not hold.
        """
        lengths = seqlen.input_lens_list or seqlen.input_lengths.tolist()
        if lengths != (seqlen.context_lens_list or seqlen.context_lengths.tolist()):
            raise ValueError("prefill_cache_indices needs whole prompts, without a cached part")
        blocks_per_row = -(-max(lengths) // block_size)
        tables = torch.arange(len(lengths) * blocks_per_row, dtype=torch.int32, device=slots.device)
        self.block_tables = tables.view(len(lengths), blocks_per_row)
        row_starts = [row * blocks_per_row * block_size for row in range(len(lengths))]
        spans = [torch.arange(start, start + size) for start, size in zip(row_starts, lengths, strict=True)]
        self.slots = torch.cat(spans).to(slots.device)
        self._chosen = self.slots[indices]
        self._places = slots[indices]
        self._shape = (self.block_tables.numel(), block_size)
        self._scratch: tuple[torch.Tensor, torch.Tensor] | None = None

    def scratch(self, kv_cache: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V blocks for one layer, in the shape of `kv_cache`; the same memory serves all layers."""
        if self._scratch is None:
            k_cache, v_cache = kv_cache
            shape = (*self._shape, *k_cache.shape[2:])
            self._scratch = k_cache.new_zeros(shape), v_cache.new_zeros(shape)
        return self._scratch

    def keep(self, kv_cache: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Copies the chosen tokens from the scratch blocks to their real places."""
        assert self._scratch is not None
        for real, scratch in zip(kv_cache, self._scratch, strict=True):
            real.flatten(0, 1)[self._places] = scratch.flatten(0, 1)[self._chosen]
