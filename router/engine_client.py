"""The API side of the engine: one stream of events per request, merged while its reader lags."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable
from typing import Protocol

from router.messages import Event, Load, RequestDone, RequestFailed, SequenceDelta, Submission


class EngineSide(Protocol):
    """What the client asks of the engine; router.engine.Engine, or a link to it."""

    def submit(self, submission: Submission) -> None:
        """Takes a validated request."""

    def cancel(self, key: int) -> None:
        """Ends a request."""

    def load(self) -> Load:
        """How busy the engine is."""


class RequestStream:
    """The events of one request, in order. Holds at most one delta per sequence beside the last event."""

    def __init__(self, key: int, close: Callable[[RequestStream], None]) -> None:
        self.key = key
        self._close = close
        self._pending: collections.deque[Event] = collections.deque()
        self._deltas: dict[int, SequenceDelta] = {}
        self._arrived = asyncio.Event()
        self._is_over = False
        self.is_ended = False  # The last event came from the engine, read or not.

    def put(self, item: Event) -> None:
        """Takes the next event; a delta that was not read yet grows instead."""
        if isinstance(item, SequenceDelta):
            if (earlier := self._deltas.get(item.index)) is not None:
                _merge(earlier, item)
                return
            self._deltas[item.index] = item
        else:
            self.is_ended = True
        self._pending.append(item)
        self._arrived.set()

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> Event:
        while not self._pending:
            if self._is_over:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        item = self._pending.popleft()
        if isinstance(item, SequenceDelta):
            del self._deltas[item.index]
        else:
            self._is_over = True
        return item

    def close(self) -> None:
        """Cancels the request unless it has ended. May be called again."""
        self._close(self)


class EngineClient:
    """Streams by request key. `attach` it to an engine before the first submission."""

    def __init__(self) -> None:
        self._engine: EngineSide | None = None
        self._streams: dict[int, RequestStream] = {}

    def attach(self, engine: EngineSide) -> None:
        """From now on requests go to `engine`, whose events have to come to `deliver`."""
        self._engine = engine

    def submit(self, submission: Submission) -> RequestStream:
        """Hands a request over; its events come out of the stream, which has to be closed."""
        assert self._engine is not None
        stream = self._streams[submission.key] = RequestStream(submission.key, self._closed)
        self._engine.submit(submission)
        return stream

    def load(self) -> Load:
        """How busy the engine is."""
        assert self._engine is not None
        return self._engine.load()

    def deliver(self, events: list[Event]) -> None:
        """Takes a step's events."""
        streams = self._streams
        for item in events:
            if (stream := streams.get(item.key)) is not None:
                stream.put(item)
                if isinstance(item, RequestDone | RequestFailed):
                    del streams[item.key]

    def _closed(self, stream: RequestStream) -> None:
        if self._streams.pop(stream.key, None) is not None:
            assert self._engine is not None
            self._engine.cancel(stream.key)


def _merge(earlier: SequenceDelta, later: SequenceDelta) -> None:
    assert earlier.finish is None, "nothing follows the end of a sequence"
    earlier.text += later.text
    earlier.token_ids += later.token_ids
    earlier.logprobs += later.logprobs
    earlier.finish = later.finish
