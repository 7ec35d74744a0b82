"""Rotary position encoding and the write into the paged cache, in one kernel."""

from __future__ import annotations

import dataclasses

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
    num_tokens: tl.tensor,
    qkv_stride: tl.tensor,
    k_slot_stride: tl.tensor,
    v_slot_stride: tl.tensor,
    FIRST_HEAD: tl.constexpr,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    IS_ROTATED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """BLOCK_T tokens, BLOCK_H heads: | q heads 0..NUM_Q | k heads ..+NUM_KV | v heads ..+NUM_KV |.

    A tile `[BLOCK_T, BLOCK_H, BLOCK_D]` is read and written as it lies, several numbers a thread, and taken apart into
    pairs only in registers.
    """
    wait_for_inputs()
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token = token < num_tokens
    token = token.to(tl.int64)
    head = FIRST_HEAD + tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    column = tl.arange(0, BLOCK_D)
    is_column = (column < HEAD_DIM)[None, None, :]
    inside = is_token[:, None, None] & (head < NUM_Q + 2 * NUM_KV)[None, :, None] & is_column
    offsets = (head * HEAD_DIM)[None, :, None] + column[None, None, :]
    places = qkv + (token * qkv_stride)[:, None, None] + offsets
    values = tl.load(places, mask=inside, other=0.0)
    is_turned = (head < NUM_Q + NUM_KV)[None, :, None]
    if IS_ROTATED:
        position = tl.load(positions + token, mask=is_token, other=0)
        angle = cos_sin + (position * HEAD_DIM)[:, None, None] + column[None, None, :]
        angles = tl.load(angle, mask=is_token[:, None, None] & is_column, other=0.0)
        cos, sin = tl.split(tl.reshape(angles, [BLOCK_T, 1, BLOCK_D // 2, 2]))
        even, odd = tl.split(tl.reshape(values.to(tl.float32), [BLOCK_T, BLOCK_H, BLOCK_D // 2, 2]))
        turned = tl.join(even * cos - odd * sin, odd * cos + even * sin)
        turned = tl.reshape(turned, [BLOCK_T, BLOCK_H, BLOCK_D]).to(values.dtype)
        values = tl.where(is_turned, turned, values)
        tl.store(places, values, mask=inside & (head < NUM_Q)[None, :, None])
    slot = tl.load(slots + token, mask=is_token, other=0)
    k_places = k_cache + (slot * k_slot_stride)[:, None, None] + (offsets - NUM_Q * HEAD_DIM)
    v_places = v_cache + (slot * v_slot_stride)[:, None, None] + (offsets - (NUM_Q + NUM_KV) * HEAD_DIM)
    tl.store(k_places, values, mask=inside & (head >= NUM_Q)[None, :, None] & is_turned)
    tl.store(v_places, values, mask=inside & (head >= NUM_Q + NUM_KV)[None, :, None])


@dataclasses.dataclass(frozen=True, slots=True)
class RotaryTiling:
    """Tokens and heads of a program (powers of two), and its warps."""

    block_t: int
    block_h: int
    num_warps: int


def rotary_tiling(num_tokens: int) -> RotaryTiling:
    """Many small programs for few tokens; for many, 16 bytes a load and more than one load a thread."""
    return RotaryTiling(1, 8, 4) if num_tokens <= 256 else RotaryTiling(1, 16, 4)


def rotary_and_cache(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_q_heads: int,
    tiling: RotaryTiling | None = None,
) -> None:
    """Rotates q in place and writes the rotated k and the v into the paged cache; float32 maths, cast once.

    Args:
        qkv: `[T, (Hq + 2 Hkv) * D]` columns of the fused projection. Its k and v parts stay as they are.
        positions: int64 `[T]`.
        cos_sin: float32 `[max_positions, D]`, cos of pair (2i, 2i+1) at 2i and its sin at 2i + 1; None: no encoding.
        slots: int64 `[T]`, block * block_size + offset.
        k_cache, v_cache: `[num_blocks, block_size, Hkv, D]`, blocks one after the other.
        num_q_heads: Hq.
        tiling: None takes `rotary_tiling`.
    """
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    assert k_cache.stride(0) == block_size * k_cache.stride(1) and v_cache.stride(0) == block_size * v_cache.stride(1)
    num_tokens = qkv.shape[0]
    if not num_tokens:
        return
    chosen = rotary_tiling(num_tokens) if tiling is None else tiling
    first_head = 0 if cos_sin is not None else num_q_heads  # without encoding q stays as it is
    num_heads = num_q_heads + 2 * num_kv_heads - first_head
    _rotary_and_cache_kernel[(ceil_div(num_tokens, chosen.block_t), ceil_div(num_heads, chosen.block_h))](
        qkv,
        positions,
        cos_sin,
        slots,
        k_cache,
        v_cache,
        num_tokens,
        qkv.stride(0),
        k_cache.stride(1),
        v_cache.stride(1),
        FIRST_HEAD=first_head,
        NUM_Q=num_q_heads,
        NUM_KV=num_kv_heads,
        HEAD_DIM=head_dim,
        IS_ROTATED=cos_sin is not None,
        BLOCK_T=chosen.block_t,
        BLOCK_H=chosen.block_h,
        BLOCK_D=next_power_of_2(head_dim),
        num_warps=chosen.num_warps,
        **LAUNCH,
    )
