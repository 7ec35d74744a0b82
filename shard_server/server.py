"""The gRPC server of one shard: where it listens, its health, and how it ends."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import stat
import sys
import threading
from collections.abc import Callable

import grpc
from cohort.shard.v1 import shard_pb2_grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from model.errors import ModelError
from shard_server import logs
from shard_server.config import ShardConfig
from shard_server.distributed import RankGroup
from shard_server.errors import ShardError, StartError
from shard_server.loader import load
from shard_server.service import ShardService
from shard_server.worker import Worker

logger = logging.getLogger(__name__)

SERVICE = "cohort.shard.v1.ShardService"
OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.so_reuseport", 0),
    # A router may ask often whether a silent stream is still alive.
    ("grpc.http2.min_ping_interval_without_data_ms", 10000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
]
MAX_UNIX_PATH_BYTES = 107  # sun_path of Linux, but for its final zero
STOP_GRACE_S = 0.5
EXIT_WATCHDOG_S = 5.0
EXIT_OK, EXIT_FAILED, EXIT_REFUSED = 0, 1, 2


class ShardServer:
    """Listens from the start, loads beside that, serves until told to stop or a step is beyond recovery."""

    def __init__(self, config: ShardConfig) -> None:
        self._config = config
        self._worker = Worker()
        self._group: RankGroup | None = None
        self._health = health.aio.HealthServicer()
        self._service = ShardService(self._worker, self._step_failed)
        self._exit_code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def run(self) -> int:
        """Serves; returns the process's exit code.

        Raises:
            StartError: the address cannot be had.
        """
        server = await self._listen()
        loading = asyncio.create_task(self._load())
        self._watch_for_the_end()
        code = await self._exit_code
        loading.cancel()
        await server.stop(STOP_GRACE_S)
        return code

    async def _listen(self) -> grpc.aio.Server:
        listen = self._config.listen
        if listen.startswith("unix:"):
            clear_stale_socket(listen.removeprefix("unix:"))
        server = grpc.aio.server(options=OPTIONS)
        shard_pb2_grpc.add_ShardServiceServicer_to_server(self._service, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        await self._health.set(SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
        try:
            port = server.add_insecure_port(listen)
        except RuntimeError:
            port = 0
        if not port:
            raise StartError(f"cannot listen at {listen}; is the address in use, or not this machine's?")
        await server.start()
        address = listen if listen.startswith("unix:") else f"{listen.rpartition(':')[0]}:{port}"
        logger.info("listening at %s, process %d", address, os.getpid())
        return server

    async def _load(self) -> None:
        try:
            runner, facts = await self._worker.submit(lambda: load(self._config, self._join))
        except (ModelError, StartError) as error:
            self._end(EXIT_REFUSED, str(error))
        except ShardError as error:
            self._end(EXIT_FAILED, str(error))
        except Exception as error:
            logger.exception("the model could not be loaded")
            self._end(EXIT_FAILED, self._explain(error))
        else:
            self._service.set_ready(runner, facts, runner.adapters.staged if runner.adapters is not None else None)
            await self._health.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
            logger.info("ready: %s", facts)

    def _join(self) -> RankGroup:
        self._group = RankGroup.join(self._config)
        return self._group

    def _explain(self, error: BaseException) -> str:
        return self._group.explain(error) if self._group else f"{type(error).__name__}: {error}"

    def _step_failed(self, error: BaseException) -> str:
        """Text for the router. With several ranks the others wait in a collective for us, so the process ends."""
        text = f"rank {self._config.rank}: {self._explain(error)}"
        if self._config.world_size > 1:
            self._end(EXIT_FAILED, self._explain(error))
        return text

    def _end(self, code: int, cause: str | None = None) -> None:
        if not self._exit_code.done():
            if cause is not None:
                logs.fatal(self._config.rank, cause)
            self._exit_code.set_result(code)

    def _watch_for_the_end(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end, EXIT_OK)
        if self._config.exit_with_parent:
            end = lambda: loop.call_soon_threadsafe(self._end, EXIT_OK)  # noqa: E731
            threading.Thread(target=_wait_for_parent, args=(end,), daemon=True).start()


def _wait_for_parent(end: Callable[[], object]) -> None:
    """Standard input is a pipe that the parent never writes to; it ends with the parent."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    end()
    threading.Event().wait(EXIT_WATCHDOG_S)
    os._exit(EXIT_FAILED)  # The event loop did not get to it.


def clear_stale_socket(path: str) -> None:
    """Removes what a killed server left at `path`; gRPC itself would also remove a living one's.

    Raises:
        StartError: the path is too long, something else lies there, or a server answers.
    """
    if len(os.fsencode(path)) > MAX_UNIX_PATH_BYTES:
        raise StartError(f"--listen unix:{path} is longer than the {MAX_UNIX_PATH_BYTES} bytes a socket path may have")
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise StartError(f"--listen unix:{path} is no socket; move it away or choose another path")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        else:
            raise StartError(
                f"--listen unix:{path} belongs to a server that is running; stop it or choose another path"
            )
