"""Where deltas go: collected for a unary answer, or written as the events of a stream."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from cohort.v1 import generation_pb2 as pb

from router.api import convert
from router.api.calls import Call
from router.messages import Finish, RequestDone, SequenceDelta, TokenLogprob

StreamMessage = pb.GenerateStreamResponse | pb.ChatStreamResponse


@dataclasses.dataclass(slots=True)
class Collected:
    """One sequence of a unary answer."""

    texts: list[str] = dataclasses.field(default_factory=list)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    finish: Finish | None = None


class UnaryAnswer:
    """Keeps every sequence until the request is done."""

    is_unary = True

    def __init__(self, has_token_ids: bool) -> None:
        self._has_token_ids = has_token_ids
        self._sequences: dict[int, Collected] = {}

    async def start(self) -> None:
        """Nothing to say yet."""

    async def add(self, delta: SequenceDelta) -> None:
        """Joins the delta to its sequence."""
        sequence = self._sequences.setdefault(delta.index, Collected())
        sequence.texts.append(delta.text)
        sequence.token_ids.extend(delta.token_ids)
        sequence.logprobs.extend(delta.logprobs)
        sequence.finish = delta.finish or sequence.finish

    def sequences(self) -> list[pb.GeneratedSequence]:
        """The finished sequences in order of index."""
        return [self._sequence(index, sequence) for index, sequence in sorted(self._sequences.items())]

    def _sequence(self, index: int, sequence: Collected) -> pb.GeneratedSequence:
        assert sequence.finish is not None
        return pb.GeneratedSequence(
            index=index,
            text="".join(sequence.texts),
            token_ids=sequence.token_ids if self._has_token_ids else [],
            logprobs=[convert.to_logprob(logprob) for logprob in sequence.logprobs],
            finish_reason=convert.FINISH_REASONS[sequence.finish.reason],
            matched_stop=convert.to_matched_stop(sequence.finish),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class StreamEvents:
    """How one service wraps the events of its stream."""

    started: Callable[[pb.StreamStarted], StreamMessage]
    delta: Callable[[pb.SequenceDelta], StreamMessage]
    finished: Callable[[pb.SequenceFinished], StreamMessage]
    done: Callable[[pb.StreamDone], StreamMessage]


class StreamAnswer:
    """Writes each event as it comes; while the reader is behind, the engine's side merges what follows."""

    is_unary = False

    def __init__(self, call: Call, events: StreamEvents, model: str, has_token_ids: bool) -> None:
        self._call = call
        self._events = events
        self._model = model
        self._has_token_ids = has_token_ids

    async def start(self) -> None:
        """The stream's first message."""
        started = pb.StreamStarted(request_id=self._call.request_id, model=self._model)
        await self._call.write(self._events.started(started))

    async def add(self, delta: SequenceDelta) -> None:
        """The delta's messages, and the sequence's end if it is its last."""
        for piece in convert.deltas(delta, self._has_token_ids):
            await self._call.write(self._events.delta(piece))
        if delta.finish is not None:
            await self._call.write(self._events.finished(convert.to_finished(delta.index, delta.finish)))

    async def end(self, done: RequestDone) -> None:
        """The stream's last message."""
        message = pb.StreamDone(usage=convert.to_usage(done), timing=convert.to_timing(done))
        await self._call.write(self._events.done(message))
