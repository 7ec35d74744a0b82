"""Where each query of a step finds its keys in the paged cache: worked out once per step, used by every layer."""

from __future__ import annotations

import dataclasses

import torch

from model.attention import Seqlen

# Keys per sequence are padded to a multiple, so that oneDNN meets few different shapes; each new one costs it 1 ms.
KEY_MULTIPLE = 32
# Sequences up to this many keys share one product, whatever padding that means.
SHORT_CONTEXT = 512
# Queries and mask elements of one product with a mask.
MAX_MASKED_QUERIES = 512
MAX_MASK_SIZE = 1 << 24


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences of one query each whose numbers of keys are alike.

    Attributes:
        rows: int64, their rows of the step; None: the first `num_rows`.
        num_rows: how many.
        num_products: num_rows * Hkv.
        places: int64 `[num_products * padded_len]`, rows of the cache seen as `[-1, D]`.
        mask: `[num_products, 1, padded_len]`, 0 or -inf.
    """

    rows: torch.Tensor | None
    num_rows: int
    num_products: int
    places: torch.Tensor
    mask: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillPiece:
    """A run of one sequence's queries (rows of the step), the cache places of their keys, and the mask.

    `places` are rows of the cache seen as `[-1, Hkv, D]`; `mask` is `[queries, keys]`, or None for plain causal.
    """

    queries: slice
    places: torch.Tensor
    mask: torch.Tensor | None


class AttentionPlan:
    """The groups and pieces of one step, one set for each window that occurs in the model."""

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
        self._made: dict[int | None, tuple[list[DecodeGroup], list[PrefillPiece]]] = {}

    def for_window(self, window: int | None) -> tuple[list[DecodeGroup], list[PrefillPiece]]:
        """What layers with this window compute."""
        if window not in self._made:
            self._made[window] = self._decode_groups(window), self._prefill_pieces(window)
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
        device = self.block_tables.device
        index = torch.tensor(rows, device=device)
        lengths = torch.tensor([[num_keys[row]] for row in rows], device=device)
        ends = torch.tensor([[self._context_lens[row]] for row in rows], device=device)
        offsets = torch.arange(-(-longest // KEY_MULTIPLE) * KEY_MULTIPLE, device=device)
        # Padding repeats the query's own key: a place that holds a finite number, unlike those past the context.
        positions = (ends - lengths + offsets).clamp_(max=ends - 1)
        tables = self.block_tables[: len(rows)] if is_all else self.block_tables[index]
        places = self._places(tables, positions).unsqueeze(1) * self._num_kv_heads
        places = places + torch.arange(self._num_kv_heads, device=device).view(1, -1, 1)
        mask = torch.zeros(positions.shape, dtype=self._dtype, device=device)
        mask.masked_fill_(offsets >= lengths, -torch.inf)
        num_products = len(rows) * self._num_kv_heads
        mask = mask.repeat_interleave(self._num_kv_heads, dim=0).unsqueeze(1)
        return DecodeGroup(None if is_all else index, len(rows), num_products, places.flatten(), mask)

    def _prefill_pieces(self, window: int | None) -> list[PrefillPiece]:
        pieces = []
        first_query = self.seqlen.num_decode_rows
        for row in range(self.seqlen.num_decode_rows, len(self._input_lens)):
            input_len, context_len = self._input_lens[row], self._context_lens[row]
            if input_len == context_len and context_len <= (window or context_len):
                places = self._keys(row, 0, context_len)
                pieces.append(PrefillPiece(slice(first_query, first_query + input_len), places, None))
            else:
                pieces += self._masked_pieces(row, first_query, window)
            first_query += input_len
        return pieces

    def _masked_pieces(self, row: int, first_query: int, window: int | None) -> list[PrefillPiece]:
        """Queries [start, stop) of the row's input see keys [first, end), but for the mask."""
        input_len, context_len = self._input_lens[row], self._context_lens[row]
        step = max(1, min(MAX_MASKED_QUERIES, MAX_MASK_SIZE // context_len))
        pieces = []
        for start in range(0, input_len, step):
            stop = min(start + step, input_len)
            position, end = context_len - input_len + start, context_len - input_len + stop
            first = max(0, position - window + 1) if window else 0
            queries = torch.arange(position, end, device=self.block_tables.device).unsqueeze(1)
            keys = torch.arange(first, end, device=self.block_tables.device)
            is_hidden = keys > queries
            if window:
                is_hidden |= keys <= queries - window
            mask = torch.zeros(is_hidden.shape, dtype=self._dtype, device=self.block_tables.device)
            mask.masked_fill_(is_hidden, -torch.inf)
            places = self._keys(row, first, end)
            pieces.append(PrefillPiece(slice(first_query + start, first_query + stop), places, mask))
        return pieces

    def _keys(self, row: int, first: int, end: int) -> torch.Tensor:
        positions = torch.arange(first, end, device=self.block_tables.device).unsqueeze(0)
        return self._places(self.block_tables[row : row + 1], positions).flatten()

    def _places(self, tables: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """int64 `[S, L]` places of positions `[S, L]` under block tables `[S, max_blocks]`."""
        blocks = tables.gather(1, positions // self._block_size).long()
        return blocks * self._block_size + positions % self._block_size


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
