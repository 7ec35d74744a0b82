"""The one thread that touches the model: everything runs there in the order in which it was handed over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Worker:
    """A thread and its queue; results come back to the event loop that calls."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="steps")

    def submit(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Queues `work`; the future belongs to the running loop. Cancelling it stops nothing that has begun."""
        return asyncio.get_running_loop().run_in_executor(self._executor, work)
