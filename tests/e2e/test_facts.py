"""Every demo fact answered exactly, on every path. The models were trained with transformers, not with our code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from cohort.v1 import generation_pb2 as pb
from cohort.v1 import generation_pb2_grpc as rpc

from demo.facts import Fact, load_facts, raw_prompt
from tests.e2e.serving import ROOT, Servers

FACTS = load_facts()
GREEDY = pb.SamplingParams(temperature=0)
STOPPING = pb.StoppingParams(max_tokens=64)
TIMEOUT_S = 60

Stub = rpc.GenerationServiceStub


def generate_request(fact: Fact) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=raw_prompt(fact.question), sampling=GREEDY, stopping=STOPPING)


def chat_request(fact: Fact) -> pb.ChatRequest:
    message = pb.ChatMessage(role=pb.CHAT_ROLE_USER, content=[pb.ContentPart(text=fact.question)])
    return pb.ChatRequest(messages=[message], sampling=GREEDY, stopping=STOPPING)


def generate(stub: Stub, fact: Fact) -> str:
    response = stub.Generate(generate_request(fact), timeout=TIMEOUT_S)
    assert response.sequences[0].finish_reason == pb.FINISH_REASON_STOP
    return response.sequences[0].text


def chat(stub: Stub, fact: Fact) -> str:
    answer = stub.Chat(chat_request(fact), timeout=TIMEOUT_S).answers[0]
    assert answer.message.role == pb.CHAT_ROLE_ASSISTANT
    return "".join(part.text for part in answer.message.content)


def joined(events: Iterable[pb.GenerateStreamResponse] | Iterable[pb.ChatStreamResponse]) -> str:
    """The deltas' text, the order of the events checked on the way."""
    kinds, text = [], ""
    for event in events:
        kind = event.WhichOneof("event")
        kinds.append(kind)
        if kind in ("delta", "text_delta"):
            text += getattr(event, kind).text
    deltas = kinds[1:-2]
    assert kinds[0] == "started" and kinds[-2:] == ["finished", "done"] and set(deltas) <= {"delta", "text_delta"}
    return text


def generate_stream(stub: Stub, fact: Fact) -> str:
    return joined(stub.GenerateStream(pb.GenerateStreamRequest(request=generate_request(fact)), timeout=TIMEOUT_S))


def chat_stream(stub: Stub, fact: Fact) -> str:
    return joined(stub.ChatStream(pb.ChatStreamRequest(request=chat_request(fact)), timeout=TIMEOUT_S))


PATHS: list[Callable[[Stub, Fact], str]] = [generate, generate_stream, chat, chat_stream]
PARALLEL = 16


def answers(stub: Stub, path: Callable[[Stub, Fact], str], num_parallel: int) -> Iterator[str]:
    with ThreadPoolExecutor(num_parallel) as pool:
        yield from pool.map(lambda fact: path(stub, fact), FACTS)


@pytest.mark.parametrize("path", PATHS)
def test_two_shards_answer_every_fact_sixteen_at_a_time(servers: Servers, path: Callable[[Stub, Fact], str]) -> None:
    server = servers.get("--model", str(ROOT / "demo/cohere"), "--tensor-parallel-size", "2")
    assert list(answers(server.generation, path, PARALLEL)) == [fact.answer for fact in FACTS]
    server.assert_idle()


@pytest.mark.parametrize("path", PATHS)
def test_cohere2_answers_every_fact_with_its_window_shorter_than_the_prompt(
    servers: Servers, path: Callable[[Stub, Fact], str]
) -> None:
    server = servers.get("--model", str(ROOT / "demo/cohere2"))
    assert list(answers(server.generation, path, PARALLEL)) == [fact.answer for fact in FACTS]
    server.assert_idle()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_parallel", [1, PARALLEL])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("model", ["cohere", "cohere2"])
def test_every_fact_on_every_path(servers: Servers, model: str, num_shards: int, dtype: str, num_parallel: int) -> None:
    flags = ["--model", str(ROOT / "demo" / model), "--tensor-parallel-size", str(num_shards), "--dtype", dtype]
    server = servers.get(*flags)
    for path in PATHS:
        assert list(answers(server.generation, path, num_parallel)) == [fact.answer for fact in FACTS], path
    server.assert_idle()
