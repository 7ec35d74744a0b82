"""Start, death of a shard, signals and the end, as an operator meets them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from cohort.v1 import generation_pb2 as pb
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.e2e.serving import ROOT, Server

DEMO = str(ROOT / "demo/cohere")
FOREVER = pb.GenerateRequest(
    text="Question: What?\nAnswer:\n", stopping=pb.StoppingParams(max_tokens=200, ignore_eos=True)
)


def stream(server: Server, request: pb.GenerateRequest = FOREVER, timeout: float = 60) -> grpc.Call:
    call: grpc.Call = server.generation.GenerateStream(pb.GenerateStreamRequest(request=request), timeout=timeout)
    return call


def first_delta(call: Iterator[pb.GenerateStreamResponse]) -> None:
    while next(call).WhichOneof("event") != "delta":
        pass


def shard_pids(server: Server) -> list[int]:
    found = subprocess.run(
        ["ps", "-eo", "pid,ppid,args"], check=True, capture_output=True, text=True
    ).stdout.splitlines()[1:]
    rows = [line.split(None, 2) for line in found]
    supervisors = {row[0] for row in rows if int(row[1]) == server.process.pid and "router.supervisor" in row[2]}
    return [int(row[0]) for row in rows if row[1] in supervisors and "shard_server" in row[2]]


def wait_gone(pids: list[int], timeout_s: float = 30) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.05)
    return False


def readiness(server: Server) -> int:
    request = health_pb2.HealthCheckRequest(service="cohort.v1.GenerationService")
    return int(health_pb2_grpc.HealthStub(server.channel).Check(request, timeout=10).status)


@pytest.fixture
def two_shards() -> Iterator[Server]:
    server = Server("--model", DEMO, "--tensor-parallel-size", "2", "--shutdown-timeout", "20").wait_ready()
    yield server
    server.kill()


def test_beyond_the_budget_a_killed_shard_ends_running_calls_and_the_process_with_its_cause() -> None:
    server = Server("--model", DEMO, "--tensor-parallel-size", "2", "--max-restarts", "0").wait_ready()
    try:
        call = stream(server)
        first_delta(call)
        pids = shard_pids(server)
        assert len(pids) == 2
        os.kill(pids[1], signal.SIGKILL)
        killed_s = time.monotonic()
        with pytest.raises(grpc.RpcError) as ended:
            list(call)
        assert ended.value.code() == grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() - killed_s < 25  # 5 s, five times over
        assert server.wait_end() != 0
        assert "shard 1 ended with signal 9" in server.output
        assert wait_gone(pids)
    finally:
        server.kill()


def test_sigterm_lets_streams_finish_refuses_new_work_and_leaves_nothing_behind(two_shards: Server) -> None:
    pids = shard_pids(two_shards)
    call = stream(two_shards)
    first_delta(call)
    two_shards.process.send_signal(signal.SIGTERM)
    events = list(call)
    assert events[-1].WhichOneof("event") == "done" and events[-1].done.usage.completion_tokens == 200
    with pytest.raises(grpc.RpcError) as refused:
        list(stream(two_shards))
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    assert two_shards.wait_end() == 0
    assert wait_gone(pids)


def test_the_death_of_the_router_ends_its_shards(two_shards: Server) -> None:
    pids = shard_pids(two_shards)
    two_shards.process.kill()
    two_shards.wait_end()
    assert wait_gone(pids)


def test_readiness_and_liveness_are_told_apart(two_shards: Server) -> None:
    assert readiness(two_shards) == health_pb2.HealthCheckResponse.SERVING
    live = health_pb2_grpc.HealthStub(two_shards.channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    assert live.status == health_pb2.HealthCheckResponse.SERVING


def test_the_metrics_tell_how_long_the_shards_took_to_start(server: Server) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics", timeout=10) as page:
        text = page.read().decode()
    seconds = re.search(r'^cohort_startup_phase_seconds\{phase="shard_load"\} (.+)$', text, re.MULTILINE)
    assert seconds is not None and 0 < float(seconds[1]) < 600
    assert 'cohort_shard_up{rank="1"} 1.0' in text


def test_a_client_that_goes_away_frees_its_blocks(server: Server) -> None:
    call = stream(server)
    first_delta(call)
    assert server.load().num_running == 1
    call.cancel()
    server.assert_idle()


def test_a_passed_deadline_ends_the_call_and_frees_its_blocks(server: Server) -> None:
    many = [stream(server, timeout=0.2) for _ in range(16)]
    for call in many:
        with pytest.raises(grpc.RpcError) as ended:
            list(call)
        assert ended.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    server.assert_idle()


def test_a_port_in_use_ends_start_up_with_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = Server("--model", DEMO, "--port", str(port))
        assert server.wait_end() != 0
    assert f"{port}" in server.lines[-1] and "in use" in server.lines[-1]
    assert "Traceback" not in server.output


@pytest.mark.parametrize(
    ("break_checkpoint", "sentence"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "safetensors"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
        (lambda folder: edit(folder, '"CohereForCausalLM"', '"LlamaForCausalLM"'), "LlamaForCausalLM"),
        (lambda folder: edit(folder, '"intermediate_size": ', '"intermediate_size": 1'), "mlp"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("[]"), "index"),
    ],
    ids=["no weights", "no tokenizer", "broken config", "unknown architecture", "wrong shape", "broken index"],
)
def test_a_wrong_checkpoint_ends_start_up_with_its_cause(
    tmp_path: Path, break_checkpoint: object, sentence: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    assert callable(break_checkpoint)
    break_checkpoint(folder)
    server = Server("--model", str(folder))
    assert server.wait_end(120) != 0
    assert sentence in server.output
    assert "Traceback" not in server.output


def edit(folder: Path, old: str, new: str) -> None:
    text = (folder / "config.json").read_text()
    assert old in text
    (folder / "config.json").write_text(text.replace(old, new))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_starts_and_stops_each_end_with_zero_while_streams_run() -> None:
    for _ in range(20):
        server = Server("--model", DEMO, "--shutdown-timeout", "0.2").wait_ready()
        threads = [threading.Thread(target=consume, args=(server,)) for _ in range(10)]
        for thread in threads:
            thread.start()
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_end() == 0, server.output
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()


def consume(server: Server) -> None:
    try:
        list(stream(server))
    except grpc.RpcError as error:
        assert error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
