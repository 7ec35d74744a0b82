"""Where each query of a step finds its keys in the paged cache: worked out once per step, used by every layer."""

from __future__ import annotations

import dataclasses

import torch

from model.attention import Seqlen

# Keys per sequence are padded to a multiple, so that oneDNN meets few different shapes; each new one costs it 1 ms.
KEY_MULTIPLE = 32
# Sequences up to this many keys share one product, whatever padding that means.
SHORT_CONTEXT = 512
# Queries of one product of a prefill.
QUERY_BLOCK = 64


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences of one query each whose numbers of keys are alike.

    Attributes:
        rows: int64, their rows of the step; None: the first `num_rows`.
        num_rows: how many.
        num_products: num_rows * Hkv.
        places: int64 `[num_products * padded_len]`, rows of the cache seen as `[-1, D]`.
        mask: `[num_products, 1, padded_len]`, 0 or -inf; None for one sequence alone, which has no padding.
    """

    rows: torch.Tensor | None
    num_rows: int
    num_products: int
    places: torch.Tensor
    mask: torch.Tensor | None


@dataclasses.dataclass(frozen=True, slots=True)
class QueryBlock:
    """A run of queries and the keys that at least one of them sees, both counted within their PrefillRun.

    `mask` is `[queries, w]`, 0 or -inf, for the last w of the keys; the queries see all keys before those.
    """

    queries: slice
    keys: slice
    mask: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillRun:
    """One sequence's queries: rows of the step, and int64 `[Hkv * num_keys]` rows of the cache seen as `[-1, D]`."""

    rows: slice
    places: torch.Tensor
    blocks: list[QueryBlock]


class AttentionPlan:
    """The groups and runs of one step, one set for each window that occurs in the model."""

    def __init__(
        self, block_tables: torch.Tensor, seqlen: Seqlen, block_size: int, num_kv_heads: int, dtype: torch.dtype
    ) -> None:
        """Reads the step's lengths; `dtype` is that of the masks."""
        self.block_tables = block_tables
        self.seqlen = seqlen
        self._block_size = block_size
        self._num_kv_heads = num_kv_heads
        self._dtype = dtype
        self._input_lens = seqlen.input_lens_list or seqlen.input_lengths.tolist()
        self._context_lens = seqlen.context_lens_list or seqlen.context_lengths.tolist()
        self._device = block_tables.device
        self._masks: dict[tuple[int, int, int | None], torch.Tensor] = {}
        self._made: dict[int | None, tuple[list[DecodeGroup], list[PrefillRun]]] = {}

    def for_window(self, window: int | None) -> tuple[list[DecodeGroup], list[PrefillRun]]:
        """What layers with this window compute."""
        if window not in self._made:
            self._made[window] = self._decode_groups(window), self._prefill_runs(window)
        return self._made[window]

    def _decode_groups(self, window: int | None) -> list[DecodeGroup]:
        num_rows = self.seqlen.num_decode_rows
        num_keys = [min(context, window or context) for context in self._context_lens[:num_rows]]
        groups = []
        for rows in split_by_length(num_keys):
            longest = max(num_keys[row] for row in rows)
            is_all = len(rows) == num_rows
            groups.append(self._decode_group(list(range(num_rows)) if is_all else rows, num_keys, longest, is_all))
        return groups

    def _decode_group(self, rows: list[int], num_keys: list[int], longest: int, is_all: bool) -> DecodeGroup:
        index = torch.tensor(rows, device=self._device)
        lengths = torch.tensor([[num_keys[row]] for row in rows], device=self._device)
        ends = torch.tensor([[self._context_lens[row]] for row in rows], device=self._device)
        padded_len = longest if len(rows) == 1 else -(-longest // KEY_MULTIPLE) * KEY_MULTIPLE
        offsets = torch.arange(padded_len, device=self._device)
        # Padding repeats the query's own key: a place that holds a finite number, unlike those past the context.
        positions = (ends - lengths + offsets).clamp_(max=ends - 1)
        places = self._places(self.block_tables[: len(rows)] if is_all else self.block_tables[index], positions)
        mask = None
        if len(rows) > 1:
            mask = torch.zeros(positions.shape, dtype=self._dtype, device=self._device)
            mask.masked_fill_(offsets >= lengths, -torch.inf)
            mask = mask.repeat_interleave(self._num_kv_heads, dim=0).unsqueeze(1)
        return DecodeGroup(None if is_all else index, len(rows), len(rows) * self._num_kv_heads, places, mask)

    def _prefill_runs(self, window: int | None) -> list[PrefillRun]:
        runs = []
        first_row = self.seqlen.num_decode_rows
        for sequence in range(self.seqlen.num_decode_rows, len(self._input_lens)):
            input_len, context_len = self._input_lens[sequence], self._context_lens[sequence]
            start = context_len - input_len
            first_key = max(0, start - window + 1) if window else 0
            positions = torch.arange(first_key, context_len, device=self._device).unsqueeze(0)
            places = self._places(self.block_tables[sequence : sequence + 1], positions)
            blocks = [
                self._query_block(position, min(position + QUERY_BLOCK, context_len), start, first_key, window)
                for position in range(start, context_len, QUERY_BLOCK)
            ]
            runs.append(PrefillRun(slice(first_row, first_row + input_len), places, blocks))
            first_row += input_len
        return runs

    def _query_block(self, position: int, end: int, start: int, first_key: int, window: int | None) -> QueryBlock:
        """Positions [position, end) of a sequence whose queries begin at `start` and whose keys at `first_key`."""
        queries = slice(position - start, end - start)
        if window is None or end <= window:
            return QueryBlock(queries, slice(0, end - first_key), self._mask(end - position, 0, None))
        first = max(0, position - window + 1)
        mask = self._mask(end - position, position - first, window)
        return QueryBlock(queries, slice(first - first_key, end - first_key), mask)

    def _mask(self, num_queries: int, num_before: int, window: int | None) -> torch.Tensor:
        """`[num_queries, num_before + num_queries]` for queries after `num_before` keys; blocks alike share one."""
        made = self._masks.get((num_queries, num_before, window))
        if made is None:
            queries = torch.arange(num_before, num_before + num_queries, device=self._device).unsqueeze(1)
            keys = torch.arange(num_before + num_queries, device=self._device)
            is_hidden = keys > queries
            if window is not None:
                is_hidden |= keys <= queries - window
            made = torch.zeros(is_hidden.shape, dtype=self._dtype, device=self._device)
            self._masks[num_queries, num_before, window] = made.masked_fill_(is_hidden, -torch.inf)
        return made

    def _places(self, tables: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rows of the cache seen as `[-1, D]`: int64 `[S * Hkv * L]` of positions `[S, L]` in tables `[S, blocks]`."""
        blocks = tables.gather(1, positions // self._block_size).long()
        tokens = blocks * self._block_size + positions % self._block_size
        heads = torch.arange(self._num_kv_heads, device=self._device).view(1, -1, 1)
        return (tokens.unsqueeze(1) * self._num_kv_heads + heads).flatten()


def split_by_length(num_keys: list[int]) -> list[list[int]]:
    """Rows in groups in which the longest has at most twice the keys of the shortest, or SHORT_CONTEXT keys."""
    groups: list[list[int]] = []
    longest = 0
    for row in sorted(range(len(num_keys)), key=lambda row: -num_keys[row]):
        if not groups or (longest > SHORT_CONTEXT and num_keys[row] * 2 < longest):
            groups.append([])
            longest = num_keys[row]
        groups[-1].append(row)
    return groups
