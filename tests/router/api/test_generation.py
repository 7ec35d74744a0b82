"""Generate and GenerateStream over the wire: the same answers, one final status, nothing left behind."""

from __future__ import annotations

import asyncio
import logging

import grpc
import pytest
from cohort.v1 import generation_pb2 as pb

from router.api import convert
from router.messages import SequenceDelta, TokenLogprob
from tests.router.api.edge import TIMEOUT_S, TOKENIZER, details, edge, failure, joined, plain, streamed

REQUESTS: dict[str, pb.GenerateRequest] = {
    "plain": plain(),
    "text": pb.GenerateRequest(text="What is it?", stopping=pb.StoppingParams(max_tokens=20)),
    "three sequences": plain(n=3, sampling=pb.SamplingParams(seed=5)),
    "ids and logprobs": plain(output=pb.OutputOptions(logprobs=3, return_token_ids=True), n=2),
    "logprobs alone": plain(output=pb.OutputOptions(logprobs=0)),
    "special tokens": plain(output=pb.OutputOptions(skip_special_tokens=False)),
    "neutral values": plain(
        sampling=pb.SamplingParams(seed=1, typical_p=1, repetition_penalty=1), output=pb.OutputOptions()
    ),
}


def with_seed(request: pb.GenerateRequest) -> pb.GenerateRequest:
    seeded = pb.GenerateRequest()
    seeded.CopyFrom(request)
    seeded.sampling.seed = 7
    seeded.request_id = "mine"
    return seeded


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_streams_deltas_add_up_to_the_unary_answer(name: str) -> None:
    request = with_seed(REQUESTS[name])
    async with edge(enable_prefix_caching=False) as server:  # The second answer's usage would show what is cached.
        unary = await server.generation.Generate(request, timeout=TIMEOUT_S)
        events = [event async for event in server.generation.GenerateStream(streamed(request), timeout=TIMEOUT_S)]
        assert unary.timing.e2e_s > 0 and events[-1].done.timing.e2e_s > 0
        unary.ClearField("timing")
        assert joined(events) == unary
        assert (events[0].started.model, unary.request_id) == ("command", "mine")
        assert unary.usage.completion_tokens == max(1, request.n) * request.stopping.max_tokens
        await server.assert_idle()


async def test_what_was_not_asked_for_is_not_returned() -> None:
    async with edge() as server:
        [sequence] = (await server.generation.Generate(plain(), timeout=TIMEOUT_S)).sequences
        assert sequence.text and not sequence.token_ids and not sequence.logprobs
        output = pb.OutputOptions(return_token_ids=True, logprobs=2)
        [sequence] = (await server.generation.Generate(plain(output=output), timeout=TIMEOUT_S)).sequences
        assert len(sequence.token_ids) == len(sequence.logprobs) == 8
        assert [entry.token_id for entry in sequence.logprobs] == list(sequence.token_ids)
        assert all(len(entry.top) == 2 for entry in sequence.logprobs)


async def test_a_stop_token_ends_the_answer_and_is_told() -> None:
    async with edge() as server:
        output = pb.OutputOptions(return_token_ids=True)
        request = plain(sampling=pb.SamplingParams(seed=3), output=output)
        ids = (await server.generation.Generate(request, timeout=TIMEOUT_S)).sequences[0].token_ids
        request.stopping.stop_token_ids.append(ids[4])
        end = ids.index(ids[4]) if ids[4] in ids[:4] else 4
        [sequence] = (await server.generation.Generate(request, timeout=TIMEOUT_S)).sequences
        assert (sequence.finish_reason, sequence.matched_stop.token_id) == (pb.FINISH_REASON_STOP, ids[4])
        assert list(sequence.token_ids) == list(ids[:end])


async def test_an_unset_request_id_is_drawn_and_the_same_throughout_a_stream() -> None:
    async with edge() as server:
        first = await server.generation.Generate(plain(), timeout=TIMEOUT_S)
        second = await server.generation.Generate(plain(), timeout=TIMEOUT_S)
        assert first.request_id and second.request_id and first.request_id != second.request_id


async def test_a_lagging_reader_gets_everything_and_holds_up_nobody() -> None:
    info = {"max_model_len": 1024, "num_blocks": 512}
    window = [("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0)]
    async with edge(info=info, channel_options=window) as server:
        output = pb.OutputOptions(return_token_ids=True, logprobs=20, skip_special_tokens=False)
        request = with_seed(plain(max_tokens=900, output=output))
        slow = server.generation.GenerateStream(streamed(request), timeout=TIMEOUT_S * 2)
        reading = aiter(slow)
        first = await anext(reading)
        for _ in range(20):
            answer = await server.generation.Generate(plain(max_tokens=3), timeout=TIMEOUT_S)
            assert answer.usage.completion_tokens == 3
        await server.until(lambda load: load.num_running == 0)  # Its tokens are all there before it is read.
        events = [first, *[event async for event in reading]]
        assert len(events) < 700, "deltas that wait are merged"
        unary = await server.generation.Generate(request, timeout=TIMEOUT_S * 2)
        unary.ClearField("timing")
        assert joined(events) == unary
        await server.assert_idle()


async def test_a_callers_deadline_frees_its_blocks() -> None:
    async with edge(step_s=0.01) as server:
        for call in (
            server.generation.Generate(plain(max_tokens=100), timeout=0.2),
            server.generation.GenerateStream(streamed(plain(max_tokens=100)), timeout=0.2),
        ):
            assert (await failure(call)).code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await server.assert_idle()
        assert await server.metric("cohort_generation_tokens_total") < 2 * 100 * 0.75  # 20 steps fit into each.
        await server.assert_serves()
        assert await server.metric("cohort_request_failure_total", code="DEADLINE_EXCEEDED") == 2


async def test_the_default_deadline_ends_requests_that_bring_none() -> None:
    async with edge(step_s=0.01, default_deadline=0.2) as server:
        call = server.generation.GenerateStream(streamed(plain(max_tokens=100)))
        assert (await failure(call)).code() == grpc.StatusCode.DEADLINE_EXCEEDED
        answer = await server.generation.Generate(plain(max_tokens=60), timeout=TIMEOUT_S)  # Its own is longer.
        assert answer.usage.completion_tokens == 60
        await server.assert_idle()


async def test_a_caller_that_leaves_frees_its_blocks_at_once() -> None:
    async with edge(step_s=0.005) as server:
        call = server.generation.GenerateStream(streamed(plain(max_tokens=120, n=4)), timeout=TIMEOUT_S)
        events = aiter(call)
        while not (await anext(events)).HasField("delta"):
            pass
        assert (await server.load()).num_running == 4
        call.cancel()
        await server.assert_idle()
        assert await server.metric("cohort_generation_tokens_total") < 4 * 120 / 2
        await server.assert_serves()
        assert await server.metric("cohort_request_failure_total", code="CANCELLED") == 1


async def test_a_full_queue_is_unavailable_with_a_time_to_come_back() -> None:
    async with edge(step_s=0.01, info={"max_num_seqs": 1}, max_num_queued_reqs=1) as server:
        running = [server.generation.Generate(plain(max_tokens=60), timeout=TIMEOUT_S) for _ in range(2)]
        await server.until(lambda load: load.num_waiting == load.num_running == 1)
        error = await failure(server.generation.Generate(plain(), timeout=TIMEOUT_S))
        assert error.code() == grpc.StatusCode.UNAVAILABLE and "the limit is 1" in error.details()
        assert details(error)["RetryInfo"].retry_delay.seconds >= 1
        assert [(await call).usage.completion_tokens for call in running] == [60, 60]
        await server.assert_serves()


async def test_prompt_tokens_wait_only_until_the_answer_begins() -> None:
    async with edge(step_s=0.01, max_num_queued_tokens=4) as server:
        call = server.generation.GenerateStream(streamed(plain(max_tokens=100)), timeout=TIMEOUT_S)
        events = aiter(call)
        while not (await anext(events)).HasField("delta"):
            pass
        answer = await server.generation.Generate(plain(max_tokens=1), timeout=TIMEOUT_S)
        assert answer.usage.completion_tokens == 1
        call.cancel()
        await server.assert_serves()


async def test_a_caller_that_leaves_the_queue_gives_its_place_up() -> None:
    async with edge(step_s=0.01, info={"max_num_seqs": 1}, max_num_queued_tokens=4) as server:
        running = server.generation.GenerateStream(streamed(plain(max_tokens=100)), timeout=TIMEOUT_S)
        events = aiter(running)
        while not (await anext(events)).HasField("delta"):
            pass
        waiting = server.generation.Generate(plain(), timeout=TIMEOUT_S)
        await server.until(lambda load: load.num_waiting == 1)
        error = await failure(server.generation.Generate(plain(), timeout=TIMEOUT_S))
        assert error.code() == grpc.StatusCode.UNAVAILABLE and "3 prompt tokens wait" in error.details()
        waiting.cancel()
        await server.until(lambda load: load.num_waiting == 0)
        running.cancel()
        await server.assert_serves()


async def test_a_draining_server_refuses_and_finishes_what_runs() -> None:
    async with edge(step_s=0.005) as server:
        call = server.generation.GenerateStream(streamed(plain(max_tokens=50)), timeout=TIMEOUT_S)
        reading = aiter(call)
        await anext(reading)
        server.readiness.close("the server is shutting down")
        error = await failure(server.generation.Generate(plain(), timeout=TIMEOUT_S))
        assert error.code() == grpc.StatusCode.UNAVAILABLE and "shutting down" in error.details()
        assert "RetryInfo" in details(error)
        assert not await server.calls.wait_idle(0.01)
        events = [event async for event in reading]
        assert events[-1].done.usage.completion_tokens == 50
        assert await server.calls.wait_idle(TIMEOUT_S)


async def test_calls_that_are_cut_end_with_unavailable() -> None:
    async with edge(step_s=0.01) as server:
        calls = [
            server.generation.Generate(plain(max_tokens=100), timeout=TIMEOUT_S),
            server.generation.GenerateStream(streamed(plain(max_tokens=100)), timeout=TIMEOUT_S),
        ]
        await server.until(lambda load: load.num_running == 2)
        server.calls.cut("the server is shutting down")
        for call in calls:
            error = await failure(call)
            assert error.code() == grpc.StatusCode.UNAVAILABLE and error.details() == "the server is shutting down"
        await server.assert_serves()


async def test_lost_shards_end_running_and_later_calls_with_unavailable() -> None:
    async with edge(step_s=0.005) as server:
        call = server.generation.GenerateStream(streamed(plain(max_tokens=100)), timeout=TIMEOUT_S)
        reading = aiter(call)
        await anext(reading)
        server.link.lose()
        assert (await failure(reading)).code() == grpc.StatusCode.UNAVAILABLE
        error = await failure(server.generation.Generate(plain(), timeout=TIMEOUT_S))
        assert error.code() == grpc.StatusCode.UNAVAILABLE and "RetryInfo" in details(error)
        await asyncio.wait((server.engine,))
        assert server.engine.exception() is not None


async def test_an_exceptions_text_stays_in_the_log_under_the_requests_id(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def break_down(*_: object) -> list[int]:
        raise ValueError("a secret path")

    async with edge() as server:
        monkeypatch.setattr(TOKENIZER, "encode", break_down)
        with caplog.at_level(logging.ERROR):
            error = await failure(
                server.generation.Generate(pb.GenerateRequest(text="x", request_id="mine"), timeout=TIMEOUT_S)
            )
        monkeypatch.undo()
        assert error.code() == grpc.StatusCode.INTERNAL and "mine" in error.details()
        assert "secret" not in error.details() and not details(error)
        assert "a secret path" in caplog.text and "mine" in caplog.text
        await server.assert_serves()


async def test_a_wait_that_is_cancelled_inside_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    async with edge() as server:

        async def cancelled(*_: object) -> list[int]:
            raise asyncio.CancelledError

        monkeypatch.setattr(server.application._pool, "run", cancelled)
        error = await failure(server.generation.Generate(pb.GenerateRequest(text="x"), timeout=TIMEOUT_S))
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        monkeypatch.undo()
        await server.assert_serves()


async def test_a_row_without_finite_numbers_ends_its_request_alone() -> None:
    async with edge() as server:
        server.shards.poison = lambda row, scheduled: row.seed == 13
        bad = server.generation.Generate(plain(sampling=pb.SamplingParams(seed=13)), timeout=TIMEOUT_S)
        good = server.generation.Generate(plain(sampling=pb.SamplingParams(seed=14)), timeout=TIMEOUT_S)
        assert (await failure(bad)).code() == grpc.StatusCode.INTERNAL
        assert (await good).usage.completion_tokens == 8
        await server.assert_serves()


@pytest.mark.parametrize("field", [b"\xf8\x07\x01", b"\xa2\x06\x01x"])  # Numbers 127 and 100, unknown to us.
async def test_a_field_from_the_future_is_refused_not_ignored(field: bytes) -> None:
    async with edge() as server:
        raw = server.channel.unary_unary("/cohort.v1.GenerationService/Generate")
        error = await failure(raw(plain().SerializeToString() + field, timeout=TIMEOUT_S))
        assert error.code() == grpc.StatusCode.UNIMPLEMENTED and "field 1" in error.details()
        await server.assert_serves()


async def test_log_and_metrics_account_for_every_request(caplog: pytest.LogCaptureFixture) -> None:
    async with edge() as server:
        with caplog.at_level(logging.INFO, logger="router.api.requests"):
            answers = [await server.generation.Generate(plain(max_tokens=k, n=k), timeout=TIMEOUT_S) for k in (1, 2, 3)]
            await failure(server.generation.Generate(plain(model="other"), timeout=TIMEOUT_S))
        records = [record.cohort_fields for record in caplog.records if record.message == "request ended"]
        assert [record["code"] for record in records] == ["OK", "OK", "OK", "NOT_FOUND"]
        assert [record["request_id"] for record in records[:3]] == [answer.request_id for answer in answers]
        assert records[2]["finish_reasons"] == "length,length,length" and records[2]["prompt_tokens"] == 3
        assert [record.get("completion_tokens") for record in records] == [1, 4, 9, None]
        total = sum(answer.usage.completion_tokens for answer in answers)
        assert await server.metric("cohort_generation_tokens_total") == total == 14
        assert await server.metric("cohort_prompt_tokens_total") == 9
        assert await server.metric("cohort_request_success_total", finish_reason="length") == 6
        assert await server.metric("cohort_request_failure_total", code="NOT_FOUND") == 1
        labels = {"grpc_type": "unary", "grpc_service": "cohort.v1.GenerationService", "grpc_method": "Generate"}
        assert await server.metric("grpc_server_handled_total", **labels, grpc_code="OK") == 3
        assert await server.metric("grpc_server_handled_total", **labels, grpc_code="NotFound") == 1
        assert await server.metric("grpc_server_started_total", **labels) == 4


def test_a_long_delta_is_cut_into_messages_that_any_client_takes() -> None:
    count = 5000
    logprobs = [TokenLogprob(i, -1.0, ((i, -1.0),) * 20) for i in range(count)]
    delta = SequenceDelta(1, 2, "text", list(range(count)), logprobs)
    pieces = list(convert.deltas(delta, has_token_ids=True))
    assert max(piece.ByteSize() for piece in pieces) < 2**20
    assert [i for piece in pieces for i in piece.token_ids] == list(range(count))
    assert [entry.token_id for piece in pieces for entry in piece.logprobs] == list(range(count))
    assert "".join(piece.text for piece in pieces) == "text" and {piece.index for piece in pieces} == {2}


def test_a_delta_with_nothing_asked_for_is_no_message() -> None:
    assert list(convert.deltas(SequenceDelta(1, 0, "", [5]), has_token_ids=False)) == []
    assert [piece.text for piece in convert.deltas(SequenceDelta(1, 0, "a", [5]), has_token_ids=False)] == ["a"]
