"""The router without its network side: engine and scheduler over a shard link, requests in, token ids out."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

from bench.workloads import Request
from router.engine import Engine
from router.messages import (
    Event,
    RequestFailed,
    SamplingParams,
    SequenceDelta,
    StoppingParams,
    Submission,
)
from router.metrics import Metrics
from router.scheduler import MakeDetokenizer
from router.shard_client import ShardLink
from router.step import ShardInfo, Step, StepResult


class WatchedLink:
    """Passes a link's steps on and adds up what the shards report of each.

    The idle time before a step counts only if another step was under way when it was sent: before the others the
    device had nothing to wait for.
    """

    def __init__(self, link: ShardLink) -> None:
        self._link = link
        self.info: ShardInfo = link.info
        self.num_steps = 0
        self.step_s = 0.0
        self.idle_s = 0.0
        self._num_unanswered = 0
        self._after_pause: set[int] = set()

    def send(self, step: Step) -> None:
        """Sends a step on."""
        if not self._num_unanswered:
            self._after_pause.add(step.step_id)
        self._num_unanswered += 1
        self._link.send(step)

    async def receive(self) -> StepResult:
        """The next result, counted."""
        result = await self._link.receive()
        self._num_unanswered -= 1
        self.num_steps += 1
        self.step_s += result.step_s
        if result.step_id in self._after_pause:
            self._after_pause.remove(result.step_id)
        else:
            self.idle_s += result.device_idle_s
        return result

    async def close(self) -> None:
        """Closes the link."""
        await self._link.close()

    def forget(self) -> None:
        """Starts counting anew."""
        self.num_steps, self.step_s, self.idle_s = 0, 0.0, 0.0


class OfflineRouter:
    """Answers batches of requests through `link`. `start` it on the loop that it is used on."""

    def __init__(self, link: ShardLink, make_detokenizer: MakeDetokenizer, run_ahead: int) -> None:
        self._keys = itertools.count(1)
        self._outputs: dict[int, list[int]] = {}
        self._ends: dict[int, asyncio.Future[None]] = {}
        self._engine = Engine(
            link=link,
            make_detokenizer=make_detokenizer,
            metrics=Metrics(),
            deliver=self._deliver,
            run_ahead=run_ahead,
            enable_prefix_caching=False,  # Every round has the same prompts, and all of them are to be computed.
        )
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to take requests."""
        self._task = asyncio.create_task(self._engine.run(), name="engine")

    async def stop(self) -> None:
        """Ends the engine's loop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def generate(self, requests: list[Request]) -> list[list[int]]:
        """Greedy ids for each request, all submitted at once. Raises the first request's error, or the link's."""
        assert self._task is not None, "start it first"
        keys = [self.submit(request) for request in requests]
        ends = asyncio.gather(*[self._ends[key] for key in keys])
        waits: list[asyncio.Future[Any]] = [self._task, ends]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            ends.cancel()
            await self._task
        await ends
        return [self.take(key) for key in keys]

    def submit(self, request: Request) -> int:
        """Hands a request to the engine; returns its key."""
        key = next(self._keys)
        self._outputs[key] = []
        self._ends[key] = asyncio.get_running_loop().create_future()
        self._engine.submit(
            Submission(
                key=key,
                request_id=str(key),
                prompt_token_ids=tuple(request.prompt),
                sampling=SamplingParams(temperature=0.0),
                stopping=StoppingParams(max_tokens=request.num_output_tokens),
                arrival_s=time.monotonic(),
            )
        )
        return key

    def take(self, key: int) -> list[int]:
        """A finished request's ids; the request is forgotten."""
        del self._ends[key]
        return self._outputs.pop(key)

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, SequenceDelta):
                self._outputs[event.key].extend(event.token_ids)
            elif isinstance(event, RequestFailed):
                self._ends[event.key].set_exception(event.error)
            else:
                self._ends[event.key].set_result(None)
