"""The torch backend against the formula in float64, on a cache whose unused places are NaN."""

from __future__ import annotations

import pytest
import torch

from model.attention import Seqlen
from model.attention.plan import QUERY_BLOCK, SHORT_CONTEXT, split_by_length
from model.attention.torch import TorchAttention
from model.config import parse_model_config

HEADS, KV_HEADS, DIM, BLOCK_SIZE = 6, 2, 8, 16
CONFIG = parse_model_config(
    {"model_type": "cohere", "hidden_size": HEADS * DIM, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
)
Lengths = list[tuple[int, int]]  # (input, context) of each sequence


class Case:
    """Random queries, keys and values, laid out in shuffled blocks."""

    def __init__(self, lengths: Lengths) -> None:
        torch.manual_seed(0)
        self.inputs, self.contexts = (list(part) for part in zip(*lengths, strict=True))
        self.queries = torch.randn(sum(self.inputs), HEADS, DIM)
        self.keys, self.values = ([torch.randn(context, KV_HEADS, DIM) for context in self.contexts] for _ in range(2))
        width = -(-max(self.contexts) // BLOCK_SIZE)
        shuffled = torch.randperm(len(lengths) * width) + 1
        self.tables = shuffled.view(len(lengths), width).to(torch.int32)

    def answer(self, window: int | None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """What the backend writes, `[T, heads, dim]`; query and output are columns of wider matrices."""
        wide = torch.cat([self.queries.flatten(1), torch.full((len(self.queries), 5), torch.nan)], dim=1).to(dtype)
        out = torch.full_like(wide, torch.nan)
        int32 = {"dtype": torch.int32}
        caches = [part - total for total, part in zip(self.inputs, self.contexts, strict=True)]
        seqlen = Seqlen(
            *(torch.tensor(part, **int32) for part in (self.inputs, caches, self.contexts)),
            num_decode_rows=self.inputs.count(1),
            max_input_len=max(self.inputs),
            max_context_len=max(self.contexts),
        )
        k_cache, v_cache = (self._paged(parts).to(dtype) for parts in (self.keys, self.values))
        columns = HEADS * DIM
        TorchAttention(CONFIG, BLOCK_SIZE).forward(
            wide[:, :columns], k_cache, v_cache, self.tables, None, seqlen, window, out[:, :columns]
        )
        assert bool(out[:, columns:].isnan().all()), "columns of others were written"
        return out[:, :columns].view(-1, HEADS, DIM)

    def formula(self, window: int | None) -> torch.Tensor:
        """softmax(q k^T / sqrt(D)) v with the causal mask, in float64."""
        answers = []
        for index, queries in enumerate(self.queries.double().split(self.inputs)):
            keys, values = (
                parts[index].double().repeat_interleave(HEADS // KV_HEADS, 1) for parts in (self.keys, self.values)
            )
            context = self.contexts[index]
            distance = torch.arange(context - len(queries), context).view(-1, 1) - torch.arange(context)
            is_seen = (distance >= 0) & (distance < (window or context))
            scores = torch.einsum("qhd,khd->hqk", queries, keys) * DIM**-0.5
            weights = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
            answers.append(torch.einsum("hqk,khd->qhd", weights, values))
        return torch.cat(answers)

    def _paged(self, parts: list[torch.Tensor]) -> torch.Tensor:
        cache = torch.full((self.tables.numel() + 1, BLOCK_SIZE, KV_HEADS, DIM), torch.nan)
        for table, part in zip(self.tables.tolist(), parts, strict=True):
            for position, row in enumerate(part):
                cache[table[position // BLOCK_SIZE], position % BLOCK_SIZE] = row
        return cache


CASES: dict[str, Lengths] = {
    "one row": [(1, 33)],
    "rows of many lengths": [(1, 1), (1, 16), (1, 17), (1, 300), (1, 31)],
    "rows so unlike that they are grouped": [(1, 20), (1, SHORT_CONTEXT + 90), (1, 250), (1, SHORT_CONTEXT + 60)],
    "a new prompt of several query blocks": [(2 * QUERY_BLOCK + 7, 2 * QUERY_BLOCK + 7)],
    "a chunk after a cached part": [(QUERY_BLOCK + 30, 2 * QUERY_BLOCK + 77)],
    "rows beside chunks": [(1, 50), (1, 9), (3, 3), (QUERY_BLOCK, QUERY_BLOCK), (70, 150), (2, 90)],
}


@pytest.mark.parametrize("window", [None, 1, 8, QUERY_BLOCK - 1, QUERY_BLOCK, 100, 10_000])
@pytest.mark.parametrize("name", CASES)
def test_every_row_equals_the_formula(name: str, window: int | None) -> None:
    case = Case(CASES[name])
    assert torch.allclose(case.answer(window).double(), case.formula(window), atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_stays_within_its_own_rounding(name: str) -> None:
    case = Case(CASES[name])
    for part in ("queries", "keys", "values"):
        rounded = getattr(case, part)
        as_list = [tensor.bfloat16().float() for tensor in ([rounded] if part == "queries" else rounded)]
        setattr(case, part, as_list[0] if part == "queries" else as_list)
    assert (case.answer(None, torch.bfloat16).double() - case.formula(None)).abs().max() < 0.05


def test_a_sequence_that_is_not_finite_spoils_no_other() -> None:
    case = Case(CASES["rows beside chunks"])
    healthy = case.answer(None)
    case.keys[1][0] = torch.nan
    case.values[3][0] = torch.inf
    spoilt = case.answer(None)
    rows = torch.tensor(case.inputs).cumsum(0).tolist()
    touched = {1, *range(rows[2], rows[3])}
    for row in range(len(spoilt)):
        assert torch.equal(spoilt[row], healthy[row]) == (row not in touched)


def test_only_rows_of_like_length_share_a_product_once_contexts_are_long() -> None:
    assert split_by_length([5, SHORT_CONTEXT, 1]) == [[1, 0, 2]]
    assert split_by_length([10, 4000, 2000, 1999, 900, 600]) == [[1, 2], [3], [4, 5], [0]]
    assert split_by_length([]) == []
