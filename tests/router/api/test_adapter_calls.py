"""Adapters over the wire, with scripted shards whose tokens depend on the version that a row is bound to."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import grpc
import pytest
from cohort.v1 import adapter_pb2
from cohort.v1 import generation_pb2 as pb

from router.adapter_link import AdapterLinkBroken, AdapterRecipe, AdapterRefused
from router.adapters import Adapters
from router.errors import StartupError
from tests.fake_shards import FakeAdapterLink, hashed_token
from tests.router.adapter_files import make_adapter, version_of
from tests.router.api.edge import TIMEOUT_S, Edge, edge, failure, plain, streamed

PROMPT = (9, 10, 11)
NOT_FOUND, REFUSED = grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION


@contextlib.asynccontextmanager
async def serving(
    root: Path, max_loras: int = 2, step_s: float = 0.0, info: dict[str, Any] | None = None, **settings: object
) -> AsyncIterator[Edge]:
    """An edge with LoRA on and `root` as its adapter folder."""
    facts = {"max_loras": max_loras, "max_lora_rank": 16, **(info or {})}
    options = {"enable_lora": True, "max_loras": max_loras, "adapter_dirs": (str(root),), **settings}
    async with edge(step_s, facts, **options) as server:
        yield server
        await server.assert_idle()


def known(server: Edge) -> Adapters:
    assert server.application._adapters is not None
    return server.application._adapters


def copies(server: Edge) -> list[Path]:
    """Private copies on disk."""
    return list(known(server)._folders._copies.iterdir())


def link(server: Edge) -> FakeAdapterLink:
    return server.link.adapters


def ask(adapter: str, seed: int = 5, max_tokens: int = 6, **fields: object) -> pb.GenerateRequest:
    output = pb.OutputOptions(return_token_ids=True)
    return plain(max_tokens, adapter=adapter, sampling=pb.SamplingParams(seed=seed), output=output, **fields)


def right(version: str, seed: int = 5, max_tokens: int = 6) -> list[int]:
    """The tokens of this version; empty: the base model."""
    tokens = list(PROMPT)
    for _ in range(max_tokens):
        tokens.append(hashed_token(seed, tuple(tokens), version))
    return tokens[len(PROMPT) :]


async def tokens(server: Edge, request: pb.GenerateRequest) -> list[int]:
    answer = await server.generation.Generate(request, timeout=TIMEOUT_S)
    return list(answer.sequences[0].token_ids)


async def load(server: Edge, name: str, path: str = "", pin: bool = False) -> adapter_pb2.Adapter:
    request = adapter_pb2.LoadAdapterRequest(name=name, path=path, pin=pin)
    answer: adapter_pb2.LoadAdapterResponse = await server.adapters.LoadAdapter(request, timeout=TIMEOUT_S)
    return answer.adapter


def unload(server: Edge, name: str, wait: bool = False) -> Awaitable[object]:
    request = adapter_pb2.UnloadAdapterRequest(name=name, wait=wait)
    call: Awaitable[object] = server.adapters.UnloadAdapter(request, timeout=TIMEOUT_S)
    return call


async def listed(server: Edge) -> dict[str, adapter_pb2.Adapter]:
    answer = await server.adapters.ListAdapters(adapter_pb2.ListAdaptersRequest(), timeout=TIMEOUT_S)
    assert [a.name for a in answer.adapters] == sorted(a.name for a in answer.adapters)
    return {adapter.name: adapter for adapter in answer.adapters}


async def until(condition: object) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():  # type: ignore[operator]  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_requests_with_and_without_adapters_share_a_batch_and_each_is_right(tmp_path: Path) -> None:
    versions = {"": ""} | {name: version_of(make_adapter(tmp_path / name, name)) for name in "abc"}
    async with serving(tmp_path) as server:
        names = ["a", "", "b", "c", "a", "", "c"]
        answers = await asyncio.gather(*(tokens(server, ask(name, seed)) for seed, name in enumerate(names)))
        assert answers == [right(versions[name], seed) for seed, name in enumerate(names)]
        assert len({tuple(answer) for answer in answers}) == len(names)
        assert sorted(recipe.version for recipe in link(server).loads) == sorted(versions[name] for name in "abc")


async def test_chat_and_streams_take_an_adapter_too(tmp_path: Path) -> None:
    version = version_of(make_adapter(tmp_path / "a"))
    async with serving(tmp_path) as server:
        events = [event async for event in server.generation.GenerateStream(streamed(ask("a")), timeout=TIMEOUT_S)]
        assert [token for event in events for token in event.delta.token_ids] == right(version)
        message = pb.ChatMessage(role=pb.CHAT_ROLE_USER, content=[pb.ContentPart(text="hello")])
        chat = pb.ChatRequest(messages=[message], adapter="a", stopping=pb.StoppingParams(max_tokens=3))
        assert (await server.generation.Chat(chat, timeout=TIMEOUT_S)).usage.completion_tokens > 0
        assert {row.adapter_slot for step in server.shards.steps for row in step.opened} == {0}


async def test_lora_off_refuses_adapters_at_once_and_base_requests_go_on() -> None:
    """Public bug predibase/lorax#65: it failed late, with an attribute error."""
    async with edge() as server:
        for call in (
            server.generation.Generate(ask("a"), timeout=TIMEOUT_S),
            server.generation.GenerateStream(streamed(ask("a")), timeout=TIMEOUT_S),
            load(server, "a"),
            unload(server, "a"),
            listed(server),
        ):
            error = await failure(call)
            assert error.code() == REFUSED and "--enable-lora" in error.details()
        await server.assert_serves()


async def test_an_unknown_adapter_is_not_found_and_leaves_nothing_behind(tmp_path: Path) -> None:
    make_adapter(tmp_path / "a")
    async with serving(tmp_path) as server:
        for name in ("nobody", "../a", "a/../a", str(tmp_path / "a"), "."):
            error = await failure(server.generation.Generate(ask(name), timeout=TIMEOUT_S))
            assert error.code() == NOT_FOUND and repr(name) in error.details()
        error = await failure(unload(server, "a"))
        assert error.code() == NOT_FOUND, "it is on disk only"
        assert link(server).loads == []


async def test_the_life_of_an_adapter_by_calls(tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "team" / "polite")
    async with serving(tmp_path) as server:
        adapter = await load(server, "p", "team/polite")
        assert (adapter.name, adapter.version, adapter.path) == ("p", version_of(folder), str(folder))
        assert (adapter.rank, adapter.is_pinned, adapter.tier) == (8, False, adapter_pb2.ADAPTER_TIER_HOST)
        assert await tokens(server, ask("p")) == right(version_of(folder))
        assert (await listed(server))["p"].tier == adapter_pb2.ADAPTER_TIER_DEVICE
        await unload(server, "p")
        assert await listed(server) == {}
        await until(lambda: server.shards.staged == set())
        error = await failure(server.generation.Generate(ask("p"), timeout=TIMEOUT_S))
        assert error.code() == NOT_FOUND
        assert (await load(server, "p", str(folder))).version == version_of(folder)
        assert await tokens(server, ask("p")) == right(version_of(folder)), "as before it was unloaded"


async def test_what_lies_on_disk_is_listed_and_loads_by_its_first_request(tmp_path: Path) -> None:
    make_adapter(tmp_path / "a")
    (tmp_path / "no-adapter").mkdir()
    async with serving(tmp_path) as server:
        (only,) = (await listed(server)).values()
        assert (only.name, only.version, only.tier) == ("a", "", adapter_pb2.ADAPTER_TIER_DISK)
        await tokens(server, ask("a"))
        only = (await listed(server))["a"]
        assert (only.version, only.tier) == (version_of(tmp_path / "a"), adapter_pb2.ADAPTER_TIER_DEVICE)


@pytest.mark.parametrize("path", ["../secret", "{tmp}/secret", "link", "a/../../secret"])
async def test_paths_outside_the_adapter_dirs_are_refused(tmp_path: Path, path: str) -> None:
    root = tmp_path / "adapters"
    make_adapter(root / "a")
    make_adapter(tmp_path / "secret")
    (root / "link").symlink_to(tmp_path / "secret")
    async with serving(root) as server:
        error = await failure(load(server, "x", path.format(tmp=tmp_path)))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT and "--adapter-dirs" in error.details()
        assert (await failure(server.generation.Generate(ask("link"), timeout=TIMEOUT_S))).code() == NOT_FOUND
        assert link(server).loads == []


async def test_many_requests_for_one_cold_adapter_load_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = version_of(make_adapter(tmp_path / "a"))
    async with serving(tmp_path) as server:
        folders, copied = known(server)._folders, []
        copy = folders.copy
        monkeypatch.setattr(folders, "copy", lambda folder, *rest: (copied.append(folder), copy(folder, *rest))[1])
        answers = await asyncio.gather(*(tokens(server, ask("a", seed)) for seed in range(30)))
        assert answers == [right(version, seed) for seed in range(30)]
        assert len(copied) == len(link(server).loads) == 1


async def test_a_slow_load_delays_no_base_request_and_no_other_adapter(tmp_path: Path) -> None:
    slow, quick = (version_of(make_adapter(tmp_path / name, name)) for name in ("slow", "quick"))
    gate = asyncio.Event()

    async def before_load(recipe: AdapterRecipe) -> None:
        if recipe.version == slow:
            await gate.wait()

    async with serving(tmp_path, info={"max_num_seqs": 2}) as server:
        link(server).before_load = before_load
        waiting = [asyncio.ensure_future(tokens(server, ask("slow", seed))) for seed in range(5)]
        await until(lambda: link(server).loads)
        for seed in range(5):
            assert await tokens(server, ask("", seed)) == right("", seed)
            assert await tokens(server, ask("quick", seed)) == right(quick, seed)
        assert not any(task.done() for task in waiting)
        assert (await server.load()).num_waiting == 5
        gate.set()
        assert await asyncio.gather(*waiting) == [right(slow, seed) for seed in range(5)]


async def test_a_broken_adapter_fails_only_its_own_requests_with_the_reason_and_can_be_retried(tmp_path: Path) -> None:
    broken, good = (version_of(make_adapter(tmp_path / name, name)) for name in ("broken", "good"))

    async def refuse(recipe: AdapterRecipe) -> None:
        if recipe.version == broken:
            raise AdapterRefused("lora_A of layer 3's q_proj has shape [8, 63], not [8, 64].")

    async with serving(tmp_path) as server:
        link(server).before_load = refuse
        calls = [server.generation.Generate(ask("broken"), timeout=TIMEOUT_S) for _ in range(5)]
        running = asyncio.ensure_future(tokens(server, ask("good", max_tokens=40)))
        for error in [await failure(call) for call in calls]:
            assert error.code() == REFUSED and "q_proj has shape" in error.details()
        assert await running == right(good, max_tokens=40)
        error = await failure(load(server, "other-name", "broken"))
        assert error.code() == REFUSED and "q_proj has shape" in error.details()
        assert set(await listed(server)) == {"broken", "good"}, "the failed call changed nothing"
        assert await server.metric("cohort_request_failure_total", code="FAILED_PRECONDITION") == 5
        # Somebody repairs it.
        repaired = version_of(make_adapter(tmp_path / "broken", "repaired"))
        assert await tokens(server, ask("broken")) == right(repaired)


async def test_a_shard_that_does_not_answer_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.adapter_loading.RETRY_S", 0.001)
    version = version_of(make_adapter(tmp_path / "a"))
    async with serving(tmp_path) as server:

        async def lose(recipe: AdapterRecipe) -> None:
            if len(link(server).loads) < 3:
                raise AdapterLinkBroken("UNAVAILABLE: gone")

        link(server).before_load = lose
        assert await tokens(server, ask("a")) == right(version)


async def test_a_fault_of_the_shards_own_fails_the_requests_without_its_text(tmp_path: Path) -> None:
    make_adapter(tmp_path / "a")

    async def fail(recipe: AdapterRecipe) -> None:
        raise ZeroDivisionError("a secret")

    async with serving(tmp_path) as server:
        link(server).before_load = fail
        error = await failure(server.generation.Generate(ask("a"), timeout=TIMEOUT_S))
        assert error.code() == grpc.StatusCode.INTERNAL and "secret" not in error.details()
        await server.assert_serves()


async def test_a_new_version_serves_new_requests_while_the_old_one_finishes_its_own(tmp_path: Path) -> None:
    old = version_of(make_adapter(tmp_path / "a", "old"))
    async with serving(tmp_path, step_s=0.003) as server:
        await load(server, "a")
        running = asyncio.ensure_future(tokens(server, ask("a", max_tokens=60)))
        await server.until(lambda now: now.num_running == 1)
        new = version_of(make_adapter(tmp_path / "a", "new"))
        assert await tokens(server, ask("a")) == right(old), "until it is loaded again"
        assert (await load(server, "a")).version == new
        assert await tokens(server, ask("a")) == right(new)
        assert not running.done() and (await listed(server))["a"].num_requests == 1
        assert await running == right(old, max_tokens=60)
        await until(lambda: server.shards.staged == {new})
        await until(lambda: len(copies(server)) == 1)


async def test_the_same_content_under_two_names_takes_one_place(tmp_path: Path) -> None:
    version = version_of(make_adapter(tmp_path / "a"))
    async with serving(tmp_path) as server:
        await load(server, "x", "a")
        await load(server, "y", "a")
        assert len(link(server).loads) == 1
        await unload(server, "x")
        assert await tokens(server, ask("y")) == right(version) and len(link(server).loads) == 1


async def test_an_adapter_in_use_is_not_unloaded_unless_one_waits(tmp_path: Path) -> None:
    version = version_of(make_adapter(tmp_path / "a"))
    async with serving(tmp_path, step_s=0.003) as server:
        await load(server, "a")
        running = asyncio.ensure_future(tokens(server, ask("a", max_tokens=80)))
        await server.until(lambda now: now.num_running == 1)
        error = await failure(unload(server, "a"))
        assert error.code() == REFUSED and "in use by 1 request" in error.details()
        waiting = asyncio.ensure_future(unload(server, "a", wait=True))
        refused = await failure(retried_until_leaving(server))
        assert refused.code() == REFUSED and "being unloaded" in refused.details()
        assert (await failure(load(server, "a"))).code() == REFUSED
        assert not running.done() and not waiting.done()
        assert await running == right(version, max_tokens=80)
        await waiting
        await until(lambda: server.shards.staged == set())


async def retried_until_leaving(server: Edge) -> object:
    """The unload that waits is on its way to the server."""
    while True:
        await tokens(server, ask("a", max_tokens=1))


async def test_a_caller_that_stops_waiting_for_an_unload_leaves_the_adapter_as_it_was(tmp_path: Path) -> None:
    make_adapter(tmp_path / "a")
    async with serving(tmp_path, step_s=0.003) as server:
        await load(server, "a")
        running = asyncio.ensure_future(tokens(server, ask("a", max_tokens=80)))
        await server.until(lambda now: now.num_running == 1)
        request = adapter_pb2.UnloadAdapterRequest(name="a", wait=True)
        error = await failure(server.adapters.UnloadAdapter(request, timeout=0.05))
        assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await tokens(server, ask("a", max_tokens=1))
        await running


async def test_pinned_adapters_leave_a_slot_for_others(tmp_path: Path) -> None:
    for name in "abc":
        make_adapter(tmp_path / name, name)
    async with serving(tmp_path) as server:
        assert (await load(server, "a", pin=True)).is_pinned
        error = await failure(load(server, "b", pin=True))
        assert error.code() == REFUSED and "at most 1 may be" in error.details()
        for name in "abcbc":
            await tokens(server, ask(name))
        assert (await listed(server))["a"].tier == adapter_pb2.ADAPTER_TIER_DEVICE
        assert not (await load(server, "a")).is_pinned, "loaded again without the pin"
        assert (await load(server, "b", pin=True)).is_pinned


@pytest.mark.parametrize("name", ["", "x" * 257])
async def test_a_name_has_one_to_256_bytes(tmp_path: Path, name: str) -> None:
    make_adapter(tmp_path / "a")
    async with serving(tmp_path) as server:
        error = await failure(load(server, name, "a"))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT and "256" in error.details()


async def test_cancelled_requests_free_what_they_held_even_while_their_adapter_loads(tmp_path: Path) -> None:
    make_adapter(tmp_path / "a")
    gate = asyncio.Event()

    async def before_load(recipe: AdapterRecipe) -> None:
        await gate.wait()

    async with serving(tmp_path) as server:
        link(server).before_load = before_load
        for timeout in (0.02, 0.05):
            error = await failure(server.generation.Generate(ask("a"), timeout=timeout))
            assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await server.assert_idle()
        assert (await listed(server))["a"].num_requests == 0
        gate.set()
        await tokens(server, ask("a"))
        assert len(link(server).loads) == 1


async def test_modules_of_the_command_line_are_loaded_before_anybody_asks(tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "elsewhere" / "x")
    (tmp_path / "adapters").mkdir()
    async with serving(tmp_path / "adapters", lora_modules=(f"mine={folder}",)) as server:
        await server.application.load_adapters()
        assert (await listed(server))["mine"].tier == adapter_pb2.ADAPTER_TIER_HOST
        assert await tokens(server, ask("mine")) == right(version_of(folder))


async def test_a_module_that_cannot_be_loaded_ends_the_start(tmp_path: Path) -> None:
    make_adapter(tmp_path / "x")
    (tmp_path / "x" / "adapter_config.json").unlink()
    async with serving(tmp_path, lora_modules=(f"mine={tmp_path}/x",)) as server:
        with pytest.raises(StartupError, match=r"--lora-modules mine=.*adapter_config.json"):
            await server.application.load_adapters()


async def test_shards_without_lora_do_not_fit_a_router_with_it(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="--enable-lora"):
        async with serving(tmp_path, info={"max_loras": 0}):
            pass


async def test_two_hundred_adapters_over_eight_slots_by_zipf_are_all_right_and_leave_nothing(tmp_path: Path) -> None:
    versions = [version_of(make_adapter(tmp_path / f"a{n}", f"a{n}")) for n in range(200)]
    chance = random.Random(3)
    picks = chance.choices(range(200), [1 / (n + 1) for n in range(200)], k=300)
    async with serving(tmp_path, max_loras=8, max_cpu_loras=16) as server:
        most = asyncio.Semaphore(24)

        async def one(seed: int, n: int) -> bool:
            async with most:
                return await tokens(server, ask(f"a{n}", seed)) == right(versions[n], seed)

        assert all(await asyncio.gather(*(one(seed, n) for seed, n in enumerate(picks))))
        await server.assert_idle()
        adapters = await listed(server)
        tiers = [adapter.tier for adapter in adapters.values()]
        assert tiers.count(adapter_pb2.ADAPTER_TIER_DEVICE) == 8
        assert len(server.shards.staged or ()) <= 16
        assert sum(adapter.num_requests for adapter in adapters.values()) == 0
        await until(lambda: len(copies(server)) <= 16)
        known(server)._registry.check_integrity()


async def test_what_adapters_do_shows_in_the_metrics(tmp_path: Path) -> None:
    for name in "ab":
        make_adapter(tmp_path / name, name)
    async with serving(tmp_path, step_s=0.002) as server:
        for name in "aab":
            await tokens(server, ask(name))
        assert await server.metric("cohort_adapter_requests_total", adapter="a") == 2
        assert await server.metric("cohort_adapter_generation_tokens_total", adapter="a") == 12
        assert await server.metric("cohort_adapter_load_seconds_count") == 2
        assert await server.metric("cohort_adapters", tier="device") == 2
        running = asyncio.ensure_future(tokens(server, ask("a", max_tokens=50)))
        labels = {"max_lora": "2", "running_lora_adapters": "a", "waiting_lora_adapters": ""}
        async with asyncio.timeout(TIMEOUT_S):
            while await server.metric("vllm:lora_requests_info", **labels) < 1e9:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await running
        await unload(server, "a")
        assert server.metrics.registry.get_sample_value("cohort_adapter_requests_total", {"adapter": "a"}) is None
        assert await server.metric("cohort_adapters", tier="device") == 1


async def test_copies_are_gone_when_the_server_is(tmp_path: Path) -> None:
    make_adapter(tmp_path / "a")
    async with serving(tmp_path) as server:
        await tokens(server, ask("a"))
        folder = known(server)._folders._copies
        assert copies(server)
    assert not folder.exists()
