"""Draws each row's token with counter-based noise, in two stages and without writing the noise down.

Noise of (seed, position, token): Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") with
key (seed low, seed high) and counter (token >> 2, position, 0, 0); the token's word is number token & 3. The word gives
u = ((word >> 8) + 1/2) / 2^24 in float32, kept below 1 where that sum rounds up to it, and u gives -log(-log(u)), a
Gumbel number: the arg max of logits / temperature + noise is a draw from the softmax.
"""

from __future__ import annotations

import dataclasses

import torch
import triton.language as tl

from model.kernels.jit import LAUNCH, ceil_div, jit, jit_loosely, next_power_of_2, wait_for_inputs

CHUNK = 4096
"""Tokens of one program of the first stage."""
PARTS = ["best_value", "best_token", "chunk_max", "chunk_sum", "is_bad"]
"""What the first stage leaves for the second, in one allocation, so that alignment varies with the number of rows."""


@jit
def _gumbel(word: tl.tensor) -> tl.tensor:
    uniform = ((word >> 8).to(tl.float32) + 0.5) * 5.9604644775390625e-08
    uniform = tl.minimum(uniform, 0.99999994039535522)  # the largest float32 below 1
    return -tl.log(-tl.log(uniform))


@jit_loosely(["first_token"], ["temperature", "seeds", "positions", *PARTS])
def _first_stage(
    logits: tl.tensor,
    temperature: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    best_value: tl.tensor,
    best_token: tl.tensor,
    chunk_max: tl.tensor,
    chunk_sum: tl.tensor,
    is_bad: tl.tensor,
    row_stride: tl.tensor,
    size: tl.tensor,
    first_token: tl.tensor,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_LOGSUMEXP: tl.constexpr,
) -> None:
    """Program (row, chunk of the vocabulary): the chunk's best token, largest logit, sum of powers, and its faults."""
    wait_for_inputs()
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    source = logits + row.to(tl.int64) * row_stride
    heat = tl.load(temperature + row)
    seed = tl.load(seeds + row)
    position = tl.load(positions + row).to(tl.uint32)
    best = float("-inf")
    token = size
    largest = float("-inf")
    total = 0.0
    bad = 0
    for start in range(0, CHUNK, BLOCK):
        column = chunk * CHUNK + start + tl.arange(0, BLOCK)
        values = tl.load(source + column, mask=column < size, other=float("-inf")).to(tl.float32)
        bad += tl.sum(((values != values) | (values == float("inf"))).to(tl.int32), 0)
        values = tl.where(values != values, float("-inf"), values)
        if HAS_LOGSUMEXP:
            new_largest = tl.maximum(largest, tl.max(values, 0))
            base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
            total = total * tl.exp(largest - base) + tl.sum(tl.exp(values - base), 0)
            largest = new_largest
        if heat > 0.0:
            quad = ((first_token + chunk * CHUNK + start) >> 2) + tl.arange(0, BLOCK // 4)
            zero = tl.zeros([BLOCK // 4], tl.uint32)
            w0, w1, w2, w3 = tl.philox(seed, quad.to(tl.uint32), zero + position, zero, zero)
            noise = tl.join(tl.join(_gumbel(w0), _gumbel(w2)), tl.join(_gumbel(w1), _gumbel(w3)))
            values = tl.div_rn(values, tl.zeros([BLOCK], tl.float32) + heat) + tl.reshape(noise, [BLOCK])
        block_best = tl.max(values, 0)
        block_token = tl.min(tl.where((values == block_best) & (column < size), column, size), 0)
        if block_best > best:  # equal ones stay with the lower token
            best = block_best
            token = block_token
    place = row * tl.num_programs(1) + chunk
    tl.store(best_value + place, best)
    tl.store(best_token + place, token)
    tl.store(is_bad + place, bad)
    if HAS_LOGSUMEXP:
        tl.store(chunk_max + place, largest)
        tl.store(chunk_sum + place, total)


@jit_loosely(["num_chunks", "first_token"], PARTS)
def _second_stage(
    best_value: tl.tensor,
    best_token: tl.tensor,
    chunk_max: tl.tensor,
    chunk_sum: tl.tensor,
    is_bad: tl.tensor,
    tokens: tl.tensor,
    values: tl.tensor,
    is_finite: tl.tensor,
    logsumexp: tl.tensor,
    num_chunks: tl.tensor,
    size: tl.tensor,
    first_token: tl.tensor,
    BLOCK: tl.constexpr,
    HAS_LOGSUMEXP: tl.constexpr,
) -> None:
    wait_for_inputs()
    row = tl.program_id(0)
    chunk = tl.arange(0, BLOCK)
    place = row * num_chunks + chunk
    inside = chunk < num_chunks
    value = tl.load(best_value + place, mask=inside, other=float("-inf"))
    token = tl.load(best_token + place, mask=inside, other=0)
    best = tl.max(value, 0)
    winner = tl.min(tl.where((value == best) & inside, token, size), 0)
    num_bad = tl.sum(tl.load(is_bad + place, mask=inside, other=0), 0)
    fine = (num_bad == 0) & (best > float("-inf"))
    tl.store(tokens + row, tl.where(fine, winner + first_token, 0))
    tl.store(values + row, best)
    tl.store(is_finite + row, fine)
    if HAS_LOGSUMEXP:
        part = tl.load(chunk_max + place, mask=inside, other=float("-inf"))
        largest = tl.max(part, 0)
        base = tl.where(largest == float("-inf"), 0.0, largest)
        total = tl.sum(tl.load(chunk_sum + place, mask=inside, other=0.0) * tl.exp(part - base), 0)
        tl.store(logsumexp + row, base + tl.log(total))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """What `sample` fills, one entry a row.

    tokens: int32, the drawn token; 0 where the row is not finite.
    values: float32, what the token won with (logit / temperature + noise), to compare candidates of several ranks.
    is_finite: bool, false if a logit is NaN or +inf or if all are -inf.
    logsumexp: float32 of the row's logits as they are, or None.
    """

    tokens: torch.Tensor
    values: torch.Tensor
    is_finite: torch.Tensor
    logsumexp: torch.Tensor | None

    @classmethod
    def create(cls, num_rows: int, has_logsumexp: bool, device: torch.device | str) -> Samples:
        """Empty outputs for `num_rows` rows."""
        return cls(
            tokens=torch.empty(num_rows, dtype=torch.int32, device=device),
            values=torch.empty(num_rows, dtype=torch.float32, device=device),
            is_finite=torch.empty(num_rows, dtype=torch.bool, device=device),
            logsumexp=torch.empty(num_rows, dtype=torch.float32, device=device) if has_logsumexp else None,
        )


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    out: Samples,
    first_token: int = 0,
) -> None:
    """Samples every row; the lowest token wins among equals.

    Args:
        logits: `[R, V]` float32 or bfloat16, last dimension contiguous; -inf never wins.
        temperature: float32 `[R]`; 0 takes the largest logit without noise.
        seeds: int64 `[R]`, the 64 bits of the seed.
        positions: int32 or int64 `[R]`, position in its sequence of the token that is drawn.
        out: filled.
        first_token: id of column 0 where the vocabulary is sharded, a multiple of 4.
    """
    assert first_token % 4 == 0
    num_rows, size = logits.shape
    num_chunks = ceil_div(size, CHUNK)
    shape, device = (num_rows, num_chunks), logits.device
    best_value, chunk_max, chunk_sum = torch.empty((3, *shape), dtype=torch.float32, device=device)
    best_token, is_bad = torch.empty((2, *shape), dtype=torch.int32, device=device)
    if not num_rows:
        return
    _first_stage[shape](
        logits,
        temperature,
        seeds,
        positions,
        best_value,
        best_token,
        chunk_max,
        chunk_sum,
        is_bad,
        logits.stride(0),
        size,
        first_token,
        CHUNK=CHUNK,
        BLOCK=2048,
        HAS_LOGSUMEXP=out.logsumexp is not None,
        num_warps=4,
        **LAUNCH,
    )
    _second_stage[(num_rows,)](
        best_value,
        best_token,
        chunk_max,
        chunk_sum,
        is_bad,
        out.tokens,
        out.values,
        out.is_finite,
        out.logsumexp,
        num_chunks,
        size,
        first_token,
        BLOCK=next_power_of_2(num_chunks),
        HAS_LOGSUMEXP=out.logsumexp is not None,
        num_warps=1,
        **LAUNCH,
    )
