"""How the ranks find each other, agree on facts, and tell each other which of them failed first."""

from __future__ import annotations

import datetime
import json
import logging
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from model.parallel import TensorParallel
from shard_server.config import ShardConfig, split_address
from shard_server.errors import ShardError, StartError

logger = logging.getLogger(__name__)

RENDEZVOUS_TIMEOUT_S = 120.0
LOAD_TIMEOUT_S = 3600.0
POLL_S = 0.05
FAILURE_KEY = "first_failure"


class RankGroup:
    """This process's place among the ranks. A store of rank 0 carries what does not go through collectives."""

    def __init__(self, parallel: TensorParallel, store: Store | None) -> None:
        self.parallel = parallel
        self._store = store

    @classmethod
    def join(cls, config: ShardConfig) -> RankGroup:
        """Meets the other ranks.

        Raises:
            StartError: they were not there in time, or rank 0's port is taken.
        """
        if config.world_size == 1:
            return cls(TensorParallel(), None)
        host, port = split_address(config.rendezvous, "--rendezvous")
        try:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                host,
                port,
                config.world_size,
                is_master=config.rank == 0,
                timeout=datetime.timedelta(seconds=RENDEZVOUS_TIMEOUT_S),
                wait_for_workers=False,
            )
        except (RuntimeError, ValueError) as error:
            task = "listen at" if config.rank == 0 else f"reach rank 0 within {RENDEZVOUS_TIMEOUT_S:.0f} s at"
            raise StartError(f"cannot {task} --rendezvous {config.rendezvous}: {_first_line(error)}") from error
        group = cls(TensorParallel(config.rank, config.world_size), store)
        group._meet("met", config.rank, RENDEZVOUS_TIMEOUT_S)
        group._start_collectives(config)
        return group

    def _start_collectives(self, config: ShardConfig) -> None:
        backend = "gloo" if config.device == "cpu" else "nccl"
        try:
            if backend == "nccl":
                torch.cuda.set_device(config.rank % torch.cuda.device_count())
            dist.init_process_group(
                backend,
                store=self._store,
                rank=config.rank,
                world_size=config.world_size,
                timeout=datetime.timedelta(seconds=config.collective_timeout),
            )
        except RuntimeError as error:
            raise StartError(f"{backend} could not connect the ranks: {_first_line(error)}") from error

    def agree(self, facts: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's facts, in order of rank.

        Raises:
            ShardError: a rank failed, or was not heard of in time.
        """
        if self._store is None:
            return [facts]
        return [json.loads(text) for text in self._meet("facts", json.dumps(facts), LOAD_TIMEOUT_S)]

    def _meet(self, name: str, mine: object, timeout_s: float) -> list[str]:
        """What each rank has put under `name`."""
        assert self._store is not None
        keys = [f"{name}/{rank}" for rank in range(self.parallel.world_size)]
        deadline_s = time.monotonic() + timeout_s
        try:
            self._store.set(keys[self.parallel.rank], str(mine))
            while not self._store.check(keys):
                if failure := self.first_failure():
                    raise ShardError(failure)
                if time.monotonic() > deadline_s:
                    missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                    raise ShardError(f"rank {missing[0]} was not heard of within {timeout_s:.0f} s ({name})")
                time.sleep(POLL_S)
            return [self._store.get(key).decode() for key in keys]
        except RuntimeError as error:  # torch's own errors for a lost store are of this kind
            raise ShardError("rank 0 ended, and with it the ranks' rendezvous") from error

    def report_failure(self, cause: str) -> None:
        """Keeps `cause` for the other ranks if it is the first."""
        if self._store is not None:
            try:
                self._store.compare_set(FAILURE_KEY, "", f"rank {self.parallel.rank} failed first: {cause}")
            except RuntimeError:
                logger.debug("rank 0 is gone, nobody is left to tell")

    def first_failure(self) -> str | None:
        """The text of the rank that failed first, or None."""
        if self._store is None or not self._store.check([FAILURE_KEY]):
            return None
        text: str = self._store.get(FAILURE_KEY).decode()
        return text

    def explain(self, error: BaseException) -> str:
        """One line for an error here, which may only follow from another rank's; tells the others as well."""
        cause = f"{type(error).__name__}: {_first_line(error)}"
        try:
            self.report_failure(cause)
            return self.first_failure() or cause
        except RuntimeError:
            return f"{cause} (rank 0 is gone)"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no further text"
