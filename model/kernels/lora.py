"""What the adapters of a step's tokens add to a layer's two products: a shrink and an expand for each."""

from __future__ import annotations

import dataclasses

import torch

from model.kernels.jit import next_power_of_2
from model.kernels.lora_expand import ExpandTiling, lora_expand
from model.kernels.lora_shrink import ShrinkTiling, lora_shrink
from model.lora import AdapterBatchData
from model.lora_adapter import INPUT_MODULES

FEW_TOKENS = 8
"""Up to here a program works for one token; above, tensor cores multiply tiles of an adapter's tokens."""
DECODE_TOKENS = 512
"""Above this a step has prompts, and what counts is how fast activations are read."""


@dataclasses.dataclass(frozen=True, slots=True)
class LoraTilings:
    """How the four kernels of a layer cut their work."""

    shrink_in: ShrinkTiling
    expand_in: ExpandTiling
    shrink_out: ShrinkTiling
    expand_out: ExpandTiling


def lora_tilings(num_tokens: int, max_rank: int, dtype: torch.dtype = torch.bfloat16) -> LoraTilings:
    """Some 8 KiB of weights a program for few tokens; tiles of an adapter's tokens for more; long streams for prompts.

    Kernels are compiled apart for each of the three, so warm-up meets all of them by their numbers of tokens. Products
    of float32 are made outside tensor cores, where large tiles do not fit in registers.
    """
    if num_tokens <= FEW_TOKENS:
        return LoraTilings(
            ShrinkTiling(block_t=1, block_n=1, block_k=4096, part=4096),
            ExpandTiling(block_t=1, block_n=256),
            ShrinkTiling(block_t=1, block_n=1, block_k=2048, part=2048),
            ExpandTiling(block_t=1, block_n=32),
        )
    block_n = min(max(16, next_power_of_2(max_rank)), 64)
    if num_tokens <= DECODE_TOKENS or dtype == torch.float32:
        return LoraTilings(
            ShrinkTiling(block_t=16, block_n=block_n, block_k=256, part=1024),
            ExpandTiling(block_t=16, block_n=256),
            ShrinkTiling(block_t=16, block_n=block_n, block_k=256, part=1024),
            ExpandTiling(block_t=16, block_n=64),
        )
    all_rows = min(next_power_of_2(5 * max_rank), 128)
    return LoraTilings(
        ShrinkTiling(block_t=64, block_n=max(16, all_rows), block_k=64, part=2048, num_stages=4),
        ExpandTiling(block_t=64, block_n=128),
        ShrinkTiling(block_t=64, block_n=block_n, block_k=128, part=4096, num_stages=4),
        ExpandTiling(block_t=64, block_n=128),
    )


def add_lora_input(
    normed: torch.Tensor,
    projected: torch.Tensor,
    data: AdapterBatchData,
    layer: int,
    tilings: LoraTilings | None = None,
) -> None:
    """projected += normed A^T B^T of each token's adapter, for q, k, v, gate and up.

    The kernel before this call must not be the one that wrote `normed`, see `lora_shrink`; the product lies between.

    Args:
        normed: `[T, hidden]`, last dimension contiguous.
        projected: `[T, q + 2 kv + 2 inner]` local columns, in place.
        data: the tokens' slots.
        layer: index of the layer.
        tilings: None takes `lora_tilings`.
    """
    if not len(normed):
        return
    own, sizes = data.stacks.layers[layer], data.stacks.sizes
    chosen = lora_tilings(len(normed), data.stacks.max_rank, normed.dtype) if tilings is None else tilings
    shrunk = lora_shrink(normed, own.a_in, (sizes.hidden,), 0, data, chosen.shrink_in)
    columns = (sizes.q, sizes.kv, sizes.inner)
    lora_expand(shrunk, own.b_in, projected, columns, 0, data, chosen.expand_in)


def add_lora_output(
    mixed: torch.Tensor,
    out: torch.Tensor,
    data: AdapterBatchData,
    layer: int,
    tilings: LoraTilings | None = None,
) -> None:
    """out += mixed A^T B^T of each token's adapter, for o and down.

    The kernel before this call must not be one that wrote to `mixed`, see `lora_shrink`; the product lies between.

    Args:
        mixed: `[T, q + inner]` local columns, last dimension contiguous.
        out: `[T, hidden]`, in place.
        data: the tokens' slots.
        layer: index of the layer.
        tilings: None takes `lora_tilings`.
    """
    if not len(mixed):
        return
    own, sizes = data.stacks.layers[layer], data.stacks.sizes
    chosen = lora_tilings(len(mixed), data.stacks.max_rank, mixed.dtype) if tilings is None else tilings
    first_module = len(INPUT_MODULES)
    shrunk = lora_shrink(mixed, own.a_out, sizes.outputs, first_module, data, chosen.shrink_out)
    lora_expand(shrunk, own.b_out, out, (sizes.hidden, 0, 0), first_module, data, chosen.expand_out)
