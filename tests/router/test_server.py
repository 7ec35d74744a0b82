"""The life of a server: loading, ready, draining, and the loss of its shards. The shards are scripted ones."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cohort.v1 import generation_pb2_grpc, model_pb2, model_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from router.config import RouterConfig
from router.errors import StartupError
from router.server import Server, ShardFailure
from tests.fake_shard_server import FakeShardServer
from tests.fake_shards import INFO, FakeShards
from tests.router.api.edge import DEMO, FACTS, TEMPLATES, TIMEOUT_S, TOKENIZER, details, failure, plain, streamed

READY = "cohort.v1.GenerationService"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclasses.dataclass
class Life:
    server: Server
    task: asyncio.Task[None]
    shard: FakeShardServer
    channel: grpc.aio.Channel

    def __post_init__(self) -> None:
        self.generation: Any = generation_pb2_grpc.GenerationServiceStub(self.channel)

    async def status(self, service: str) -> int:
        stub: Any = health_pb2_grpc.HealthStub(self.channel)
        request = health_pb2.HealthCheckRequest(service=service)
        return int((await stub.Check(request, timeout=TIMEOUT_S, wait_for_ready=True)).status)

    async def ready(self) -> None:
        await self.until(SERVING)

    async def until(self, status: int) -> None:
        """Waits for a state of readiness."""
        async with asyncio.timeout(TIMEOUT_S):
            while await self.status(READY) != status:  # noqa: ASYNC110 (tests of watching are elsewhere)
                await asyncio.sleep(0.001)

    def signal(self) -> None:
        """As if SIGTERM came."""
        self.server._on_signal(signal.SIGTERM)

    async def end(self) -> BaseException | None:
        """What `run` raised."""
        await asyncio.wait((self.task,), timeout=TIMEOUT_S)
        assert self.task.done()
        return self.task.exception()


@contextlib.asynccontextmanager
async def life(folder: Path, is_loaded: bool = True, step_s: float = 0.0, **settings: object) -> AsyncIterator[Life]:
    """A server that was just started."""
    shards = FakeShards(dataclasses.replace(INFO, vocab_size=TOKENIZER.vocab_size))
    shard = FakeShardServer(f"unix:{folder}/shard", shards)
    shard.is_loaded = is_loaded
    shard.before_step = lambda step_id: asyncio.sleep(step_s)
    await shard.start()
    config = RouterConfig(  # type: ignore[arg-type]
        **{"model": str(DEMO), "host": "127.0.0.1", "port": free_port(), "metrics_port": -1}
        | {"shard_addresses": (shard.address,)}
        | settings
    )
    server = Server(config, FACTS, TOKENIZER, TEMPLATES, None)
    task = asyncio.create_task(server.run())
    async with grpc.aio.insecure_channel(f"127.0.0.1:{config.port}") as channel:
        yield Life(server, task, shard, channel)
    if not task.done():
        server._stop.set()
        await asyncio.wait((task,), timeout=TIMEOUT_S)
    await shard.stop()


async def test_while_the_model_loads_the_server_lives_but_is_not_ready(tmp_path: Path) -> None:
    async with life(tmp_path, is_loaded=False) as server:
        assert await server.status("") == SERVING
        assert await server.status(READY) == NOT_SERVING
        unary = await failure(server.generation.Generate(plain(), timeout=TIMEOUT_S))
        stream = await failure(server.generation.GenerateStream(streamed(plain()), timeout=TIMEOUT_S))
        model: Any = model_pb2_grpc.ModelServiceStub(server.channel)
        for error in (unary, stream, await failure(model.GetModel(model_pb2.GetModelRequest(), timeout=TIMEOUT_S))):
            assert error.code() == grpc.StatusCode.UNAVAILABLE and "loading" in error.details()
            assert "RetryInfo" in details(error)
        server.shard.is_loaded = True
        await server.ready()
        answer = await server.generation.Generate(plain(), timeout=TIMEOUT_S)
        assert answer.usage.completion_tokens == 8


async def test_a_signal_while_loading_ends_the_server_at_once(tmp_path: Path) -> None:
    async with life(tmp_path, is_loaded=False) as server:
        await server.status("")
        server.signal()
        assert await server.end() is None


async def test_after_a_signal_streams_finish_and_new_calls_are_refused(tmp_path: Path) -> None:
    async with life(tmp_path, step_s=0.01) as server:
        await server.ready()
        call = server.generation.GenerateStream(streamed(plain(max_tokens=60)), timeout=TIMEOUT_S)
        reading = aiter(call)
        await anext(reading)
        server.signal()
        await server.until(NOT_SERVING)
        assert await server.status("") == SERVING
        refused = await failure(server.generation.Generate(plain(), timeout=TIMEOUT_S))
        assert refused.code() == grpc.StatusCode.UNAVAILABLE and "shutting down" in refused.details()
        events = [event async for event in reading]
        assert events[-1].done.usage.completion_tokens == 60
        assert await server.end() is None


@pytest.mark.parametrize("timeout_s", [0.0, 0.2])
async def test_streams_that_outlast_the_shutdown_timeout_are_ended(tmp_path: Path, timeout_s: float) -> None:
    async with life(tmp_path, step_s=0.05, shutdown_timeout=timeout_s) as server:
        await server.ready()
        call = server.generation.GenerateStream(streamed(plain(max_tokens=120)), timeout=TIMEOUT_S)
        reading = aiter(call)
        await anext(reading)
        server.signal()
        error = await failure(reading)
        assert error.code() == grpc.StatusCode.UNAVAILABLE and "shutting down" in error.details()
        assert await server.end() is None


async def test_a_lost_shard_ends_calls_readiness_and_the_server(tmp_path: Path) -> None:
    async with life(tmp_path, step_s=0.01) as server:
        await server.ready()
        stub: Any = health_pb2_grpc.HealthStub(server.channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=READY), timeout=TIMEOUT_S)
        assert (await watch.read()).status == SERVING
        call = server.generation.GenerateStream(streamed(plain(max_tokens=120)), timeout=TIMEOUT_S)
        reading = aiter(call)
        await anext(reading)
        await server.shard.stop()
        assert (await failure(reading)).code() == grpc.StatusCode.UNAVAILABLE
        assert (await watch.read()).status == NOT_SERVING
        ended = await server.end()
        assert isinstance(ended, ShardFailure) and "shard 0" in str(ended)


async def test_a_shard_that_does_not_fit_ends_the_start(tmp_path: Path) -> None:
    async with life(tmp_path, is_loaded=False) as server:
        server.shard.facts = {"link_version": 99}
        server.shard.is_loaded = True
        ended = await server.end()
        assert isinstance(ended, StartupError) and "link version 99" in str(ended)


async def test_a_second_server_on_the_same_port_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    async with life(tmp_path) as first:
        await first.ready()
        second = Server(first.server._config, FACTS, TOKENIZER, TEMPLATES, None)
        with pytest.raises(StartupError, match="cannot listen"):
            await second.run()
        assert (await first.generation.Generate(plain(), timeout=TIMEOUT_S)).usage.completion_tokens == 8


async def test_reflection_lists_what_is_served(tmp_path: Path) -> None:
    async with life(tmp_path) as server:
        await server.ready()
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(server.channel)
        call = stub.ServerReflectionInfo(timeout=TIMEOUT_S)
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        answer = await call.read()
        names = {service.name for service in answer.list_services_response.service}
        ours = {"cohort.v1.GenerationService", "cohort.v1.ModelService", "cohort.v1.AdapterService"}
        assert names == {*ours, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
        await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol="cohort.v1.GenerationService"))
        assert (await call.read()).file_descriptor_response.file_descriptor_proto
        call.cancel()
