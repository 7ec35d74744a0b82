"""What the tables accept and hold, against a plain Python model of them, and what they refuse."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from shard_server.batch import Batch
from shard_server.errors import ProtocolError
from shard_server.link import decode_step
from shard_server.tables import RowTables
from tests.shard_server.steps import Open, Run, filled, opened, scheduled, step

NUM_SLOTS, MAX_LEN, BLOCK, NUM_BLOCKS, VOCAB = 4, 32, 4, 40, 100


@pytest.fixture
def tables() -> RowTables:
    return RowTables(NUM_SLOTS, MAX_LEN, BLOCK, NUM_BLOCKS, VOCAB, torch.device("cpu"))


def apply(tables: RowTables, runs: list[Run], opens: list[Open] | None = None, closed: tuple[int, ...] = ()) -> Batch:
    """Everything that a step does to the tables but the sampled tokens, which are written as 99."""
    work = decode_step(step(1, runs, opens, closed))
    tables.close(work.closed_slots)
    if work.opened is not None and work.filled is not None:
        tables.open(work.opened)
        tables.fill(work.filled)
    assert tables.check_scheduled(work.scheduled)
    tables.append_blocks(work.scheduled)
    batch = Batch.build(work.scheduled, tables)
    tables.tokens.tensor.view(-1)[torch.from_numpy(batch.sampled_places)] = 99
    tables.commit(work.scheduled)
    return batch


def test_random_steps_give_the_inputs_that_a_plain_model_gives(tables: RowTables) -> None:
    rng = random.Random(0)
    rows: dict[int, tuple[list[int], list[int], int]] = {}  # slot: tokens, blocks, computed
    for _ in range(300):
        closed = tuple(slot for slot in rows if rng.random() < 0.1 or len(rows[slot][0]) >= MAX_LEN)
        for slot in closed:
            del rows[slot]
        opens = []
        for slot in range(NUM_SLOTS):
            if slot not in rows and rng.random() < 0.5:
                tokens = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
                opens.append(Open(slot, tokens))
                rows[slot] = (list(tokens), [], 0)
        runs = []
        for slot in rng.sample(sorted(rows), rng.randint(0, len(rows))):
            tokens, blocks, computed = rows[slot]
            count = rng.randint(1, len(tokens) - computed)
            new = []
            while (len(blocks) + len(new)) * BLOCK < computed + count:
                new.append(rng.randrange(1, NUM_BLOCKS))
            runs.append(Run(slot, computed, count, computed + count == len(tokens), tuple(new)))
            blocks.extend(new)
        batch = apply(tables, runs, opens, closed)

        expected_order = sorted(range(len(runs)), key=lambda i: runs[i].num_tokens != 1)
        assert batch.num_decode_rows == sum(run.num_tokens == 1 for run in runs)
        position = 0
        flat_tokens, flat_blocks = tables.tokens.tensor.view(-1), tables.blocks.tensor.view(-1)
        for index, i in enumerate(expected_order):
            run, (tokens, blocks, _) = runs[i], rows[runs[i].slot]
            here = slice(position, position + run.num_tokens)
            positions = list(range(run.start, run.start + run.num_tokens))
            assert batch.cu_seqlens[index : index + 2].tolist() == [here.start, here.stop]
            assert batch.positions[here].tolist() == positions
            assert flat_tokens[torch.from_numpy(batch.token_places[here])].tolist() == [tokens[p] for p in positions]
            got = flat_blocks[torch.from_numpy(batch.block_places[here])].tolist()
            assert got == [blocks[p // BLOCK] for p in positions]
            assert tables.blocks.tensor[run.slot, : len(blocks)].tolist() == blocks
            assert batch.restore(np.arange(len(runs)))[i] == index
            position = here.stop
        for run in runs:
            tokens, blocks, _ = rows[run.slot]
            if run.is_sampled:
                tokens.append(99)
            rows[run.slot] = (tokens, blocks, run.start + run.num_tokens)


def test_a_slot_changes_hands_in_one_step_and_starts_without_blocks(tables: RowTables) -> None:
    apply(tables, [Run(0, 0, 3, True, (5,))], [Open(0, [1, 2, 3])])
    apply(tables, [Run(0, 0, 2, True, (6,))], [Open(0, [7, 8])], closed=(0,))
    assert tables.tokens.tensor[0, :3].tolist() == [7, 8, 99]
    assert tables.blocks.tensor[0, 0] == 6
    assert tables.num_row_blocks[0] == 1


def test_a_long_prompt_may_be_filled_over_several_steps(tables: RowTables) -> None:
    tables.open(decode_step(step(1, [], [Open(2, [])])).opened)  # type: ignore[arg-type]
    for start, ids in [(0, [1, 2, 3]), (3, [4, 5]), (4, [6])]:
        work = decode_step(step(1, []))
        assert work.filled is None
        message = step(1, [])
        message.filled.CopyFrom(filled([(2, start, ids)]))
        piece = decode_step(message).filled
        assert piece is not None
        tables.fill(piece)
    assert tables.tokens.tensor[2, :5].tolist() == [1, 2, 3, 4, 6]
    assert tables.num_known[2] == 5


def test_tables_without_rows_forget_their_owners(tables: RowTables) -> None:
    apply(tables, [], [Open(0, [1])])
    tables.reset()
    apply(tables, [], [Open(0, [1])])


def test_a_row_with_cached_tokens_goes_on_after_them_in_the_blocks_that_hold_them(tables: RowTables) -> None:
    apply(tables, [Run(0, 0, 10, True, (7, 8, 9))], [Open(0, list(range(10)))])
    batch = apply(tables, [Run(1, 8, 2, False, (7, 8, 4))], [Open(1, list(range(11)), num_cached_tokens=8)])
    assert batch.positions.tolist() == [8, 9]
    assert tables.blocks.tensor[1, :3].tolist() == [7, 8, 4]
    assert tables.tokens.tensor[1, 8:11].tolist() == [8, 9, 10]
    assert (tables.num_known[1], tables.next_starts[1], tables.num_row_blocks[1]) == (11, 10, 3)
    with pytest.raises(ProtocolError, match="starts: 8 of slot 1, whose next position is 10"):
        apply(tables, [Run(1, 8, 1, False)])
    apply(tables, [Run(1, 10)])


@pytest.mark.parametrize(
    ("text", "run"),
    {
        "starts: 0 of slot 1, whose next position is 8": Run(1, 0, 9, True, (7, 8, 4)),
        "slot 1 has no block": Run(1, 8, 1, True, (7, 8)),
    }.items(),
)
def test_a_row_with_cached_tokens_has_to_bring_their_blocks(tables: RowTables, text: str, run: Run) -> None:
    with pytest.raises(ProtocolError, match=text):
        apply(tables, [run], [Open(1, list(range(9)), num_cached_tokens=8)])


def test_a_slot_that_is_opened_again_forgets_what_was_cached(tables: RowTables) -> None:
    apply(tables, [Run(1, 8, 1, True, (7, 8, 4))], [Open(1, list(range(9)), num_cached_tokens=8)])
    apply(tables, [Run(1, 0, 2, True, (4,))], [Open(1, [1, 2])], closed=(1,))
    assert (tables.num_known[1], tables.next_starts[1], tables.num_row_blocks[1]) == (3, 2, 1)


REFUSED_RUNS = {
    "slot 4 is out of range": Run(4, 0),
    "slot -1 is out of range": Run(-1, 0),
    "slot 3 is not open": Run(3, 0),
    "starts: 3 of slot 0, whose next position is 4": Run(0, 3),
    "starts: 5 of slot 0, whose next position is 4": Run(0, 5),
    "num_tokens of slot 0 is below 1": Run(0, 4, 0),
    "goes over max_model_len 32": Run(0, 4, 29, True, (1, 2, 3, 4, 5, 6, 7, 8)),
    "slot 0 has no token at a position": Run(0, 4, 4, True, (8,)),
    "slot 0 has a token already": Run(0, 4, 1, True, (8,)),
    "block 0 is outside": Run(0, 4, 2, True, (0,)),
    "block 40 is outside": Run(0, 4, 2, True, (40,)),
    "slot 0 has no block": Run(0, 4, 2),
    "slot 0 has too many blocks": Run(0, 4, 2, True, tuple(range(1, 9))),
}


@pytest.mark.parametrize("text", REFUSED_RUNS)
def test_a_scheduled_row_that_does_not_follow_is_refused_with_its_name(tables: RowTables, text: str) -> None:
    """Slot 0 has 6 tokens, of which 4 are computed in one block of 4."""
    apply(tables, [Run(0, 0, 4, False, (7,))], [Open(0, [1, 2, 3, 4, 5, 6])])
    with pytest.raises(ProtocolError, match=text.replace("[", r"\[")):
        apply(tables, [REFUSED_RUNS[text]])
    apply(tables, [Run(0, 4, 2, True, (8,))])


def test_one_slot_twice_in_a_step_is_refused(tables: RowTables) -> None:
    apply(tables, [], [Open(0, [1, 2])])
    with pytest.raises(ProtocolError, match="names a slot twice"):
        apply(tables, [Run(0, 0, 1, False, (1,)), Run(0, 0, 1, False, (2,))])


REFUSED_OPENS = {
    "slot 0 is open already": Open(0, [1]),
    "opened.slots: slot 4": Open(4, [1]),
    "temperature of slot 1": Open(1, [1], temperature=float("nan")),
    "temperature of slot 1 is bad": Open(1, [1], temperature=-1.0),
    "top_p of slot 1": Open(1, [1], top_p=1.5),
    "top_k of slot 1": Open(1, [1], top_k=-1),
    "num_logprobs of slot 1": Open(1, [1], num_logprobs=101),
    "stop_ids: 22565 is no id": Open(1, [1], stop_ids=(22565,)),
    "stop_ids: -1 is no id": Open(1, [1], stop_ids=(-1,)),
    "num_cached_tokens of slot 1 is not a multiple of 4": Open(1, [1] * 9, num_cached_tokens=6),
    "num_cached_tokens of slot 1 is not": Open(1, [1] * 9, num_cached_tokens=-4),
    r"num_cached_tokens of slot 1 is not a multiple of 4 in \[0, 32\)": Open(1, [1] * 40, num_cached_tokens=32),
    "token_ids: 100 is no id": Open(1, [5, 100]),
    "over max_model_len 32": Open(1, [1] * 33),
}


@pytest.mark.parametrize("text", REFUSED_OPENS)
def test_a_row_that_cannot_be_opened_is_refused_with_its_name(tables: RowTables, text: str) -> None:
    apply(tables, [], [Open(0, [1])])
    with pytest.raises(ProtocolError, match=text):
        apply(tables, [], [REFUSED_OPENS[text]])


def test_closing_what_is_not_open_and_filling_after_a_hole_are_refused(tables: RowTables) -> None:
    with pytest.raises(ProtocolError, match="closed_slots: slot 2 is not open"):
        apply(tables, [], closed=(2,))
    apply(tables, [], [Open(0, [1])])
    message = step(1, [])
    message.filled.CopyFrom(filled([(0, 2, [5])]))
    piece = decode_step(message).filled
    assert piece is not None
    with pytest.raises(ProtocolError, match="2 of slot 0 leaves a hole after 1 tokens"):
        tables.fill(piece)


def test_columns_of_another_length_are_refused_with_their_name() -> None:
    message = step(1, [Run(0, 0)])
    message.scheduled.starts = b"\0" * 8
    with pytest.raises(ProtocolError, match=r"scheduled.starts has 8 bytes, which are not 1 entries of 4"):
        decode_step(message)
    message = step(1, [], [Open(0, [1])])
    message.opened.seeds = b"\0" * 7
    with pytest.raises(ProtocolError, match=r"opened.seeds has 7 bytes"):
        decode_step(message)
    message = step(1, [Run(0, 0)])
    message.scheduled.new_block_counts = np.array([-1], "<i4").tobytes()
    with pytest.raises(ProtocolError, match="negative entry -1"):
        decode_step(message)


def test_columns_are_read_as_they_were_packed() -> None:
    rows = [
        Open(
            3,
            [1, 2],
            seed=2**64 - 1,
            temperature=0.5,
            top_k=7,
            top_p=0.25,
            min_tokens=9,
            num_logprobs=4,
            stop_ids=(8, 9),
        )
    ]
    message = step(5, [Run(3, 0, 2, True, (4, 6))], rows, closed=(1, 2))
    assert message.opened == opened(rows) and message.scheduled == scheduled([Run(3, 0, 2, True, (4, 6))])
    work = decode_step(message)
    assert work.opened is not None and work.filled is not None
    assert work.step_id == 5 and work.closed_slots.tolist() == [1, 2]
    assert work.opened.seeds.view(np.uint64).tolist() == [2**64 - 1]
    got = [c.tolist() for c in (work.opened.temperature, work.opened.top_k, work.opened.top_p, work.opened.stop_ids)]
    assert got == [[0.5], [7], [0.25], [8, 9]]
    assert work.filled.token_ids.tolist() == [1, 2]
    assert work.scheduled.is_sampled.tolist() == [True] and work.scheduled.new_block_ids.tolist() == [4, 6]
