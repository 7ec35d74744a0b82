"""The two ends of a decode step on the device: rows of the tables to the model's inputs, drawn tokens to the tables."""

from __future__ import annotations

import dataclasses

import torch
import triton.language as tl

from model.kernels.jit import ceil_div, jit_loosely

ROW_COLUMNS = 3
"""int32 columns that the host sends of each row, one after another: slot, start position, whether it samples."""
PUBLISH_BLOCK = 128
TABLE_COLUMNS = 256
"""Columns of the block tables that are copied at once."""


@jit_loosely(["num_rows", "token_stride", "block_stride", "out_stride", "width"], [])
def _gather_kernel(
    rows: tl.tensor,
    tokens: tl.tensor,
    blocks: tl.tensor,
    seed_table: tl.tensor,
    temperature_table: tl.tensor,
    input_ids: tl.tensor,
    positions: tl.tensor,
    next_positions: tl.tensor,
    kv_slots: tl.tensor,
    seeds: tl.tensor,
    temperature: tl.tensor,
    cache_lengths: tl.tensor,
    context_lengths: tl.tensor,
    block_tables: tl.tensor,
    num_rows: tl.tensor,
    token_stride: tl.tensor,
    block_stride: tl.tensor,
    out_stride: tl.tensor,
    width: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_W: tl.constexpr,
) -> None:
    """Program (row)."""
    row = tl.program_id(0)
    slot = tl.load(rows + row).to(tl.int64)
    start = tl.load(rows + num_rows + row)
    position = start.to(tl.int64)
    tl.store(input_ids + row, tl.load(tokens + slot * token_stride + position).to(tl.int64))
    tl.store(positions + row, position)
    tl.store(next_positions + row, position + 1)
    block = tl.load(blocks + slot * block_stride + position // BLOCK_SIZE).to(tl.int64)
    tl.store(kv_slots + row, block * BLOCK_SIZE + position % BLOCK_SIZE)
    tl.store(seeds + row, tl.load(seed_table + slot))
    tl.store(temperature + row, tl.load(temperature_table + slot))
    tl.store(cache_lengths + row, start)
    tl.store(context_lengths + row, start + 1)
    for first in range(0, width, BLOCK_W):
        column = first + tl.arange(0, BLOCK_W)
        ids = tl.load(blocks + slot * block_stride + column, mask=column < width, other=0)
        tl.store(block_tables + row * out_stride + column, ids, mask=column < width)


@jit_loosely(["num_rows", "token_stride"], ["drawn", "is_finite"])
def _publish_kernel(
    rows: tl.tensor,
    tokens: tl.tensor,
    drawn: tl.tensor,
    is_finite: tl.tensor,
    results: tl.tensor,
    num_rows: tl.tensor,
    token_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    slot = tl.load(rows + row, mask=inside, other=0).to(tl.int64)
    start = tl.load(rows + num_rows + row, mask=inside, other=0).to(tl.int64)
    is_sampled = tl.load(rows + 2 * num_rows + row, mask=inside, other=0)
    token = tl.load(drawn + row, mask=inside, other=0).to(tl.int32)
    fine = tl.load(is_finite + row, mask=inside, other=0).to(tl.int32)
    tl.store(tokens + slot * token_stride + start + 1, token, mask=inside & (is_sampled != 0))
    tl.store(results + row, token, mask=inside)
    tl.store(results + num_rows + row, fine, mask=inside)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DecodeInputs:
    """What the model and the sampler read of B rows with one token each; see FlashCohereForCausalLM.forward.

    Attributes:
        input_ids, positions, next_positions, kv_slots, seeds: int64 `[B]`; next_positions are those of the tokens
            that are drawn.
        temperature: float32 `[B]`.
        cache_lengths, context_lengths, input_lengths: int32 `[B]`; the last are ones.
        block_tables: int32 `[B, max_blocks]`.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    next_positions: torch.Tensor
    kv_slots: torch.Tensor
    seeds: torch.Tensor
    temperature: torch.Tensor
    cache_lengths: torch.Tensor
    context_lengths: torch.Tensor
    input_lengths: torch.Tensor
    block_tables: torch.Tensor

    @classmethod
    def create(cls, max_rows: int, max_blocks: int, device: torch.device) -> DecodeInputs:
        """Room for `max_rows` rows, all zero."""
        longs = torch.zeros((5, max_rows), dtype=torch.int64, device=device)
        ints = torch.zeros((2, max_rows), dtype=torch.int32, device=device)
        return cls(
            input_ids=longs[0],
            positions=longs[1],
            next_positions=longs[2],
            kv_slots=longs[3],
            seeds=longs[4],
            temperature=torch.zeros(max_rows, dtype=torch.float32, device=device),
            cache_lengths=ints[0],
            context_lengths=ints[1],
            input_lengths=torch.ones(max_rows, dtype=torch.int32, device=device),
            block_tables=torch.zeros((max_rows, max_blocks), dtype=torch.int32, device=device),
        )

    def first(self, num_rows: int, max_blocks: int) -> DecodeInputs:
        """Views of the first rows, with tables of `max_blocks` columns."""
        columns = {field.name: getattr(self, field.name)[:num_rows] for field in dataclasses.fields(self)}
        return DecodeInputs(**columns | {"block_tables": self.block_tables[:num_rows, :max_blocks]})


def gather_rows(
    rows: torch.Tensor,
    tokens: torch.Tensor,
    blocks: torch.Tensor,
    seeds: torch.Tensor,
    temperature: torch.Tensor,
    block_size: int,
    out: DecodeInputs,
) -> None:
    """Fills `out` from the tables.

    Args:
        rows: int32 `[ROW_COLUMNS * B]`.
        tokens: int32 `[num_slots, max_len]`.
        blocks: int32 `[num_slots, max_blocks_per_seq]`, at least as wide as the tables of `out`.
        seeds: int64 `[num_slots, 1]`.
        temperature: float32 `[num_slots, 1]`.
        block_size: tokens of a block.
        out: B rows.
    """
    num_rows, width = out.block_tables.shape
    assert rows.numel() == ROW_COLUMNS * num_rows
    _gather_kernel[(num_rows,)](
        rows,
        tokens,
        blocks,
        seeds,
        temperature,
        out.input_ids,
        out.positions,
        out.next_positions,
        out.kv_slots,
        out.seeds,
        out.temperature,
        out.cache_lengths,
        out.context_lengths,
        out.block_tables,
        num_rows,
        tokens.stride(0),
        blocks.stride(0),
        out.block_tables.stride(0),
        width,
        BLOCK_SIZE=block_size,
        BLOCK_W=TABLE_COLUMNS,
        num_warps=1,
    )


def publish_tokens(
    rows: torch.Tensor, tokens: torch.Tensor, drawn: torch.Tensor, is_finite: torch.Tensor, results: torch.Tensor
) -> None:
    """Writes drawn tokens behind their rows' last ones, and them and the flags into `results`.

    Args:
        rows: int32 `[ROW_COLUMNS * B]`; only rows that sample write into the table.
        tokens: int32 `[num_slots, max_len]`.
        drawn: int32 `[B]`.
        is_finite: bool or int32 `[B]`.
        results: int32 `[2 * B]`, tokens and then flags.
    """
    num_rows = drawn.shape[0]
    if is_finite.dtype == torch.bool:
        is_finite = is_finite.view(torch.uint8)
    assert rows.numel() == ROW_COLUMNS * num_rows and results.numel() == 2 * num_rows
    _publish_kernel[(ceil_div(num_rows, PUBLISH_BLOCK),)](
        rows, tokens, drawn, is_finite, results, num_rows, tokens.stride(0), BLOCK=PUBLISH_BLOCK, num_warps=4
    )
