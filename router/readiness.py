"""Whether the server takes requests: the shards are there and it is not draining."""

from __future__ import annotations

import asyncio

from router.errors import Unavailable


class Readiness:
    """A switch that calls look at and health watchers wait on. Starts off, `reason` says why."""

    def __init__(self, reason: str = "the model is loading") -> None:
        self.is_ready = False
        self._reason = reason
        self._change = asyncio.Event()

    def set_ready(self) -> None:
        """Requests are taken from now on."""
        self.is_ready = True
        self._wake()

    def set_unready(self, reason: str) -> None:
        """Requests are refused from now on with `reason`."""
        self.is_ready, self._reason = False, reason
        self._wake()

    def check(self) -> None:
        """Raises Unavailable unless requests are taken."""
        if not self.is_ready:
            raise Unavailable(self._reason)

    async def changed(self) -> None:
        """Waits for the next change."""
        await self._change.wait()

    def _wake(self) -> None:
        self._change.set()
        self._change = asyncio.Event()
