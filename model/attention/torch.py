"""Attention in plain torch: the reference, and the backend of a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from model.attention import Seqlen
from model.attention.plan import AttentionPlan, DecodeGroup, PrefillRun
from model.config import ModelConfig

DEFAULT_BLOCK_SIZE = 16


class TorchAttention:
    """Gathers the keys and values of each sequence from the paged cache, then multiplies.

    Only places inside a sequence's context are ever gathered, so what lies elsewhere in the cache cannot matter.
    """

    name = "torch"

    def __init__(self, config: ModelConfig, block_size: int | None = None) -> None:
        """`config` fixes the scale; `block_size` is 16 unless given."""
        self.block_size = block_size or DEFAULT_BLOCK_SIZE
        self._scale = config.head_dim**-0.5
        self._plan: AttentionPlan | None = None

    def forward(
        self,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_tables: torch.Tensor,
        cu_seqlens_q: torch.Tensor | None,
        seqlen: Seqlen,
        window: int | None,
        out: torch.Tensor,
    ) -> None:
        """See AttentionBackend.forward."""
        plan = self._plan
        if plan is None or plan.seqlen is not seqlen or plan.block_tables is not block_tables:
            num_kv_heads = k_cache.shape[2]
            plan = self._plan = AttentionPlan(block_tables, seqlen, self.block_size, num_kv_heads, query.dtype)
        groups, runs = plan.for_window(window)
        for group in groups:
            self._decode(group, query, k_cache, v_cache, out)
        for run in runs:
            self._prefill(run, query, k_cache, v_cache, out)

    def _decode(
        self, group: DecodeGroup, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor
    ) -> None:
        """One product for all sequences and kv heads; the query heads that share a kv head are its rows."""
        rows = query[: group.num_rows] if group.rows is None else query.index_select(0, group.rows)
        shape = (group.num_products, -1, k_cache.shape[3])
        grouped = rows.reshape(shape)  # [S * Hkv, Hq / Hkv, D]
        keys, values = gather(k_cache, group.places, shape), gather(v_cache, group.places, shape)
        if group.mask is None:  # one sequence: the fused operator starts fastest
            mixed = F.scaled_dot_product_attention(
                grouped.unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), scale=self._scale
            )
        else:
            scores = torch.baddbmm(group.mask, grouped, keys.transpose(1, 2), alpha=self._scale)
            mixed = torch.bmm(torch.softmax(scores, dim=-1), values)
        if group.rows is None:
            out[: group.num_rows].copy_(mixed.view(rows.shape))
        else:
            out.index_copy_(0, group.rows, mixed.view(rows.shape))

    def _prefill(
        self, run: PrefillRun, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor
    ) -> None:
        """All queries of one sequence, a block of them at a time; kv heads are the batch of each product.

        Products over blocks skip the keys that no query of a block sees; torch's fused operator does so as well, but
        takes twice the time in bfloat16.
        """
        num_kv_heads, head_dim = k_cache.shape[2:]
        shape = (num_kv_heads, -1, head_dim)
        keys, values = gather(k_cache, run.places, shape), gather(v_cache, run.places, shape)
        num_queries = run.rows.stop - run.rows.start
        heads = query[run.rows].view(num_queries, num_kv_heads, -1, head_dim)  # [L, Hkv, G, D]
        per_query = heads.shape[2]
        rows = heads.transpose(0, 1).reshape(shape)  # [Hkv, L * G, D]
        mixed = out[run.rows].view(heads.shape)
        zero = rows.new_zeros(())
        for block in run.blocks:
            part = rows[:, block.queries.start * per_query : block.queries.stop * per_query]
            seen = keys[:, block.keys].transpose(1, 2)
            scores = torch.baddbmm(zero, part, seen, beta=0, alpha=self._scale)  # [Hkv, n * G, keys]
            size, width = block.mask.shape
            scores.view(num_kv_heads, size, per_query, -1)[..., -width:].add_(block.mask.unsqueeze(1))
            answer = torch.bmm(torch.softmax(scores, dim=-1), values[:, block.keys])
            mixed[block.queries].copy_(answer.view(num_kv_heads, size, per_query, head_dim).transpose(0, 1))


def gather(cache: torch.Tensor, places: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Heads `[*shape]` from `places`, rows of `cache` seen as `[-1, D]`."""
    return cache.view(-1, cache.shape[3]).index_select(0, places).view(shape)
