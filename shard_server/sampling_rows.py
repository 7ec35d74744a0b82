"""What the rows of one step ask of the sampler, decided on the host so that the device is never waited for."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from shard_server.batch import Batch
from shard_server.link import Float32, Int32, Int64
from shard_server.tables import RowTables


@dataclasses.dataclass(frozen=True, slots=True)
class DrawRows:
    """Rows that draw by noise, all in the same way; every column is `[N]`.

    Attributes:
        rows: rows of the step's logits.
        temperature: above 0.
        top_k: 0 means off.
        top_p: 1 means off.
        seeds: bits of the u64.
        positions: positions of the tokens to draw in their sequences.
    """

    rows: Int64
    temperature: Float32
    top_k: Int32
    top_p: Float32
    seeds: Int64
    positions: Int64


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingRows:
    """Groups of the step's rows; rows in none of the first three take the likeliest token.

    Attributes:
        plain: drawn from the whole vocabulary.
        top_k: drawn from the likeliest k, perhaps cut by top_p as well.
        top_p: cut by top_p alone.
        logprob_rows: `[L]`, rows that want log-probabilities.
        num_logprobs: `[L]`, how many likeliest tokens they want.
        forbidden_rows, forbidden_ids: `[F]`, logits that min_tokens forbids.
    """

    plain: DrawRows | None
    top_k: DrawRows | None
    top_p: DrawRows | None
    logprob_rows: Int64
    num_logprobs: Int32
    forbidden_rows: Int64
    forbidden_ids: Int64

    @property
    def is_plain(self) -> bool:
        """Whether each row takes the likeliest token or draws from the whole vocabulary, and wants nothing more."""
        has_filter = self.top_k is not None or self.top_p is not None
        return not (has_filter or len(self.logprob_rows) or len(self.forbidden_rows))

    @classmethod
    def build(cls, batch: Batch, tables: RowTables) -> SamplingRows:
        """Reads the tables' columns of the batch's slots; rows that sample nothing are in no group."""
        slots, positions = batch.slots, batch.context_lens
        temperature = tables.temperature[slots]
        is_drawn = batch.is_sampled & (temperature > 0)
        num_logprobs = np.where(batch.is_sampled, tables.num_logprobs[slots], -1)
        logprob_rows = np.flatnonzero(num_logprobs >= 0)
        is_young = batch.is_sampled & (positions - tables.num_prompt_tokens[slots] < tables.min_tokens[slots])
        forbidden_rows, forbidden_ids = _forbidden(np.flatnonzero(is_young), slots, tables)
        plain = top_k = top_p = None
        if is_drawn.any():
            has_k, has_p = is_drawn & (tables.top_k[slots] > 0), is_drawn & (tables.top_p[slots] < 1)
            plain = _draw_rows(is_drawn & ~has_k & ~has_p, slots, positions, tables)
            top_k = _draw_rows(has_k, slots, positions, tables)
            top_p = _draw_rows(has_p & ~has_k, slots, positions, tables)
        return cls(plain, top_k, top_p, logprob_rows, num_logprobs[logprob_rows], forbidden_rows, forbidden_ids)


def _draw_rows(
    is_in: npt.NDArray[np.bool_], slots: Int64, positions: npt.NDArray[Any], tables: RowTables
) -> DrawRows | None:
    rows = np.flatnonzero(is_in)
    if not len(rows):
        return None
    slots = slots[rows]
    return DrawRows(
        rows=rows,
        temperature=tables.temperature[slots],
        top_k=tables.top_k[slots],
        top_p=tables.top_p[slots],
        seeds=tables.seeds[slots],
        positions=positions[rows].astype(np.int64),
    )


def _forbidden(young: Int64, slots: Int64, tables: RowTables) -> tuple[Int64, Int64]:
    if not len(young):
        return young, young
    lists = [tables.stop_ids[slot] for slot in slots[young].tolist()]
    return np.repeat(young, [len(ids) for ids in lists]), np.concatenate(lists).astype(np.int64)
