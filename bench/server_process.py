"""A Cohort server as a child process on this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from types import TracebackType

import grpc
from grpc_health.v1 import health_pb2

ROOT = Path(__file__).resolve().parent.parent
READY_SERVICE = "cohort.v1.GenerationService"
STOP_GRACE_S = 30.0


class ServerFailed(Exception):
    """The server ended or did not become ready; the text has its last lines."""


class ServerProcess:
    """`python -m router serve` on free ports, ready to answer; a context manager that stops it."""

    def __init__(self, model_dir: Path, flags: list[str], num_threads: int, ready_timeout_s: float = 180.0) -> None:
        self.address = f"127.0.0.1:{_free_port()}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in stop)
        command = [sys.executable, "-m", "router", "serve", "--model", str(model_dir), "--host", "127.0.0.1"]
        self._metrics_port = _free_port()
        command += ["--port", self.address.rpartition(":")[2], "--metrics-port", str(self._metrics_port), *flags]
        environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads)}
        start = time.perf_counter()
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log
        )
        try:
            self._wait_until_ready(start + ready_timeout_s)
        except BaseException:
            self.stop()
            raise
        self.start_to_ready_s = time.perf_counter() - start

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _wait_until_ready(self, give_up_at: float) -> None:
        with grpc.insecure_channel(self.address, [("grpc.enable_http_proxy", 0)]) as channel:
            while not _is_serving(channel):
                if self._process.poll() is not None:
                    raise ServerFailed(f"the server ended with {self._process.returncode}:\n{self.last_lines()}")
                if time.perf_counter() > give_up_at:
                    raise ServerFailed(f"the server did not become ready in time:\n{self.last_lines()}")
                time.sleep(0.1)

    def last_lines(self, num_bytes: int = 4000) -> str:
        """The end of what the server wrote."""
        self._log.seek(0)
        return self._log.read()[-num_bytes:].decode(errors="replace")

    def cpu_s(self) -> float:
        """Processor seconds that the server and its shards have used so far."""
        return sum(_cpu_s(pid) for pid in _family(self._process.pid))

    def shard_pids(self) -> list[int]:
        """The processes of its shards that live now, in order of their start."""
        return [pid for pid in sorted(_family(self._process.pid)) if "shard_server" in _command(pid)]

    def held(self) -> tuple[int, int]:
        """Open files and resident bytes of the router's process."""
        folder = Path(f"/proc/{self._process.pid}")
        pages = int((folder / "statm").read_text().split()[1])
        return len(list((folder / "fd").iterdir())), pages * os.sysconf("SC_PAGE_SIZE")

    def counted(self, *names: str) -> tuple[float, ...]:
        """What its metrics say of these counters, over all labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics_port}/metrics", timeout=10) as response:
            lines = response.read().decode().splitlines()
        values = [(line.partition(" ")[0].partition("{")[0], line.rpartition(" ")[2]) for line in lines]
        return tuple(sum(float(value) for found, value in values if found == name) for name in names)

    def num_open_calls(self) -> int:
        """RPCs that began and have not ended, by its metrics."""
        started, handled = self.counted("grpc_server_started_total", "grpc_server_handled_total")
        return int(started - handled)

    def stop(self) -> None:
        """Asks the server to drain and waits for its end; kills it if it does not."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def _is_serving(channel: grpc.Channel) -> bool:
    check: grpc.UnaryUnaryMultiCallable[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]
    check = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    try:
        answer = check(health_pb2.HealthCheckRequest(service=READY_SERVICE), timeout=5)
    except grpc.RpcError:
        return False
    return answer.status == health_pb2.HealthCheckResponse.SERVING


def _family(root: int) -> list[int]:
    """`root` and all its descendants, from /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    family = [root]
    for pid in family:
        family += children.get(pid, [])
    return family


def _cpu_s(pid: int) -> float:
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def _stat(pid: int) -> list[str]:
    # The fields after the name in parentheses: state, parent, ...; see proc_pid_stat(5).
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
