"""Adapters as callers see them: names that requests use, loaded and unloaded by call or found on disk."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from router.adapter_folders import AdapterCopy, AdapterFolders
from router.adapter_link import AdapterLink
from router.adapter_loading import AdapterEngine, AdapterLoading
from router.adapter_places import AdapterPlaces, Tier
from router.adapter_registry import AdapterRegistry, KnownAdapter
from router.adapter_settings import AdapterSettings
from router.errors import FailedPrecondition, InvalidArgument, NotFound, RequestError, StartupError
from router.messages import AdapterRef
from router.metrics import Metrics
from router.validation import MAX_ADAPTER_NAME_BYTES

Result = TypeVar("Result")

NUM_THREADS = 8  # Copies under way at once; more wait for one to end.


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterState:
    """One adapter as ListAdapters tells it."""

    name: str
    version: str
    path: str
    rank: int = 0
    is_pinned: bool = False
    tier: Tier = Tier.DISK
    num_requests: int = 0


@dataclasses.dataclass(slots=True, eq=False)
class _Reading:
    """A name that requests found on disk, on its way; its version is held until each of them had its turn."""

    task: asyncio.Task[str]
    num_waiters: int = 0


@dataclasses.dataclass(slots=True, eq=False)
class _Turn:
    lock: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)
    num_users: int = 0


class Adapters:
    """Lives on the event loop; disk work runs in threads."""

    def __init__(
        self,
        settings: AdapterSettings,
        places: AdapterPlaces,
        link: AdapterLink,
        engine: AdapterEngine,
        metrics: Metrics,
    ) -> None:
        """`places` are the engine's."""
        self._settings = settings
        self._folders = AdapterFolders(settings.dirs)
        self._registry = AdapterRegistry(self._remove_copy)
        self._places = places
        self._loading = AdapterLoading(places, self._registry, link, engine, metrics)
        self._metrics = metrics
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="adapters")
        self._is_closed = False
        self._readings: dict[str, _Reading] = {}
        self._turns: dict[str, _Turn] = {}
        self._ended: dict[str, asyncio.Event] = {}  # set when the last request of a name that is unloaded has ended

    # Requests.

    async def acquire(self, name: str) -> AdapterRef:
        """The version that `name` stands for now, for one request; read from disk if need be, once for all who ask.

        Raises NotFound for an unknown name and FailedPrecondition with the reason for one that cannot be used.
        """
        while (ref := self._registry.begin(name)) is None:
            ref = await self._read(name)
            if ref is not None:
                break
        self._metrics.adapter_request(name)
        return ref

    def release(self, ref: AdapterRef) -> None:
        """The request is over, and the engine has no sequence of it."""
        adapter = self._registry.end(ref)
        self._report()
        if not self._registry.stands_for(ref.version):
            self._places.forget(ref.version)
        if not adapter.num_requests and (ended := self._ended.get(ref.name)) is not None:
            ended.set()

    async def _read(self, name: str) -> AdapterRef | None:
        reading = self._readings.get(name)
        if reading is None:
            reading = self._readings[name] = _Reading(asyncio.create_task(self._read_from_disk(name)))
            reading.task.add_done_callback(lambda _: self._readings.pop(name))
        reading.num_waiters += 1
        try:
            await asyncio.shield(reading.task)
            return self._registry.begin(name)
        finally:
            reading.num_waiters -= 1
            if not reading.num_waiters:
                reading.task.add_done_callback(self._let_go)

    def _let_go(self, task: asyncio.Task[str]) -> None:
        if not task.cancelled() and task.exception() is None:
            self._registry.release(task.result())

    async def _read_from_disk(self, name: str) -> str:
        folder = await self._in_thread(lambda: self._folders.find(name))
        if folder is None:
            raise NotFound(f"no adapter {name[:MAX_ADAPTER_NAME_BYTES]!r} is loaded or in --adapter-dirs")
        version = await self._copy(folder)
        known = self._registry.get(name)
        if known is None or known.version is None:  # A call may have loaded one of this name meanwhile.
            self._registry.assign(KnownAdapter(name, folder, version=version))
            self._report()
        return version

    # Calls.

    async def load(self, name: str, path: str, is_pinned: bool) -> AdapterState:
        """Makes the adapter at `path` (empty: the folder of that name) what `name` stands for, once shards have it.

        Raises InvalidArgument, NotFound, or FailedPrecondition with the reason; `name` then stands for what it did.
        """
        _check_name(name)
        self._check_leaving(name)
        folder = await self._in_thread(lambda: self._folders.resolve(path or name))
        return await self._load(KnownAdapter(name, folder, is_kept=True, is_pinned=is_pinned))

    async def _load(self, adapter: KnownAdapter) -> AdapterState:
        async with self._turn(adapter.name):
            version = await self._copy(adapter.folder, adapter.is_trusted)
            try:
                await self._loading.ensure(version)
                self._check_leaving(adapter.name)
                if adapter.is_pinned:
                    self._check_pins(adapter.name, version)
                old = self._registry.get(adapter.name)
                old_version = None if old is None else old.version
                adapter.version = version
                self._registry.assign(adapter)
                self._report()
                self._settle_pin(version)
                if old_version is not None and old_version != version:
                    self._settle_pin(old_version)
                    self._forget_unnamed(old_version)
                return self._state(adapter)
            finally:
                self._registry.release(version)

    async def unload(self, name: str, is_waiting: bool) -> None:
        """Forgets a name and frees its places. A folder in --adapter-dirs can be asked for again afterwards.

        Raises NotFound; FailedPrecondition if requests use it, unless `is_waiting`: then their end is waited for.
        """
        async with self._turn(name):
            adapter = self._registry.get(name)
            if adapter is None:
                raise NotFound(f"no adapter {name[:MAX_ADAPTER_NAME_BYTES]!r} is loaded")
            if adapter.num_requests and not is_waiting:
                raise FailedPrecondition(f"adapter {name!r} is in use by {adapter.num_requests} requests")
            if adapter.num_requests:
                await self._wait_end(adapter)
            version = adapter.version
            self._registry.remove(name)
            self._metrics.adapter_gone(name)
            self._report()
            if version is not None:
                self._settle_pin(version)
                self._forget_unnamed(version)

    async def _wait_end(self, adapter: KnownAdapter) -> None:
        ended = self._ended[adapter.name] = asyncio.Event()
        adapter.is_leaving = True
        try:
            await ended.wait()
        finally:
            adapter.is_leaving = False
            del self._ended[adapter.name]

    async def list(self) -> list[AdapterState]:
        """Every adapter that is known, and those that lie in --adapter-dirs, in order of name."""
        on_disk = await self._in_thread(self._folders.names)
        states = {name: AdapterState(name, "", str(folder)) for name, folder in on_disk.items()}
        states |= {adapter.name: self._state(adapter) for adapter in self._registry}
        return [states[name] for name in sorted(states)]

    # The server's life.

    async def load_modules(self) -> None:
        """Loads what --lora-modules names. Raises StartupError with the reason where one cannot be loaded."""
        for name, folder in self._settings.modules:
            try:
                await self._load(KnownAdapter(name, folder, is_trusted=True, is_kept=True))
            except RequestError as error:
                raise StartupError(f"--lora-modules {name}={folder}: {error}") from error

    async def restore(self, link: AdapterLink) -> None:
        """Goes on with new streams to the shards; see AdapterLoading.restore."""
        await self._loading.restore(link)

    async def close(self) -> None:
        """Stops loading and removes every copy."""
        self._is_closed = True
        await self._loading.close()
        for reading in list(self._readings.values()):
            reading.task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._folders.close)

    def _report(self) -> None:
        counts = {tier.value: 0 for tier in Tier}
        for adapter in self._registry:
            counts[self._places.tier(adapter.version).value] += 1
        self._metrics.set_adapter_tiers(counts)

    # Parts.

    async def _copy(self, folder: Path, is_trusted: bool = False) -> str:
        """The version of a private copy, held once."""
        loop = asyncio.get_running_loop()
        copying = loop.run_in_executor(self._threads, lambda: self._folders.copy(folder, is_trusted))
        try:
            return self._registry.add(await asyncio.shield(copying))
        except asyncio.CancelledError:
            copying.add_done_callback(self._discard)
            raise

    def _discard(self, copying: asyncio.Future[AdapterCopy]) -> None:
        if not copying.cancelled() and copying.exception() is None:
            self._remove_copy(copying.result().folder)

    def _remove_copy(self, folder: Path) -> None:
        if not self._is_closed:  # Then all copies go together.
            self._threads.submit(self._folders.remove, folder)

    @contextlib.asynccontextmanager
    async def _turn(self, name: str) -> AsyncIterator[None]:
        """Calls that change what a name stands for, one after another."""
        turn = self._turns.setdefault(name, _Turn())
        turn.num_users += 1
        try:
            async with turn.lock:
                yield
        finally:
            turn.num_users -= 1
            if not turn.num_users:
                del self._turns[name]

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _check_leaving(self, name: str) -> None:
        adapter = self._registry.get(name)
        if adapter is not None and adapter.is_leaving:
            raise FailedPrecondition(f"adapter {name!r} is being unloaded")

    def _check_pins(self, name: str, version: str) -> None:
        others = {a.version for a in self._registry if a.is_pinned and a.name != name and a.version != version}
        limit = self._places.max_loras - 1
        if len(others) >= limit:
            raise FailedPrecondition(
                f"{len(others)} adapters are pinned, and at most {limit} may be: one of --max-loras is for the others"
            )

    def _settle_pin(self, version: str) -> None:
        """A version is pinned while a pinned name stands for it."""
        if any(adapter.is_pinned and adapter.version == version for adapter in self._registry):
            self._places.pin(version)
        else:
            self._places.unpin(version)

    def _forget_unnamed(self, version: str) -> None:
        if not self._registry.stands_for(version):
            self._places.forget(version)

    def _state(self, adapter: KnownAdapter) -> AdapterState:
        version = adapter.version
        rank = 0 if version is None else self._registry.version(version).rank
        tier = self._places.tier(version)
        return AdapterState(
            adapter.name, version or "", str(adapter.folder), rank, adapter.is_pinned, tier, adapter.num_requests
        )


def _check_name(name: str) -> None:
    size = len(name.encode())
    if not 1 <= size <= MAX_ADAPTER_NAME_BYTES:
        raise InvalidArgument("name", f"must have 1 to {MAX_ADAPTER_NAME_BYTES} bytes, not {size}")
