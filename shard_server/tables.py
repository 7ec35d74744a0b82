"""The row tables: what the shard knows of each slot. The router owns the ids; the shard checks and derives nothing."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from shard_server.device_table import DeviceTable, TableWrite
from shard_server.errors import ProtocolError
from shard_server.link import Bool, FilledTokens, Int32, Int64, OpenedRows, ScheduledRows

# Below this the quotient logits / temperature could overflow; the likeliest token then wins anyway.
MIN_TEMPERATURE = 1e-5


class RowTables:
    """Token table, block tables and sampling columns of `max_num_seqs` slots, and one spare row for padding.

    Host columns are `[max_num_seqs + 1]`. `num_known` counts a slot's tokens in the token table, sampled ones included;
    `next_starts` its tokens in the KV cache; `num_row_blocks` its blocks.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        num_blocks: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        num_rows = max_num_seqs + 1
        self.max_num_seqs = max_num_seqs
        self.spare_slot = max_num_seqs
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.vocab_size = vocab_size
        self.max_blocks_per_seq = -(-max_model_len // block_size)
        # One more column than positions: the token after a full row is sampled, though never computed.
        self.tokens = DeviceTable(num_rows, max_model_len + 1, np.int32, device)
        self.blocks = DeviceTable(num_rows, self.max_blocks_per_seq, np.int32, device)
        # Twins of the host columns below, for steps that draw without the host's help.
        self.device_seeds = DeviceTable(num_rows, 1, np.int64, device)
        self.device_temperature = DeviceTable(num_rows, 1, np.float32, device)
        self.is_open = np.zeros(num_rows, np.bool_)
        self.num_known = np.zeros(num_rows, np.int32)
        self.next_starts = np.zeros(num_rows, np.int32)
        self.num_row_blocks = np.zeros(num_rows, np.int32)
        # Where the router believes a row to be, as it cannot know yet that a step was lost; -1: nothing was lost.
        self.lost_starts = np.full(num_rows, -1, np.int32)
        self.num_prompt_tokens = np.zeros(num_rows, np.int32)
        self.seeds: Int64 = np.zeros(num_rows, np.int64)
        self.temperature = np.zeros(num_rows, np.float32)
        self.top_k = np.zeros(num_rows, np.int32)
        self.top_p = np.ones(num_rows, np.float32)
        self.min_tokens = np.zeros(num_rows, np.int32)
        self.num_logprobs = np.full(num_rows, -1, np.int32)
        self.adapter_slots = np.full(num_rows, -1, np.int32)
        self.stop_ids: list[Int32] = [np.zeros(0, np.int32)] * num_rows

    def reset(self) -> None:
        """Closes every row."""
        self.is_open[:] = False
        self.take_writes()

    def take_writes(self) -> list[TableWrite]:
        """What has to be written on the device before the next step computes; nothing on a CPU."""
        tables = (self.tokens, self.blocks, self.device_seeds, self.device_temperature)
        return [write for table in tables for write in table.take_writes()]

    def close(self, slots: Int32) -> None:
        """Ends rows; raises ProtocolError for a slot that is not open."""
        self._check_open(slots, "closed_slots")
        self.is_open[slots] = False

    def open(self, rows: OpenedRows) -> None:
        """Gives slots to new sequences, without tokens or blocks; raises ProtocolError for a bad slot or value."""
        slots = rows.slots
        self._check_slots(slots, "opened.slots")
        _refuse(self.is_open[slots], slots, "opened.slots: slot {} is open already")
        self._check_opened(rows)
        self.is_open[slots] = True
        for column in (self.num_known, self.next_starts, self.num_row_blocks):
            column[slots] = 0
        self.lost_starts[slots] = -1
        self.num_prompt_tokens[slots] = rows.num_prompt_tokens
        self.seeds[slots] = rows.seeds
        self.temperature[slots] = np.where(rows.temperature < MIN_TEMPERATURE, 0, rows.temperature)
        self.top_k[slots] = np.where(rows.top_k >= self.vocab_size, 0, rows.top_k)
        self.top_p[slots] = rows.top_p
        self.min_tokens[slots] = rows.min_tokens
        self.num_logprobs[slots] = rows.num_logprobs
        self.adapter_slots[slots] = rows.adapter_slots
        self.device_seeds.write(slots, np.zeros_like(slots), self.seeds[slots])
        self.device_temperature.write(slots, np.zeros_like(slots), self.temperature[slots])
        ends = np.cumsum(rows.stop_id_counts)
        for slot, end, count in zip(slots.tolist(), ends.tolist(), rows.stop_id_counts.tolist(), strict=True):
            self.stop_ids[slot] = rows.stop_ids[end - count : end]

    def _check_opened(self, rows: OpenedRows) -> None:
        slots = rows.slots
        _refuse(
            ~(rows.temperature >= 0) | ~np.isfinite(rows.temperature), slots, "opened.temperature of slot {} is bad"
        )
        _refuse(~((rows.top_p >= 0) & (rows.top_p <= 1)), slots, "opened.top_p of slot {} is outside [0, 1]")
        _refuse(rows.top_k < 0, slots, "opened.top_k of slot {} is negative")
        _refuse(rows.adapter_slots < -1, slots, "opened.adapter_slots of slot {} is below -1")
        _refuse(rows.num_prompt_tokens < 0, slots, "opened.num_prompt_tokens of slot {} is negative")
        too_many = (rows.num_logprobs < -1) | (rows.num_logprobs > self.vocab_size)
        _refuse(too_many, slots, "opened.num_logprobs of slot {} is outside [-1, vocab_size]")
        self._check_ids(rows.stop_ids, "opened.stop_ids")

    def fill(self, pieces: FilledTokens) -> None:
        """Writes tokens; raises ProtocolError where a piece leaves a hole, reaches too far or has an unknown token."""
        self._check_open(pieces.slots, "filled.slots")
        self._check_ids(pieces.token_ids, "filled.token_ids")
        for slot, start, count in zip(*(c.tolist() for c in (pieces.slots, pieces.starts, pieces.counts)), strict=True):
            if not 0 <= start <= self.num_known[slot]:
                raise ProtocolError(
                    f"filled.starts: {start} of slot {slot} leaves a hole after {self.num_known[slot]} tokens"
                )
            if start + count > self.max_model_len:
                raise ProtocolError(
                    f"filled: slot {slot} to position {start + count}, over max_model_len {self.max_model_len}"
                )
            self.num_known[slot] = start + count
        rows, offsets = _spread(pieces.slots, pieces.counts)
        self.tokens.write(rows, np.repeat(pieces.starts, pieces.counts) + offsets, pieces.token_ids)

    def check_scheduled(self, rows: ScheduledRows) -> bool:
        """Whether the rows follow from the tables; False where they follow from a step that was lost for memory.

        Raises ProtocolError for anything else.
        """
        slots, ends = rows.slots, rows.starts + rows.num_tokens
        self._check_open(slots, "scheduled.slots")
        if len(set(slots.tolist())) != len(slots):
            raise ProtocolError("scheduled.slots names a slot twice")
        _refuse(rows.num_tokens < 1, slots, "scheduled.num_tokens of slot {} is below 1")
        _refuse(ends > self.max_model_len, slots, f"scheduled: slot {{}} goes over max_model_len {self.max_model_len}")
        self._check_blocks(rows.new_block_ids)
        is_next = rows.starts == self.next_starts[slots]
        is_lost = rows.starts == self.lost_starts[slots]
        if not is_next.all():
            bad = np.flatnonzero(~(is_next | is_lost))
            if len(bad):
                slot, start = slots[bad[0]], rows.starts[bad[0]]
                raise ProtocolError(
                    f"scheduled.starts: {start} of slot {slot}, whose next position is {self.next_starts[slot]}"
                )
            return False
        _refuse(ends > self.num_known[slots], slots, "scheduled: slot {} has no token at a position to compute")
        early = rows.is_sampled & (ends < self.num_known[slots])
        _refuse(early, slots, "scheduled.is_sampled: slot {} has a token already at the position to sample")
        room = (self.num_row_blocks[slots] + rows.new_block_counts) * self.block_size
        _refuse(ends > room, slots, "scheduled.new_block_ids: slot {} has no block for a position to compute")
        _refuse(room // self.block_size > self.max_blocks_per_seq, slots, "scheduled: slot {} has too many blocks")
        return True

    def append_blocks(self, rows: ScheduledRows) -> None:
        """Writes the new block ids; they count from `commit` on."""
        if len(rows.new_block_ids):
            slots, offsets = _spread(rows.slots, rows.new_block_counts)
            self.blocks.write(slots, self.num_row_blocks[slots] + offsets, rows.new_block_ids)

    def commit(self, rows: ScheduledRows) -> None:
        """The step was computed: starts, blocks and sampled tokens count."""
        slots, ends = rows.slots, rows.starts + rows.num_tokens
        self.next_starts[slots] = ends
        self.lost_starts[slots] = -1
        self.num_row_blocks[slots] += rows.new_block_counts
        self.num_known[slots] = np.maximum(self.num_known[slots], ends + rows.is_sampled)

    def lose(self, rows: ScheduledRows) -> None:
        """The step was not computed, but the router may have sent more steps that build on it."""
        self.lost_starts[rows.slots] = rows.starts + rows.num_tokens

    def _check_slots(self, slots: Int32, name: str) -> None:
        _refuse((slots < 0) | (slots >= self.max_num_seqs), slots, f"{name}: slot {{}} is out of range")

    def _check_open(self, slots: Int32, name: str) -> None:
        self._check_slots(slots, name)
        _refuse(~self.is_open[slots], slots, f"{name}: slot {{}} is not open")

    def _check_ids(self, ids: Int32, name: str) -> None:
        _refuse((ids < 0) | (ids >= self.vocab_size), ids, f"{name}: {{}} is no id of the vocabulary")

    def _check_blocks(self, ids: Int32) -> None:
        bad = (ids < 1) | (ids >= self.num_blocks)
        _refuse(bad, ids, f"scheduled.new_block_ids: block {{}} is outside [1, {self.num_blocks})")


def _refuse(is_bad: Bool, values: npt.NDArray[np.int32], text: str) -> None:
    """Raises ProtocolError with the first value that is bad."""
    if is_bad.any():
        raise ProtocolError(text.format(values[is_bad.argmax()]))


def _spread(slots: Int32, counts: Int32) -> tuple[Int32, Int32]:
    """Each slot `counts` times, and 0, 1, ... within each run: `([3, 5], [1, 2])` gives `[3, 5, 5]`, `[0, 0, 1]`."""
    ends = np.cumsum(counts, dtype=np.int32)
    offsets = np.arange(counts.sum(), dtype=np.int32) - np.repeat(ends - counts, counts)
    return np.repeat(slots, counts), offsets.astype(np.int32)
