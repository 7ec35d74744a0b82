"""Runs every call of the server: parses its bytes, counts it, and ends it with exactly one status.

Messages are parsed here and not by gRPC, whose answer to bytes that do not parse would be INTERNAL. An exception never
leaves a handler, since gRPC would send its text to the caller.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from router.errors import ContextLengthExceeded, InternalError, InvalidArgument, RequestError, Unavailable
from router.metrics import Metrics
from router.status import Status, to_status
from router.validation import MAX_REQUEST_ID_BYTES

logger = logging.getLogger(__name__)

Request = TypeVar("Request", bound=Message)
Context = Any  # grpc.aio.ServicerContext[bytes, Message]; its type parameters exist for type checkers only


@dataclasses.dataclass(slots=True)
class Call:
    """One call: the caller's or a drawn id, when it came and when its caller gives up (time.monotonic())."""

    method: str
    request_id: str
    arrival_s: float
    deadline_s: float | None
    context: Context

    async def write(self, message: Message) -> None:
        """Sends one message of a stream; waits while the reader is behind."""
        await self.context.write(message)


UnaryBody = Callable[[Request, Call], Awaitable[Message]]
StreamBody = Callable[[Request, Call], Awaitable[None]]


@dataclasses.dataclass(frozen=True, slots=True)
class Limit:
    """A bound on a request's bytes beyond which it cannot fit the model's `max_total_tokens`; no byte is then read."""

    max_bytes: int
    max_total_tokens: int


class Calls:
    """The calls under way. Makes gRPC handlers of plain coroutines."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._active: set[asyncio.Task[Any]] = set()
        self._cut: set[asyncio.Task[Any]] = set()
        self._cut_reason = ""
        self._idle = asyncio.Event()
        self._idle.set()

    def unary(
        self, method: str, request_type: type[Request], body: UnaryBody[Request], limit: Limit | None = None
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """A handler for `package.Service/Method` that answers with what `body` returns."""

        async def handle(data: bytes, context: Context) -> Message | None:
            parse = _parser(request_type, limit)
            answer: Message | None = await self._run(method, "unary", parse, data, context, body)
            return answer

        return grpc.unary_unary_rpc_method_handler(handle, response_serializer=_serialize)

    def stream(
        self,
        method: str,
        request_type: type[Request],
        body: StreamBody[Request],
        limit: Limit | None = None,
        is_watch: bool = False,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """A handler whose `body` writes its messages. A watch never ends by itself, so nobody waits for it."""

        async def handle(data: bytes, context: Context) -> None:
            parse = _parser(request_type, limit)
            await self._run(method, "server_stream", parse, data, context, body, is_watch)

        return grpc.unary_stream_rpc_method_handler(handle, response_serializer=_serialize)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Whether every call but watches has ended within `timeout_s`."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def cut(self, reason: str) -> None:
        """Ends every call that runs with UNAVAILABLE."""
        self._cut_reason = reason
        for task in list(self._active):
            self._cut.add(task)
            task.cancel()

    async def _run(
        self,
        method: str,
        kind: str,
        parse: Callable[[bytes], Any],
        data: bytes,
        context: Context,
        body: Callable[[Any, Call], Awaitable[Any]],
        is_watch: bool = False,
    ) -> Any:  # noqa: ANN401 - a message or None, as the body
        call = _call(method, context)
        task = asyncio.current_task()
        assert task is not None
        if not is_watch:
            self._active.add(task)
            self._idle.clear()
        try:
            answer, status = await self._outcome(call, kind, parse, data, body, task)
            if status is not None:
                await context.abort(status.code, status.text, status.trailing_metadata)
            return answer
        finally:
            self._cut.discard(task)
            self._active.discard(task)
            if not self._active:
                self._idle.set()

    async def _outcome(
        self,
        call: Call,
        kind: str,
        parse: Callable[[bytes], Any],
        data: bytes,
        body: Callable[[Any, Call], Awaitable[Any]],
        task: asyncio.Task[Any],
    ) -> tuple[Any, Status | None]:
        """The body's answer, or the status that takes its place; counted before the caller hears of it."""
        self._metrics.rpc_started(call.method, kind)
        code = "CANCELLED"
        try:
            request = parse(data)
            call.request_id = _request_id(request) or call.request_id
            answer = await body(request, call)
            code = "OK"
            return answer, None
        except BaseException as error:
            status = to_status(self._as_request_error(error, call, task))
            code = status.code.name
            return None, status
        finally:
            if code == "CANCELLED" and call.deadline_s is not None and time.monotonic() >= call.deadline_s:
                code = "DEADLINE_EXCEEDED"
            self._metrics.rpc_handled(call.method, code, kind)

    def _as_request_error(self, error: BaseException, call: Call, task: asyncio.Task[Any]) -> RequestError:
        """What to tell the caller; raises again where there is no caller left."""
        if isinstance(error, RequestError):
            return error
        if isinstance(error, asyncio.CancelledError):
            if task in self._cut:
                return Unavailable(self._cut_reason)
            if task.cancelling():
                raise error  # gRPC ends the call: its caller left or its deadline passed.
            # Something that the call waited for was cancelled; without an answer the caller would wait for ever.
            return Unavailable("the server stopped working on this request")
        if not isinstance(error, Exception):
            raise error
        logger.error("call %s failed, request_id %r", call.method, call.request_id, exc_info=error)
        return InternalError(f"internal error; request_id {call.request_id}")


def _call(method: str, context: Context) -> Call:
    arrival_s = time.monotonic()
    remaining_s = context.time_remaining()
    deadline_s = None if remaining_s is None else arrival_s + remaining_s
    return Call(method, uuid.uuid4().hex, arrival_s, deadline_s, context)


def _request_id(request: Message) -> str:
    request_id: str = getattr(getattr(request, "request", request), "request_id", "")
    return request_id if len(request_id.encode()) <= MAX_REQUEST_ID_BYTES else ""


def _parser(request_type: type[Request], limit: Limit | None) -> Callable[[bytes], Request]:
    def parse(data: bytes) -> Request:
        if limit is not None and len(data) > limit.max_bytes:
            description = f"a message of {len(data)} bytes cannot fit {limit.max_total_tokens} tokens"
            raise ContextLengthExceeded("prompt", description, limit.max_total_tokens)
        try:
            return request_type.FromString(data)
        except DecodeError as error:
            name = request_type.DESCRIPTOR.full_name
            raise InvalidArgument("request", f"the bytes are no {name}; strings have to be UTF-8") from error

    return parse


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()
