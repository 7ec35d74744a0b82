"""Shards without a model: tables as the real ones have, tokens from a hash, faults on request."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import Awaitable, Callable

from router.adapter_link import AdapterRecipe
from router.shard_client import ShardLost
from router.step import RowResult, SampledToken, ScheduledRow, ShardInfo, Step, StepResult

INFO = ShardInfo(
    model_fingerprint="fake",
    world_size=1,
    block_size=4,
    num_blocks=65,
    max_model_len=128,
    max_num_seqs=8,
    max_num_batched_tokens=32,
    vocab_size=1000,
    dtype="float32",
    device="cpu",
    attention_backend="torch",
)

NextToken = Callable[[int, tuple[int, ...]], int]


def hashed_token(seed: int, tokens: tuple[int, ...], version: str = "") -> int:
    """A token that depends on the seed, on every token before it and on the adapter's version, and on nothing else."""
    content = repr((seed, tokens, version) if version else (seed, tokens))
    digest = hashlib.blake2b(content.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % INFO.vocab_size


@dataclasses.dataclass
class Row:
    seed: int
    num_logprobs: int
    adapter_slot: int = -1
    tokens: dict[int, int] = dataclasses.field(default_factory=dict)
    blocks: list[int] = dataclasses.field(default_factory=list)


class FakeShards:
    """Executes steps as a shard would and checks what a shard checks, the KV cache's content included.

    The cache is a dict from (block, offset) to the token, position and adapter version whose key and value would be
    there; a row that attends to a place which holds something else, or which nobody wrote, fails the test. So does a
    binding of a version that is not staged, or of a slot in use. Put versions into `staged`, or set it to None: then
    every version is staged.
    """

    def __init__(self, info: ShardInfo = INFO, next_token: NextToken = hashed_token) -> None:
        self.info = info
        self.next_token = next_token
        self.rows: dict[int, Row] = {}
        self.cache: dict[tuple[int, int], tuple[int, int, str]] = {}
        self.staged: set[str] | None = set()
        self.bound: dict[int, str] = {}
        self.last_step_id = 0
        self.num_computed_tokens = 0
        self.steps: list[Step] = []
        self.poison: Callable[[Row, ScheduledRow], bool] = lambda row, scheduled: False
        self.out_of_memory_at: set[int] = set()

    def execute(self, step: Step) -> StepResult:
        """Applies one step."""
        assert step.step_id == self.last_step_id + 1, "a gap in the steps"
        self.last_step_id = step.step_id
        self.steps.append(step)
        for slot in step.closed_slots:
            del self.rows[slot]
        for binding in step.bindings:
            assert self.staged is None or binding.version in self.staged, "a version is bound that is not staged"
            assert 0 <= binding.slot < self.info.max_loras
            assert all(row.adapter_slot != binding.slot for row in self.rows.values()), "a slot in use is bound anew"
            self.bound[binding.slot] = binding.version
        for opened in step.opened:
            assert opened.slot not in self.rows, "a slot was opened twice"
            assert 0 <= opened.slot < self.info.max_num_seqs
            assert opened.adapter_slot < 0 or opened.adapter_slot in self.bound, (
                "a row in a slot that nothing is bound to"
            )
            self.rows[opened.slot] = Row(opened.seed, opened.num_logprobs, opened.adapter_slot)
        assert sum(len(filled.token_ids) for filled in step.filled) <= self.info.max_num_batched_tokens
        for filled in step.filled:
            for offset, token in enumerate(filled.token_ids):
                self.rows[filled.slot].tokens[filled.start + offset] = token
        assert sum(row.num_tokens for row in step.scheduled) <= self.info.max_num_batched_tokens
        assert len({row.slot for row in step.scheduled}) == len(step.scheduled), "a slot twice in a step"
        is_out_of_memory = step.step_id in self.out_of_memory_at
        results = [self._compute(row) for row in step.scheduled]
        if is_out_of_memory:
            results = [RowResult(True, None) for _ in results]
        return StepResult(step.step_id, is_out_of_memory, results, 0.0, 0.0)

    def _compute(self, scheduled: ScheduledRow) -> RowResult:
        row = self.rows[scheduled.slot]
        row.blocks += scheduled.new_block_ids
        assert 0 not in row.blocks and all(block < self.info.num_blocks for block in row.blocks)
        end = scheduled.start + scheduled.num_tokens
        version = self.bound[row.adapter_slot] if row.adapter_slot >= 0 else ""
        for position in range(scheduled.start, end):
            self.cache[self._place(row, position)] = (position, row.tokens[position], version)
            self.num_computed_tokens += 1
        for position in range(end):
            assert self.cache.get(self._place(row, position)) == (position, row.tokens[position], version), (
                "a wrong key"
            )
        if self.poison(row, scheduled):
            row.tokens[end] = 0  # What a shard writes for a row without finite numbers.
            return RowResult(False, None)
        if not scheduled.is_sampled:
            return RowResult(True, None)
        known = tuple(row.tokens[position] for position in range(end))
        token = hashed_token(row.seed, known, version) if version else self.next_token(row.seed, known)
        row.tokens[end] = token
        if row.num_logprobs < 0:
            return RowResult(True, SampledToken(token))
        top = tuple((other, -1.0 - other) for other in range(row.num_logprobs))
        return RowResult(True, SampledToken(token, -0.5, top))

    def _place(self, row: Row, position: int) -> tuple[int, int]:
        return row.blocks[position // self.info.block_size], position % self.info.block_size


class FakeAdapterLink:
    """Stages versions of FakeShards. `before_load(recipe)` may wait, or raise AdapterRefused or AdapterLinkBroken."""

    def __init__(self, shards: FakeShards) -> None:
        self.shards = shards
        self.staged: frozenset[str] = frozenset(shards.staged or ())
        self.strays: frozenset[str] = frozenset()
        self.before_load: Callable[[AdapterRecipe], Awaitable[None]] | None = None
        self.unload_s = 0.0
        self.loads: list[AdapterRecipe] = []
        self.unloads: list[str] = []

    async def load(self, recipe: AdapterRecipe) -> int:
        """As shards do, but for reading the files."""
        self.loads.append(recipe)
        if self.before_load is not None:
            await self.before_load(recipe)
        assert self.shards.staged is not None
        self.shards.staged.add(recipe.version)
        return 8

    async def unload(self, version: str) -> None:
        """As shards do."""
        assert self.shards.staged is not None
        self.unloads.append(version)
        await asyncio.sleep(self.unload_s)
        self.shards.staged.discard(version)


class FakeLink:
    """FakeShards as the engine's link, with a pause before each answer and a loss on request."""

    def __init__(self, shards: FakeShards | None = None, step_s: float = 0.0) -> None:
        self.shards = shards or FakeShards()
        self.info = self.shards.info
        self.startup_phase_s: dict[str, float] = {}
        self.step_s = step_s
        self.adapters = FakeAdapterLink(self.shards)
        self.num_sent = 0
        self.max_unanswered = 0
        self._sent: asyncio.Queue[Step] = asyncio.Queue()
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def send(self, step: Step) -> None:
        """Queues a step."""
        self._sent.put_nowait(step)
        self.num_sent += 1
        self.max_unanswered = max(self.max_unanswered, self.num_sent - self.shards.last_step_id)

    async def receive(self) -> StepResult:
        """The next answer."""
        step = asyncio.ensure_future(self._sent.get())
        await asyncio.wait((step, self._lost), return_when=asyncio.FIRST_COMPLETED)
        if self._lost.done():
            step.cancel()
            raise ShardLost(0, "on request")
        await asyncio.sleep(self.step_s)
        return self.shards.execute(step.result())

    def lose(self) -> None:
        """From now on the shards are gone."""
        self._lost.set_result(None)

    async def close(self) -> None:
        """Nothing to close."""
