"""Steps through the real model: transformers' greedy tokens, run-ahead's order, lost steps and bad rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model.flash_cohere import FlashCohereForCausalLM
from model.parallel import TensorParallel
from shard_server import sampler
from shard_server.config import ShardConfig
from shard_server.distributed import RankGroup
from shard_server.errors import ProtocolError
from shard_server.link import RowResults, StepOutcome, decode_step
from shard_server.loader import load
from shard_server.model_runner import ModelRunner
from tests.shard_server import checkpoints
from tests.shard_server.ranks import run_ranks
from tests.shard_server.steps import Open, Run, step

PROMPTS = [[5, 9, 300, 17, 4], [7], [(11 * i) % 319 for i in range(1, 40)]]
BLOCK = 16


def make_runner(folder: Path, parallel: TensorParallel | None = None, **options: int) -> ModelRunner:
    parallel = parallel or TensorParallel()
    values: dict[str, Any] = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "num_blocks_override": 40,
        "num_threads": 1,
        **options,
    }
    config = ShardConfig(
        model=str(folder),
        listen="unix:x",
        dtype="float32",
        rank=parallel.rank,
        world_size=parallel.world_size,
        **values,
    )
    # The ranks of a test have met already; what they agree on is the same by construction.
    runner, _ = load(config, lambda: RankGroup(parallel, None))
    return runner


@pytest.fixture(scope="module", params=["cohere", "cohere2"])
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, torch.nn.Module]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, checkpoints.make(folder, request.param)


@pytest.fixture
def runner(checkpoint: tuple[Path, torch.nn.Module]) -> ModelRunner:
    return make_runner(checkpoint[0])


class Client:
    """Counts steps and hands out blocks."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.step_id = 0
        self.next_block = 1
        self.blocks: dict[int, int] = {}

    def run(self, slot: int, start: int, num_tokens: int = 1, is_sampled: bool = True) -> Run:
        new = []
        while self.blocks.setdefault(slot, 0) * BLOCK < start + num_tokens:
            new.append(self.next_block)
            self.next_block += 1
            self.blocks[slot] += 1
        return Run(slot, start, num_tokens, is_sampled, tuple(new))

    def send(self, runs: list[Run], opens: list[Open] | None = None, closed: tuple[int, ...] = ()) -> StepOutcome:
        self.step_id += 1
        return self.runner.step(decode_step(step(self.step_id, runs, opens, closed)))

    def rows(self, runs: list[Run], opens: list[Open] | None = None, closed: tuple[int, ...] = ()) -> RowResults:
        rows = self.send(runs, opens, closed).rows
        assert rows is not None
        return rows


def generate_mixed(runner: ModelRunner, num_tokens: int) -> list[list[int]]:
    """Greedy tokens of PROMPTS: the short ones decode while the long one is filled in chunks of 7."""
    client = Client(runner)
    opens = [Open(slot, prompt) for slot, prompt in enumerate(PROMPTS)]
    computed, answers = [0, 0, 0], [[], [], []]
    while min(len(answer) for answer in answers) < num_tokens:
        runs = []
        for slot in (2, 0, 1):
            prompt = PROMPTS[slot]
            count = min(7, len(prompt) - computed[slot]) if computed[slot] < len(prompt) else 1
            runs.append(client.run(slot, computed[slot], count, computed[slot] + count >= len(prompt)))
            computed[slot] += count
        rows = client.rows(runs, opens)
        opens = []
        assert rows.is_finite.all()
        for run, token in zip([run for run in runs if run.is_sampled], rows.token_ids.tolist(), strict=True):
            answers[run.slot].append(token)
    return [answer[:num_tokens] for answer in answers]


def test_chunked_prefill_beside_decode_gives_the_tokens_of_transformers(
    checkpoint: tuple[Path, torch.nn.Module], runner: ModelRunner
) -> None:
    expected = [checkpoints.greedy(checkpoint[1], prompt, 12) for prompt in PROMPTS]
    assert generate_mixed(runner, 12) == expected


def test_compiling_draws_in_every_way_and_leaves_nothing_behind(
    checkpoint: tuple[Path, torch.nn.Module], runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []

    def draw_among(keys: torch.Tensor, *arguments: Any) -> torch.Tensor:
        kept.append(keys.shape[1])
        return draw(keys, *arguments)

    draw = sampler.draw_among
    monkeypatch.setattr(sampler, "draw_among", draw_among)
    runner.compile_kernels()
    assert kept == [20, checkpoints.VOCAB], "top_k alone bounds the number of candidates"
    assert generate_mixed(runner, 2) == [checkpoints.greedy(checkpoint[1], prompt, 2) for prompt in PROMPTS]


@pytest.mark.parametrize("num_cached", [16, 32])
def test_a_row_on_the_blocks_of_another_gives_what_a_cold_row_gives(
    checkpoint: tuple[Path, torch.nn.Module], runner: ModelRunner, num_cached: int
) -> None:
    """Both are longer than Cohere2's window, of 9 tokens here. The row's own token table holds something else."""
    prompt = PROMPTS[2]
    expected = checkpoints.greedy(checkpoint[1], prompt, 6)
    client = Client(runner)
    first = Open(0, prompt, num_logprobs=3)
    other = Open(1, [300 - i for i in range(35)])
    cold = [client.rows([client.run(0, 0, len(prompt)), client.run(1, 0, 20, False)], [first, other])]
    shared = tuple(range(1, num_cached // BLOCK + 1))
    own = tuple(range(20, 23 - len(shared)))
    again = Open(1, prompt, num_logprobs=3, num_cached_tokens=num_cached)
    chunk = (len(prompt) - num_cached) // 2
    client.rows([Run(1, num_cached, chunk, False, shared + own)], [again], closed=(1,))
    middle = num_cached + chunk
    warm = [client.rows([Run(1, middle, len(prompt) - middle)])]
    for position in range(len(prompt), len(prompt) + 5):
        cold.append(client.rows([client.run(0, position)]))
        warm.append(client.rows([Run(1, position)]))
    for rows in (cold, warm):
        assert [row.token_ids.tolist()[0] for row in rows] == expected
    for one, another in zip(cold, warm, strict=True):
        np.testing.assert_allclose(one.logprobs, another.logprobs, rtol=0, atol=1e-5)
        np.testing.assert_allclose(one.top_logprobs, another.top_logprobs, rtol=0, atol=1e-5)


def two_rank_tokens(parallel: TensorParallel, folder: str) -> list[list[int]]:
    return generate_mixed(make_runner(Path(folder), parallel), 12)


def test_two_ranks_give_the_tokens_of_transformers(checkpoint: tuple[Path, torch.nn.Module], tmp_path: Path) -> None:
    expected = [checkpoints.greedy(checkpoint[1], prompt, 12) for prompt in PROMPTS]
    assert run_ranks(two_rank_tokens, 2, tmp_path, str(checkpoint[0])) == [expected, expected]


def test_results_come_in_the_order_of_the_scheduled_rows(runner: ModelRunner) -> None:
    prompts = {4: [5, 6, 7, 8], 1: [9], 6: [10, 11]}
    apart = {}
    for slot, prompt in prompts.items():
        runner.reset()
        client = Client(runner)
        apart[slot] = client.rows([client.run(slot, 0, len(prompt))], [Open(slot, prompt, num_logprobs=slot - 1)])
    runner.reset()
    client = Client(runner)
    opens = [Open(slot, prompt, num_logprobs=slot - 1) for slot, prompt in prompts.items()]
    rows = client.rows([client.run(slot, 0, len(prompt)) for slot, prompt in prompts.items()], opens)
    assert rows.token_ids.tolist() == [int(one.token_ids[0]) for one in apart.values()]
    assert rows.top_token_ids.tolist() == [i for one in apart.values() for i in one.top_token_ids.tolist()]
    assert len(rows.top_token_ids) == 3 + 0 + 5
    np.testing.assert_allclose(rows.logprobs, [one.logprobs[0] for one in apart.values()], atol=1e-5)


def test_a_replayed_row_goes_on_with_the_tokens_it_would_have_had(runner: ModelRunner) -> None:
    """Preemption: the slot is opened again with prompt and generated tokens; the noise depends on positions alone."""
    prompt, opening = (
        [5, 6, 7, 8],
        {"seed": 77, "temperature": 1.5, "num_prompt_tokens": 4, "min_tokens": 3, "stop_ids": (2,)},
    )
    client = Client(runner)
    tokens = client.rows([client.run(0, 0, 4)], [Open(0, prompt, **opening)]).token_ids.tolist()
    for start in range(4, 12):
        tokens += client.rows([client.run(0, start)]).token_ids.tolist()
    again = prompt + tokens[:5]
    client.blocks.clear()
    replayed = client.rows([client.run(3, 0, 9)], [Open(3, again, **opening)], closed=(0,)).token_ids.tolist()
    for start in range(9, 12):
        replayed += client.rows([client.run(3, start)]).token_ids.tolist()
    assert replayed == tokens[5:]


def test_steps_count_from_one_without_a_gap(runner: ModelRunner) -> None:
    runner.step(decode_step(step(1, [])))
    for step_id in (1, 3):
        with pytest.raises(ProtocolError, match=f"step_id {step_id} does not follow 1"):
            runner.step(decode_step(step(step_id, [])))
    runner.reset()
    runner.step(decode_step(step(1, [])))


def test_more_tokens_than_a_step_may_have_are_refused(runner: ModelRunner) -> None:
    client = Client(runner)
    with pytest.raises(ProtocolError, match="65 tokens in a step, over 64"):
        client.send([client.run(0, 0, 65)], [Open(0, [1] * 65)])


def test_a_row_that_is_not_finite_ends_alone_even_where_nothing_is_sampled(
    checkpoint: tuple[Path, torch.nn.Module],
) -> None:
    """The embedding of token 250 is NaN; rows that contain it are flagged, their neighbours' tokens stay."""
    folder, model = checkpoint
    runner = make_runner(folder)
    embedding = runner._model.model.embed_tokens
    # The head shares the embedding, so it keeps its own packed copy free of the NaN.
    embedding.weight = embedding.weight.clone()
    embedding.weight[250] = torch.nan
    client = Client(runner)
    opens = [Open(0, [5, 250, 9, 4], num_logprobs=2), Open(1, PROMPTS[0]), Open(2, [250, 3, 3])]
    rows = client.rows([client.run(0, 0, 4), client.run(1, 0, 5), client.run(2, 0, 2, False)], opens)
    assert rows.is_finite.tolist() == [False, True, False]
    assert rows.token_ids.tolist() == [0, checkpoints.greedy(model, PROMPTS[0], 1)[0]]
    assert np.isfinite(rows.logprobs).all() and np.isfinite(rows.top_logprobs).all()


class Memory:
    """Stands before the model and runs out of memory on command."""

    def __init__(self, model: FlashCohereForCausalLM) -> None:
        self._model = model
        self.is_full = False

    def forward(self, **arguments: Any) -> Any:
        if self.is_full:
            raise torch.OutOfMemoryError("no room")
        return self._model.forward(**arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def test_a_step_without_memory_counts_for_nothing_nor_do_those_sent_before_the_router_knew(
    checkpoint: tuple[Path, torch.nn.Module], runner: ModelRunner
) -> None:
    memory = runner._model = Memory(runner._model)
    expected = checkpoints.greedy(checkpoint[1], PROMPTS[0], 4)
    client = Client(runner)
    tokens = client.rows([client.run(0, 0, 5)], [Open(0, PROMPTS[0])]).token_ids.tolist()
    memory.is_full = True
    assert client.send([Run(0, 5), Run(1, 0, 1, True, (9,))], [Open(1, [7])]).rows is None
    memory.is_full = False
    assert client.send([Run(0, 6), Run(1, 1)]).rows is None, "sent ahead, builds on the lost step"
    rows = client.rows([Run(0, 5), Run(1, 0, 1, True, (9,))])
    tokens.append(int(rows.token_ids[0]))
    assert rows.token_ids[1] == checkpoints.greedy(checkpoint[1], [7], 1)[0]
    for start in (6, 7):
        tokens += client.rows([Run(0, start)]).token_ids.tolist()
    assert tokens == expected
    with pytest.raises(ProtocolError, match="starts"):
        client.send([Run(0, 9)])
