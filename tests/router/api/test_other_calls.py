"""Tokenize, Detokenize, GetModel, GetLoad and health over the wire."""

from __future__ import annotations

import asyncio
import json

import grpc
import pytest
from cohort.v1 import generation_pb2 as pb
from cohort.v1 import model_pb2
from grpc_health.v1 import health_pb2

from tests.router.api.edge import DEMO, TIMEOUT_S, TOKENIZER, details, edge, failure, plain

READY = "cohort.v1.GenerationService"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
TEXT = "What is it?\n\n### héllo \U0001f600"


async def test_tokenize_and_detokenize_are_the_tokenizers() -> None:
    async with edge() as server:
        tokenized = await server.generation.Tokenize(pb.TokenizeRequest(text=TEXT), timeout=TIMEOUT_S)
        assert list(tokenized.token_ids) == TOKENIZER.encode(TEXT)
        bare = pb.TokenizeRequest(text=TEXT, add_special_tokens=False)
        assert (await server.generation.Tokenize(bare, timeout=TIMEOUT_S)).token_ids == tokenized.token_ids[1:]
        back = pb.DetokenizeRequest(token_ids=tokenized.token_ids)
        assert (await server.generation.Detokenize(back, timeout=TIMEOUT_S)).text == TEXT
        back.skip_special_tokens = False
        assert (await server.generation.Detokenize(back, timeout=TIMEOUT_S)).text.endswith(TEXT) and TEXT != ""
        assert (await server.generation.Tokenize(pb.TokenizeRequest(), timeout=TIMEOUT_S)).token_ids == []
        assert (await server.generation.Detokenize(pb.DetokenizeRequest(), timeout=TIMEOUT_S)).text == ""


async def test_their_rules_are_those_of_prompts() -> None:
    async with edge() as server:
        ids = pb.DetokenizeRequest(token_ids=[5, 10**6])
        error = await failure(server.generation.Detokenize(ids, timeout=TIMEOUT_S))
        assert details(error)["BadRequest"].field_violations[0].field == "token_ids[1]"
        error = await failure(server.generation.Tokenize(pb.TokenizeRequest(model="x"), timeout=TIMEOUT_S))
        assert error.code() == grpc.StatusCode.NOT_FOUND
        error = await failure(server.generation.Tokenize(pb.TokenizeRequest(text="a b " * 10**6), timeout=TIMEOUT_S))
        assert details(error)["ErrorInfo"].reason == "CONTEXT_LENGTH_EXCEEDED"


async def test_the_model_is_described_as_it_is_served() -> None:
    config = json.loads((DEMO / "config.json").read_text())
    async with edge() as server:
        model = await server.model.GetModel(model_pb2.GetModelRequest(), timeout=TIMEOUT_S)
        assert model == await server.model.GetModel(model_pb2.GetModelRequest(model="command"), timeout=TIMEOUT_S)
        assert (model.model, model.geometry.model_type) == ("command", "cohere")
        for name in ("hidden_size", "num_hidden_layers", "num_key_value_heads", "vocab_size"):
            assert getattr(model.geometry, name) == config[name]
        info = server.shards.info
        assert (model.block_size, model.num_blocks) == (info.block_size, info.num_blocks - 1)
        assert model.limits.max_kv_tokens == model.block_size * model.num_blocks
        assert (model.limits.max_model_len, model.limits.max_message_bytes) == (info.max_model_len, 32 * 2**20)
        assert list(model.eos_token_ids) == sorted(TOKENIZER.eos_token_ids)
        assert model.default_sampling.temperature == model.default_sampling.top_p == 1
        assert "default" in model.chat_templates
        error = await failure(server.model.GetModel(model_pb2.GetModelRequest(model="x"), timeout=TIMEOUT_S))
        assert error.code() == grpc.StatusCode.NOT_FOUND


async def test_the_limits_that_are_told_are_the_limits_that_hold() -> None:
    async with edge(info={"num_blocks": 9}) as server:
        limits = (await server.model.GetModel(model_pb2.GetModelRequest(), timeout=TIMEOUT_S)).limits
        most = min(limits.max_model_len, limits.max_kv_tokens) - 3  # The prompt has three tokens.
        answer = await server.generation.Generate(plain(max_tokens=most), timeout=TIMEOUT_S)
        assert answer.usage.completion_tokens == most
        error = await failure(server.generation.Generate(plain(max_tokens=most + 1), timeout=TIMEOUT_S))
        assert details(error)["ErrorInfo"].metadata["limit"] == str(limits.max_kv_tokens)
        await server.assert_serves()


async def test_the_load_follows_what_runs_and_waits() -> None:
    async with edge(step_s=0.01, info={"max_num_seqs": 2}) as server:
        assert (await server.load()).is_ready
        call = server.generation.Generate(plain(max_tokens=60, n=2), timeout=TIMEOUT_S)
        other = server.generation.Generate(plain(max_tokens=2), timeout=TIMEOUT_S)
        await server.until(lambda load: load.num_running == 2 and load.num_waiting == 1)
        assert 0 < (await server.load()).kv_cache_usage <= 1
        await asyncio.gather(call, other)
        await server.assert_idle()


async def test_health_tells_live_and_ready_apart_and_refuses_other_names() -> None:
    async with edge() as server:
        server.readiness.set_unready("a shard failed")
        for name, status in (("", SERVING), (READY, NOT_SERVING), ("cohort.v1.ModelService", NOT_SERVING)):
            answer = await server.health.Check(health_pb2.HealthCheckRequest(service=name), timeout=TIMEOUT_S)
            assert answer.status == status
        error = await failure(server.health.Check(health_pb2.HealthCheckRequest(service="x"), timeout=TIMEOUT_S))
        assert error.code() == grpc.StatusCode.NOT_FOUND


async def test_every_watcher_sees_every_change_though_others_leave() -> None:
    async with edge() as server:
        request = health_pb2.HealthCheckRequest(service=READY)
        first, second = (server.health.Watch(request, timeout=TIMEOUT_S) for _ in range(2))
        assert [(await call.read()).status for call in (first, second)] == [SERVING, SERVING]
        first.cancel()
        await asyncio.sleep(0.05)
        server.readiness.set_unready("draining")
        assert (await second.read()).status == NOT_SERVING
        server.readiness.set_ready()
        assert (await second.read()).status == SERVING
        unknown = server.health.Watch(health_pb2.HealthCheckRequest(service="x"), timeout=TIMEOUT_S)
        assert (await unknown.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        assert await server.calls.wait_idle(TIMEOUT_S), "nobody waits for watchers"


async def test_health_answers_beside_a_full_queue() -> None:
    async with edge(step_s=0.02, info={"max_num_seqs": 1}, max_num_queued_reqs=0) as server:
        calls = [server.generation.Generate(plain(max_tokens=50), timeout=TIMEOUT_S) for _ in range(200)]
        await server.until(lambda load: load.num_waiting >= 190)
        answer = await server.health.Check(health_pb2.HealthCheckRequest(service=READY), timeout=TIMEOUT_S)
        assert answer.status == SERVING and (await server.load()).num_waiting > 0
        for call in calls:
            call.cancel()
        await server.assert_idle()


@pytest.mark.parametrize(
    ("method", "data"),
    [
        ("/cohort.v1.GenerationService/Generate", b"\x22\x02\xff\xfe"),  # A text that is not UTF-8.
        ("/cohort.v1.GenerationService/Generate", b"\xff\xff\xff"),
        ("/cohort.v1.GenerationService/Tokenize", b"\x12\x01\xff"),
        ("/cohort.v1.ModelService/GetModel", b"\x0a\x05a"),
        ("/grpc.health.v1.Health/Check", b"\x0a\x01\xff"),
    ],
)
async def test_bytes_that_do_not_parse_are_an_invalid_argument(method: str, data: bytes) -> None:
    async with edge() as server:
        error = await failure(server.channel.unary_unary(method)(data, timeout=TIMEOUT_S))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert details(error)["BadRequest"].field_violations[0].field == "request"
        await server.assert_serves()


async def test_bytes_that_do_not_parse_end_a_stream_the_same_way() -> None:
    async with edge() as server:
        raw = server.channel.unary_stream("/cohort.v1.GenerationService/GenerateStream")
        error = await failure(raw(b"\x0a\x04\x22\x02\xff\xfe", timeout=TIMEOUT_S))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        await server.assert_serves()


async def test_a_service_that_is_not_served_is_unimplemented() -> None:
    async with edge() as server:
        error = await failure(server.channel.unary_unary("/cohort.v1.OtherService/List")(b""))
        assert error.code() == grpc.StatusCode.UNIMPLEMENTED
