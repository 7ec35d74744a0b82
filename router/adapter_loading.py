"""Carries out what the engine's side of the adapters orders: loads and drops on the shards, beside the steps."""

from __future__ import annotations

import asyncio
import collections
import functools
import logging
import time
from collections.abc import Collection, Coroutine
from typing import Protocol

from router.adapter_host import LoadOrder
from router.adapter_link import AdapterLink, AdapterLinkBroken, AdapterRefused
from router.adapter_places import AdapterPlaces
from router.adapter_registry import AdapterRegistry
from router.errors import FailedPrecondition, InternalError, RequestError
from router.logs import event
from router.metrics import Metrics

logger = logging.getLogger(__name__)

RETRY_S = 0.2


class AdapterEngine(Protocol):
    """What the engine is told; router.engine.Engine is one."""

    def adapters_changed(self) -> None:
        """Sequences may start that could not before."""

    def adapter_failed(self, version: str, error: RequestError) -> None:
        """Ends the requests that wait for the version."""


class AdapterLoading:
    """Every order runs in a task of its own, so that a slow one holds up no other."""

    def __init__(
        self,
        places: AdapterPlaces,
        registry: AdapterRegistry,
        link: AdapterLink,
        engine: AdapterEngine,
        metrics: Metrics,
    ) -> None:
        self._places = places
        self._registry = registry
        self._link = link
        self._engine = engine
        self._metrics = metrics
        self._held: set[str] = set()  # versions whose copy the shards' memory stands for
        self._waiters: dict[str, list[asyncio.Future[None]]] = collections.defaultdict(list)
        self._tasks: set[asyncio.Task[None]] = set()
        self._strays: dict[str, asyncio.Task[None]] = {}
        self._is_due = False
        self._is_closed = False
        places.on_change = self._act_soon
        self._drop_strays(link.staged | link.strays)

    async def ensure(self, version: str) -> None:
        """Waits until the version, held by the caller, is loaded. Raises the RequestError that says why it is not."""
        if self._places.is_loaded(version):
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[version].append(future)
        self._places.retain(version)
        try:
            await future
        finally:
            self._places.release(version)

    async def restore(self, link: AdapterLink) -> None:
        """Goes on with new streams to the shards, where no row is open and no slot is bound.

        What every shard still holds stays; other versions in use are loaded again from their copies. It need not be
        waited for: their sequences are parked until then. What nobody uses is loaded when somebody does.
        """
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._link = link
        self._places.restart(link.staged)
        kept = {version for version in self._held if self._places.is_loaded(version)}
        for version in self._held - kept:
            self._registry.release(version)
        self._held = kept
        self._drop_strays(
            {version for version in link.staged | link.strays if not self._places.has_users(version)} - kept
        )

    def _drop_strays(self, versions: Collection[str]) -> None:
        """What shards hold from earlier and nobody asks for."""
        for version in versions:
            task = self._strays[version] = self._start(self._drop_stray(version))
            task.add_done_callback(functools.partial(self._stray_is_gone, version))

    def _stray_is_gone(self, version: str, task: asyncio.Task[None]) -> None:
        self._strays.pop(version, None)

    async def close(self) -> None:
        """Stops carrying out orders."""
        self._is_closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for future in (future for waiters in self._waiters.values() for future in waiters):
            future.cancel()

    def _act_soon(self) -> None:
        if not (self._is_due or self._is_closed):
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._act)

    def _act(self) -> None:
        self._is_due = False
        if not self._is_closed:
            for order in self._places.take_orders():
                work = self._load(order.version) if isinstance(order, LoadOrder) else self._drop(order.version)
                self._start(work)

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _load(self, version: str) -> None:
        start_s = time.monotonic()
        self._held.add(version)
        self._registry.hold(version)
        if (stray := self._strays.get(version)) is not None:
            await asyncio.wait((stray,))
        try:
            rank = await self._load_on_shards(version)
        except RequestError as error:
            event(logger, "adapter cannot be loaded", version=version, reason=str(error))
            self._places.failed(version)
            self._engine.adapter_failed(version, error)
            self._tell(version, error)
            await self._drop(version)
            return
        seconds = time.monotonic() - start_s
        self._metrics.adapter_loaded(seconds)
        event(logger, "adapter loaded", version=version, rank=rank, seconds=round(seconds, 3))
        self._registry.version(version).rank = rank
        self._places.loaded(version)
        self._tell(version, None)
        self._engine.adapters_changed()

    async def _load_on_shards(self, version: str) -> int:
        while True:
            try:
                return await self._link.load(self._registry.recipe(version))
            except AdapterRefused as error:
                raise FailedPrecondition(f"the adapter cannot be applied: {error}") from error
            except AdapterLinkBroken as error:
                # The link is about to be replaced, and this task to be cancelled; or it was a passing trouble.
                logger.warning("a shard did not answer for adapter version %s: %s", version, error)
                await asyncio.sleep(RETRY_S)
            except Exception as error:
                logger.exception("adapter version %s could not be loaded", version)
                raise InternalError("internal error while the adapter was loaded") from error

    async def _drop(self, version: str) -> None:
        try:
            await self._link.unload(version)
        except AdapterLinkBroken as error:
            logger.warning("a shard did not answer for adapter version %s: %s", version, error)
        self._held.discard(version)
        self._registry.release(version)
        self._places.dropped(version)

    async def _drop_stray(self, version: str) -> None:
        try:
            await self._link.unload(version)
        except AdapterLinkBroken as error:
            logger.warning("a shard did not answer for adapter version %s: %s", version, error)

    def _tell(self, version: str, error: RequestError | None) -> None:
        for future in self._waiters.pop(version, ()):
            if future.done():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)
