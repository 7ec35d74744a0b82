"""Adapters across new streams to the shards, of which some may be new processes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from router.adapter_link import AdapterRecipe
from router.adapter_places import AdapterPlaces
from router.adapter_settings import AdapterSettings
from router.adapters import Adapters
from router.errors import RequestError
from router.metrics import Metrics
from tests.fake_shards import FakeAdapterLink, FakeShards
from tests.router.adapter_files import make_adapter, version_of

TIMEOUT_S = 20


class Engine:
    """Counts what it is told."""

    def __init__(self) -> None:
        self.num_changes = 0
        self.failed: list[tuple[str, RequestError]] = []

    def adapters_changed(self) -> None:
        self.num_changes += 1

    def adapter_failed(self, version: str, error: RequestError) -> None:
        self.failed.append((version, error))


def fresh(*staged: str, strays: tuple[str, ...] = ()) -> FakeAdapterLink:
    """Shards that all hold `staged`, and some `strays`."""
    shards = FakeShards()
    shards.staged = {*staged, *strays}
    link = FakeAdapterLink(shards)
    link.staged, link.strays = frozenset(staged), frozenset(strays)
    return link


@contextlib.asynccontextmanager
async def adapters(
    root: Path, link: FakeAdapterLink, max_cpu_loras: int = 4
) -> AsyncIterator[tuple[Adapters, AdapterPlaces, Engine]]:
    places, engine = AdapterPlaces(2, max_cpu_loras), Engine()
    it = Adapters(AdapterSettings(True, 2, max_cpu_loras, dirs=(root,)), places, link, engine, Metrics())
    async with asyncio.timeout(TIMEOUT_S):
        yield it, places, engine
        it._registry.check_integrity()
        await it.close()


async def settled(link: FakeAdapterLink, staged: set[str]) -> None:
    while link.shards.staged != staged:  # noqa: ASYNC110 (nothing tells of it)
        await asyncio.sleep(0.001)


async def test_a_version_in_use_is_loaded_again_from_its_copy_though_the_folder_has_changed(tmp_path: Path) -> None:
    old = version_of(make_adapter(tmp_path / "a", "old"))
    async with adapters(tmp_path, fresh()) as (it, places, _):
        ref = await it.acquire("a")
        places.retain(ref.version)  # As its sequences do.
        make_adapter(tmp_path / "a", "new")
        link = fresh()
        await it.restore(link)
        await settled(link, {old})
        (recipe,) = link.loads
        assert version_of(Path(recipe.sources[0].path)) == recipe.sources[0].sha256 == old
        assert places.is_loaded(old)
        places.release(ref.version)
        it.release(ref)


async def test_what_every_shard_still_holds_is_not_loaded_again_and_strays_are_dropped(tmp_path: Path) -> None:
    a, b = (version_of(make_adapter(tmp_path / name, name)) for name in "ab")
    first = fresh()
    async with adapters(tmp_path, first) as (it, places, _):
        for name in "ab":
            await it.load(name, "", False)
        places.retain(b)
        link = fresh(a, "unknown", strays=(b, "other"))
        await it.restore(link)
        await settled(link, {a, b})
        assert [recipe.version for recipe in link.loads] == [b], "one shard lacked it"
        assert sorted(link.unloads) == ["other", "unknown"]
        assert places.is_loaded(a) and places.is_loaded(b)
        places.release(b)


async def test_what_nobody_uses_is_loaded_when_somebody_does(tmp_path: Path) -> None:
    """Loaded by call: its version stays, whatever happened to the folder."""
    old = version_of(make_adapter(tmp_path / "a", "old"))
    async with adapters(tmp_path, fresh()) as (it, places, _):
        await it.load("a", "", False)
        make_adapter(tmp_path / "a", "new")
        link = fresh()
        await it.restore(link)
        assert not places.is_loaded(old) and not link.loads
        ref = await it.acquire("a")
        assert ref.version == old
        it.release(ref)


async def test_a_load_that_the_old_shards_did_not_finish_is_done_by_the_new_ones(tmp_path: Path) -> None:
    version = version_of(make_adapter(tmp_path / "a"))

    async def for_ever(recipe: AdapterRecipe) -> None:
        await asyncio.Event().wait()

    first = fresh()
    first.before_load = for_ever
    async with adapters(tmp_path, first) as (it, _, engine):
        call = asyncio.create_task(it.load("a", "", False))
        while not first.loads:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        link = fresh()
        await it.restore(link)
        assert (await call).version == version and link.shards.staged == {version}
        assert engine.failed == []


async def test_shards_that_outlived_their_router_drop_what_the_new_one_does_not_know(tmp_path: Path) -> None:
    version = version_of(make_adapter(tmp_path / "a"))
    link = fresh(version, "other")
    link.unload_s = 0.05  # A load in between must not be undone.
    async with adapters(tmp_path, link) as (it, _, _):
        await it.load("a", "", False)
        await asyncio.sleep(0.1)
        assert link.shards.staged == {version}


@pytest.mark.parametrize("num_callers", [1, 4])
async def test_callers_that_leave_while_a_folder_is_read_leave_nothing_behind(
    tmp_path: Path, num_callers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_adapter(tmp_path / "a")
    gate = threading.Event()
    async with adapters(tmp_path, fresh()) as (it, _, _):
        copy = it._folders.copy
        monkeypatch.setattr(it._folders, "copy", lambda *arguments: (gate.wait(TIMEOUT_S), copy(*arguments))[1])
        callers = [asyncio.create_task(it.acquire("a")) for _ in range(num_callers)]
        callers.append(asyncio.create_task(it.load("b", "a", False)))  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
        gate.set()
        while it._readings or list(it._folders._copies.iterdir()):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert it._registry._versions == {} and it._turns == {}
