"""Staging in host memory: loads once, beside everything else, and forgets what nobody waits for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import cast

import pytest

from model.errors import AdapterError
from model.lora_adapter import LoraSlices
from shard_server.adapters import AdapterRecipe, StagedAdapters

LIMIT_S = 20


class Slices:
    rank, num_bytes = 4, 100


class Disk:
    """Reads versions; those in `gates` wait, those in `broken` fail."""

    def __init__(self) -> None:
        self.gates: dict[str, threading.Event] = {}
        self.broken: set[str] = set()
        self.reads: list[str] = []

    def __call__(self, recipe: AdapterRecipe) -> LoraSlices:
        self.reads.append(recipe.version)
        if gate := self.gates.get(recipe.version):
            assert gate.wait(LIMIT_S)
        if recipe.version in self.broken:
            raise AdapterError("lora_A is missing")
        return cast("LoraSlices", Slices())


def recipe(version: str) -> AdapterRecipe:
    return AdapterRecipe(version, ())


@pytest.fixture
async def disk() -> AsyncIterator[Disk]:
    disk = Disk()
    yield disk
    for gate in disk.gates.values():
        gate.set()


async def reading(disk: Disk, count: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        while len(disk.reads) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_one_load_serves_all_who_ask_and_later_ones_find_it(disk: Disk) -> None:
    staged = StagedAdapters(disk)
    answers = await asyncio.gather(*(staged.load(recipe("a")) for _ in range(5)))
    assert await staged.load(recipe("a")) is answers[0] is answers[4] is staged.get("a")
    assert disk.reads == ["a"] and staged.versions == ["a"]


async def test_a_slow_load_holds_up_neither_the_loop_nor_another_load(disk: Disk) -> None:
    staged = StagedAdapters(disk)
    disk.gates["slow"] = threading.Event()
    slow = asyncio.create_task(staged.load(recipe("slow")))
    await reading(disk, 1)
    await asyncio.wait_for(staged.load(recipe("quick")), LIMIT_S)
    assert not slow.done() and staged.versions == ["quick"]
    disk.gates["slow"].set()
    await slow
    assert staged.versions == ["quick", "slow"]


async def test_a_failed_load_leaves_nothing_and_may_be_tried_again(disk: Disk) -> None:
    staged = StagedAdapters(disk)
    disk.broken.add("a")
    for _ in range(2):
        with pytest.raises(AdapterError, match="lora_A is missing"):
            await staged.load(recipe("a"))
    assert staged.get("a") is None
    disk.broken.clear()
    await staged.load(recipe("a"))
    assert disk.reads == ["a"] * 3 and staged.versions == ["a"]


async def test_unloading_waits_for_a_load_under_way(disk: Disk) -> None:
    staged = StagedAdapters(disk)
    disk.gates["a"] = threading.Event()
    load = asyncio.create_task(staged.load(recipe("a")))
    await reading(disk, 1)
    unload = asyncio.create_task(staged.unload("a"))
    await asyncio.sleep(0.01)
    assert not unload.done()
    disk.gates["a"].set()
    await asyncio.gather(load, unload)
    assert staged.versions == []
    await staged.unload("never there")


@pytest.mark.parametrize("stays", [False, True])
async def test_a_load_that_nobody_waits_for_any_more_is_dropped(disk: Disk, stays: bool) -> None:
    staged = StagedAdapters(disk)
    disk.gates["a"] = threading.Event()
    calls = [asyncio.create_task(staged.load(recipe("a"))) for _ in range(2)]
    await reading(disk, 1)
    for call in calls[stays:]:
        call.cancel()
    await asyncio.sleep(0)
    disk.gates["a"].set()
    await asyncio.gather(*calls, return_exceptions=True)
    async with asyncio.timeout(LIMIT_S):
        while staged._loadings:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert staged.versions == (["a"] if stays else [])
