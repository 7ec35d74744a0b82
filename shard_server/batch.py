"""A step's scheduled rows in the order and the form that the model wants; numpy only."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from shard_server.link import Bool, Int32, Int64, ScheduledRows
from shard_server.tables import RowTables


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """S rows and their T tokens, rows of one token first.

    Attributes:
        order: batch row i is scheduled row `order[i]`; None where nothing moved.
        num_decode_rows: rows of one token.
        slots, num_tokens, cache_lens, context_lens: `[S]`; context = cache + this step's tokens.
        is_sampled: `[S]`.
        cu_seqlens: `[S + 1]`, where each row's tokens start.
        positions: `[T]`.
        token_places: `[T]`, the tokens in the flattened token table.
        block_places: `[T]`, their blocks in the flattened block tables.
        sampled_places: `[S]`, where each row's next token goes in the flattened token table; the spare row's first
            place for rows that sample none.
    """

    order: Int64 | None
    num_decode_rows: int
    slots: Int64
    num_tokens: Int32
    cache_lens: Int32
    context_lens: Int32
    is_sampled: Bool
    cu_seqlens: Int32
    positions: Int64
    token_places: Int64
    block_places: Int64
    sampled_places: Int64

    @classmethod
    def build(cls, rows: ScheduledRows, tables: RowTables) -> Batch:
        """Sorts rows and works out places; the rows were checked."""
        order, num_decode_rows = _order(rows.num_tokens)
        slots = _pick(rows.slots, order).astype(np.int64)
        num_tokens, starts = _pick(rows.num_tokens, order), _pick(rows.starts, order)
        is_sampled = _pick(rows.is_sampled, order)
        ends = starts + num_tokens
        cu_seqlens = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(num_tokens, out=cu_seqlens[1:])
        if num_decode_rows == len(slots):
            positions, token_slots = starts.astype(np.int64), slots
        else:
            token_slots = np.repeat(slots, num_tokens)
            positions = np.arange(cu_seqlens[-1], dtype=np.int64) + np.repeat(starts - cu_seqlens[:-1], num_tokens)
        width = tables.max_model_len + 1
        return cls(
            order=order,
            num_decode_rows=num_decode_rows,
            slots=slots,
            num_tokens=num_tokens,
            cache_lens=starts,
            context_lens=ends,
            is_sampled=is_sampled,
            cu_seqlens=cu_seqlens,
            positions=positions,
            token_places=token_slots * width + positions,
            block_places=token_slots * tables.max_blocks_per_seq + positions // tables.block_size,
            sampled_places=np.where(is_sampled, slots * width + ends, tables.spare_slot * width),
        )

    def restore(self, column: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """A column `[S, ...]` in the order of the scheduled rows."""
        if self.order is None:
            return column
        restored = np.empty_like(column)
        restored[self.order] = column
        return restored


def _order(num_tokens: Int32) -> tuple[Int64 | None, int]:
    is_long = num_tokens != 1
    num_long = int(np.count_nonzero(is_long))
    num_decode_rows = len(num_tokens) - num_long
    if not is_long[:num_decode_rows].any():
        return None, num_decode_rows
    return np.argsort(is_long, kind="stable"), num_decode_rows


def _pick(column: npt.NDArray[Any], order: Int64 | None) -> npt.NDArray[Any]:
    # A copy in either case: the message's memory is read-only, which torch warns about.
    return column.copy() if order is None else column[order]
