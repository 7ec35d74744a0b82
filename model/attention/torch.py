"""Attention in plain torch: the reference, and the backend of a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from model.attention import Seqlen
from model.attention.plan import AttentionPlan, DecodeGroup, PrefillPiece
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
        groups, pieces = plan.for_window(window)
        for group in groups:
            self._decode(group, query, k_cache, v_cache, out)
        for piece in pieces:
            self._prefill(piece, query, k_cache, v_cache, out)

    def _decode(
        self, group: DecodeGroup, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor
    ) -> None:
        """One product for all sequences and kv heads; the query heads that share a kv head are its rows."""
        head_dim = k_cache.shape[3]
        rows = query[: group.num_rows] if group.rows is None else query.index_select(0, group.rows)
        grouped = rows.reshape(group.num_products, -1, head_dim)  # [S * Hkv, Hq / Hkv, D]
        keys = k_cache.view(-1, head_dim).index_select(0, group.places).view(group.num_products, -1, head_dim)
        scores = torch.baddbmm(group.mask, grouped, keys.transpose(1, 2), alpha=self._scale)
        values = v_cache.view(-1, head_dim).index_select(0, group.places).view(group.num_products, -1, head_dim)
        mixed = torch.bmm(torch.softmax(scores, dim=-1), values).view(rows.shape)
        if group.rows is None:
            out[: group.num_rows].copy_(mixed)
        else:
            out.index_copy_(0, group.rows, mixed)

    def _prefill(
        self, piece: PrefillPiece, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor
    ) -> None:
        """One run of queries of one sequence; kv heads are the batch, their keys are shared without a copy."""
        num_kv_heads, head_dim = k_cache.shape[2:]
        group = query.shape[1] // (num_kv_heads * head_dim)
        heads = query[piece.queries].view(-1, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
        shape = (*heads.shape[:2], piece.places.numel(), head_dim)
        keys = k_cache.flatten(0, 1).index_select(0, piece.places).transpose(0, 1).unsqueeze(1).expand(shape)
        values = v_cache.flatten(0, 1).index_select(0, piece.places).transpose(0, 1).unsqueeze(1).expand(shape)
        mixed = F.scaled_dot_product_attention(
            heads, keys, values, attn_mask=piece.mask, is_causal=piece.mask is None, scale=self._scale
        )
        out[piece.queries].view(-1, num_kv_heads, group, head_dim).copy_(mixed.permute(2, 0, 1, 3))
