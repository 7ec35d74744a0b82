"""Attention by flash-attn 2: its paged kernels, called so that they write into the output's columns."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from model.attention import Seqlen
from model.attention.triton import SplitDecode
from model.config import ModelConfig
from model.errors import ModelError

BLOCK_SIZE_MULTIPLE = 256
SUPPORTED_VERSION = "2.8."
"""The extension's own functions take `out`, which the package's public ones do not; their arguments are this line's."""
NO_WINDOW = (-1, -1)


class FlashAttention:
    """Single-token rows go to the paged decode kernel with split KV, longer ones to the variable-length kernel.

    A decode row's query heads of one KV head are given to flash-attn as that many queries of one head, so K and V are
    read once. It cannot do so under a window, where our own decode kernel serves instead.
    """

    name = "flash"

    def __init__(self, config: ModelConfig, block_size: int | None = None) -> None:
        """`block_size` is 256 unless given.

        Raises:
            ModelError: flash-attn is missing or of another version, or the block or head size is none of its own.
        """
        self.block_size = block_size or BLOCK_SIZE_MULTIPLE
        if self.block_size % BLOCK_SIZE_MULTIPLE:
            raise ModelError(
                f"The flash backend's block size is a multiple of {BLOCK_SIZE_MULTIPLE}, not {block_size}."
            )
        if config.head_dim > 256 or config.head_dim % 8:
            raise ModelError(f"flash-attn has no head size {config.head_dim}; use --attention-backend triton.")
        self._kernels = load_flash_attn()
        self._scale = config.head_dim**-0.5
        self._windowed_decode = SplitDecode()

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
        if window is not None and window >= seqlen.max_context_len:
            window = None
        if window is not None:
            self._windowed_decode.forward(query, k_cache, v_cache, block_tables, seqlen, window, out)
        elif seqlen.num_decode_rows:
            self._decode(query, k_cache, v_cache, block_tables, seqlen, out)
        if seqlen.num_decode_rows < block_tables.shape[0]:
            assert cu_seqlens_q is not None
            self._prefill(query, k_cache, v_cache, block_tables, cu_seqlens_q, seqlen, window, out)

    def _decode(
        self,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_tables: torch.Tensor,
        seqlen: Seqlen,
        out: torch.Tensor,
    ) -> None:
        num_rows = seqlen.num_decode_rows
        num_kv_heads, head_dim = k_cache.shape[2:]
        # [S, Hq * D] -> [S, Hq / Hkv queries, Hkv heads, D], views of the same memory
        shape = (num_rows, num_kv_heads, -1, head_dim)
        # the table's width is the longest context that flash-attn plans its splits for
        width = -(-seqlen.max_context_len // self.block_size)
        self._kernels.fwd_kvcache(
            query[:num_rows].view(shape).transpose(1, 2),
            k_cache,
            v_cache,
            None,  # new keys
            None,  # new values
            seqlen.context_lengths[:num_rows],
            None,  # cos
            None,  # sin
            None,  # cache_batch_idx
            None,  # cache_leftpad
            block_tables[:num_rows, :width],
            None,  # alibi slopes
            out[:num_rows].view(shape).transpose(1, 2),
            self._scale,
            False,  # causal: every query here is the last position
            *NO_WINDOW,
            0.0,  # softcap
            True,  # interleaved rotary, unused
            0,  # splits: as many as its heuristic says
        )

    def _prefill(
        self,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_tables: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        seqlen: Seqlen,
        window: int | None,
        out: torch.Tensor,
    ) -> None:
        first = seqlen.num_decode_rows
        borders = cu_seqlens_q[first:]
        shape = (query.shape[0], -1, k_cache.shape[3])
        self._kernels.varlen_fwd(
            query.view(shape),
            k_cache,
            v_cache,
            out.view(shape),
            borders,
            borders,  # of the keys: only the shape counts where seqused_k is given
            seqlen.context_lengths[first:],
            None,  # leftpad_k
            block_tables[first:],
            None,  # alibi slopes
            seqlen.max_input_len,
            seqlen.max_context_len,
            0.0,  # dropout
            self._scale,
            False,  # zero_tensors
            True,  # causal, aligned to the context's end
            *(NO_WINDOW if window is None else (window - 1, 0)),
            0.0,  # softcap
            False,  # return_softmax
            None,  # generator
        )


def load_flash_attn() -> Any:  # noqa: ANN401
    """flash-attn's extension module.

    Raises:
        ModelError: it is not installed, or its functions are not the ones that this file calls.
    """
    try:
        found = version("flash_attn")
    except PackageNotFoundError:
        raise ModelError("flash-attn is not installed; install it or use --attention-backend triton.") from None
    if not found.startswith(SUPPORTED_VERSION):
        raise ModelError(f"flash-attn {found} is not supported, only {SUPPORTED_VERSION}*; or use the triton backend.")
    return importlib.import_module("flash_attn_2_cuda")
