"""The captured step's content, run once under Triton's interpreter: it must do what single launches do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.model.kernels.interpreter import interpret_triton

interpret_triton()

from model import kernels, layers  # noqa: E402
from model.lora_adapter import LoraSlices  # noqa: E402
from model.lora_stacks import LoraStacks  # noqa: E402
from shard_server import device_draw  # noqa: E402
from shard_server.adapter_slots import AdapterSlots  # noqa: E402
from shard_server.adapters import AdapterRecipe, StagedAdapters  # noqa: E402
from shard_server.cuda_graphs import DecodeGraphs, pack_rows  # noqa: E402
from shard_server.graph_sizes import GraphShape  # noqa: E402
from shard_server.link import decode_step  # noqa: E402
from shard_server.model_runner import ModelRunner  # noqa: E402
from tests.shard_server import checkpoints  # noqa: E402
from tests.shard_server.steps import Open, Run, step  # noqa: E402
from tests.shard_server.test_model_runner import make_runner  # noqa: E402
from tests.shard_server.test_sampler import random_logits, sample  # noqa: E402

NO_ADAPTERS = (-1, -1, -1)
PROMPTS = [[5, 9, 300, 17, 4], [7], [(11 * i) % 319 for i in range(1, 18)]]
SIZE = 4


@pytest.fixture(scope="module", params=["cohere", "cohere2"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder: Path = tmp_path_factory.mktemp(request.param)
    checkpoints.make(folder, request.param)
    made = make_runner(folder)
    made._stacks = two_adapters(made)
    made.adapters = AdapterSlots(made._stacks, StagedAdapters(nothing_to_read))
    return made


def nothing_to_read(recipe: AdapterRecipe) -> LoraSlices:
    raise AssertionError("the slots are filled by hand")


def two_adapters(runner: ModelRunner) -> LoraStacks:
    """Slots 0 and 2 of three, with all modules at the largest rank."""
    stacks = LoraStacks(runner._model.config, runner._model.parallel, 3, 4, torch.float32)
    generator = torch.Generator().manual_seed(8)
    for slot in (0, 2):
        for layer in stacks.layers:
            for stack in (layer.a_in, layer.b_in, layer.a_out, layer.b_out):
                stack[slot].normal_(0, 0.2, generator=generator)
        stacks.ranks[slot] = 4
        stacks.host_ranks[slot] = (4,) * 7
    return stacks


def prefill(runner: ModelRunner, adapter_slots: tuple[int, ...] = NO_ADAPTERS) -> list[int]:
    """Three open rows, the second and third drawn by noise; their first tokens."""
    runner.reset()
    runner._tables.tokens.tensor.numpy()[:] = 0
    assert runner.adapters is not None
    runner.adapters._is_bound[[0, 2]] = True
    opens = [
        Open(slot, prompt, seed=slot, temperature=0.8 * slot, adapter_slot=adapter_slots[slot])
        for slot, prompt in enumerate(PROMPTS)
    ]
    runs = [Run(slot, 0, len(prompt), True, (2 * slot + 1, 2 * slot + 2)) for slot, prompt in enumerate(PROMPTS)]
    rows = runner.step(decode_step(step(1, runs, opens))).rows
    assert rows is not None
    return rows.token_ids.tolist()


@torch.inference_mode()
def run_body(
    runner: ModelRunner, is_sampled: list[int], adapter_slots: tuple[int, ...] | None = None
) -> tuple[list[int], list[int]]:
    """Tokens and flags of one decode step of three rows and one of padding; None: the graph without adapters."""
    starts = np.array([len(prompt) for prompt in PROMPTS], np.int32)
    slots = np.arange(len(PROMPTS), dtype=np.int32)
    rows = torch.full((100,), -7, dtype=torch.int32)
    graphs = DecodeGraphs(runner._model, runner._tables, runner._kv_cache, runner._sampler, rows, runner._stacks)
    shape = GraphShape(SIZE, 64, adapter_slots is not None)
    adapters = np.array(adapter_slots or NO_ADAPTERS, np.int32)
    packed = graphs.pack_step(shape, slots, starts, np.array(is_sampled, np.int32), adapters)
    rows[: len(packed)] = torch.from_numpy(packed)
    graphs._make_buffers(SIZE)
    graphs._run(shape)
    tokens, flags = graphs._results.view(2, SIZE).tolist()
    return tokens, flags


def test_a_captured_step_gives_the_tokens_of_single_launches_and_writes_them_behind_their_rows(
    runner: ModelRunner,
) -> None:
    first = prefill(runner)
    before = runner._tables.tokens.tensor.clone()
    tokens, flags = run_body(runner, [1, 1, 1])
    written = runner._tables.tokens.tensor.clone()
    rows = runner.step(decode_step(step(2, [Run(slot, len(prompt)) for slot, prompt in enumerate(PROMPTS)]))).rows
    assert rows is not None
    assert tokens[:3] == rows.token_ids.tolist() and flags == [1] * SIZE
    for slot, prompt in enumerate(PROMPTS):
        assert written[slot, : len(prompt) + 2].tolist() == [*prompt, first[slot], tokens[slot]]
        before[slot, len(prompt) + 1] = tokens[slot]
    assert torch.equal(before, written), "nothing else is written, padding included"


@pytest.mark.parametrize("adapter_slots", [(2, -1, 0), (0, 0, 0), NO_ADAPTERS])
def test_a_captured_step_with_adapters_gives_the_tokens_of_single_launches(
    runner: ModelRunner, adapter_slots: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prefill(runner, adapter_slots)
    with monkeypatch.context() as patch:
        for name in ("add_lora_input", "add_lora_output"):  # the host's way reads no columns
            patch.setattr(layers, name, getattr(kernels, name))
        tokens, flags = run_body(runner, [1, 1, 1], adapter_slots)
    rows = runner.step(decode_step(step(2, [Run(slot, len(prompt)) for slot, prompt in enumerate(PROMPTS)]))).rows
    assert rows is not None
    assert tokens[:3] == rows.token_ids.tolist() and flags == [1] * SIZE
    plain_first, (plain, _) = prefill(runner), run_body(runner, [1, 1, 1])
    for slot, adapter_slot in enumerate(adapter_slots):
        if adapter_slot < 0:
            assert (first[slot], tokens[slot]) == (plain_first[slot], plain[slot])
    assert (tokens[0] != plain[0]) == (adapter_slots[0] >= 0), "without noise the adapter is seen"


def test_a_row_that_samples_none_keeps_its_tokens(runner: ModelRunner) -> None:
    prefill(runner)
    before = runner._tables.tokens.tensor.clone()
    run_body(runner, [1, 0, 0])
    assert torch.equal(before[1:], runner._tables.tokens.tensor[1:])
    assert not torch.equal(before[0], runner._tables.tokens.tensor[0])


def test_rows_are_padded_with_the_spare_slot() -> None:
    one = np.ones(1, np.int32)
    packed = pack_rows(9, 3, 4 * one, 7 * one, one)
    assert packed.reshape(3, 3).tolist() == [[4, 9, 9], [7, 0, 0], [1, 0, 0]]
    assert pack_rows(9, 2).reshape(3, 2).tolist() == [[9, 9], [0, 0], [0, 0]]


def test_the_devices_draw_gives_the_tokens_of_the_hosts() -> None:
    opens = [Open(0, [1]), *(Open(slot, [1], seed=77 * slot, temperature=0.5 * slot) for slot in range(1, 5))]
    logits = random_logits(len(opens), seed=4)
    logits[3, 17] = torch.nan
    expected = sample(logits, opens)
    temperature = torch.tensor([row.temperature for row in opens])
    seeds = torch.tensor([row.seed for row in opens])
    drawn = device_draw.sample(logits, temperature, seeds, torch.full((len(opens),), 8), 0)
    assert drawn.tokens.tolist() == expected.token_ids.tolist()
    assert drawn.is_finite.int().tolist() == expected.is_finite.tolist() == [1, 1, 1, 0, 1]
    _, raw, largest = device_draw.draw(logits, temperature, seeds, torch.full((len(opens),), 8), 0)
    assert raw[:3].tolist() == [logits[i, t] for i, t in enumerate(expected.token_ids[:3].tolist())]
    assert torch.isfinite(largest).tolist() == [True, True, True, False, True]
