"""Servers as a user starts them: `python -m router serve` in a process of its own."""

from __future__ import annotations

import collections
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
from cohort.v1 import generation_pb2_grpc, model_pb2, model_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 120


class Server:
    """A `python -m router serve` process on free ports."""

    def __init__(self, *flags: str, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "router",
                "serve",
                "--port",
                "0",
                "--metrics-port",
                "0",
                "--host",
                "127.0.0.1",
                *flags,
            ],
            cwd=ROOT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: collections.deque[str] = collections.deque(maxlen=400)
        self._is_over = threading.Event()
        self._ready = threading.Event()
        self.port = self.metrics_port = 0
        self.channel: grpc.Channel | None = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if "ready" in line and (port := re.search(r"\bport=(\d+)", line)):
                self.port = int(port[1])
                metrics_port = re.search(r"\bmetrics_port=(\d+)", line)
                self.metrics_port = int(metrics_port[1]) if metrics_port else 0
                self._ready.set()
        self.process.stdout.close()
        self._is_over.set()
        self._ready.set()

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_ready(self) -> Server:
        assert self._ready.wait(START_TIMEOUT_S), self.output
        assert self.port, f"the server ended before it was ready:\n{self.output}"
        self.channel = grpc.insecure_channel(
            f"127.0.0.1:{self.port}",
            options=[("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)],
        )
        self.generation = generation_pb2_grpc.GenerationServiceStub(self.channel)
        self.model = model_pb2_grpc.ModelServiceStub(self.channel)
        return self

    def wait_end(self, timeout_s: float = 60) -> int:
        """The exit code, all output read."""
        code = self.process.wait(timeout_s)
        assert self._is_over.wait(timeout_s)
        return code

    def stop(self) -> int:
        """Ends it in order; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.wait_end()
        finally:
            self.kill()

    def kill(self) -> None:
        """Ends it at once, whatever it was doing."""
        self.process.kill()
        self.wait_end()
        if self.channel is not None:
            self.channel.close()

    def load(self) -> model_pb2.GetLoadResponse:
        return self.model.GetLoad(model_pb2.GetLoadRequest(), timeout=30)

    def assert_idle(self, timeout_s: float = 30) -> None:
        """Waits until nothing runs, nothing waits and every KV block is free."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            load = self.load()
            if not (load.num_running or load.num_waiting or load.kv_cache_usage):
                return
            time.sleep(0.02)
        raise AssertionError(f"not idle: {self.load()}\n{self.output}")


class Servers:
    """Starts a server the first time that its flags are asked for."""

    def __init__(self) -> None:
        self._servers: dict[tuple[str, ...], Server] = {}

    def get(self, *flags: str) -> Server:
        if flags not in self._servers:
            self._servers[flags] = Server(*flags)
        return self._servers[flags].wait_ready()

    def stop(self) -> None:
        codes = {flags: server.stop() for flags, server in self._servers.items()}
        assert set(codes.values()) <= {0}, codes
