"""Turns a request's error into a gRPC status with google.rpc details."""

from __future__ import annotations

import dataclasses

import grpc
from google.protobuf import duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from router.errors import (
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    FailedPrecondition,
    InternalError,
    InvalidArgument,
    NotFound,
    RequestError,
    ResourceExhausted,
    Unavailable,
    Unimplemented,
)

DOMAIN = "cohort"
DETAILS_KEY = "grpc-status-details-bin"
MAX_TEXT_BYTES = 1000  # the details hold at most three such texts and have to stay under 4 KiB

CODES: dict[type[RequestError], grpc.StatusCode] = {
    InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    ContextLengthExceeded: grpc.StatusCode.INVALID_ARGUMENT,
    NotFound: grpc.StatusCode.NOT_FOUND,
    FailedPrecondition: grpc.StatusCode.FAILED_PRECONDITION,
    Unimplemented: grpc.StatusCode.UNIMPLEMENTED,
    ResourceExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    Cancelled: grpc.StatusCode.CANCELLED,
    InternalError: grpc.StatusCode.INTERNAL,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Status:
    """What a failed call ends with."""

    code: grpc.StatusCode
    text: str
    trailing_metadata: tuple[tuple[str, bytes], ...] = ()


def to_status(error: RequestError) -> Status:
    """The status for `error`; see docs/errors.md."""
    code = CODES[type(error)]
    text = _cut(str(error))
    details = _details(error)
    if not details:
        return Status(code, text)
    message = status_pb2.Status(code=code.value[0], message=text)
    for detail in details:
        message.details.add().Pack(detail)
    return Status(code, text, ((DETAILS_KEY, message.SerializeToString()),))


def _details(error: RequestError) -> list[Message]:
    details: list[Message] = []
    if isinstance(error, InvalidArgument):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_cut(error.field), description=_cut(error.description)
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, ContextLengthExceeded):
        metadata = {"limit": str(error.limit)}
        details.append(error_details_pb2.ErrorInfo(reason="CONTEXT_LENGTH_EXCEEDED", domain=DOMAIN, metadata=metadata))
    if isinstance(error, Unavailable):
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return details


def _cut(text: str) -> str:
    data = text.encode(errors="replace")
    return text if len(data) <= MAX_TEXT_BYTES else data[: MAX_TEXT_BYTES - 3].decode(errors="ignore") + "…"
