"""Attention by our own Triton kernels: any block size and head size, windows with all heads of a group packed."""

from __future__ import annotations

import dataclasses
import functools

import torch

from model.attention import Seqlen
from model.config import ModelConfig
from model.kernels import decode_attention, num_decode_splits, prefill_attention
from model.kernels.decode_attention import SplitWorkspace

DEFAULT_BLOCK_SIZE = 128
"""A multiple of the kernels' tiles, so that a tile lies in one block."""
HOPPER = (9, 0)


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillTiling:
    """How the prefill kernel cuts its work; fields as in `prefill_attention`."""

    block_m: int = 128
    block_n: int = 64
    num_warps: int = 8
    num_stages: int = 3
    use_descriptors: bool = False
    max_registers: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeTiling:
    """How the decode kernel cuts its work; fields as in `decode_attention`."""

    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 3


@functools.cache
def choose_tilings(
    dtype: torch.dtype, head_dim: int, block_size: int, capability: tuple[int, int]
) -> tuple[PrefillTiling, DecodeTiling]:
    """The fastest of the tilings timed on an H200 (bfloat16, head size 128, blocks of 256), wherever they apply.

    Prefill, TFLOP/s with 32 query heads on 8 over 8 x 2048, 1 x 6000 and 16 x 512 tokens: the plain 128 x 64 tile
    gives 297, 334 and 166; tiles copied through descriptors, two in flight and at most 128 registers so that two
    programs share a multiprocessor, give 420, 443 and 236; flash-attn's paged kernel gives 285, 289 and 191. A head
    size of 256 does not compile within 128 registers.

    Decode, microseconds at 32 heads for rows x context of 1 x 256, 16 x 6000 and 256 x 384: 7.4, 126.7 and 102.1 with
    tiles of 64 keys, 7.0, 99.9 and 99.6 with 128. At 64 heads neither leads throughout: 8.1, 106.8 and 102.7 with 64
    keys, 8.6, 112.7 and 101.1 with 128.
    """
    is_bf16 = dtype == torch.bfloat16
    is_power = head_dim.bit_count() == 1
    prefill, decode = PrefillTiling(), DecodeTiling()
    if is_bf16 and capability >= HOPPER and block_size % 64 == 0 and is_power and 16 <= head_dim <= 128:
        prefill = PrefillTiling(num_stages=2, use_descriptors=True, max_registers=128)
    if is_bf16 and head_dim == 128 and block_size % 128 == 0:
        decode = DecodeTiling(block_n=128)
    return prefill, decode


def tilings_for(k_cache: torch.Tensor) -> tuple[PrefillTiling, DecodeTiling]:
    """`choose_tilings` for a cache `[num_blocks, block_size, Hkv, D]` and the device it lies on."""
    return choose_tilings(k_cache.dtype, k_cache.shape[3], k_cache.shape[1], _capability(k_cache.device))


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


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
            tiling, _ = tilings_for(k_cache)
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
                tiling.block_m,
                tiling.block_n,
                tiling.num_warps,
                tiling.num_stages,
                tiling.use_descriptors,
                tiling.max_registers,
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
        _, tiling = tilings_for(k_cache)
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
            tiling.block_n,
            tiling.num_warps,
            tiling.num_stages,
        )
