"""Carries one generation request from validation to its last event, for every service that generates."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol

from router import validation
from router.admission import Admission, Place
from router.api.calls import Call
from router.errors import DeadlineExceeded, InternalError, RequestError
from router.logs import event
from router.messages import (
    AdapterRef,
    Event,
    FinishReason,
    Load,
    RequestDone,
    RequestFailed,
    SequenceDelta,
    Submission,
)
from router.metrics import Metrics
from router.readiness import Readiness
from router.request import GenerationRequest, Limits
from router.status import CODES

logger = logging.getLogger(__name__)

SEED_BITS = 64


class Stream(Protocol):
    """One request's events."""

    def __aiter__(self) -> AsyncIterator[Event]:
        """Events in order; deltas of one sequence are merged while nobody asks."""

    def close(self) -> None:
        """Cancels the request unless it has ended."""


class Engine(Protocol):
    """The API's side of the engine; router.engine_client.EngineClient is one."""

    def submit(self, submission: Submission) -> Stream:
        """Hands a request over; its events come out of the stream, which has to be closed."""

    def load(self) -> Load:
        """How busy the engine is."""


class AdapterNames(Protocol):
    """What adapters' names stand for; router.adapters.Adapters is one."""

    async def acquire(self, name: str) -> AdapterRef:
        """The version for one request, which has to be released. Raises the RequestError that ends the request."""

    def release(self, ref: AdapterRef) -> None:
        """The request is over."""


class Answer(Protocol):
    """Where a request's deltas go."""

    is_unary: bool

    async def start(self) -> None:
        """The request was admitted."""

    async def add(self, delta: SequenceDelta) -> None:
        """The next piece of one sequence."""


Encode = Callable[[], Awaitable[Sequence[int]]]


@dataclasses.dataclass(slots=True)
class Record:
    """What the log says of a request: counts and times, never text."""

    code: str = "CANCELLED"
    num_prompt_tokens: int = 0
    finish_reasons: list[FinishReason] = dataclasses.field(default_factory=list)
    done: RequestDone | None = None

    def write(self, call: Call) -> None:
        """One record per request, at its end."""
        values: dict[str, object] = {
            "request_id": call.request_id,
            "method": call.method,
            "code": self.code,
            "prompt_tokens": self.num_prompt_tokens,
            "finish_reasons": ",".join(reason.value for reason in self.finish_reasons),
            "duration_s": round(time.monotonic() - call.arrival_s, 6),
        }
        if self.done is not None:
            values |= {"completion_tokens": self.done.completion_tokens, "cached_tokens": self.done.cached_tokens}
            values |= {name: round(value, 6) for name, value in dataclasses.asdict(self.done.timing).items()}
        event(logger, "request ended", **values)


class Requests:
    """Admits requests to the engine and carries their events. `default_deadline_s`: 0 means none."""

    def __init__(
        self,
        limits: Limits,
        engine: Engine,
        admission: Admission,
        readiness: Readiness,
        metrics: Metrics,
        default_deadline_s: float = 0.0,
        adapters: AdapterNames | None = None,
    ) -> None:
        """`adapters` None: LoRA is off, and `limits` refuse requests for one."""
        self.limits = limits
        self._adapters = adapters
        self._num_reading = 0  # requests whose adapter is being read from disk
        self._engine = engine
        self._admission = admission
        self._readiness = readiness
        self._metrics = metrics
        self._default_deadline_s = default_deadline_s
        self._keys = itertools.count(1)

    async def run(self, request: GenerationRequest, encode: Encode, answer: Answer, call: Call) -> RequestDone:
        """Sees the request through to its end; `encode` gives its prompt's ids once its fields are known to be right.

        Raises the RequestError that ends it. However it ends, its slots and blocks are freed.
        """
        record = Record()
        if call.deadline_s is None and self._default_deadline_s:
            call.deadline_s = call.arrival_s + self._default_deadline_s
        try:
            async with asyncio.timeout_at(call.deadline_s) as timer:  # The loop's clock is time.monotonic().
                record.done = await self._run(request, encode, answer, call, record)
            record.code = "OK"
            return record.done
        except RequestError as error:
            record.code = CODES[type(error)].name
            raise
        except TimeoutError:
            record.code = "DEADLINE_EXCEEDED" if timer.expired() else "INTERNAL"
            if not timer.expired():
                raise
            raise DeadlineExceeded("the deadline passed before the answer was complete") from None
        except asyncio.CancelledError:
            if call.deadline_s is not None and time.monotonic() >= call.deadline_s:
                record.code = "DEADLINE_EXCEEDED"  # gRPC's own timer was first.
            raise
        except Exception:
            record.code = "INTERNAL"
            raise
        finally:
            record.write(call)
            if record.code != "OK":
                self._metrics.request_failed(record.code)

    async def _run(
        self, request: GenerationRequest, encode: Encode, answer: Answer, call: Call, record: Record
    ) -> RequestDone:
        self._readiness.check()
        validation.check_fields(request, self.limits)
        ids = await encode()
        record.num_prompt_tokens = len(ids)
        submission = validation.build(request, ids, self._admitted(call), self.limits, answer.is_unary)
        self._readiness.check()  # It may have changed while the prompt was encoded.
        load = self._engine.load()
        load = dataclasses.replace(load, num_waiting=load.num_waiting + self._num_reading)
        place = self._admission.enter(len(ids), load)
        stream: Stream | None = None
        try:
            adapter = await self._acquire(request.adapter)
        except BaseException:
            place.leave()
            raise
        try:
            submission = dataclasses.replace(submission, adapter=adapter)
            self._readiness.check()
            stream = self._engine.submit(submission)
            await answer.start()
            return await self._carry(stream, place, answer, record)
        finally:
            place.leave()
            if stream is not None:
                stream.close()
            if adapter is not None and self._adapters is not None:
                self._adapters.release(adapter)

    async def _acquire(self, name: str) -> AdapterRef | None:
        if not name or self._adapters is None:
            return None
        self._num_reading += 1
        try:
            return await self._adapters.acquire(name)
        finally:
            self._num_reading -= 1

    async def _carry(self, stream: Stream, place: Place, answer: Answer, record: Record) -> RequestDone:
        async for item in stream:
            place.leave()
            if isinstance(item, RequestDone):
                return item
            if isinstance(item, RequestFailed):
                raise item.error
            if item.finish is not None:
                record.finish_reasons.append(item.finish.reason)
            await answer.add(item)
        raise InternalError("the request's events ended early")

    def _admitted(self, call: Call) -> validation.Admitted:
        key, seed = next(self._keys), secrets.randbits(SEED_BITS)
        return validation.Admitted(key, call.request_id, seed, call.arrival_s, call.deadline_s)
