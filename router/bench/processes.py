"""Starts client processes, lets them begin together, and collects what they saw."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from router.bench.client import Job, Record

ROOT = Path(__file__).resolve().parent.parent.parent
START_DELAY_S = 0.2  # Time for the start line to reach every process.


class ClientFailed(Exception):
    """A client process ended without its records."""


class ClientProcesses:
    """One process per job, connected and waiting; a context manager that ends them."""

    def __init__(self, jobs: list[Job]) -> None:
        self._processes = [_spawn() for _ in jobs]
        try:
            for process, job in zip(self._processes, jobs, strict=True):
                _tell(process, json.dumps(dataclasses.asdict(job)))
            for process in self._processes:
                if _hear(process) != "ready\n":
                    raise ClientFailed("a client process could not connect to the server")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ClientProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, say: Callable[[str], None] = lambda text: None) -> tuple[float, list[Record]]:
        """Starts all at the same moment; returns it, and the records of all processes."""
        start = time.monotonic() + START_DELAY_S
        for process in self._processes:
            _tell(process, str(start))
        records: list[Record] = []
        for index, process in enumerate(self._processes):
            line = _hear(process)
            if not line:
                raise ClientFailed("a client process ended early")
            records += [Record(**fields) for fields in json.loads(line)]
            say(f"client process {index + 1} of {len(self._processes)} is done")
        return start, records

    def close(self) -> None:
        """Ends processes that still run."""
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


def _spawn() -> subprocess.Popen[str]:
    # A fresh interpreter, never a fork: this process may hold gRPC's threads.
    return subprocess.Popen(
        [sys.executable, "-m", "router.bench.client"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(line + "\n")
        process.stdin.flush()
    except BrokenPipeError as error:
        raise ClientFailed("a client process ended early") from error


def _hear(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()
