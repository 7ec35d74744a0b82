"""Rotary position encoding and the write into the paged cache, in one kernel."""

from __future__ import annotations

import torch
import triton.language as tl

from model.kernels.jit import LAUNCH, ceil_div, jit, next_power_of_2, wait_for_inputs


@jit
def _rotary_and_cache_kernel(
    qkv: tl.tensor,
    positions: tl.tensor,
    cos_sin: tl.tensor,
    slots: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    qkv_stride: tl.tensor,
    k_slot_stride: tl.tensor,
    v_slot_stride: tl.tensor,
    FIRST_HEAD: tl.constexpr,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    IS_ROTATED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HALF: tl.constexpr,
) -> None:
    """One token, BLOCK_H heads: | q heads 0..NUM_Q | k heads ..+NUM_KV | v heads ..+NUM_KV |."""
    wait_for_inputs()
    token = tl.program_id(0).to(tl.int64)
    head = FIRST_HEAD + tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    # [BLOCK_H, HALF, 2]: a head's pairs
    column = 2 * tl.arange(0, HALF)[:, None] + tl.arange(0, 2)[None, :]
    inside = (head < NUM_Q + 2 * NUM_KV)[:, None, None] & (column < HEAD_DIM)[None, :, :]
    places = qkv + token * qkv_stride + (head * HEAD_DIM)[:, None, None] + column[None, :, :]
    pairs = tl.load(places, mask=inside, other=0.0)
    is_turned = head < NUM_Q + NUM_KV
    if IS_ROTATED:
        angle = cos_sin + tl.load(positions + token) * HEAD_DIM + 2 * tl.arange(0, HALF)
        has_angle = 2 * tl.arange(0, HALF) < HEAD_DIM
        cos = tl.load(angle, mask=has_angle, other=1.0)[None, :]
        sin = tl.load(angle + 1, mask=has_angle, other=0.0)[None, :]
        even, odd = tl.split(pairs.to(tl.float32))
        turned = tl.join(even * cos - odd * sin, odd * cos + even * sin).to(qkv.dtype.element_ty)
        pairs = tl.where(is_turned[:, None, None], turned, pairs)
        tl.store(places, pairs, mask=inside & (head < NUM_Q)[:, None, None])
    slot = tl.load(slots + token)
    k_offset = slot * k_slot_stride + ((head - NUM_Q) * HEAD_DIM)[:, None, None] + column[None, :, :]
    v_offset = slot * v_slot_stride + ((head - NUM_Q - NUM_KV) * HEAD_DIM)[:, None, None] + column[None, :, :]
    tl.store(k_cache + k_offset, pairs, mask=inside & ((head >= NUM_Q) & is_turned)[:, None, None])
    tl.store(v_cache + v_offset, pairs, mask=inside & (head >= NUM_Q + NUM_KV)[:, None, None])


def rotary_and_cache(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_q_heads: int,
) -> None:
    """Rotates q in place and writes the rotated k and the v into the paged cache; float32 maths, cast once.

    Args:
        qkv: `[T, (Hq + 2 Hkv) * D]` columns of the fused projection. Its k and v parts stay as they are.
        positions: int64 `[T]`.
        cos_sin: float32 `[max_positions, D]`, cos of pair (2i, 2i+1) at 2i and its sin at 2i + 1; None: no encoding.
        slots: int64 `[T]`, block * block_size + offset.
        k_cache, v_cache: `[num_blocks, block_size, Hkv, D]`, blocks one after the other.
        num_q_heads: Hq.
    """
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    assert k_cache.stride(0) == block_size * k_cache.stride(1) and v_cache.stride(0) == block_size * v_cache.stride(1)
    block_h = 8 if qkv.shape[0] <= 256 else 16
    first_head = 0 if cos_sin is not None else num_q_heads  # without encoding q stays as it is
    num_heads = num_q_heads + 2 * num_kv_heads - first_head
    if not qkv.shape[0]:
        return
    _rotary_and_cache_kernel[(qkv.shape[0], ceil_div(num_heads, block_h))](
        qkv,
        positions,
        cos_sin,
        slots,
        k_cache,
        v_cache,
        qkv.stride(0),
        k_cache.stride(1),
        v_cache.stride(1),
        FIRST_HEAD=first_head,
        NUM_Q=num_q_heads,
        NUM_KV=num_kv_heads,
        HEAD_DIM=head_dim,
        IS_ROTATED=cos_sin is not None,
        BLOCK_H=block_h,
        HALF=next_power_of_2(head_dim) // 2,
        num_warps=4,
        **LAUNCH,
    )
