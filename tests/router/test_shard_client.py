"""The gRPC link against scripted shards on unix sockets."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from cohort.shard.v1 import shard_pb2

from router.engine import Engine
from router.engine_client import EngineClient
from router.errors import StartupError, Unavailable
from router.messages import OutputParams, RequestFailed, SequenceDelta
from router.metrics import Metrics
from router.shard_client import GrpcShardLink, ShardLost
from router.step import FillTokens, OpenRow, ScheduledRow, Step
from tests.fake_shard_server import FakeShardServer
from tests.fake_shards import INFO, FakeShards
from tests.router.test_engine import read, tokens
from tests.router.test_scheduler import Words, expected, submission

TIMEOUT_S = 20


@contextlib.asynccontextmanager
async def shards(folder: Path, world_size: int = 1) -> AsyncIterator[list[FakeShardServer]]:
    info = dataclasses.replace(INFO, world_size=world_size)
    servers = [
        FakeShardServer(f"unix:{folder}/{rank}.sock", FakeShards(info), rank, world_size) for rank in range(world_size)
    ]
    try:
        async with asyncio.timeout(TIMEOUT_S):
            for server in servers:
                await server.start()
            yield servers
    finally:
        for server in servers:
            await server.stop()


@contextlib.asynccontextmanager
async def linked(servers: list[FakeShardServer]) -> AsyncIterator[GrpcShardLink]:
    link = await connect(servers)
    try:
        yield link
    finally:
        await link.close()


async def connect(servers: list[FakeShardServer], timeout_s: float = TIMEOUT_S) -> GrpcShardLink:
    return await GrpcShardLink.connect([server.address for server in servers], "router-1", timeout_s)


def opening(slot: int, num_logprobs: int = -1) -> OpenRow:
    return OpenRow(slot, 3, 2**64 - 1 - slot, 0.5, 7, 0.25, 2, num_logprobs, (5, 9))


def first_step() -> Step:
    """Three rows of three tokens, with no, two and one place of log-probabilities; the middle one does not sample."""
    fills = [FillTokens(slot, 0, (10 + slot, 20, 30)) for slot in range(3)]
    rows = [ScheduledRow(0, 0, 3, True, (1,)), ScheduledRow(1, 0, 2, False, (2,)), ScheduledRow(2, 0, 3, True, (3, 4))]
    return Step(1, [], [opening(0), opening(1, 2), opening(2, 1)], fills, rows)


async def test_steps_and_results_cross_the_link_unchanged(tmp_path: Path) -> None:
    async with shards(tmp_path) as servers, linked(servers) as link:
        assert link.info == servers[0].shards.info
        twin = FakeShards(link.info)
        second = Step(2, [1], [opening(5, 0)], [FillTokens(5, 0, (1,))], [ScheduledRow(5, 0, 1, True, (2,))])
        for step in (first_step(), second):
            link.send(step)
            assert await link.receive() == twin.execute(step)
        assert servers[0].shards.steps == [first_step(), second]
        assert servers[0].hellos[0].router_id == "router-1"


async def test_a_result_is_handed_out_when_the_slowest_rank_has_answered(tmp_path: Path) -> None:
    async with shards(tmp_path, world_size=3) as servers:
        gate = asyncio.Event()

        async def wait(step_id: int) -> None:
            await gate.wait()

        servers[2].before_step = wait
        async with linked(servers) as link:
            link.send(first_step())
            receiving = asyncio.create_task(link.receive())
            while not (servers[0].shards.steps and servers[1].shards.steps):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.02)
            assert not receiving.done()
            gate.set()
            assert (await receiving) == FakeShards().execute(first_step())


async def test_out_of_memory_on_any_rank_is_the_steps_result(tmp_path: Path) -> None:
    async with shards(tmp_path, world_size=2) as servers:
        servers[1].shards.out_of_memory_at = {1}
        async with linked(servers) as link:
            link.send(first_step())
            result = await link.receive()
            assert result.is_out_of_memory and [row.sampled for row in result.rows] == [None] * 3


async def test_a_row_that_is_not_finite_shifts_no_other_rows_token(tmp_path: Path) -> None:
    async with shards(tmp_path) as servers:
        rows = [ScheduledRow(slot, 0, 3, True, (slot + 1,)) for slot in range(3)]
        step = dataclasses.replace(first_step(), scheduled=rows)
        twin = FakeShards()
        for fake in (twin, servers[0].shards):
            fake.poison = lambda row, scheduled: scheduled.slot == 1
        async with linked(servers) as link:
            link.send(step)
            result = await link.receive()
            assert result == twin.execute(step)
            assert [row.is_finite for row in result.rows] == [True, False, True]


async def test_an_engine_over_two_shards_gives_every_request_its_tokens(tmp_path: Path) -> None:
    async with shards(tmp_path, world_size=2) as servers, linked(servers) as link:
        client = EngineClient()
        engine = Engine(link, lambda skip: Words(), Metrics(), client.deliver, run_ahead=2)
        client.attach(engine)
        task = asyncio.create_task(engine.run())
        output = OutputParams(num_logprobs=2)
        requests = [submission(key, num_prompt=7 * key, max_tokens=6, output=output) for key in range(1, 13)]
        answers = await asyncio.gather(*(read(client.submit(request)) for request in requests))
        assert [tokens(events) for events in answers] == [expected(request) for request in requests]
        logprobs = [p for event in answers[0] if isinstance(event, SequenceDelta) for p in event.logprobs]
        assert [p.logprob for p in logprobs] == [-0.5] * 6 and logprobs[0].top == ((0, -1.0), (1, -2.0))
        assert servers[0].shards.steps == servers[1].shards.steps
        task.cancel()


async def raising(step_id: int) -> None:
    if step_id == 3:
        raise RuntimeError("CUDA error: an illegal memory access")


async def test_a_step_that_fails_ends_requests_with_unavailable_and_names_the_rank(tmp_path: Path) -> None:
    async with shards(tmp_path, world_size=2) as servers:
        servers[1].before_step = raising
        async with linked(servers) as link:
            client = EngineClient()
            engine = Engine(link, lambda skip: Words(), Metrics(), client.deliver)
            client.attach(engine)
            task = asyncio.create_task(engine.run())
            last = (await read(client.submit(submission(1, max_tokens=50))))[-1]
            assert isinstance(last, RequestFailed) and isinstance(last.error, Unavailable)
            with pytest.raises(ShardLost, match="shard 1 was lost: INTERNAL"):
                await task
            late = await read(client.submit(submission(2)))
            assert isinstance(late[0], RequestFailed) and isinstance(late[0].error, Unavailable)


async def test_a_shard_that_is_gone_is_noticed_while_nothing_runs_and_told_again(tmp_path: Path) -> None:
    async with shards(tmp_path, world_size=2) as servers, linked(servers) as link:
        await servers[1].stop()
        for _ in range(2):
            with pytest.raises(ShardLost, match="shard 1"):
                await link.receive()


def renumber(result: shard_pb2.StepResult) -> None:
    result.step_id += 1


def shorten(result: shard_pb2.StepResult) -> None:
    result.is_finite = b"\x01"


def lengthen(result: shard_pb2.StepResult) -> None:
    result.token_ids += bytes(4)


def tear(result: shard_pb2.StepResult) -> None:
    result.token_ids = result.token_ids[:-1]


def drop_token(result: shard_pb2.StepResult) -> None:
    result.token_ids = result.token_ids[:-4]


def add_logprob(result: shard_pb2.StepResult) -> None:
    result.logprobs += bytes(4)


CHANGES = [renumber, shorten, lengthen, tear, drop_token, add_logprob]


@pytest.mark.parametrize("change", CHANGES)
async def test_an_answer_that_does_not_fit_its_step_ends_the_link_and_hangs_nobody(
    tmp_path: Path, change: Callable[[shard_pb2.StepResult], None]
) -> None:
    async with shards(tmp_path) as servers, linked(servers) as link:
        servers[0].change_answer = change
        link.send(first_step())
        with pytest.raises(ShardLost, match="step"):
            await link.receive()


async def test_the_rank_whose_answer_does_not_fit_is_named_whoever_answers_last(tmp_path: Path) -> None:
    async with shards(tmp_path, world_size=2) as servers:

        async def last(step_id: int) -> None:
            while not servers[0].shards.steps:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)

        servers[0].change_answer, servers[1].before_step = shorten, last
        async with linked(servers) as link:
            link.send(first_step())
            with pytest.raises(ShardLost, match="shard 0 was lost"):
                await link.receive()


async def test_connecting_waits_for_a_socket_that_comes_late_and_a_model_that_loads(tmp_path: Path) -> None:
    async with shards(tmp_path, world_size=2) as servers:
        await servers[1].stop()
        servers[0].is_loaded = False
        connecting = asyncio.create_task(connect(servers))
        await asyncio.sleep(0.3)
        assert not connecting.done()
        servers[0].is_loaded = True
        await servers[1].start()
        await (await connecting).close()


async def test_the_wait_for_loading_ends_in_time_and_says_why(tmp_path: Path) -> None:
    async with shards(tmp_path) as servers:
        servers[0].is_loaded = False
        with pytest.raises(StartupError, match=r"0\.sock does not answer: the model is still loading"):
            await connect(servers, timeout_s=0.3)


async def test_the_wait_for_loading_can_be_cancelled(tmp_path: Path) -> None:
    async with shards(tmp_path) as servers:
        servers[0].is_loaded = False
        connecting = asyncio.create_task(connect(servers))
        await asyncio.sleep(0.05)
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting


async def test_a_shard_that_never_answers_hello_ends_the_start_in_time(tmp_path: Path) -> None:
    async with shards(tmp_path) as servers:
        servers[0].is_silent = True
        with pytest.raises(StartupError, match="in time"):
            await connect(servers, timeout_s=0.3)


async def test_a_second_router_is_told_that_it_was_refused(tmp_path: Path) -> None:
    async with shards(tmp_path) as servers, linked(servers):
        with pytest.raises(StartupError, match="refused the stream: router router-1 is served"):
            await connect(servers)


DIFFERENT = [("model_fingerprint", "other"), ("block_size", 8), ("num_blocks", 3), ("dtype", "bfloat16")]
ALONE = [("link_version", 99, "link version 99"), ("rank", 1, "rank 1 of 1"), ("world_size", 4, "rank 0 of 4")]


@pytest.mark.parametrize(("name", "value"), DIFFERENT)
async def test_shards_that_disagree_are_refused_by_the_facts_name(tmp_path: Path, name: str, value: object) -> None:
    async with shards(tmp_path, world_size=2) as servers:
        servers[1].facts = {name: value}
        with pytest.raises(StartupError, match=f"disagree on {name}: .* at .*0.sock, {value} at .*1.sock"):
            await connect(servers)


@pytest.mark.parametrize(("name", "value", "text"), ALONE)
async def test_a_shard_that_does_not_fit_is_refused(tmp_path: Path, name: str, value: int, text: str) -> None:
    async with shards(tmp_path) as servers:
        servers[0].facts = {name: value}
        with pytest.raises(StartupError, match=text):
            await connect(servers)


async def test_addresses_in_the_wrong_order_are_refused(tmp_path: Path) -> None:
    async with shards(tmp_path, world_size=2) as servers:
        with pytest.raises(StartupError, match="list every rank once, in order"):
            await connect(servers[::-1])


async def test_a_proxy_for_web_traffic_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, suffix in itertools.product(("http_proxy", "https_proxy", "grpc_proxy"), ("", "upper")):
        monkeypatch.setenv(name.upper() if suffix else name, "http://127.0.0.1:9")
    async with shards(tmp_path) as servers, linked(servers) as link:
        link.send(first_step())
        await link.receive()
