"""Starts this machine's shard group through the supervisor and watches it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from router.config import RouterConfig

ROOT = Path(__file__).resolve().parent.parent
STOP_GRACE_S = 12.0  # more than the supervisor's two rounds of signals


@dataclasses.dataclass(frozen=True, slots=True)
class ShardExit:
    """A shard process that ended by itself."""

    rank: int
    returncode: int  # negative: the signal that ended it
    last_lines: list[str]

    def __str__(self) -> str:
        how = f"signal {-self.returncode}" if self.returncode < 0 else f"exit code {self.returncode}"
        return "\n  ".join([f"shard {self.rank} ended with {how}; its last lines:", *self.last_lines])


class ShardGroup:
    """The shard processes of one model on this machine, reachable at `addresses` in order of rank."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, addresses: list[str]) -> None:
        self._process = process
        self._folder = folder
        self._exits: asyncio.Queue[ShardExit] = asyncio.Queue()
        self._watch: asyncio.Task[None] | None = None
        self.addresses = addresses
        self.pids: dict[int, int] = {}

    @classmethod
    def start(cls, config: RouterConfig) -> ShardGroup:
        """Spawns the supervisor, which spawns the shards. Call it before any gRPC object exists."""
        folder = Path(tempfile.mkdtemp(prefix="cohort-"))
        try:
            addresses = [f"unix:{folder}/shard-{rank}.sock" for rank in range(config.tensor_parallel_size)]
            process = subprocess.Popen(
                [sys.executable, "-m", "router.supervisor"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=ROOT,
                start_new_session=True,
            )
            assert process.stdin is not None
            process.stdin.write(json.dumps(_order(config, addresses)).encode() + b"\n")
            process.stdin.flush()
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return cls(process, folder, addresses)

    async def wait_exit(self) -> ShardExit:
        """Waits until a shard ends by itself."""
        if self._watch is None:
            self._watch = asyncio.create_task(self._read_events(), name="supervisor-events")
        return await self._exits.get()

    async def _read_events(self) -> None:
        assert self._process.stdout is not None
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), self._process.stdout
        )
        while line := await reader.readline():
            event: dict[str, Any] = json.loads(line)
            if "pid" in event:
                self.pids[event["rank"]] = event["pid"]
            else:
                self._exits.put_nowait(ShardExit(event["rank"], event["returncode"], event["last_lines"]))
        self._exits.put_nowait(ShardExit(-1, self._process.wait(), ["the supervisor ended"]))

    def stop(self) -> None:
        """Ends the shards and the supervisor and removes the sockets. May be called again, and from any thread."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # The shards see their pipe close and leave by themselves.
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def _order(config: RouterConfig, addresses: list[str]) -> dict[str, object]:
    rendezvous = f"127.0.0.1:{_free_port()}"
    program = [sys.executable, "-m", "shard_server"]
    shared = _shared_flags(config)
    commands = [
        [*program, "--rank", str(rank), "--listen", address, "--rendezvous", rendezvous, *shared]
        for rank, address in enumerate(addresses)
    ]
    # Ranks of one machine talk over loopback, whatever the host's name resolves to.
    return {"commands": commands, "env": {"GLOO_SOCKET_IFNAME": "lo"}}


def _shared_flags(config: RouterConfig) -> list[str]:
    values: dict[str, object] = {
        "model": config.model,
        "world-size": config.tensor_parallel_size,
        "dtype": config.dtype,
        "device": config.device,
        "max-model-len": config.max_model_len,
        "max-num-seqs": config.max_num_seqs,
        "max-num-batched-tokens": config.max_num_batched_tokens,
        "num-blocks-override": config.num_blocks_override,
        "kv-cache-memory-bytes": config.kv_cache_memory_bytes,
        "gpu-memory-utilization": config.gpu_memory_utilization,
        "cuda-graph-sizes": ",".join(config.cuda_graph_sizes),
        "attention-backend": config.attention_backend,
        "load-format": config.load_format,
        "max-loras": config.max_loras,
        "max-lora-rank": config.max_lora_rank,
        "log-level": config.log_level,
        "log-format": config.log_format,
    }
    switches = ["--exit-with-parent"]
    switches += ["--enforce-eager"] if config.enforce_eager else []
    switches += ["--enable-lora"] if config.enable_lora else []
    return [text for name, value in values.items() for text in (f"--{name}", str(value))] + switches


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
