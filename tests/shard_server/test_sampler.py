"""The sampler against transformers' warpers, numpy and a plain draw of the definition, on one rank and on two."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from model.parallel import TensorParallel
from shard_server import candidates, draw, noise
from shard_server.batch import Batch
from shard_server.link import ScheduledRows, decode_step
from shard_server.logprobs import FLOOR
from shard_server.sampler import Sampler, Samples
from shard_server.sampling_rows import SamplingRows
from shard_server.staging import Staging
from shard_server.tables import RowTables
from tests.shard_server.ranks import run_ranks
from tests.shard_server.steps import Open, step

CPU = torch.device("cpu")
VOCAB = 1000


def decode_rows(opens: list[Open], vocab_size: int = VOCAB, length: int = 8) -> SamplingRows:
    """Rows of `length` tokens each, of which the next one is sampled at position `length`."""
    tables = RowTables(len(opens), 64, 4, 100, vocab_size, CPU)
    message = step(1, [], opens)
    work = decode_step(message)
    assert work.opened is not None
    tables.open(work.opened)
    n = len(opens)
    rows = ScheduledRows(
        slots=np.array([row.slot for row in opens], np.int32),
        starts=np.full(n, length - 1, np.int32),
        num_tokens=np.ones(n, np.int32),
        is_sampled=np.ones(n, np.bool_),
        new_block_counts=np.zeros(n, np.int32),
        new_block_ids=np.zeros(0, np.int32),
    )
    return SamplingRows.build(Batch.build(rows, tables), tables)


def sample(logits: torch.Tensor, opens: list[Open], length: int = 8) -> Samples:
    rows = decode_rows(opens, logits.shape[1], length)
    return Sampler(TensorParallel(), 0).sample(logits.clone(), rows, Staging(CPU, 0))


def drawn(scores: torch.Tensor, seed: int, position: int) -> int:
    """The definition: arg max of warped scores plus noise."""
    ids = torch.arange(scores.numel())
    return int((scores + noise.gumbel(torch.tensor(seed), torch.tensor(position), ids)).argmax())


def random_logits(num_rows: int, seed: int = 0, vocab_size: int = VOCAB, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def test_greedy_takes_the_largest_logit_and_the_lowest_id_among_equals() -> None:
    logits = random_logits(3)
    logits[1, [17, 400, 999]] = 50.0
    logits[2] = 0.0
    logits[2, ::2] = -0.0
    got = sample(logits, [Open(slot, [1]) for slot in range(3)])
    assert got.token_ids.tolist() == [int(logits[0].argmax()), 17, 0]


@pytest.mark.parametrize("temperature", [0.05, 0.7, 1.0, 5.0, 100.0])
def test_a_temperature_alone_draws_from_the_whole_vocabulary(temperature: float) -> None:
    logits = random_logits(40)
    got = sample(logits, [Open(slot, [1], seed=slot * 7, temperature=temperature) for slot in range(40)])
    scale = torch.tensor(temperature)
    assert got.token_ids.tolist() == [drawn(row / scale, slot * 7, 8) for slot, row in enumerate(logits)]


@pytest.mark.parametrize("scale", [0.01, 8.0])
def test_leaving_out_hopeless_tokens_changes_no_draw(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, opens = random_logits(64, scale=scale), [Open(slot, [1], seed=slot, temperature=1.0) for slot in range(64)]
    pruned = sample(logits, opens).token_ids
    monkeypatch.setattr(draw, "SPARSE_SHARE", 0.0)
    assert torch.equal(sample(logits, opens).token_ids, pruned)


@pytest.mark.parametrize(
    ("top_k", "top_p"),
    [(1, 1.0), (5, 1.0), (999, 1.0), (50, 0.8), (0, 0.9), (0, 0.3), (0, 1e-9), (3, 0.0), (0, 0.99999)],
)
@pytest.mark.parametrize("temperature", [0.8, 3.0])
def test_filters_keep_the_tokens_that_the_warpers_of_transformers_keep(
    top_k: int, top_p: float, temperature: float
) -> None:
    logits = random_logits(30, seed=top_k)
    opens = [Open(s, [1], seed=s, temperature=temperature, top_k=top_k, top_p=top_p) for s in range(30)]
    warped = TemperatureLogitsWarper(temperature)(None, logits.clone())
    if top_k:
        warped = TopKLogitsWarper(top_k)(None, warped)
    if top_p < 1:
        warped = TopPLogitsWarper(max(top_p, 1e-7))(None, warped)
    got = sample(logits, opens)
    assert got.token_ids.tolist() == [drawn(row, s, 8) for s, row in enumerate(warped)]


def test_top_p_beyond_the_first_candidates_falls_back_to_the_whole_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, opens = random_logits(8, scale=0.1), [Open(s, [1], seed=s, temperature=1.0, top_p=0.95) for s in range(8)]
    expected = sample(logits, opens).token_ids
    monkeypatch.setattr(draw, "FEW", VOCAB)
    assert torch.equal(sample(logits, opens).token_ids, expected)
    peaked = logits * 80
    monkeypatch.setattr(draw, "FEW", 64)
    few = sample(peaked, opens).token_ids
    monkeypatch.setattr(draw, "FEW", VOCAB)
    assert torch.equal(sample(peaked, opens).token_ids, few)


def test_equal_values_at_the_kth_place_keep_exactly_k_lowest_ids_first() -> None:
    logits = torch.zeros(200, VOCAB)
    logits[:, 500:504] = 1.0
    opens = [Open(s, [1], seed=s, temperature=2.0, top_k=6) for s in range(200)]
    assert set(sample(logits, opens).token_ids.tolist()) == {500, 501, 502, 503, 0, 1}


def test_a_row_draws_the_same_alone_and_among_rows_that_want_other_things() -> None:
    logits = random_logits(6)
    opens = [
        Open(0, [1]),
        Open(1, [1], seed=1, temperature=0.9),
        Open(2, [1], seed=2, temperature=0.9, top_k=4, num_logprobs=2),
        Open(3, [1], seed=3, temperature=0.9, top_p=0.7),
        Open(4, [1], seed=4, temperature=1.5, top_k=40, top_p=0.5),
        Open(5, [1], min_tokens=60, stop_ids=(int(logits[5].argmax()),), num_logprobs=0),
    ]
    together = sample(logits, opens)
    for row, one in enumerate(opens):
        one.slot = 0
        alone = sample(logits[row : row + 1], [one])
        assert alone.token_ids[0] == together.token_ids[row]


def test_logprobs_are_the_raw_log_softmax_with_the_likeliest_first() -> None:
    logits = random_logits(3)
    logits[2, [10, 20, 30]] = 40.0
    opens = [
        Open(0, [1], temperature=0.3, top_k=2, num_logprobs=5),
        Open(1, [1], seed=9, temperature=2.0, num_logprobs=0),
        Open(2, [1], min_tokens=60, stop_ids=(10, 20), num_logprobs=3),
    ]
    got = sample(logits, opens)
    assert got.token_ids[2] == 30
    assert got.logprobs is not None
    expected = torch.log_softmax(logits, dim=1)
    torch.testing.assert_close(got.logprobs.sampled, expected[range(3), got.token_ids.long()], atol=1e-5, rtol=0)
    assert got.logprobs.top_token_ids[0, :5].tolist() == logits[0].topk(5).indices.tolist()
    assert got.logprobs.top_token_ids[2, :3].tolist() == [10, 20, 30], "min_tokens forbids drawing, not reporting"
    torch.testing.assert_close(got.logprobs.top[0], expected[0].topk(5).values, atol=1e-5, rtol=0)


def test_logprobs_have_a_finite_floor() -> None:
    logits = torch.full((2, VOCAB), -torch.inf)
    logits[0, 5] = 1.0
    logits[1, 5] = torch.nan
    got = sample(logits, [Open(0, [1], num_logprobs=3), Open(1, [1], num_logprobs=3)])
    assert got.logprobs is not None
    assert got.logprobs.sampled[0] == 0
    assert got.logprobs.top[0].tolist() == [0, FLOOR, FLOOR]
    assert torch.isfinite(got.logprobs.sampled).all() and torch.isfinite(got.logprobs.top).all()


@pytest.mark.parametrize(("length", "is_forbidden"), [(8, True), (10, True), (11, False)])
def test_min_tokens_forbids_stop_ids_until_enough_are_generated(length: int, is_forbidden: bool) -> None:
    """A prompt of 8 and min_tokens 3: the tokens at positions 8, 9 and 10 are no stop, the one at 11 may be."""
    logits = random_logits(2)
    best, second = logits[0].topk(2).indices.tolist()
    opens = [Open(0, [1], num_prompt_tokens=8, min_tokens=3, stop_ids=(best,)), Open(1, [1])]
    got = sample(logits, opens, length)
    assert got.token_ids[0] == (second if is_forbidden else best)
    assert got.token_ids[1] == logits[1].argmax()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.5)])
def test_rows_that_are_not_finite_give_0_and_touch_no_other(temperature: float, top_k: int, top_p: float) -> None:
    logits = random_logits(5)
    opens = [Open(s, [1], seed=s, temperature=temperature, top_k=top_k, top_p=top_p) for s in range(5)]
    expected = sample(logits, opens)
    assert expected.is_finite.tolist() == [1] * 5
    logits[0, 3] = torch.nan
    logits[2] = -torch.inf
    logits[3, 7] = torch.inf
    got = sample(logits, opens)
    assert got.is_finite.tolist() == [0, 1, 0, 0, 1]
    assert got.token_ids.tolist() == [0, int(expected.token_ids[1]), 0, 0, int(expected.token_ids[4])]


@pytest.mark.parametrize("temperature", [1e-8, 1e-5, 1e-4, 1e-38])
def test_a_tiny_temperature_takes_the_likeliest(temperature: float) -> None:
    logits = random_logits(4, scale=30)
    got = sample(logits, [Open(s, [1], temperature=temperature) for s in range(4)])
    assert got.token_ids.tolist() == logits.argmax(dim=1).tolist()


def test_candidate_keys_sort_by_value_then_by_lower_id_and_come_back_exactly() -> None:
    values = torch.tensor([-torch.inf, -3.5, -0.0, 0.0, 1e-40, 2.5, 2.5, torch.inf])
    ids = torch.tensor([7, 255_999, 3, 4, 9, 1, 0, 2])
    keys = candidates.pack(values, ids)
    assert candidates.unpack(keys.sort(descending=True).values)[1].tolist() == [2, 0, 1, 9, 3, 4, 255_999, 7]
    back, back_ids = candidates.unpack(keys)
    assert torch.equal(back, values) and torch.equal(back_ids, ids)


SHARDED_VOCAB = 1001
OPENS = [
    Open(0, [1], num_logprobs=3),
    Open(1, [1], seed=1, temperature=1.8, num_logprobs=0),
    Open(2, [1], seed=2, temperature=1.8, top_k=30, num_logprobs=7),
    Open(3, [1], seed=3, temperature=1.8, top_p=0.9),
    Open(4, [1], seed=4, temperature=1.8, top_k=700, top_p=0.95),
    Open(5, [1], min_tokens=200, stop_ids=(3, 900), seed=5, temperature=1.8),
]


def shard_samples(parallel: TensorParallel, noise_scale: float) -> list[tuple[list[int], list[int], list[float]]]:
    """Forty steps on this rank's slice of the same logits, padded; rank 1's are disturbed."""
    width = 504
    answers = []
    for number in range(40):
        logits = torch.nn.functional.pad(
            random_logits(len(OPENS), number, SHARDED_VOCAB), (0, 2 * width - SHARDED_VOCAB), value=-torch.inf
        )
        logits[0, [5, 600]] = 60.0  # a tie over two ranks
        start = parallel.rank * width if parallel.world_size > 1 else 0
        own = logits[:, start : start + width] if parallel.world_size > 1 else logits[:, :SHARDED_VOCAB]
        if parallel.rank == 1:
            own = own + noise_scale * torch.rand(own.shape, generator=torch.Generator().manual_seed(number))
        if number == 7:
            own[2, 9] = torch.nan if parallel.rank == 0 else 0.0
        if number == 9 and start + own.shape[1] > 600:
            own[4, 600 - start] = torch.nan
        rows = decode_rows(OPENS, SHARDED_VOCAB, length=8 + number % 4)
        got = Sampler(parallel, start).sample(own.clone(), rows, Staging(CPU, 0))
        assert got.logprobs is not None
        answers.append((got.token_ids.tolist(), got.is_finite.tolist(), got.logprobs.sampled.tolist()))
    return answers


def test_two_ranks_choose_what_one_rank_with_all_logits_chooses(tmp_path: Path) -> None:
    first, second = run_ranks(shard_samples, 2, tmp_path, 0.0)
    alone = shard_samples(TensorParallel(), 0.0)
    assert first == second
    assert [answer[:2] for answer in first] == [answer[:2] for answer in alone]
    np.testing.assert_allclose([a[2] for a in first], [a[2] for a in alone], atol=2e-5)
    assert all(tokens[0] == 5 for tokens, _, _ in first)
    assert first[7][1] == [1, 1, 0, 1, 1, 1], "a NaN on rank 0"
    assert first[9][1] == [1, 1, 1, 1, 0, 1], "a NaN on rank 1"


def test_ranks_whose_logits_are_disturbed_still_choose_alike(tmp_path: Path) -> None:
    first, second = run_ranks(shard_samples, 2, tmp_path, 1e-6)
    assert first == second
