"""The whole command against a small server that answers by script."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest
from cohort.v1 import generation_pb2, generation_pb2_grpc, model_pb2, model_pb2_grpc

from router.bench.cli import main

VOCAB_SIZE = 500
Context = grpc.aio.ServicerContext


class ScriptedGeneration(generation_pb2_grpc.GenerationServiceServicer):
    """Sends as many tokens as asked, two in the first message; refuses prompts of the length `refused_len`."""

    def __init__(self, refused_len: int | None = None) -> None:
        self.refused_len = refused_len
        self.under_way = 0
        self.most_under_way = 0
        self.peers: set[str] = set()
        self.requests: list[generation_pb2.GenerateRequest] = []

    async def GenerateStream(
        self, request: generation_pb2.GenerateStreamRequest, context: Context
    ) -> AsyncIterator[generation_pb2.GenerateStreamResponse]:
        self.peers.add(context.peer())
        self.requests.append(request.request)
        if len(request.request.token_ids.ids) == self.refused_len:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many")
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        yield generation_pb2.GenerateStreamResponse(started=generation_pb2.StreamStarted())
        left = request.request.stopping.max_tokens
        while left:
            count = min(2, left) if left == request.request.stopping.max_tokens else 1
            left -= count
            await asyncio.sleep(0.001)
            yield generation_pb2.GenerateStreamResponse(delta=generation_pb2.SequenceDelta(token_ids=[7] * count))
        self.under_way -= 1
        yield generation_pb2.GenerateStreamResponse(done=generation_pb2.StreamDone())


class ScriptedModel(model_pb2_grpc.ModelServiceServicer):
    async def GetLoad(self, request: model_pb2.GetLoadRequest, context: Context) -> model_pb2.GetLoadResponse:
        return model_pb2.GetLoadResponse(is_ready=True)

    async def GetModel(self, request: model_pb2.GetModelRequest, context: Context) -> model_pb2.GetModelResponse:
        geometry = model_pb2.ModelGeometry(vocab_size=VOCAB_SIZE)
        return model_pb2.GetModelResponse(
            model="scripted", geometry=geometry, limits=model_pb2.ModelLimits(max_model_len=100)
        )


async def bench(servicer: ScriptedGeneration, *flags: str) -> int:
    """Runs the command in a thread while the server answers on this loop; returns its exit status."""
    server = grpc.aio.server()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    model_pb2_grpc.add_ModelServiceServicer_to_server(ScriptedModel(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        return await asyncio.to_thread(main, ["--port", str(port), *flags])
    finally:
        await server.stop(None)


async def test_two_processes_stream_every_request_within_the_concurrency(tmp_path: Path) -> None:
    servicer = ScriptedGeneration()
    flags = "--num-prompts 12 --random-input-len 8 --random-output-len 5 --max-concurrency 4 --num-processes 2"
    flags += f" --channels per-client --ignore-eos --num-warmups 1 --save-detailed --result-dir {tmp_path}"
    assert await bench(servicer, *flags.split(), "--result-filename", "r.json") == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["completed"], result["total_output_tokens"], result["total_input_tokens"]) == (12, 60, 96)
    assert result["merged_tokens"] == 12
    assert servicer.most_under_way <= 4
    assert len(servicer.peers) == 5  # Two connections a process, and the warm-up's.
    assert len(servicer.requests) == 13 and all(r.stopping.ignore_eos for r in servicer.requests)
    assert all(request["due"] == pytest.approx(0.0) for request in result["requests"])


async def test_a_poisson_run_sends_requests_when_they_are_due(tmp_path: Path) -> None:
    flags = "--num-prompts 8 --random-input-len 4 --random-output-len 2 --request-rate 40 --num-processes 1"
    flags += f" --save-detailed --result-dir {tmp_path} --result-filename r.json"
    assert await bench(ScriptedGeneration(), *flags.split()) == 0
    requests = json.loads((tmp_path / "r.json").read_text())["requests"]
    dues = [request["due"] for request in requests]
    assert dues == sorted(dues) and len(set(dues)) == 8
    assert all(request["sent"] >= request["due"] - 1e-6 for request in requests)


async def test_refused_requests_are_reported_and_the_status_is_1(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--num-prompts 4 --random-input-len 8 --random-output-len 2 --num-processes 1"
    assert await bench(ScriptedGeneration(refused_len=8), *flags.split()) == 1
    assert "4 x RESOURCE_EXHAUSTED: too many" in capsys.readouterr().out


async def test_requests_longer_than_the_server_takes_are_refused_before_they_are_sent(
    capsys: pytest.CaptureFixture[str],
) -> None:
    servicer = ScriptedGeneration()
    assert await bench(servicer, *["--num-prompts", "2", "--random-input-len", "99", "--random-output-len", "2"]) == 1
    assert "101 tokens, the server takes at most 100" in capsys.readouterr().err
    assert not servicer.requests


def test_no_server_is_one_sentence_and_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        assert main(["--port", str(port), "--ready-check-timeout-sec", "0"]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"bench: 127.0.0.1:{port}: ") and "Traceback" not in captured.err
