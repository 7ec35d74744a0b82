"""Runs a function once per rank, in processes of their own that share a gloo group."""

from __future__ import annotations

import datetime
import os
import traceback
from collections.abc import Callable
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from model.parallel import TensorParallel

LIMIT_S = 60


def run_ranks(function: Callable[..., Any], world_size: int, folder: Path, *args: object) -> list[Any]:
    """What `function(parallel, *args)` returned on each rank; raises RuntimeError with a rank's traceback."""
    context = mp.get_context("spawn")
    queue: Queue[tuple[int, Any, str | None]] = context.Queue()
    call = (function, world_size, str(folder / "store"), queue, args)
    processes = [context.Process(target=_rank, args=(rank, *call)) for rank in range(world_size)]
    try:
        for process in processes:
            process.start()
        answers = [queue.get(timeout=LIMIT_S) for _ in processes]
    finally:
        for process in processes:
            process.join(5)
            process.kill()
            process.join()
            process.close()
        queue.close()
        queue.join_thread()
    for rank, _, error in answers:
        if error is not None:
            raise RuntimeError(f"rank {rank}: {error}")
    return [answer for _, answer, _ in sorted(answers, key=lambda item: item[0])]


def _rank(
    rank: int, function: Callable[..., Any], world_size: int, store: str, queue: Queue[Any], args: tuple[object, ...]
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=LIMIT_S),
        )
        with torch.inference_mode():
            answer = function(TensorParallel(rank, world_size), *args)
        dist.destroy_process_group()
        queue.put((rank, answer, None))
    except BaseException:
        queue.put((rank, None, traceback.format_exc()))
