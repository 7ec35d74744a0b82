"""Spawns the shard processes of this machine and reports their ends; a small process without grpc or torch.

It is started before the router makes any gRPC object, so that no process is ever forked beside gRPC's threads, and in a
session of its own, so that a terminal's Ctrl-C reaches the router alone. Each child holds a pipe to its parent: when
the router dies the supervisor's standard input ends, when the supervisor dies the shards' does, and they leave.

Standard input: JSON lines `{"commands": [[argv of rank 0], ...], "env": {...}, "group": g}`. Each starts a group of
shards; those of the group before are killed first. Its end ends the shards.
Standard output: one JSON line per event, `{"group": g, "rank": r, "pid": p}` at each start and
`{"group": g, "rank": r, "returncode": c, "last_lines": [...]}` at each end. The shards' own output goes to standard
error.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from typing import BinaryIO

LAST_LINES = 20
TERM_GRACE_S = 5.0


class Shard:
    """One shard process and the thread that carries its output."""

    def __init__(
        self, group: int, rank: int, argv: list[str], env: dict[str, str], is_terminal: bool, report: Reporter
    ) -> None:
        self._rank = rank
        self._facts: dict[str, object] = {"group": group, "rank": rank}
        self._report = report
        self._is_terminal = is_terminal
        self._last_lines: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        # A shard draws a progress bar if its standard error is a terminal, so rank 0 is given one where we have one.
        reader, writer = os.openpty() if is_terminal else os.pipe()
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=writer, stderr=writer, env={**os.environ, **env}, close_fds=True
        )
        os.close(writer)
        report.send({**self._facts, "pid": self._process.pid})
        self._thread = threading.Thread(target=self._carry, args=(os.fdopen(reader, "rb", buffering=0),), daemon=True)
        self._thread.start()

    def _carry(self, output: BinaryIO) -> None:
        pending = b""
        with output:
            while chunk := _read(output):
                if self._is_terminal:
                    _write_through(chunk)
                *lines, pending = (pending + chunk.replace(b"\r", b"\n")).split(b"\n")
                for line in lines:
                    self._keep(line)
        self._keep(pending)
        returncode = self._process.wait()
        self._report.send({**self._facts, "returncode": returncode, "last_lines": list(self._last_lines)})

    def _keep(self, line: bytes) -> None:
        if not line.strip():
            return
        self._last_lines.append(line.decode(errors="replace"))
        if not self._is_terminal:
            _write_through(b"[shard %d] %s\n" % (self._rank, line))

    def signal(self, number: int) -> None:
        """Sends a signal unless the process has ended."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def join(self, timeout_s: float) -> bool:
        """Whether the process has ended, its last lines reported, within `timeout_s`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


class Reporter:
    """Writes events to the router, whole lines, from any thread."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def send(self, event: dict[str, object]) -> None:
        """Writes one line; a router that is gone is no error, since our input ends with it."""
        with contextlib.suppress(BrokenPipeError), self._lock:
            self._stream.write(json.dumps(event).encode() + b"\n")
            self._stream.flush()


def _read(output: BinaryIO) -> bytes:
    try:
        return output.read(65536)
    except OSError:  # A terminal whose other side closed.
        return b""


def _write_through(data: bytes) -> None:
    with contextlib.suppress(OSError):  # If nobody reads it any more the shards must not stall for that.
        os.write(sys.stderr.fileno(), data)


def _stop(shards: list[Shard], numbers: tuple[int, ...]) -> None:
    for number in numbers:
        for shard in shards:
            shard.signal(number)
        have_ended = [shard.join(TERM_GRACE_S) for shard in shards]
        if all(have_ended):
            return


def main() -> int:
    """Starts groups as ordered until standard input ends, then ends the shards."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A TERM meant for the whole pod must not cut running streams: the router drains and then closes our input.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    report = Reporter(sys.stdout.buffer)
    has_terminal = sys.stderr.isatty()
    shards: list[Shard] = []
    try:
        while line := sys.stdin.buffer.readline():
            order = json.loads(line)
            _stop(shards, (signal.SIGKILL,))  # What is left of a broken group waits for the rank that is gone.
            shards.clear()
            for rank, argv in enumerate(order["commands"]):
                is_shown = has_terminal and rank == 0
                shards.append(Shard(order["group"], rank, argv, order["env"], is_shown, report))
    finally:
        _stop(shards, (signal.SIGTERM, signal.SIGKILL))
    return 0


if __name__ == "__main__":
    sys.exit(main())
