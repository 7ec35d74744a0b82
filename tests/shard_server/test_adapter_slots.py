"""Adapters in steps of the real model: mixed batches equal solo runs, and slots change hands in order."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from model.parallel import TensorParallel
from shard_server import loader
from shard_server.adapters import AdapterRecipe
from shard_server.errors import ProtocolError
from shard_server.link import decode_step
from shard_server.model_runner import ModelRunner
from tests.shard_server import checkpoints, random_adapters
from tests.shard_server.ranks import run_ranks
from tests.shard_server.steps import Open, step
from tests.shard_server.test_model_runner import PROMPTS, Client, make_runner

NUM_TOKENS = 6


class AdapterClient(Client):
    """Binds adapters too."""

    def bind(self, bindings: dict[int, str], opens: list[Open], closed: tuple[int, ...] = ()) -> list[int]:
        """One step that prefills what it opens; the first tokens."""
        self.step_id += 1
        runs = [self.run(row.slot, 0, len(row.tokens)) for row in opens]
        rows = self.runner.step(decode_step(step(self.step_id, runs, opens, closed, bindings))).rows
        assert rows is not None and rows.is_finite.all()
        tokens: list[int] = rows.token_ids.tolist()
        return tokens

    def decode(self, starts: dict[int, int]) -> list[int]:
        tokens: list[int] = self.rows([self.run(slot, start) for slot, start in starts.items()]).token_ids.tolist()
        return tokens


def make_lora_runner(folder: Path, parallel: TensorParallel | None = None) -> ModelRunner:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "AdapterReader", random_adapters.Reader)
        runner = make_runner(
            folder, parallel, enable_lora=True, max_loras=2, max_lora_rank=8, max_num_batched_tokens=128
        )
    assert runner.adapters is not None
    for name in random_adapters.RANKS:
        asyncio.run(runner.adapters.staged.load(AdapterRecipe(name, ())))
    return runner


def generate(runner: ModelRunner, names: list[str], num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    """Greedy tokens of rows with these adapters in one batch; empty: the base model. Row i has prompt i mod 3."""
    runner.reset()
    client = AdapterClient(runner)
    slots = {name: slot for slot, name in enumerate(sorted({*names} - {""}))}
    opens = [Open(row, PROMPTS[row % 3], adapter_slot=slots.get(name, -1)) for row, name in enumerate(names)]
    tokens = [[token] for token in client.bind({slot: name for name, slot in slots.items()}, opens)]
    for done in range(num_tokens - 1):
        starts = {row: len(PROMPTS[row % 3]) + done for row in range(len(names))}
        for answer, token in zip(tokens, client.decode(starts), strict=True):
            answer.append(token)
    return tokens


@pytest.fixture(scope="module", params=["cohere", "cohere2"])
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, torch.nn.Module]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, checkpoints.make(folder, request.param)


@pytest.fixture(scope="module")
def runner(checkpoint: tuple[Path, torch.nn.Module]) -> ModelRunner:
    return make_lora_runner(checkpoint[0])


def test_rows_of_any_adapter_and_rank_in_one_batch_equal_solo_runs(runner: ModelRunner) -> None:
    """Public bug predibase/lorax#64: mixed ranks and base rows in one batch went wrong."""
    names = ["", "a", "", "b", "a", ""]
    mixed = generate(runner, names)
    solo: dict[tuple[str, int], list[int]] = {}
    for row, name in enumerate(names):
        padded = [""] * row + [name]  # the same prompt, alone with its adapter
        solo[name, row] = generate(runner, padded)[row]
    assert mixed == [solo[name, row] for row, name in enumerate(names)]
    assert len({tuple(mixed[0]), tuple(generate(runner, ["a"])[0]), tuple(generate(runner, ["b"])[0])}) == 3


def test_the_base_model_is_untouched_to_the_bit(checkpoint: tuple[Path, torch.nn.Module], runner: ModelRunner) -> None:
    """Public bug measured on vLLM 0.24.0: with LoRA on, a tied checkpoint did not even start."""
    plain = make_runner(checkpoint[0])
    opens = [Open(0, PROMPTS[0], num_logprobs=20)]
    runner.reset()
    ours, theirs = (Client(it).rows([Client(it).run(0, 0, 5)], opens) for it in (runner, plain))
    assert ours.token_ids.tolist() == theirs.token_ids.tolist()
    assert ours.top_logprobs.tolist() == theirs.top_logprobs.tolist()
    assert generate(runner, [""])[0] == checkpoints.greedy(checkpoint[1], PROMPTS[0], NUM_TOKENS)


def test_a_slot_is_bound_anew_in_the_step_that_closes_its_last_row(runner: ModelRunner) -> None:
    expected = generate(runner, ["c"], 2)[0]
    runner.reset()
    client = AdapterClient(runner)
    client.bind({0: "a"}, [Open(0, PROMPTS[0], adapter_slot=0)])
    first = client.bind({0: "c"}, [Open(1, PROMPTS[0], adapter_slot=0)], closed=(0,))
    assert first + client.decode({1: len(PROMPTS[0])}) == expected


def test_a_row_that_follows_an_adapters_in_its_slot_of_the_tables_is_the_base_models(runner: ModelRunner) -> None:
    expected = generate(runner, [""], 1)[0]
    runner.reset()
    client = AdapterClient(runner)
    client.bind({0: "a"}, [Open(0, PROMPTS[0], adapter_slot=0)])
    client.blocks.clear()
    assert client.bind({}, [Open(0, PROMPTS[0])], closed=(0,)) == expected


def two_rank_tokens(parallel: TensorParallel, folder: str) -> list[list[int]]:
    return generate(make_lora_runner(Path(folder), parallel), ["", "a", "b"])


def test_two_ranks_give_the_tokens_of_one(
    checkpoint: tuple[Path, torch.nn.Module], runner: ModelRunner, tmp_path: Path
) -> None:
    expected = generate(runner, ["", "a", "b"])
    assert run_ranks(two_rank_tokens, 2, tmp_path, str(checkpoint[0])) == [expected, expected]


@pytest.mark.parametrize(
    ("bindings", "adapter_slot", "reason"),
    [
        ({0: "nobody"}, -1, "nobody is not staged"),
        ({2: "a"}, -1, r"bindings.slots: 2 is outside \[0, 2\)"),
        ({-1: "a"}, -1, "bindings.slots: -1 is outside"),
        ({0: "a"}, 1, "nothing is bound to adapter slot 1"),
        ({0: "a"}, 2, "nothing is bound to adapter slot 2"),
        ({0: "a"}, -2, "opened.adapter_slots of slot 0 is below -1"),
    ],
)
def test_steps_that_contradict_what_is_staged_or_bound_are_refused(
    runner: ModelRunner, bindings: dict[int, str], adapter_slot: int, reason: str
) -> None:
    runner.reset()
    with pytest.raises(ProtocolError, match=reason):
        AdapterClient(runner).bind(bindings, [Open(0, PROMPTS[0], adapter_slot=adapter_slot)])


def test_a_slot_with_an_open_row_is_not_bound_anew(runner: ModelRunner) -> None:
    runner.reset()
    client = AdapterClient(runner)
    client.bind({0: "a"}, [Open(0, PROMPTS[0], adapter_slot=0)])
    with pytest.raises(ProtocolError, match="an open row uses adapter slot 0"):
        client.bind({0: "b"}, [Open(1, PROMPTS[0])])


def test_a_new_epoch_binds_again_what_it_wants_and_finds_everything_staged(runner: ModelRunner) -> None:
    runner.reset()
    AdapterClient(runner).bind({0: "a"}, [Open(0, PROMPTS[0], adapter_slot=0)])
    runner.reset()
    assert runner.adapters is not None and runner.adapters.staged.versions == ["a", "b", "c"]
    with pytest.raises(ProtocolError, match="nothing is bound to adapter slot 0"):
        AdapterClient(runner).bind({}, [Open(0, PROMPTS[0], adapter_slot=0)])


def test_a_shard_without_lora_refuses_steps_with_adapters(checkpoint: tuple[Path, torch.nn.Module]) -> None:
    runner = make_runner(checkpoint[0])
    for bindings, slot in (({0: "a"}, -1), ({}, 0)):
        runner.reset()
        with pytest.raises(ProtocolError, match="LoRA is off on this shard"):
            AdapterClient(runner).bind(bindings, [Open(0, PROMPTS[0], adapter_slot=slot)])
