"""The engine's loop with scripted shards: run-ahead, streams, lagging readers, and the loss of a shard."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from router.engine import Engine
from router.engine_client import EngineClient, RequestStream
from router.errors import DeadlineExceeded, Unavailable
from router.messages import Event, RequestDone, RequestFailed, SequenceDelta
from router.metrics import Metrics
from router.shard_client import ShardLost
from tests.fake_shards import FakeLink
from tests.router.test_scheduler import Words, expected, submission

TIMEOUT_S = 30


class Running:
    """An engine under way, with its client."""

    def __init__(self, run_ahead: int = 1, step_s: float = 0.0) -> None:
        self.link = FakeLink(step_s=step_s)
        self.client = EngineClient()
        self.metrics = Metrics("fake", has_aliases=False)
        self.engine = Engine(self.link, lambda skip: Words(), self.metrics, self.client.deliver, run_ahead)
        self.client.attach(self.engine)
        self.task = asyncio.create_task(self.engine.run())

    async def idle(self) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not self.engine._scheduler.is_idle:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        self.engine._scheduler.check_integrity()


@contextlib.asynccontextmanager
async def running(run_ahead: int = 1, step_s: float = 0.0) -> AsyncIterator[Running]:
    it = Running(run_ahead, step_s)
    async with asyncio.timeout(TIMEOUT_S):
        yield it
    it.task.cancel()
    with contextlib.suppress(asyncio.CancelledError, ShardLost):
        await it.task


async def read(stream: RequestStream) -> list[Event]:
    return [event async for event in stream]


def tokens(events: list[Event]) -> list[int]:
    return [token for event in events if isinstance(event, SequenceDelta) for token in event.token_ids]


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
async def test_every_depth_gives_the_same_tokens_and_sends_that_far_ahead(run_ahead: int) -> None:
    async with running(run_ahead, step_s=0.002) as it:
        requests = [submission(key, max_tokens=10) for key in range(1, 6)]
        answers = await asyncio.gather(*(read(it.client.submit(request)) for request in requests))
        assert [tokens(events) for events in answers] == [expected(request) for request in requests]
        assert it.link.max_unanswered == run_ahead + 1
        await it.idle()


async def test_a_request_that_comes_while_a_step_runs_joins_the_next_one() -> None:
    async with running(run_ahead=0, step_s=0.01) as it:
        first = asyncio.create_task(read(it.client.submit(submission(1, max_tokens=20))))
        await asyncio.sleep(0.03)
        second = submission(2, max_tokens=3)
        assert tokens(await read(it.client.submit(second))) == expected(second)
        assert not first.done()
        await first


async def test_a_reader_that_lags_finds_one_merged_delta_and_slows_nobody() -> None:
    async with running() as it:
        slow, fast = submission(1, max_tokens=30), submission(2, max_tokens=30)
        lagging = it.client.submit(slow)
        assert tokens(await read(it.client.submit(fast))) == expected(fast)
        await it.idle()
        events = await read(lagging)
        assert [type(event) for event in events] == [SequenceDelta, RequestDone]
        assert tokens(events) == expected(slow)
        assert isinstance(events[0], SequenceDelta) and events[0].text == "".join(f"<{t}>" for t in expected(slow))
        assert events[0].finish is not None


async def test_closing_a_stream_frees_its_blocks_and_closing_again_does_nothing() -> None:
    async with running(step_s=0.005) as it:
        stream = it.client.submit(submission(1, max_tokens=100))
        async for _ in stream:
            break
        assert it.client.load().kv_cache_usage > 0
        stream.close()
        stream.close()
        assert it.client.load().kv_cache_usage == 0
        await it.idle()


async def test_a_deadline_passes_without_any_answer_coming_in() -> None:
    async with running(step_s=3600) as it:
        request = submission(1, deadline_s=asyncio.get_running_loop().time() + 0.05)
        (only,) = await read(it.client.submit(request))
        assert isinstance(only, RequestFailed) and isinstance(only.error, DeadlineExceeded)


async def test_the_loss_of_a_shard_ends_every_request_and_then_the_engine() -> None:
    async with running(step_s=0.005) as it:
        streams = [it.client.submit(submission(key, max_tokens=100)) for key in range(1, 12)]
        await asyncio.sleep(0.05)
        it.link.lose()
        for events in await asyncio.gather(*map(read, streams)):
            assert isinstance(events[-1], RequestFailed) and isinstance(events[-1].error, Unavailable)
        with pytest.raises(ShardLost):
            await it.task


async def test_a_request_that_comes_after_the_loss_ends_at_once() -> None:
    async with running() as it:
        it.link.lose()
        await read(it.client.submit(submission(1)))
        await asyncio.wait([it.task])
        (only,) = await read(it.client.submit(submission(2)))
        assert isinstance(only, RequestFailed) and isinstance(only.error, Unavailable)


async def test_a_fault_of_our_own_ends_every_request_and_then_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    it = Running()
    stream = it.client.submit(submission(1))
    monkeypatch.setattr(it.engine._scheduler, "postprocess", fail)
    (only,) = await read(stream)
    assert isinstance(only, RequestFailed) and isinstance(only.error, Unavailable)
    with pytest.raises(ZeroDivisionError):
        await it.task


async def test_an_idle_engine_checks_once_that_nothing_leaked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.engine.IDLE_CHECK_S", 0.01)
    async with running() as it:
        checks: list[int] = []
        monkeypatch.setattr(it.engine._scheduler, "check_integrity", lambda: checks.append(1))
        for key, num_checks in ((1, 1), (2, 2)):
            await read(it.client.submit(submission(key)))
            await asyncio.sleep(0.15)
            assert len(checks) == num_checks


async def test_generated_tokens_are_counted_once_each() -> None:
    async with running(run_ahead=2) as it:
        done = [(await read(it.client.submit(submission(key, max_tokens=7))))[-1] for key in range(1, 9)]
        completion = sum(event.completion_tokens for event in done if isinstance(event, RequestDone))
        counted = it.metrics.registry.get_sample_value("cohort_generation_tokens_total")
        assert counted == completion == 8 * 7
        assert it.metrics.registry.get_sample_value("cohort_prompt_tokens_total") == 8 * 5
