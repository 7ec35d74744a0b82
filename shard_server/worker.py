"""The threads that touch the model: one enqueues work in the order in which it was handed over, one awaits its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Worker:
    """Two threads and their queues; results come back to the event loop that calls.

    A step has two halves. The first gives the device its work, the second waits for the results. While the second half
    of one step waits, the first half of the next one runs, so that the device finds it ready.
    """

    def __init__(self) -> None:
        self._launcher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="steps")
        self._finisher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="results")

    def submit(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Queues `work`; the future belongs to the running loop. Cancelling it stops nothing that has begun."""
        return asyncio.get_running_loop().run_in_executor(self._launcher, work)

    def submit_halves(self, launch: Callable[[], Callable[[], T]]) -> asyncio.Future[T]:
        """Queues `launch`, and then what it returns, whose result the future gets; both queues keep their order."""
        result: Future[T] = Future()

        def first_half() -> None:
            try:
                finish = launch()
            except BaseException as error:
                # In the order of the results: an earlier step's error is set first.
                self._finisher.submit(result.set_exception, error)
            else:
                self._finisher.submit(second_half, finish)

        def second_half(finish: Callable[[], T]) -> None:
            try:
                result.set_result(finish())
            except BaseException as error:
                result.set_exception(error)

        result.set_running_or_notify_cancel()  # from here on nobody can cancel it under the threads
        self._launcher.submit(first_half)
        return asyncio.wrap_future(result)
