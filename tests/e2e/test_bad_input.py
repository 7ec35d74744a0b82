"""Bad input over the wire: the right status, nothing leaked, and the next request served."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable

import grpc
import pytest
from cohort.v1 import generation_pb2 as pb
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from demo.facts import load_facts, raw_prompt
from tests.e2e.serving import Server

FACT = load_facts()[0]
VOCAB_SIZE_TOO_LARGE = 10**6
GREEDY = pb.SamplingParams(temperature=0)


def prompt(**fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="hello", **fields)  # type: ignore[arg-type]


def sampling(**fields: float) -> pb.GenerateRequest:
    return prompt(sampling=pb.SamplingParams(**fields))  # type: ignore[arg-type]


def stopping(**fields: object) -> pb.GenerateRequest:
    return prompt(stopping=pb.StoppingParams(**fields))  # type: ignore[arg-type]


INVALID = grpc.StatusCode.INVALID_ARGUMENT
UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED
CASES: dict[str, tuple[pb.GenerateRequest, grpc.StatusCode, str]] = {
    "no prompt": (pb.GenerateRequest(), INVALID, "prompt"),
    "empty text": (pb.GenerateRequest(text=""), INVALID, "text"),
    "no ids": (pb.GenerateRequest(token_ids=pb.TokenIds()), INVALID, "token_ids"),
    "id out of range": (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[VOCAB_SIZE_TOO_LARGE])), INVALID, "token_ids"),
    "too long": (stopping(max_tokens=10**6), INVALID, "max_tokens"),
    "prompt too long": (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[9] * 100_000)), INVALID, "token_ids"),
    "unknown model": (prompt(model="gpt"), grpc.StatusCode.NOT_FOUND, "gpt"),
    "empty stop": (stopping(stop=["x", ""]), INVALID, "stop"),
    "many stops": (stopping(stop=["x"] * 1000), INVALID, "stop"),
    "long stop": (stopping(stop=["x" * 2**20]), INVALID, "stop"),
    "stop id out of range": (stopping(stop_token_ids=[VOCAB_SIZE_TOO_LARGE], min_tokens=5), INVALID, "stop_token_ids"),
    "min over max": (stopping(max_tokens=3, min_tokens=4), INVALID, "min_tokens"),
    "max_tokens 0": (stopping(max_tokens=0), INVALID, "max_tokens"),
    "top_p 0": (sampling(top_p=0), INVALID, "top_p"),
    "top_p -0.1": (sampling(top_p=-0.1), INVALID, "top_p"),
    "top_p 1.0001": (sampling(top_p=1.0001), INVALID, "top_p"),
    "top_p NaN": (sampling(top_p=float("nan")), INVALID, "top_p"),
    "temperature -1": (sampling(temperature=-1), INVALID, "temperature"),
    "temperature NaN": (sampling(temperature=float("nan")), INVALID, "temperature"),
    "temperature inf": (sampling(temperature=float("inf")), INVALID, "temperature"),
    "top_k": (sampling(top_k=VOCAB_SIZE_TOO_LARGE), INVALID, "top_k"),
    "n 0": (prompt(n=0), INVALID, "n"),
    "n huge": (prompt(n=10**6), INVALID, "n"),
    "logprobs 21": (prompt(output=pb.OutputOptions(logprobs=21)), INVALID, "logprobs"),
    "min_p": (sampling(min_p=0.1), UNIMPLEMENTED, "min_p"),
    "typical_p": (sampling(typical_p=0.5), UNIMPLEMENTED, "typical_p"),
    "repetition_penalty": (sampling(repetition_penalty=1.1), UNIMPLEMENTED, "repetition_penalty"),
    "frequency_penalty": (sampling(frequency_penalty=0.1), UNIMPLEMENTED, "frequency_penalty"),
    "presence_penalty": (sampling(presence_penalty=0.1), UNIMPLEMENTED, "presence_penalty"),
    "logit_bias": (prompt(sampling=pb.SamplingParams(logit_bias={1: 1.0})), UNIMPLEMENTED, "logit_bias"),
    "prompt_logprobs": (prompt(output=pb.OutputOptions(prompt_logprobs=1)), UNIMPLEMENTED, "prompt_logprobs"),
    "cache_salt": (prompt(cache_salt="a"), UNIMPLEMENTED, "cache_salt"),
    "adapter": (prompt(adapter="a"), grpc.StatusCode.FAILED_PRECONDITION, "--enable-lora"),
    "adapter_merge": (prompt(adapter_merge=pb.AdapterMerge()), UNIMPLEMENTED, "adapter_merge"),
    "constraint": (prompt(constraint=pb.Constraint(regex="a")), UNIMPLEMENTED, "constraint"),
}


def served(server: Server) -> None:
    request = pb.GenerateRequest(text=raw_prompt(FACT.question), sampling=GREEDY)
    assert server.generation.Generate(request, timeout=60).sequences[0].text == FACT.answer


def refused(call: Callable[[], object]) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as refusal:
        call()
    return refusal.value


def details(error: grpc.RpcError) -> list[object]:
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    assert status is not None
    messages = {
        "BadRequest": error_details_pb2.BadRequest,
        "ErrorInfo": error_details_pb2.ErrorInfo,
        "RetryInfo": error_details_pb2.RetryInfo,
    }
    found = []
    for packed in status.details:
        message = messages[packed.TypeName().rsplit(".", 1)[-1]]()
        assert packed.Unpack(message)
        found.append(message)
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_field_that_breaks_a_rule_is_named(server: Server, name: str) -> None:
    request, code, field = CASES[name]
    error = refused(lambda: server.generation.Generate(request, timeout=60))
    assert error.code() == code, error.details()
    assert field in error.details()
    streamed = refused(lambda: list(server.generation.GenerateStream(pb.GenerateStreamRequest(request=request))))
    assert (streamed.code(), streamed.details()) == (code, error.details())
    if code == INVALID:
        violations = [
            v for d in details(error) if isinstance(d, error_details_pb2.BadRequest) for v in d.field_violations
        ]
        assert any(field in v.field for v in violations)
    served(server)
    server.assert_idle()


def test_a_length_over_the_limit_carries_its_reason(server: Server) -> None:
    error = refused(lambda: server.generation.Generate(CASES["too long"][0], timeout=60))
    assert [d.reason for d in details(error) if isinstance(d, error_details_pb2.ErrorInfo)] == [
        "CONTEXT_LENGTH_EXCEEDED"
    ]


@pytest.mark.parametrize("temperature", [0, 1e-8, 1e-6])
def test_a_tiny_temperature_is_greedy(server: Server, temperature: float) -> None:
    request = pb.GenerateRequest(text=raw_prompt(FACT.question), sampling=pb.SamplingParams(temperature=temperature))
    assert server.generation.Generate(request, timeout=60).sequences[0].text == FACT.answer


def test_bytes_that_are_no_message_are_an_invalid_argument(server: Server) -> None:
    raw = server.channel.unary_unary("/cohort.v1.GenerationService/Generate")
    invalid_utf8 = b"\x22\x02\xff\xfe"  # field 4, two bytes that are not UTF-8
    assert refused(lambda: raw(invalid_utf8, timeout=60)).code() == INVALID
    assert refused(lambda: raw(b"\xff\xff\xff", timeout=60)).code() == INVALID
    served(server)


def test_a_message_over_the_limit_is_refused_by_grpc(server: Server) -> None:
    huge = pb.GenerateRequest(text="a" * 40_000_000)
    assert refused(lambda: server.generation.Generate(huge, timeout=60)).code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    served(server)
    server.assert_idle()


def test_a_thirty_megabyte_prompt_does_not_show_in_running_streams(server: Server) -> None:
    huge = pb.GenerateRequest(text="a b " * 7_500_000)
    stop = threading.Event()
    codes: list[grpc.StatusCode] = []

    def send_huge() -> None:
        while not stop.is_set():
            codes.append(refused(lambda: server.generation.Generate(huge, timeout=60)).code())

    quiet = gaps(server)
    sender = threading.Thread(target=send_huge)
    sender.start()
    disturbed = gaps(server)
    stop.set()
    sender.join(60)
    assert set(codes) == {INVALID}
    # A prompt that were tokenized on the loop would stop every stream for seconds.
    assert max(disturbed) < 1.5, (statistics.median(quiet), sorted(disturbed)[-5:])
    served(server)
    server.assert_idle()


def gaps(server: Server) -> list[float]:
    """Seconds between the deltas of one running stream."""
    request = prompt(stopping=pb.StoppingParams(max_tokens=200, ignore_eos=True))
    times = [
        time.monotonic()
        for event in server.generation.GenerateStream(pb.GenerateStreamRequest(request=request), timeout=60)
        if event.HasField("delta")
    ]
    return [after - before for before, after in itertools.pairwise(times)]
