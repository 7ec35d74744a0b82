"""The serving process: listens, connects to the shards, runs the engine, and ends in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf import empty_pb2

from router.api.calls import Call, Calls
from router.api.health import HealthService
from router.api.reflection import reflection_handler
from router.application import Application, open_application
from router.chat import ChatTemplates
from router.config import RouterConfig
from router.errors import StartupError
from router.launcher import ShardGroup
from router.logs import event
from router.metrics import Metrics
from router.metrics_http import MetricsServer
from router.model_folder import ModelFacts
from router.ports import join
from router.readiness import Readiness
from router.request import MAX_MESSAGE_BYTES
from router.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

SERVICES = ("cohort.v1.GenerationService", "cohort.v1.ModelService", "cohort.v1.AdapterService")
SHARD_LOST_GRACE_S = 2.0  # for running calls to end by themselves after a shard died
LAST_LINES_GRACE_S = 5.0  # for a shard's end to be reported after its link broke
CUT_GRACE_S = 1.0
SERVER_OPTIONS = [
    ("grpc.so_reuseport", 0),  # Otherwise a second server shares the port silently.
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A client that pings through a long silent prefill must not be cut off with too_many_pings.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
]


class ShardFailure(Exception):
    """A shard ended or its link broke; the text has its last lines."""


class _Stopped(Exception):
    """A signal asked us to stop."""


class Server:
    """One `serve`. The shards, if they are ours, are started before it is made; `run` ends them."""

    def __init__(
        self,
        config: RouterConfig,
        facts: ModelFacts,
        tokenizer: Tokenizer,
        templates: ChatTemplates,
        shards: ShardGroup | None,
    ) -> None:
        self._config = config
        self._facts = facts
        self._tokenizer = tokenizer
        self._templates = templates
        self._shards = shards
        self._readiness = Readiness()
        self._metrics = Metrics(config.model_name, config.vllm_metric_aliases)
        self._calls = Calls(self._metrics)
        self._services = _Services(self._calls, self._readiness)
        self._stop = asyncio.Event()
        self._started_s = time.monotonic()

    async def run(self) -> None:
        """Serves until a signal asks for the end.

        Raises StartupError if it cannot listen, ShardFailure if a shard ends or cannot be reached.
        """
        self._catch_signals()
        async with contextlib.AsyncExitStack() as stack:
            if self._shards is not None:
                stack.push_async_callback(asyncio.to_thread, self._shards.stop)
            metrics_port = self._open_metrics(stack)
            port = await self._listen(stack)
            ended = asyncio.create_task(self._ended(), name="ended")
            stack.callback(ended.cancel)
            with contextlib.suppress(_Stopped):
                application = await _unless(ended, self._connect())
                stack.push_async_callback(application.close)
                self._announce(port, metrics_port)
                await self._serve(application, ended)

    async def _serve(self, application: Application, ended: asyncio.Task[None]) -> None:
        engine = asyncio.create_task(application.run(), name="engine")
        try:
            await asyncio.wait((engine, ended), return_when=asyncio.FIRST_COMPLETED)
            if not engine.done() and isinstance(ended.exception(), _Stopped):
                await self._drain(engine)
            elif not engine.done() or engine.exception() is not None:
                await self._fail(engine, ended)
        finally:
            engine.cancel()
            await asyncio.wait((engine,))

    async def _drain(self, engine: asyncio.Task[None]) -> None:
        """Lets running calls finish for the configured time, then ends them."""
        timeout_s = self._config.shutdown_timeout
        event(logger, "shutting down: running calls may finish", timeout_s=timeout_s)
        self._readiness.set_unready("the server is shutting down")
        idle = asyncio.create_task(self._calls.wait_idle(timeout_s))
        await asyncio.wait((idle, engine), return_when=asyncio.FIRST_COMPLETED)
        if not (idle.done() and idle.result()):
            self._calls.cut("the server is shutting down")
            await self._calls.wait_idle(CUT_GRACE_S)
        idle.cancel()

    async def _fail(self, engine: asyncio.Task[None], ended: asyncio.Task[None]) -> None:
        """Ends every call and raises ShardFailure with the best account of what happened."""
        self._readiness.set_unready("a shard failed")
        if not await self._calls.wait_idle(SHARD_LOST_GRACE_S):
            self._calls.cut("a shard failed")
            await self._calls.wait_idle(CUT_GRACE_S)
        await asyncio.wait((ended,), timeout=LAST_LINES_GRACE_S if self._shards is not None else 0)
        if ended.done() and isinstance(failure := ended.exception(), ShardFailure):
            raise failure
        error = engine.exception() if engine.done() else None
        raise ShardFailure(str(error)) from error

    async def _connect(self) -> Application:
        started_s = time.monotonic()
        addresses = list(self._config.shard_addresses) if self._shards is None else self._shards.addresses
        application = await open_application(
            self._config, self._facts, self._tokenizer, self._templates, addresses, self._readiness, self._metrics
        )
        self._metrics.startup_phase("shards", time.monotonic() - started_s)
        self._services.open(application.handlers(self._calls))
        return application

    async def _ended(self) -> None:
        """Raises _Stopped at a signal and ShardFailure when a shard of ours ends."""
        stop = asyncio.create_task(self._stop.wait())
        waiting: set[asyncio.Task[Any]] = {stop}
        if self._shards is not None:
            waiting.add(asyncio.create_task(self._shards.wait_exit()))
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
        if stop in done:
            raise _Stopped
        raise ShardFailure(str(done.pop().result()))

    def _open_metrics(self, stack: contextlib.AsyncExitStack) -> int:
        if self._config.metrics_port < 0:
            return -1
        server = MetricsServer(self._metrics.registry, self._config.host, self._config.metrics_port)
        stack.push_async_callback(asyncio.to_thread, server.close)
        return server.port

    async def _listen(self, stack: contextlib.AsyncExitStack) -> int:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        health = HealthService(self._readiness, SERVICES)
        server.add_generic_rpc_handlers((health.handlers(self._calls), reflection_handler(SERVICES), self._services))
        address = join(self._config.host, self._config.port)
        try:
            port = server.add_insecure_port(address)
        except RuntimeError as error:  # Since 1.60; older ones return 0.
            raise StartupError(f"cannot listen on {address}; choose another --host or --port") from error
        if port == 0:
            raise StartupError(f"cannot listen on {address}; choose another --host or --port")
        await server.start()
        stack.push_async_callback(server.stop, CUT_GRACE_S)
        return port

    def _announce(self, port: int, metrics_port: int) -> None:
        self._readiness.set_ready()
        seconds = time.monotonic() - self._started_s
        self._metrics.startup_phase("total", seconds)
        host, name = self._config.host, self._config.model_name
        metrics = f"metrics on http://{join(host, metrics_port)}/metrics" if metrics_port >= 0 else "metrics off"
        text = f"ready: {name} on {join(host, port)} (gRPC), {metrics}"
        event(logger, text, port=port, metrics_port=metrics_port, startup_s=round(seconds, 3))

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stop.is_set():
            os._exit(128 + number)  # Asked twice: at once. The shards see their parent go and leave too.
        self._stop.set()


class _Services(grpc.GenericRpcHandler):
    """The public services; until they are open every call of theirs is UNAVAILABLE."""

    def __init__(self, calls: Calls, readiness: Readiness) -> None:
        self._calls = calls
        self._readiness = readiness
        self._handlers: list[grpc.GenericRpcHandler] = []

    def open(self, handlers: list[grpc.GenericRpcHandler]) -> None:
        """Serves through `handlers` from now on."""
        self._handlers = handlers

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The handler of a call, None for one that is not served."""
        for handler in self._handlers:
            if (method := handler.service(details)) is not None:
                return method
        service = details.method.strip("/").rpartition("/")[0]
        if self._handlers or service not in SERVICES:
            return None
        return self._calls.unary(f"{service}/loading", empty_pb2.Empty, self._refuse)

    async def _refuse(self, request: empty_pb2.Empty, call: Call) -> empty_pb2.Empty:
        self._readiness.check()
        return request


async def _unless(ended: asyncio.Task[None], work: Coroutine[Any, Any, Result]) -> Result:
    """`work`'s result; if `ended` comes first, cancels the work and raises what `ended` raised."""
    task = asyncio.create_task(work)
    await asyncio.wait((task, ended), return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        task.cancel()
        await asyncio.wait((task,))
        await ended
    return task.result()
