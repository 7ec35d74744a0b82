"""Shards that die or hang in the middle of streams: nobody who reads one notices."""

from __future__ import annotations

import os
import signal
import urllib.request
from collections.abc import Iterable

import grpc
import pytest
from cohort.v1 import generation_pb2 as pb

from tests.e2e.serving import Server
from tests.e2e.test_lifecycle import DEMO, readiness, shard_pids, stream

LONG = pb.GenerateRequest(
    text="Question: What?\nAnswer:\n",
    sampling=pb.SamplingParams(temperature=1.0, seed=7),
    stopping=pb.StoppingParams(max_tokens=200, ignore_eos=True),
    output=pb.OutputOptions(return_token_ids=True, logprobs=1),
)


def read(events: Iterable[pb.GenerateStreamResponse], ids: list[int], until: int = 10**9) -> list[float]:
    """Adds the tokens' ids until there are so many, or to the end; their log-probabilities."""
    logprobs: list[float] = []
    for event in events:
        ids += event.delta.token_ids
        logprobs += [token.logprob for token in event.delta.logprobs]
        if len(ids) >= until:
            break
    return logprobs


@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_stream_goes_on_with_its_tokens_after_a_shard_died_or_hung(num_shards: int, number: int) -> None:
    flags = ["--model", DEMO, "--tensor-parallel-size", str(num_shards), "--step-timeout", "3"]
    server = Server(*flags).wait_ready()
    try:
        expected: list[int] = []
        logprobs = read(stream(server, LONG), expected)
        assert len(expected) == 200
        call, ids = stream(server, LONG, timeout=120), []  # type: ignore[var-annotated]
        got = read(call, ids, until=5)
        os.kill(shard_pids(server)[-1], number)
        got += read(call, ids)
        assert ids == expected
        assert got == pytest.approx(logprobs, abs=1e-3)
        assert len(list(stream(server, LONG))) > 2
        assert readiness(server) == 1
        text = urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics", timeout=10).read().decode()
        assert "cohort_shard_restarts_total 1.0" in text
        server.assert_idle()
        assert server.stop() == 0
    finally:
        server.kill()


@pytest.mark.timeout(300)
def test_sigterm_while_shards_come_back_lets_the_stream_finish() -> None:
    server = Server("--model", DEMO, "--shutdown-timeout", "60").wait_ready()
    try:
        call, ids = stream(server, LONG, timeout=120), []  # type: ignore[var-annotated]
        read(call, ids, until=5)
        os.kill(shard_pids(server)[0], signal.SIGKILL)
        server.process.send_signal(signal.SIGTERM)
        read(call, ids)
        assert len(ids) == 200
        with pytest.raises(grpc.RpcError):
            list(stream(server, LONG))
        assert server.wait_end() == 0
    finally:
        server.kill()
