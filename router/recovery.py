"""Brings lost shards back: the same processes where they live, new ones where we started them, within a budget."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence

from router.engine import Recovered
from router.errors import StartupError
from router.launcher import ShardExit, ShardGroup
from router.logs import event
from router.metrics import Metrics
from router.readiness import Readiness
from router.shard_client import GrpcShardLink, ShardLink, ShardLost, ShardsHang

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 3600.0  # Large checkpoints load for minutes; a shard that ends meanwhile ends the wait.
RECONNECT_TIMEOUT_S = 10.0  # for shards that live to be done with what they were doing
EXIT_GRACE_S = 1.0  # for a shard's end to be reported after its link broke
WINDOW_S = 600.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0

Restore = Callable[[GrpcShardLink], Awaitable[None]]


class ShardFailure(Exception):
    """A shard ended or its link broke, for good; the text has its last lines."""


class Budget:
    """At most `limit` restarts in WINDOW_S."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._times_s: collections.deque[float] = collections.deque()

    def take(self, now_s: float) -> bool:
        """Whether one more is allowed now, which then counts."""
        while self._times_s and self._times_s[0] <= now_s - WINDOW_S:
            self._times_s.popleft()
        if len(self._times_s) >= self._limit:
            return False
        self._times_s.append(now_s)
        return True


class ShardKeeper:
    """Connects to the shards at the start and whenever they were lost; router.engine.Supervision."""

    def __init__(
        self,
        shards: ShardGroup | None,
        addresses: Sequence[str],
        max_restarts: int,
        readiness: Readiness,
        metrics: Metrics,
    ) -> None:
        """`shards` None: others started those at `addresses`, in order of rank, and restart them."""
        self._shards = shards
        self._addresses = addresses
        self._budget = Budget(max_restarts)
        self._readiness = readiness
        self._metrics = metrics
        self._router_id = uuid.uuid4().hex
        self._link: GrpcShardLink | None = None
        self._num_fruitless = 0  # attempts since a step was answered
        self.restore_adapters: Restore | None = None  # called with each new link before steps are sent

    async def connect(self) -> GrpcShardLink:
        """The first link. Raises StartupError if the shards cannot be used, ShardFailure if one of ours ends."""
        self._link = await self._attempt(START_TIMEOUT_S)
        self._report(True)
        return self._link

    async def close(self) -> None:
        """Ends the link."""
        if self._link is not None:
            await self._link.close()

    def stalled(self) -> None:
        """See Supervision."""
        logger.warning("a step has been waiting for its answer for long")
        self._readiness.pause()

    def answered(self) -> None:
        """See Supervision."""
        self._readiness.set_ready()

    async def recover(self, lost: ShardLost, link: ShardLink) -> Recovered:
        """See Supervision. Raises ShardFailure beyond the budget, or if the shards came back different."""
        started_s = time.monotonic()
        self._readiness.pause()
        assert self._link is not None
        self._num_fruitless = 0 if self._link.num_answered_steps else self._num_fruitless
        self._report(False)
        await self._link.close()
        ended = None if isinstance(lost, ShardsHang) else await self._exit()
        cause = str(ended or lost)
        event(logger, "shards lost", cause=cause)
        is_alive = ended is None and not isinstance(lost, ShardsHang)
        while True:
            if not self._budget.take(time.monotonic()):
                raise ShardFailure(cause)
            await self._pause()
            try:
                self._link = await self._bring_back(is_alive, link.info.num_blocks)
                break
            except (StartupError, ShardFailure) as error:
                cause, is_alive = str(error), False
                event(logger, "shards did not come back", cause=cause)
        self._check_same(link)
        self._report(True)
        self._metrics.shards_restarted()
        event(logger, "shards are back", seconds=round(time.monotonic() - started_s, 3))
        return Recovered(self._link, blames_rows=ended is None or not ended.is_killed)

    async def restore(self) -> None:
        """See Supervision."""
        assert self._link is not None
        if self.restore_adapters is not None:
            await self.restore_adapters(self._link)
        self._readiness.set_ready()

    async def _pause(self) -> None:
        """Longer each time that the shards came back and answered nothing."""
        if self._num_fruitless:
            await asyncio.sleep(min(FIRST_PAUSE_S * 2 ** (self._num_fruitless - 1), LONGEST_PAUSE_S))
        self._num_fruitless += 1

    async def _bring_back(self, is_alive: bool, num_blocks: int) -> GrpcShardLink:
        if self._shards is None:
            return await self._attempt(START_TIMEOUT_S)
        if is_alive:
            return await self._attempt(RECONNECT_TIMEOUT_S)
        self._shards.restart(num_blocks)
        return await self._attempt(START_TIMEOUT_S)

    async def _attempt(self, timeout_s: float) -> GrpcShardLink:
        """A link; raises StartupError, or ShardFailure as soon as a shard of ours ends."""
        connecting = asyncio.create_task(GrpcShardLink.connect(self._addresses, self._router_id, timeout_s))
        waited: set[asyncio.Task[GrpcShardLink] | asyncio.Task[ShardExit]] = {connecting}
        ending = None if self._shards is None else asyncio.create_task(self._shards.wait_exit())
        try:
            await asyncio.wait(waited | ({ending} if ending else set()), return_when=asyncio.FIRST_COMPLETED)
            if not connecting.done() and ending is not None:
                raise ShardFailure(str(ending.result()))
            return connecting.result()
        finally:
            connecting.cancel()
            if ending is not None:
                ending.cancel()

    async def _exit(self) -> ShardExit | None:
        """How a shard of ours ended, if it has or does soon."""
        if self._shards is None:
            return None
        try:
            return await asyncio.wait_for(self._shards.wait_exit(), EXIT_GRACE_S)
        except TimeoutError:
            return None

    def _check_same(self, before: ShardLink) -> None:
        assert self._link is not None
        now = self._link.info
        if (
            now.num_blocks < before.info.num_blocks
            or dataclasses.replace(now, num_blocks=before.info.num_blocks) != before.info
        ):
            raise ShardFailure(f"the shards came back different: {now}, before: {before.info}")

    def _report(self, is_up: bool) -> None:
        assert self._link is not None
        for rank in range(self._link.info.world_size):
            self._metrics.shard_up(rank, is_up)
