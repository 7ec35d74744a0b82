"""Which status an error becomes, and what its details say."""

from __future__ import annotations

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from router import errors
from router.status import DETAILS_KEY, Status, to_status

KINDS = {
    message.DESCRIPTOR.full_name: message
    for message in (error_details_pb2.BadRequest, error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo)
}


def details(status: Status) -> list[Message]:
    """The google.rpc messages, checked to agree with the status."""
    packed = dict(status.trailing_metadata)[DETAILS_KEY]
    assert len(packed) < 4096
    message = status_pb2.Status.FromString(packed)
    assert (message.code, message.message) == (status.code.value[0], status.text)
    found = []
    for detail in message.details:
        unpacked = KINDS[detail.TypeName()]()
        assert detail.Unpack(unpacked)
        found.append(unpacked)
    return found


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.NotFound("x"), grpc.StatusCode.NOT_FOUND),
        (errors.FailedPrecondition("x"), grpc.StatusCode.FAILED_PRECONDITION),
        (errors.Unimplemented("x"), grpc.StatusCode.UNIMPLEMENTED),
        (errors.ResourceExhausted("x"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errors.DeadlineExceeded("x"), grpc.StatusCode.DEADLINE_EXCEEDED),
        (errors.Cancelled("x"), grpc.StatusCode.CANCELLED),
        (errors.InternalError("x"), grpc.StatusCode.INTERNAL),
    ],
)
def test_an_error_without_details_has_its_code_and_text(error: errors.RequestError, code: grpc.StatusCode) -> None:
    assert to_status(error) == Status(code, "x")


def test_a_broken_rule_carries_the_field() -> None:
    status = to_status(errors.InvalidArgument("sampling.top_p", "must be in (0, 1], not 2"))
    assert status.code == grpc.StatusCode.INVALID_ARGUMENT
    [detail] = details(status)
    [violation] = detail.field_violations
    assert (violation.field, violation.description) == ("sampling.top_p", "must be in (0, 1], not 2")


def test_a_length_carries_field_reason_domain_and_limit() -> None:
    status = to_status(errors.ContextLengthExceeded("prompt", "too long", 128))
    assert status.code == grpc.StatusCode.INVALID_ARGUMENT
    bad_request, info = details(status)
    assert bad_request.field_violations[0].field == "prompt"
    assert (info.reason, info.domain, dict(info.metadata)) == ("CONTEXT_LENGTH_EXCEEDED", "cohort", {"limit": "128"})


def test_unavailable_tells_when_to_come_back() -> None:
    status = to_status(errors.Unavailable("full", retry_s=1.5))
    assert status.code == grpc.StatusCode.UNAVAILABLE
    [retry] = details(status)
    assert (retry.retry_delay.seconds, retry.retry_delay.nanos) == (1, 500_000_000)


@pytest.mark.parametrize("character", ["a", "é", "\U0001f600"])
def test_long_texts_are_cut_to_keep_the_details_small(character: str) -> None:
    status = to_status(errors.ContextLengthExceeded(character * 5000, character * 5000, 1))
    assert len(details(status)) == 2  # Which checks the size.
    assert status.text.endswith("…") and status.text.startswith(character)
