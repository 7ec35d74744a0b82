"""Steps in two halves: order over two threads, buffers in turn, and results that wait for their step."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
import torch

from shard_server.staging import Readback, Turns
from shard_server.step_clock import StepClock
from shard_server.worker import Worker

LIMIT_S = 20


class Event:
    def __init__(self) -> None:
        self.num_waits = 0

    def synchronize(self) -> None:
        self.num_waits += 1


def test_a_buffer_comes_up_again_only_after_the_event_of_its_last_use() -> None:
    turns, events = Turns(3), [Event() for _ in range(6)]
    order = []
    for number, event in enumerate(events):
        order.append(turns.advance())
        turns.release_after(event)
        assert [e.num_waits for e in events] == [1] * max(0, number - 2) + [0] * min(6, 8 - number)
    assert order == [1, 2, 0, 1, 2, 0]


async def test_the_next_step_is_launched_while_the_first_one_is_awaited() -> None:
    worker, gate, seen = Worker(), threading.Event(), []
    launched_second = threading.Event()

    def first() -> str:
        assert gate.wait(LIMIT_S)
        seen.append("first ends")
        return "first"

    def launch_second() -> object:
        seen.append("second begins")
        launched_second.set()
        return lambda: seen.append("second ends") or "second"

    one = worker.submit_halves(lambda: first)
    two = worker.submit_halves(launch_second)
    assert await asyncio.to_thread(launched_second.wait, LIMIT_S)
    assert not one.done() and not two.done()
    gate.set()
    assert await asyncio.wait_for(asyncio.gather(one, two), LIMIT_S) == ["first", "second"]
    assert seen == ["second begins", "first ends", "second ends"]


async def test_an_error_of_either_half_reaches_its_own_future_only() -> None:
    worker = Worker()

    def fail() -> str:
        raise ZeroDivisionError("half")

    launch, finish = worker.submit_halves(fail), worker.submit_halves(lambda: fail)
    good = worker.submit_halves(lambda: lambda: 3)
    for future in (launch, finish):
        with pytest.raises(ZeroDivisionError, match="half"):
            await asyncio.wait_for(future, LIMIT_S)
    assert await asyncio.wait_for(good, LIMIT_S) == 3


def test_a_steps_idle_time_counts_from_the_end_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 12.0, 15.0, 16.0, 20.0, 21.0])
    monkeypatch.setattr("shard_server.step_clock.time.perf_counter", lambda: next(times))
    clock, found = StepClock(torch.device("cpu")), []
    for number in range(3):
        if number == 2:
            clock.reset()
        clock.begin()
        found.append(clock.end().wait())
    assert found == [(2.0, 0.0), (1.0, 3.0), (1.0, 0.0)]


def test_results_keep_their_shapes_and_types() -> None:
    tensors = [torch.tensor([1, 2], dtype=torch.int32), torch.tensor([[0.5], [-1.0]])]
    ints, floats = Readback(*tensors).read()
    np.testing.assert_array_equal(ints, np.array([1, 2], np.int32))
    np.testing.assert_array_equal(floats, np.array([[0.5], [-1.0]], np.float32))
