"""Attention by our own Triton kernels: any block size and head size, windows with all heads of a group packed."""

from __future__ import annotations

import torch

from model.attention import Seqlen
from model.config import ModelConfig
from model.kernels import decode_attention, num_decode_splits, prefill_attention
from model.kernels.decode_attention import SplitWorkspace

DEFAULT_BLOCK_SIZE = 128
"""A multiple of the kernels' tiles, so that a tile lies in one block."""


class TritonAttention:
    """Single-token rows go to the decode kernel, longer ones to the prefill kernel."""

    name = "triton"

    def __init__(self, config: ModelConfig, block_size: int | None = None) -> None:
        """`block_size` is 128 unless given; nothing else of `config` matters here."""
        self.block_size = block_size or DEFAULT_BLOCK_SIZE
        self._decode = SplitDecode()

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
        self._decode.forward(query, k_cache, v_cache, block_tables, seqlen, window, out)
        num_decode = seqlen.num_decode_rows
        if num_decode < block_tables.shape[0]:
            assert cu_seqlens_q is not None
            prefill_attention(
                query,
                k_cache,
                v_cache,
                block_tables[num_decode:],
                cu_seqlens_q[num_decode:],
                seqlen.context_lengths[num_decode:],
                seqlen.max_input_len,
                window,
                out,
            )


class SplitDecode:
    """The decode kernel with its workspace and its number of splits.

    The workspace is made by the first call and serves every layer; call once before capturing a CUDA graph.
    """

    def __init__(self) -> None:
        """Allocates nothing yet."""
        self._workspace: SplitWorkspace | None = None

    def forward(
        self,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_tables: torch.Tensor,
        seqlen: Seqlen,
        window: int | None,
        out: torch.Tensor,
    ) -> None:
        """Serves the first `seqlen.num_decode_rows` rows; arguments as in AttentionBackend.forward."""
        num_rows = seqlen.num_decode_rows
        if not num_rows:
            return
        num_kv_heads, head_dim = k_cache.shape[2:]
        if self._workspace is None:
            group = query.shape[1] // (num_kv_heads * head_dim)
            self._workspace = SplitWorkspace.create(group, head_dim, query.device)
        longest = seqlen.max_context_len if window is None else min(window, seqlen.max_context_len)
        decode_attention(
            query[:num_rows],
            k_cache,
            v_cache,
            block_tables[:num_rows],
            seqlen.context_lengths[:num_rows],
            window,
            out[:num_rows],
            num_decode_splits(num_rows, num_kv_heads, longest),
            self._workspace,
        )
