"""Whether the server is ready, and whether it takes requests: both unless it loads or drains.

While shards are brought back it is not ready, so that no new traffic is sent here, but what comes is queued.
"""

from __future__ import annotations

import asyncio

from router.errors import Unavailable


class Readiness:
    """A switch that calls look at and health watchers wait on. Starts off, `reason` says why."""

    def __init__(self, reason: str = "the model is loading") -> None:
        self.is_ready = False
        self._takes_requests = False
        self._is_closed = False
        self._reason = reason
        self._change = asyncio.Event()

    def set_ready(self) -> None:
        """Requests are taken from now on; nothing happens if the server is being closed."""
        if not self._is_closed:
            self.is_ready = self._takes_requests = True
            self._wake()

    def pause(self) -> None:
        """Not ready until `set_ready`; requests are taken as before."""
        self.is_ready = False
        self._wake()

    def close(self, reason: str) -> None:
        """Requests are refused with `reason`, for good."""
        self.is_ready = self._takes_requests = False
        self._is_closed, self._reason = True, reason
        self._wake()

    def check(self) -> None:
        """Raises Unavailable unless requests are taken."""
        if not self._takes_requests:
            raise Unavailable(self._reason)

    async def changed(self) -> None:
        """Waits for the next change."""
        await self._change.wait()

    def _wake(self) -> None:
        self._change.set()
        self._change = asyncio.Event()
