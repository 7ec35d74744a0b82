"""A ModelRunner driven in this process, without a router: sequences in, tokens out, steps launched ahead or not."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from model.parallel import TensorParallel
from shard_server.config import ShardConfig
from shard_server.distributed import RankGroup
from shard_server.link import FilledTokens, OpenedRows, ScheduledRows, StepOutcome, StepWork
from shard_server.loader import ShardFacts, load
from shard_server.model_runner import ModelRunner
from shard_server.pending_step import PendingStep


@dataclasses.dataclass(frozen=True)
class Row:
    """A prompt and how it is sampled; the fields are those of a row on the shard link."""

    prompt: tuple[int, ...]
    seed: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    num_logprobs: int = -1


@dataclasses.dataclass
class Answer:
    """What a sequence got."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)


def make_runner(folder: Path, **options: Any) -> tuple[ModelRunner, ShardFacts]:  # noqa: ANN401
    """One rank of the model in `folder`; options are those of ShardConfig."""
    config = ShardConfig(model=str(folder), listen="unix:none", **options)
    return load(config, lambda: RankGroup(TensorParallel(), None))


class Driver:
    """Runs sequences on slots 0, 1, ... of one epoch."""

    def __init__(self, runner: ModelRunner, facts: ShardFacts, sequences: Sequence[Row], chunk: int) -> None:
        """Nothing is computed yet; `chunk` is the most prompt tokens of one row in a step."""
        runner.reset()
        self.answers = [Answer() for _ in sequences]
        self.outcomes: list[StepOutcome] = []
        self._runner, self._facts = runner, facts
        self._sequences = sequences
        self._chunk = chunk
        self._step_id = 0
        self._next_block = 1
        self._num_blocks = [0] * len(sequences)
        self._num_computed = [0] * len(sequences)
        self._under_way: collections.deque[tuple[PendingStep, list[int]]] = collections.deque()

    def prefill(self, num_ahead: int) -> None:
        """Computes all prompts and samples one token of each."""
        waiting = list(range(len(self._sequences)))
        opened: set[int] = set()
        while waiting:
            budget, runs = self._facts.max_num_batched_tokens, []
            for slot in waiting:
                left = len(self._sequences[slot].prompt) - self._num_computed[slot]
                count = min(left, self._chunk, budget)
                if count:
                    runs.append((slot, count, count == left))
                    budget -= count
            fresh = [slot for slot, _, _ in runs if slot not in opened]
            opened.update(fresh)
            self._launch(runs, fresh, num_ahead)
            waiting = [slot for slot in waiting if self._num_computed[slot] < len(self._sequences[slot].prompt)]

    def decode(self, num_steps: int, num_ahead: int) -> None:
        """Steps of one token for every sequence."""
        runs = [(slot, 1, True) for slot in range(len(self._sequences))]
        for _ in range(num_steps):
            self._launch(runs, [], num_ahead)

    def mixed(self, num_tokens: int, num_ahead: int) -> None:
        """Every sequence goes on as it can, prompts by chunks beside decoding ones, until all have `num_tokens`."""
        opened = False
        num_sampled = [0] * len(self._sequences)
        while min(num_sampled) < num_tokens:
            runs = []
            for slot, sequence in enumerate(self._sequences):
                left = len(sequence.prompt) - self._num_computed[slot]
                count = min(left, self._chunk) if left > 0 else 1
                runs.append((slot, count, left <= count))
                num_sampled[slot] += left <= count
            self._launch(runs, [] if opened else list(range(len(self._sequences))), num_ahead)
            opened = True
        self.drain()

    def drain(self, num_left: int = 0) -> None:
        """Takes results in until `num_left` steps are under way."""
        while len(self._under_way) > num_left:
            step, sampled = self._under_way.popleft()
            outcome = step.finish()
            assert outcome.rows is not None, "out of memory"
            assert outcome.rows.is_finite.all(), f"step {outcome.step_id}: a row is not finite"
            self.outcomes.append(outcome)
            logprobs = iter(outcome.rows.logprobs.tolist())
            for slot, token in zip(sampled, outcome.rows.token_ids.tolist(), strict=True):
                self.answers[slot].tokens.append(token)
                if self._sequences[slot].num_logprobs >= 0:
                    self.answers[slot].logprobs.append(next(logprobs))

    def _launch(self, runs: list[tuple[int, int, bool]], fresh: list[int], num_ahead: int) -> None:
        self._step_id += 1
        rows = self._scheduled(runs)
        work = StepWork(self._step_id, np.zeros(0, np.int32), self._opened(fresh), self._filled(fresh), rows)
        self._under_way.append((self._runner.launch(work), [slot for slot, _, is_sampled in runs if is_sampled]))
        for slot, count, _ in runs:
            self._num_computed[slot] += count
        self.drain(num_ahead)

    def _scheduled(self, runs: list[tuple[int, int, bool]]) -> ScheduledRows:
        counts: list[int] = []
        ids: list[int] = []
        for slot, count, _ in runs:
            needed = -(-(self._num_computed[slot] + count) // self._facts.block_size) - self._num_blocks[slot]
            counts.append(needed)
            ids += range(self._next_block, self._next_block + needed)
            self._next_block += needed
            self._num_blocks[slot] += needed
        starts = [self._num_computed[slot] for slot, _, _ in runs]
        return ScheduledRows(
            slots=_ints([slot for slot, _, _ in runs]),
            starts=_ints(starts),
            num_tokens=_ints([count for _, count, _ in runs]),
            is_sampled=np.array([is_sampled for _, _, is_sampled in runs], np.bool_),
            new_block_counts=_ints(counts),
            new_block_ids=_ints(ids),
        )

    def _opened(self, slots: list[int]) -> OpenedRows | None:
        if not slots:
            return None
        rows = [self._sequences[slot] for slot in slots]
        return OpenedRows(
            slots=_ints(slots),
            num_prompt_tokens=_ints([len(row.prompt) for row in rows]),
            seeds=np.array([row.seed for row in rows], np.int64),
            temperature=np.array([row.temperature for row in rows], np.float32),
            top_k=_ints([row.top_k for row in rows]),
            top_p=np.array([row.top_p for row in rows], np.float32),
            min_tokens=_ints([row.min_tokens for row in rows]),
            num_logprobs=_ints([row.num_logprobs for row in rows]),
            stop_id_counts=_ints([len(row.stop_ids) for row in rows]),
            stop_ids=_ints([token for row in rows for token in row.stop_ids]),
            adapter_slots=_ints([-1] * len(rows)),
            num_cached_tokens=_ints([0] * len(rows)),
        )

    def _filled(self, slots: list[int]) -> FilledTokens | None:
        if not slots:
            return None
        prompts = [self._sequences[slot].prompt for slot in slots]
        return FilledTokens(
            slots=_ints(slots),
            starts=_ints([0] * len(slots)),
            counts=_ints([len(prompt) for prompt in prompts]),
            token_ids=_ints([token for prompt in prompts for token in prompt]),
        )


def _ints(values: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, np.int32)
