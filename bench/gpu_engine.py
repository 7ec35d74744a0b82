"""Cohort without gRPC towards clients: the shards as child processes, the router's engine in this one."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from bench.offline import OfflineRouter, WatchedLink
from bench.workloads import Workload
from router.config import RouterConfig
from router.launcher import ShardGroup
from router.shard_client import GrpcShardLink
from router.tokenizer import Tokenizer

CONNECT_TIMEOUT_S = 600.0


class OfflineEngine:
    """Shards of `config.model`, ready to compute. Close it when done."""

    def __init__(self, config: RouterConfig) -> None:
        start = time.perf_counter()
        self._group = ShardGroup.start(config)
        self._runner = asyncio.Runner()
        try:
            self._runner.run(self._connect(config))
        except BaseException:
            self._group.stop()
            raise
        self.start_to_ready_s = time.perf_counter() - start

    @property
    def name(self) -> str:
        """Its name in tables."""
        return "Cohort, offline"

    async def _connect(self, config: RouterConfig) -> None:
        exits = asyncio.create_task(self._group.wait_exit())
        connecting = asyncio.create_task(GrpcShardLink.connect(self._group.addresses, "bench", CONNECT_TIMEOUT_S))
        await asyncio.wait([exits, connecting], return_when=asyncio.FIRST_COMPLETED)
        if exits.done():
            connecting.cancel()
            raise ShardEnded(str(exits.result()))
        exits.cancel()
        self.link = WatchedLink(await connecting)
        self._router = OfflineRouter(self.link, Tokenizer.from_dir(Path(config.model)).detokenizer, config.run_ahead)
        self._router.start()

    def run(self, workload: Workload) -> list[list[int]]:
        """Generated ids per request."""
        return self._runner.run(self._router.generate(workload.requests))

    def close(self) -> None:
        """Ends the engine and the shards."""
        self._runner.run(self._router.stop())
        self._runner.run(self.link.close())
        self._runner.close()
        self._group.stop()


class ShardEnded(Exception):
    """A shard ended before it was ready; the text has its last lines."""
