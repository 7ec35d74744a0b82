"""Adapters in this rank's host memory: read on threads of their own, so that no step waits for a disk."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from model.lora_adapter import LoraSlices

logger = logging.getLogger(__name__)

NUM_THREADS = 4
"""Loads under way at once, so that one slow disk holds up no other; more wait for one to end."""


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterSource:
    """A folder in PEFT's format and the hash of its files, see model.lora_weights.adapter_version."""

    path: str
    sha256: str
    weight: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterRecipe:
    """What a version is made of; `combination` is empty for one source as it is."""

    version: str
    sources: tuple[AdapterSource, ...]
    combination: str = ""
    density: float = 1.0
    seed: int = 0


ReadAdapter = Callable[[AdapterRecipe], LoraSlices]


@dataclasses.dataclass(slots=True, eq=False)
class _Loading:
    task: asyncio.Future[LoraSlices]
    num_waiters: int = 0


class StagedAdapters:
    """Versions that a step may bind. Loaded and dropped from the event loop, read by the thread that launches."""

    def __init__(self, read: ReadAdapter) -> None:
        """`read` blocks; it raises ModelError with a text for the caller where the adapter cannot be applied."""
        self._read = read
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="adapters")
        self._lock = threading.Lock()
        self._staged: dict[str, LoraSlices] = {}
        self._loadings: dict[str, _Loading] = {}

    @property
    def versions(self) -> list[str]:
        """Everything that is staged, sorted."""
        with self._lock:
            return sorted(self._staged)

    def get(self, version: str) -> LoraSlices | None:
        """A staged adapter's slices."""
        with self._lock:
            return self._staged.get(version)

    async def load(self, recipe: AdapterRecipe) -> LoraSlices:
        """Stages a version unless it is there; one load serves all who ask at the same time.

        Raises whatever reading raised. A load that everybody stopped waiting for is dropped when it ends.
        """
        if (staged := self.get(recipe.version)) is not None:
            return staged
        loading = self._loadings.get(recipe.version)
        if loading is None:
            reading = asyncio.get_running_loop().run_in_executor(self._threads, self._read_timed, recipe)
            loading = self._loadings[recipe.version] = _Loading(reading)
            reading.add_done_callback(lambda _: self._ended(recipe.version))
        loading.num_waiters += 1
        try:
            return await asyncio.shield(loading.task)
        finally:
            loading.num_waiters -= 1

    def _read_timed(self, recipe: AdapterRecipe) -> LoraSlices:
        start_s = time.perf_counter()
        slices = self._read(recipe)
        seconds, megabytes = time.perf_counter() - start_s, slices.num_bytes / 1e6
        logger.info("adapter %s staged: rank %d, %.1f MB, %.3f s", recipe.version, slices.rank, megabytes, seconds)
        return slices

    def _ended(self, version: str) -> None:
        loading = self._loadings.pop(version)
        if loading.task.cancelled() or loading.task.exception() is not None:
            return
        if loading.num_waiters:
            with self._lock:
                self._staged[version] = loading.task.result()

    async def unload(self, version: str) -> None:
        """Drops a version; one that is being loaded when it has ended. Slots bound to it keep their weights."""
        if (loading := self._loadings.get(version)) is not None:
            await asyncio.wait((loading.task,))
        with self._lock:
            self._staged.pop(version, None)
