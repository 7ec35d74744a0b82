"""The server as a child process: started, watched until it is ready, stopped."""

import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
NUM_KEPT_LINES = 30
SHUTDOWN_S = 20.0
PORT = re.compile(r"(?<!\w)port\"?[=:] ?(\d+)")
METRICS_PORT = re.compile(r"(?<!\w)metrics_port\"?[=:] ?(\d+)")


class ServerFailed(Exception):
    """The server did not become ready; the text says why and ends with its last lines."""


class Ports(NamedTuple):
    """Where a ready server listens on this machine."""

    grpc: int
    metrics: int


def ports_in(line: str) -> Ports | None:
    """Return the ports that a log line announces, or None when it is not the line of a ready server."""
    port, metrics_port = PORT.search(line), METRICS_PORT.search(line)
    if "ready" not in line or port is None or metrics_port is None:
        return None
    return Ports(int(port[1]), int(metrics_port[1]))


class ServerProcess:
    """A running `python -m router serve` on free ports of 127.0.0.1; a context manager that stops it."""

    def __init__(self, model_dir: Path, num_shards: int) -> None:
        """Start the server, which answers only after `wait_until_ready`."""
        command = [sys.executable, "-m", "router", "serve", "--model", str(model_dir)]
        command += ["--tensor-parallel-size", str(num_shards)]
        command += ["--host", "127.0.0.1", "--port", "0", "--metrics-port", "0"]
        self._lines: deque[str] = deque(maxlen=NUM_KEPT_LINES)
        self._ports: Ports | None = None
        self._has_news = threading.Event()
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            # A group of its own: Ctrl-C reaches this client only, which then stops the server once.
            process_group=0,
        )
        self._reader = threading.Thread(target=self._read_lines, daemon=True)
        self._reader.start()

    def __enter__(self) -> "ServerProcess":
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the server."""
        self.stop()

    def wait_until_ready(self, timeout_s: float, progress: Callable[[float, str], None]) -> Ports:
        """Return the ports; meanwhile call `progress` with the seconds so far and the server's latest line.

        Raises:
            ServerFailed: the server ended, or was not ready after `timeout_s` seconds.
        """
        started = time.monotonic()
        while self._ports is None:
            waited_s = time.monotonic() - started
            if self._process.poll() is not None:
                self._reader.join(timeout=2)
                raise ServerFailed(self._failure(f"The server ended with exit code {self._process.returncode}"))
            if waited_s > timeout_s:
                raise ServerFailed(self._failure(f"The server was not ready after {timeout_s:.0f} s"))
            progress(waited_s, self._lines[-1] if self._lines else "")
            self._has_news.wait(0.2)
            self._has_news.clear()
        return self._ports

    def last_lines(self) -> str:
        """Return the last lines that the server wrote, indented."""
        return "\n".join(f"  | {line}" for line in list(self._lines))

    def stop(self) -> int:
        """Ask the server to end, wait for it, and return its exit code; kill it when it does not end."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(SHUTDOWN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(timeout=2)
        if self._process.stdout is not None and not self._reader.is_alive():
            self._process.stdout.close()
        return self._process.returncode

    def _read_lines(self) -> None:
        assert self._process.stdout is not None
        # tqdm ends its lines with a carriage return, which text mode reads as a line end too.
        for line in self._process.stdout:
            if not (text := line.strip()):
                continue
            self._lines.append(text)
            self._ports = self._ports or ports_in(text)
            self._has_news.set()

    def _failure(self, reason: str) -> str:
        if not self._lines:
            return f"{reason} and wrote nothing."
        return f"{reason}. Its last lines:\n{self.last_lines()}"
