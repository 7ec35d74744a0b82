"""Chat and ChatStream: messages in, the same answers as Generate's for the same ids."""

from __future__ import annotations

import grpc
import pytest
from cohort.v1 import generation_pb2 as pb

from router.chat import ChatMessage
from tests.router.api.edge import TEMPLATES, TIMEOUT_S, details, edge, failure

STOPPING = pb.StoppingParams(max_tokens=8, ignore_eos=True)
SAMPLING = pb.SamplingParams(seed=7)
OUTPUT = pb.OutputOptions(return_token_ids=True, logprobs=1)


def message(role: pb.ChatRole.ValueType, *texts: str) -> pb.ChatMessage:
    return pb.ChatMessage(role=role, content=[pb.ContentPart(text=text) for text in texts])


def ask(*messages: pb.ChatMessage, **fields: object) -> pb.ChatRequest:
    common = {"stopping": STOPPING, "sampling": SAMPLING, "output": OUTPUT}
    return pb.ChatRequest(messages=messages, **(common | fields))  # type: ignore[arg-type]


HELLO = message(pb.CHAT_ROLE_USER, "Hel", "lo")


async def test_a_chat_is_a_completion_of_its_rendered_messages() -> None:
    system = message(pb.CHAT_ROLE_SYSTEM, "Be brief.")
    ids = TEMPLATES.encode([ChatMessage("system", "Be brief."), ChatMessage("user", "Hello")])
    async with edge() as server:
        chat = await server.generation.Chat(ask(system, HELLO), timeout=TIMEOUT_S)
        raw = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), stopping=STOPPING, sampling=SAMPLING, output=OUTPUT)
        plain = await server.generation.Generate(raw, timeout=TIMEOUT_S)
        [answer], [sequence] = chat.answers, plain.sequences
        assert answer.message.role == pb.CHAT_ROLE_ASSISTANT
        assert [part.text for part in answer.message.content] == [sequence.text]
        assert (answer.token_ids, answer.logprobs) == (sequence.token_ids, sequence.logprobs)
        assert answer.finish_reason == sequence.finish_reason == pb.FINISH_REASON_LENGTH
        assert not answer.HasField("matched_stop")
        assert chat.usage == pb.Usage(prompt_tokens=len(ids), completion_tokens=8)
        assert plain.usage == pb.Usage(prompt_tokens=len(ids), completion_tokens=8, cached_tokens=16), "the second time"


async def test_a_streams_events_add_up_to_the_unary_answers() -> None:
    request = ask(HELLO, n=2)
    async with edge(enable_prefix_caching=False) as server:
        unary = await server.generation.Chat(request, timeout=TIMEOUT_S)
        call = server.generation.ChatStream(pb.ChatStreamRequest(request=request), timeout=TIMEOUT_S)
        events = [event async for event in call]
        assert events[0].HasField("started") and events[-1].done.usage == unary.usage
        for answer in unary.answers:
            own = [e.text_delta for e in events if e.HasField("text_delta") and e.text_delta.index == answer.index]
            assert "".join(delta.text for delta in own) == answer.message.content[0].text
            assert [i for delta in own for i in delta.token_ids] == list(answer.token_ids)
        assert sorted(e.finished.index for e in events if e.HasField("finished")) == [0, 1]
        await server.assert_idle()


@pytest.mark.parametrize(
    ("request_message", "field"),
    [
        (ask(), "messages"),
        (ask(message(pb.CHAT_ROLE_UNSPECIFIED, "x")), "messages[0].role"),
        (ask(HELLO, pb.ChatMessage(role=17, content=[pb.ContentPart(text="x")])), "messages[1].role"),  # type: ignore[arg-type]
        (ask(message(pb.CHAT_ROLE_USER)), "messages[0].content"),
        (ask(pb.ChatMessage(role=pb.CHAT_ROLE_USER, content=[pb.ContentPart()])), "messages[0].content[0]"),
        (ask(HELLO, chat_template="rag"), "chat_template"),
        (ask(HELLO, n=0), "n"),
        (ask(HELLO, sampling=pb.SamplingParams(top_p=0)), "sampling.top_p"),
        (ask(message(pb.CHAT_ROLE_USER, "a b " * 200_000)), "messages"),
    ],
)
async def test_a_broken_rule_names_its_field_on_both_calls(request_message: pb.ChatRequest, field: str) -> None:
    async with edge() as server:
        unary = await failure(server.generation.Chat(request_message, timeout=TIMEOUT_S))
        stream = server.generation.ChatStream(pb.ChatStreamRequest(request=request_message), timeout=TIMEOUT_S)
        for error in (unary, await failure(stream)):
            assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, error.details()
            assert details(error)["BadRequest"].field_violations[0].field == field
        await server.assert_serves()


async def test_parts_of_a_later_version_are_refused() -> None:
    async with edge() as server:
        for changed in (ask(HELLO), ask(message(pb.CHAT_ROLE_USER, "x"))):
            data = changed.SerializeToString() + b"\x72\x01x"  # Field 14, reserved for tools.
            raw = server.channel.unary_unary("/cohort.v1.GenerationService/Chat")
            error = await failure(raw(data, timeout=TIMEOUT_S))
            assert error.code() == grpc.StatusCode.UNIMPLEMENTED and "field 14" in error.details()
        await server.assert_serves()
