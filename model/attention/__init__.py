"""Attention over the paged KV cache: one interface, three backends chosen at start (torch, triton, flash)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

from model.errors import ModelError

if TYPE_CHECKING:
    import torch

    from model.config import ModelConfig

BACKENDS = ("auto", "torch", "triton", "flash")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Seqlen:
    """Lengths of the S sequences of one step, in row order: rows of exactly one token first, longer ones after.

    Tensors are int32 [S] on the model's device; context_lengths = cache_lengths + input_lengths. The lists are host
    copies of input_lengths and context_lengths; a CUDA graph has none. One object serves all layers of a step.
    """

    input_lengths: torch.Tensor
    cache_lengths: torch.Tensor
    context_lengths: torch.Tensor
    num_decode_rows: int
    max_input_len: int
    max_context_len: int
    input_lens_list: list[int] | None = None
    context_lens_list: list[int] | None = None


class AttentionBackend(Protocol):
    """Causal attention of a step's queries over what the paged cache holds, this step's K and V included."""

    name: str
    block_size: int

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
        """Writes softmax(q k^T / sqrt(D)) v of one layer into `out`.

        Args:
            query: `[T, Hq*D]`, a column view (the row stride is larger than Hq*D), rotated already.
            k_cache, v_cache: `[num_blocks, block_size, Hkv, D]`, this step's rows written already. Places past a
                sequence's context may hold NaN, which must not reach `out`.
            block_tables: int32 `[S, max_blocks]`; position p of sequence s lies in block `block_tables[s, p // B]`.
            cu_seqlens_q: int32 `[S+1]`, or None when every row has one token.
            seqlen: the step's lengths; the queries of s are its last `input_lengths[s]` positions.
            window: keys a query sees, itself included; None sees all.
            out: `[T, Hq*D]`, a column view as well.
        """


def create_attention(
    name: str, config: ModelConfig, device: torch.device | str = "cpu", block_size: int | None = None
) -> AttentionBackend:
    """Makes the backend called `name`; auto is torch on a CPU, else triton.

    Raises:
        ModelError: an unknown name, or a backend that cannot run on this device, head size or block size.
    """
    if name not in BACKENDS:
        raise ModelError(f"--attention-backend {name!r} is unknown; choose one of {', '.join(BACKENDS)}.")
    device_type = str(device).partition(":")[0]
    if name == "auto":
        name = "torch" if device_type == "cpu" else "triton"
    if name == "torch":
        from model.attention.torch import TorchAttention

        return TorchAttention(config, block_size)
    if device_type == "cpu":
        raise ModelError(f"--attention-backend {name} needs --device cuda; on a CPU use torch.")
    if name == "triton":
        from model.attention.triton import TritonAttention

        return TritonAttention(config, block_size)
    from model.attention.flash import FlashAttention

    return FlashAttention(config, block_size)
