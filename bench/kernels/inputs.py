"""What the kernels are run on: the widths of two models, and a paged cache with plain attention over it."""

from __future__ import annotations

import dataclasses

import torch

from bench.kernels.clock import normal
from model.attention import Seqlen

HEAD_DIM = 128
KV_HEADS = 8
VOCABULARY = 256000
BLOCK_SIZE = 256
"""What flash-attn asks for; our own kernels are also timed on the same places as blocks of half that size."""


@dataclasses.dataclass(frozen=True)
class Geometry:
    """The widths of one model's layer."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int = KV_HEADS

    @property
    def qkv(self) -> int:
        """Columns of q, k and v."""
        return (self.heads + 2 * self.kv_heads) * HEAD_DIM


GEOMETRIES = (Geometry("8b", 4096, 14336, 32), Geometry("32b", 8192, 24576, 64))


class Cache:
    """A pool `[num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM]` of random keys and of values, 1 MiB a block."""

    def __init__(self, num_blocks: int) -> None:
        """Draws the whole pool."""
        self.k = normal(num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
        self.v = normal(num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM)

    def tables(self, num_sequences: int, context: int) -> torch.Tensor:
        """int32 `[num_sequences, blocks]`, distinct where the pool has enough of them."""
        width = -(-context // BLOCK_SIZE)
        ids = torch.randperm(self.k.shape[0] - 1, device="cuda") + 1
        need = num_sequences * width
        return ids.repeat(-(-need // len(ids)))[:need].int().view(num_sequences, width)

    def halved(self) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v seen as twice as many blocks of half the size; `halved_tables` names the same places in them."""
        half = BLOCK_SIZE // 2
        return self.k.view(-1, half, KV_HEADS, HEAD_DIM), self.v.view(-1, half, KV_HEADS, HEAD_DIM)

    def poison_tails(self, tables: torch.Tensor, context: int) -> None:
        """NaN behind every sequence's end, as unused places may hold; what an earlier case poisoned is made whole."""
        for pool in (self.k, self.v):
            pool.nan_to_num_()
        if context % BLOCK_SIZE:
            self.k[tables[:, -1].long(), context % BLOCK_SIZE :] = float("nan")
            self.v[tables[:, -1].long(), context % BLOCK_SIZE :] = float("nan")

    def rows(self, tables: torch.Tensor, context: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of every sequence, one after the other: `[S * context, KV_HEADS, HEAD_DIM]`."""
        k, v = (pool[tables.long()].flatten(1, 2)[:, :context].flatten(0, 1) for pool in (self.k, self.v))
        return k, v

    def plain(self, query: torch.Tensor, table: torch.Tensor, context: int, window: int | None) -> torch.Tensor:
        """float32 attention of `query [n, Hq * D]`, the last n positions of a sequence."""
        heads = query.float().view(query.shape[0], -1, HEAD_DIM).transpose(0, 1)
        group = heads.shape[0] // KV_HEADS
        k, v = (rows.float().repeat_interleave(group, 1).transpose(0, 1) for rows in self.rows(table[None], context))
        q_position = torch.arange(context - query.shape[0], context, device="cuda")[:, None]
        k_position = torch.arange(context, device="cuda")[None]
        is_seen = k_position <= q_position
        if window is not None:
            is_seen &= k_position > q_position - window
        scores = (heads @ k.transpose(1, 2)) * HEAD_DIM**-0.5
        scores.masked_fill_(~is_seen, float("-inf"))
        mixed: torch.Tensor = scores.softmax(-1) @ v
        return mixed.transpose(0, 1).flatten(1)


def halved_tables(tables: torch.Tensor) -> torch.Tensor:
    """Block tables of `Cache.halved`."""
    return torch.stack((2 * tables, 2 * tables + 1), -1).flatten(1)


def seqlen_of(num_sequences: int, cached: int, new: int) -> Seqlen:
    """A step of equal rows."""
    lengths = [torch.full((num_sequences,), n, dtype=torch.int32, device="cuda") for n in (new, cached, cached + new)]
    num_decode = num_sequences if new == 1 else 0
    context_lens = [cached + new] * num_sequences
    return Seqlen(lengths[0], lengths[1], lengths[2], num_decode, new, cached + new, None, context_lens)
