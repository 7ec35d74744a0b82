"""The arithmetic between a layer's two products; each function has a Triton twin of its name in model.kernels.

Arguments are column views of the fused projection wherever they can be: only the last dimension is contiguous. On a
CUDA device the twin in `model.kernels` runs, which fills an output that is made here or passed by the caller.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from model.lora import AdapterBatchData
from model.lora_adapter import INPUT_MODULES


def layer_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Mean-subtracting LayerNorm without bias over the last dimension, in float32 with the weight, cast once.

    Twin: `layer_norm(x [T, H], weight [H], eps: float, out [T, H]) -> None`; x and out contiguous.
    """
    if x.is_cuda:
        from model import kernels

        out = torch.empty_like(x)
        kernels.layer_norm(x, weight, eps, out)
        return out
    return F.layer_norm(x, weight.shape, weight, None, eps)


def head_norm(heads: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """LayerNorm over head_dim with one weight row per head, in place.

    Twin: `head_norm(heads, weight, eps: float) -> None`.

    Args:
        heads: `[T, num_heads * D]` columns, the q or the k part of the fused projection.
        weight: `[num_heads, D]`.
    """
    if heads.is_cuda:
        from model import kernels

        kernels.head_norm(heads, weight, eps)
        return
    rows = heads.view(-1, *weight.shape)
    normed = F.layer_norm(rows.float(), weight.shape[-1:], None, None, eps)
    rows.copy_(normed.mul_(weight.float()))


def rotary_and_cache(
    qkv: torch.Tensor,
    positions: torch.Tensor | None,
    cos_sin: torch.Tensor | None,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_q_heads: int,
) -> None:
    """Rotates q in place and writes the rotated k and the v into the paged cache.

    Twin: same arguments, `rotary_and_cache(qkv, positions, cos_sin, slots, k_cache, v_cache, num_q_heads) -> None`.

    Args:
        qkv: `[T, (Hq + 2 Hkv) * D]` columns. The k part may be rotated in place as well; nobody reads it after.
        positions: int64 `[T]`, rows of cos_sin; None: cos_sin has one row for each token already (on a CPU only).
        cos_sin: float32 `[max_positions, D]` with cos of pair i at 2i and sin at 2i + 1; None: no position encoding.
        slots: int64 `[T]`, block * block_size + offset; always a real place (padding goes to block 0).
        k_cache, v_cache: `[num_blocks, block_size, Hkv, D]`.
        num_q_heads: Hq.
    """
    if qkv.is_cuda:
        from model import kernels

        assert positions is not None, "a kernel reads the whole table"
        kernels.rotary_and_cache(qkv, positions, cos_sin, slots, k_cache, v_cache, num_q_heads)
        return
    num_kv_heads, head_dim = k_cache.shape[2:]
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    if cos_sin is not None:
        turns = cos_sin if positions is None else cos_sin[positions]
        rotate_pairs(heads[:, : num_q_heads + num_kv_heads], turns)
    write_cache(heads[:, num_q_heads:], slots, k_cache, v_cache)


def rotate_pairs(heads: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """Turns each pair (2i, 2i+1) of a head by its angle, in float32 and in place: a product of complex numbers.

    Args:
        heads: `[T, num_heads, D]`.
        cos_sin: float32 `[T, D]`, pairs (cos, sin).
    """
    turn = torch.view_as_complex(cos_sin.view(cos_sin.shape[0], 1, -1, 2))
    exact = heads.float()  # float32 stays the same memory, so this is then in place
    torch.view_as_complex(exact.view(*exact.shape[:2], -1, 2)).mul_(turn)
    if exact.dtype != heads.dtype:
        heads.copy_(exact)


def write_cache(kv: torch.Tensor, slots: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    """Copies k and v heads `[T, 2 * Hkv, D]` to their places in the cache."""
    num_kv_heads = k_cache.shape[2]
    k_cache.flatten(0, 1).index_copy_(0, slots, kv[:, :num_kv_heads])
    v_cache.flatten(0, 1).index_copy_(0, slots, kv[:, num_kv_heads:])


def silu_and_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """out = silu(gate) * up.

    Twin: `silu_and_mul(gate_up, out) -> None`.

    Args:
        gate_up: `[T, 2 I]` columns, overwritten.
        out: `[T, I]` columns.
    """
    if gate_up.is_cuda:
        from model import kernels

        kernels.silu_and_mul(gate_up, out)
        return
    gate, up = gate_up.chunk(2, dim=-1)
    torch.mul(F.silu(gate, inplace=True), up, out=out)


def add_lora_input(normed: torch.Tensor, projected: torch.Tensor, data: AdapterBatchData, layer: int) -> None:
    """Adds what the tokens' adapters add to the input projection, in place and before norms and rotary read it.

    Twin: same arguments.

    Args:
        normed: `[T, hidden]`, what the projection read.
        projected: `[T, q + 2 kv + 2 inner]` local columns.
        data: the tokens' slots.
        layer: index of the layer.
    """
    if normed.is_cuda:
        from model import kernels

        kernels.add_lora_input(normed, projected, data, layer)
        return
    stacks = data.stacks
    max_rank, own = stacks.max_rank, stacks.layers[layer]
    for slot, start, stop in data.segments:
        tokens = data.token_order[start:stop]
        x, column = normed[tokens], 0
        for place, width in enumerate(stacks.sizes.inputs):
            rank, row = stacks.host_ranks[slot][place], place * max_rank
            if rank:
                low = F.linear(x, own.a_in[slot, row : row + rank])
                part = projected[:, column : column + width]
                part.index_add_(0, tokens, F.linear(low, own.b_in[slot, column : column + width, :rank]))
            column += width


def add_lora_output(mixed: torch.Tensor, out: torch.Tensor, data: AdapterBatchData, layer: int) -> None:
    """Adds what the tokens' adapters add to the output projection, in place and before the layer's all-reduce.

    Each rank shrinks its own columns; the expansion is linear, so the ranks' sum is the whole.

    Twin: same arguments.

    Args:
        mixed: `[T, q + inner]` local columns, what the projection read.
        out: `[T, hidden]`, this rank's part of the layer's sum.
        data: the tokens' slots.
        layer: index of the layer.
    """
    if mixed.is_cuda:
        from model import kernels

        kernels.add_lora_output(mixed, out, data, layer)
        return
    stacks = data.stacks
    max_rank, own = stacks.max_rank, stacks.layers[layer]
    for slot, start, stop in data.segments:
        tokens = data.token_order[start:stop]
        ranks, column = stacks.host_ranks[slot][len(INPUT_MODULES) :], 0
        for place, width in enumerate(stacks.sizes.outputs):
            rank, row = ranks[place], place * max_rank
            if rank:
                x = mixed[tokens, column : column + width]
                low = F.linear(x, own.a_out[slot, :rank, column : column + width])
                out.index_add_(0, tokens, F.linear(low, own.b_out[slot, :, row : row + rank]))
            column += width
