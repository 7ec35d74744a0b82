"""Streams by hand: merging, order, closing, and that nothing is kept."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.engine_client import EngineClient
from router.errors import Unavailable
from router.messages import (
    Event,
    Finish,
    FinishReason,
    Load,
    RequestDone,
    RequestFailed,
    SequenceDelta,
    Submission,
    Timing,
    TokenLogprob,
)
from tests.router.test_scheduler import submission


class Recorder:
    """An engine that does nothing."""

    def __init__(self) -> None:
        self.submitted: list[Submission] = []
        self.cancelled: list[int] = []

    def submit(self, submission: Submission) -> None:
        self.submitted.append(submission)

    def cancel(self, key: int) -> None:
        self.cancelled.append(key)

    def load(self) -> Load:
        return Load(1, 2, 0.5)


def made() -> tuple[EngineClient, Recorder]:
    client, engine = EngineClient(), Recorder()
    client.attach(engine)
    return client, engine


def delta(index: int, token: int, finish: Finish | None = None, key: int = 1) -> SequenceDelta:
    return SequenceDelta(key, index, f"<{token}>", [token], [TokenLogprob(token, -0.5)], finish)


DONE = RequestDone(1, 5, 3, 0, Timing(0, 0, 0, 0, 0))


async def test_deltas_that_nobody_read_become_one_per_sequence() -> None:
    client, _ = made()
    stream = client.submit(submission(1, n=2))
    stop = Finish(FinishReason.STOP, 9)
    for item in (delta(0, 1), delta(1, 2), delta(0, 3), delta(1, 4), delta(0, 5, stop)):
        client.deliver([item])
    first, second = await anext(stream), await anext(stream)
    logprobs = [TokenLogprob(1, -0.5), TokenLogprob(3, -0.5), TokenLogprob(5, -0.5)]
    assert first == SequenceDelta(1, 0, "<1><3><5>", [1, 3, 5], logprobs, stop)
    assert isinstance(second, SequenceDelta) and (second.index, second.token_ids) == (1, [2, 4])


async def test_a_delta_that_was_read_does_not_grow() -> None:
    client, _ = made()
    stream = client.submit(submission(1))
    client.deliver([delta(0, 1)])
    first = await anext(stream)
    client.deliver([delta(0, 2)])
    assert first == delta(0, 1) and await anext(stream) == delta(0, 2)


@given(st.lists(st.one_of(st.none(), st.integers(0, 2)), max_size=40))
def test_whenever_the_reader_comes_it_gets_every_token_once_and_at_most_one_pending_delta(
    moves: list[int | None],
) -> None:
    async def play() -> None:
        client, _ = made()
        stream = client.submit(submission(1, n=3))
        sent: dict[int, list[int]] = {0: [], 1: [], 2: []}
        got: dict[int, list[int]] = {0: [], 1: [], 2: []}

        def keep(item: Event) -> None:
            if isinstance(item, SequenceDelta):
                got[item.index] += item.token_ids

        for token, index in enumerate(moves):
            if index is not None:
                client.deliver([delta(index, token)])
                sent[index].append(token)
            elif stream._pending:
                keep(await anext(stream))
            assert len(stream._pending) <= 3
        client.deliver([DONE])
        events = [item async for item in stream]
        for item in events:
            keep(item)
        assert got == sent and events[-1] == DONE

    asyncio.run(play())


@pytest.mark.parametrize("last", [DONE, RequestFailed(1, Unavailable("gone"))])
async def test_a_stream_ends_after_its_last_event_and_is_forgotten(last: Event) -> None:
    client, engine = made()
    stream = client.submit(submission(1))
    client.deliver([delta(0, 1), last])
    assert [item async for item in stream] == [delta(0, 1), last]
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    stream.close()
    assert engine.cancelled == [] and client._streams == {}


async def test_closing_an_unfinished_stream_cancels_once_and_drops_what_comes_later() -> None:
    client, engine = made()
    stream = client.submit(submission(1))
    stream.close()
    stream.close()
    client.deliver([delta(0, 1), RequestFailed(1, Unavailable("gone")), delta(0, 1, key=2)])
    assert engine.cancelled == [1] and client._streams == {}


async def test_a_reader_that_waits_is_woken_and_only_by_its_own_request() -> None:
    client, engine = made()
    one, two = client.submit(submission(1)), client.submit(submission(2))
    waiting = asyncio.create_task(anext(one))
    client.deliver([delta(0, 7, key=2)])
    await asyncio.sleep(0)
    assert not waiting.done() and await anext(two) == delta(0, 7, key=2)
    client.deliver([delta(0, 8)])
    assert await waiting == delta(0, 8)
    assert [s.key for s in engine.submitted] == [1, 2] and client.load() == Load(1, 2, 0.5)
