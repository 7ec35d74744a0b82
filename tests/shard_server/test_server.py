"""Whole shard processes: start, loading, sockets, the ends that an operator meets, and two ranks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from cohort.shard.v1 import shard_pb2, shard_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shard_server.errors import StartError
from shard_server.link import LINK_VERSION
from shard_server.server import clear_stale_socket
from tests.shard_server import checkpoints
from tests.shard_server.steps import Open, Run, ints, step

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 60


class Shard:
    """One shard process; its output goes to a file."""

    def __init__(self, model: Path, folder: Path, rank: int = 0, *flags: str) -> None:
        self.address = f"unix:{folder}/s{rank}.sock"
        self.log = folder / f"log{rank}-{time.monotonic_ns()}"
        argv = ["--model", str(model), "--listen", self.address, "--rank", str(rank), "--dtype", "float32"]
        argv += ["--num-blocks-override", "20", "--num-threads", "1", *flags]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "shard_server", *argv],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**os.environ, "PYTHONPATH": f"{ROOT}/proto", "GLOO_SOCKET_IFNAME": "lo"},
            )
        self.channel = grpc.insecure_channel(self.address)
        self.stub = shard_pb2_grpc.ShardServiceStub(self.channel)

    def wait_ready(self) -> shard_pb2.GetInfoResponse:
        deadline_s = time.monotonic() + LIMIT_S
        while True:
            try:
                return self.stub.GetInfo(shard_pb2.GetInfoRequest(), timeout=LIMIT_S, wait_for_ready=True)
            except grpc.RpcError as error:
                assert error.code() == grpc.StatusCode.UNAVAILABLE, self.output  # type: ignore[attr-defined]
                assert self.process.poll() is None and time.monotonic() < deadline_s, self.output
                time.sleep(0.05)

    def health(self, service: str) -> int:
        request = health_pb2.HealthCheckRequest(service=service)
        return health_pb2_grpc.HealthStub(self.channel).Check(request, timeout=LIMIT_S, wait_for_ready=True).status

    @property
    def output(self) -> str:
        return self.log.read_text()

    def wait_end(self) -> int:
        return self.process.wait(LIMIT_S)

    def close(self) -> None:
        self.channel.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(LIMIT_S)
        assert self.process.stdin is not None
        self.process.stdin.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    checkpoints.make(folder)
    return folder


@pytest.fixture
def start(tmp_path: Path) -> Iterator[type[Shard]]:
    shards: list[Shard] = []

    def make(model: Path, rank: int = 0, *flags: str) -> Shard:
        shards.append(Shard(model, tmp_path, rank, *flags))
        return shards[-1]

    yield make  # type: ignore[misc]
    for shard in shards:
        shard.close()


def execute(shard: Shard, steps: list[shard_pb2.Step], epoch: int = 1) -> grpc.Call:
    hello = shard_pb2.Hello(link_version=LINK_VERSION, epoch=epoch, router_id="test")
    messages = [shard_pb2.ExecuteRequest(hello=hello)] + [shard_pb2.ExecuteRequest(step=one) for one in steps]
    return shard.stub.Execute(iter(messages), timeout=LIMIT_S)


STEPS = [step(1, [Run(0, 0, 3, True, (4,))], [Open(0, [5, 6, 7])]), step(2, [Run(0, 3)]), step(3, [Run(0, 4)])]


def test_a_shard_listens_loads_serves_and_leaves_nothing_behind(model: Path, start: type[Shard]) -> None:
    shard = start(model)
    assert shard.health("") == health_pb2.HealthCheckResponse.SERVING
    info = shard.wait_ready()
    assert shard.health("cohort.shard.v1.ShardService") == health_pb2.HealthCheckResponse.SERVING
    assert (info.num_blocks, info.vocab_size, info.max_model_len) == (20, checkpoints.VOCAB, 256)
    assert set(info.startup_phase_s) == {"rendezvous", "load", "warm_up"}
    tokens = [ints(answer.result.token_ids) for answer in execute(shard, STEPS)][1:]
    expected = checkpoints.greedy(checkpoints.make(model), [5, 6, 7], 3)
    assert tokens == [[token] for token in expected]
    shard.process.send_signal(signal.SIGTERM)
    assert shard.wait_end() == 0
    assert not Path(shard.address.removeprefix("unix:")).exists()
    assert "100 %" in shard.output


def test_a_checkpoint_that_cannot_be_served_ends_with_one_sentence(tmp_path: Path, start: type[Shard]) -> None:
    broken = tmp_path / "broken"
    checkpoints.make(broken)
    (broken / "model.safetensors").unlink()
    shard = start(broken)
    assert shard.wait_end() == 2
    last = shard.output.strip().splitlines()[-1]
    assert last.startswith("FATAL: rank 0: ") and "model.safetensors" in last
    assert "Traceback" not in shard.output


def test_an_unknown_flag_and_a_taken_port_end_with_one_sentence(model: Path, start: type[Shard]) -> None:
    shard = start(model, 0, "--colour", "red")
    assert shard.wait_end() == 2
    assert "FATAL: unrecognized arguments: --colour red" in shard.output
    with socket.create_server(("127.0.0.1", 0)) as taken:
        shard = start(model, 0, "--listen", f"127.0.0.1:{taken.getsockname()[1]}")
        assert shard.wait_end() == 2
    assert "FATAL: rank 0: cannot listen at 127.0.0.1:" in shard.output


def test_a_killed_shards_socket_is_taken_over_but_a_living_ones_is_not(model: Path, start: type[Shard]) -> None:
    first = start(model)
    first.wait_ready()
    second = start(model)
    assert second.wait_end() == 2
    assert "belongs to a server that is running" in second.output
    assert first.wait_ready().num_blocks == 20
    first.process.kill()
    first.wait_end()
    third = start(model)
    third.wait_ready()


def test_a_path_that_is_no_socket_or_too_long_is_refused(tmp_path: Path) -> None:
    plain = tmp_path / "file"
    plain.write_text("kept")
    with pytest.raises(StartError, match="is no socket"):
        clear_stale_socket(str(plain))
    assert plain.read_text() == "kept"
    with pytest.raises(StartError, match="longer than the 107 bytes"):
        clear_stale_socket(f"/tmp/{'x' * 115}")
    clear_stale_socket(str(tmp_path / "new"))


def test_a_shard_ends_with_its_parent(model: Path, start: type[Shard]) -> None:
    shard = start(model, 0, "--exit-with-parent")
    shard.wait_ready()
    assert shard.process.stdin is not None
    shard.process.stdin.close()
    assert shard.wait_end() == 0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def two_ranks(model: Path, start: type[Shard], *flags: str) -> list[Shard]:
    shared = ["--world-size", "2", "--rendezvous", f"127.0.0.1:{free_port()}", "--collective-timeout", "3", *flags]
    return [start(model, rank, *shared) for rank in range(2)]


def test_two_ranks_agree_on_the_fewest_blocks_and_give_the_tokens_of_one(model: Path, start: type[Shard]) -> None:
    shared = ["--world-size", "2", "--rendezvous", f"127.0.0.1:{free_port()}"]
    shards = [start(model, rank, *shared, "--num-blocks-override", str(30 - rank)) for rank in range(2)]
    infos = [shard.wait_ready() for shard in shards]
    assert [(info.rank, info.world_size, info.num_blocks) for info in infos] == [(0, 2, 29), (1, 2, 29)]
    assert infos[0].model_fingerprint == infos[1].model_fingerprint
    calls = [execute(shard, STEPS) for shard in shards]
    answers = [[ints(answer.result.token_ids) for answer in call][1:] for call in calls]
    expected = checkpoints.greedy(checkpoints.make(model), [5, 6, 7], 3)
    assert answers == [[[token] for token in expected], [[], [], []]]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_waits_in_vain_gives_up_and_both_end(model: Path, start: type[Shard], failing: int) -> None:
    """One rank never gets the second step, as after a router's death between two writes."""
    shards = two_ranks(model, start)
    for shard in shards:
        shard.wait_ready()
    calls = [execute(shard, STEPS[: 1 if rank == failing else 2]) for rank, shard in enumerate(shards)]
    other = shards[1 - failing]
    with pytest.raises(grpc.RpcError) as caught:
        list(calls[1 - failing])
    assert caught.value.code() == grpc.StatusCode.INTERNAL  # type: ignore[attr-defined]
    assert other.wait_end() == 1
    assert f"FATAL: rank {1 - failing}: " in other.output


def test_ranks_with_different_settings_end_naming_the_setting(model: Path, start: type[Shard]) -> None:
    shared = ["--world-size", "2", "--rendezvous", f"127.0.0.1:{free_port()}"]
    shards = [start(model, rank, *shared, "--max-num-seqs", str(4 + rank)) for rank in range(2)]
    assert [shard.wait_end() for shard in shards] == [1, 1]
    assert any("rank 1 has max_num_seqs 5, but rank 0 has 4" in shard.output for shard in shards)


def test_a_rank_that_cannot_load_ends_the_others_with_its_cause(
    model: Path, tmp_path: Path, start: type[Shard]
) -> None:
    broken = tmp_path / "broken"
    checkpoints.make(broken)
    (broken / "model.safetensors").unlink()
    shared = ["--world-size", "2", "--rendezvous", f"127.0.0.1:{free_port()}"]
    shards = [start(model, 0, *shared), start(broken, 1, *shared)]
    assert [shard.wait_end() for shard in shards] == [1, 2]
    assert "FATAL: rank 0: rank 1 failed first: " in shards[0].output
