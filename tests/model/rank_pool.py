"""Processes that stay up for a whole test session, one gloo group per world size."""

from __future__ import annotations

import datetime
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from model.parallel import TensorParallel

LIMIT_S = 100


class RankPool:
    """Calls functions once per rank; world size 1 runs in this process."""

    def __init__(self, world_size: int) -> None:
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        if world_size == 1:
            return
        context = mp.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            args = (rank, world_size, os.path.join(self._folder.name, "store"), theirs)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: object) -> list[Any]:
        """What `function(parallel, *args)` returned on each rank, in order."""
        if not self._connections:
            return [function(TensorParallel(), *args)]
        for connection in self._connections:
            connection.send((function, args))
        answers = []
        for rank, connection in enumerate(self._connections):
            assert connection.poll(LIMIT_S), f"rank {rank} does not answer"
            answer, error = connection.recv()
            assert error is None, f"rank {rank}: {error}"
            answers.append(answer)
        return answers

    def close(self) -> None:
        """Ends the processes."""
        for connection, process in zip(self._connections, self._processes, strict=True):
            connection.close()
            process.join(10)
            process.kill()
            process.join()
            process.close()
        if self._processes:
            self._folder.cleanup()


def _serve(rank: int, world_size: int, store: str, connection: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=LIMIT_S)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size, timeout=timeout
    )
    parallel = TensorParallel(rank, world_size)
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            return
        try:
            connection.send((function(parallel, *args), None))
        except BaseException:
            connection.send((None, traceback.format_exc()))
