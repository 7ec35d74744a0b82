"""The loop that keeps the shards busy: sends steps ahead of their answers and hands out what the answers mean."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from router.adapter_places import AdapterPlaces
from router.errors import InternalError, RequestError, Unavailable
from router.messages import Event, Finish, FinishReason, Load, RequestDone, RequestFailed, SequenceDelta, Submission
from router.metrics import Metrics
from router.scheduler import MakeDetokenizer, Scheduler
from router.shard_client import ShardLink
from router.step import Step, StepResult

logger = logging.getLogger(__name__)

IDLE_CHECK_S = 1.0  # a check walks the whole pool, so the next request must not have to wait for it

Deliver = Callable[[list[Event]], None]


class Engine:
    """Owns the scheduler and the shard link. Submissions and cancellations come in, batches of events go out."""

    def __init__(
        self,
        link: ShardLink,
        make_detokenizer: MakeDetokenizer,
        metrics: Metrics,
        deliver: Deliver,
        run_ahead: int = 1,
        adapters: AdapterPlaces | None = None,
    ) -> None:
        """`run_ahead` is how many steps are sent before the oldest one's answer is here, beside that one."""
        self._link = link
        self._adapters = adapters
        self._scheduler = Scheduler(link.info, make_detokenizer, adapters)
        self._metrics = metrics
        self._deliver = deliver
        self._run_ahead = run_ahead
        self._wake = asyncio.Event()
        self._sent: dict[int, Step] = {}
        self._finish_reasons: dict[int, list[FinishReason]] = {}
        self._is_checked = False
        self._is_over = False

    def submit(self, submission: Submission) -> None:
        """Takes a validated request; one that comes when the shards are gone ends at once."""
        if self._is_over:
            self._hand_out([RequestFailed(submission.key, Unavailable("the shards are gone"))])
            return
        self._scheduler.add(submission)
        self._wake.set()

    def cancel(self, key: int) -> None:
        """Ends a request whose caller went away; its blocks are free at once."""
        self._hand_out(self._scheduler.cancel(key))
        self._wake.set()

    def adapters_changed(self) -> None:
        """An adapter was loaded: sequences may start that could not before."""
        self._wake.set()

    def adapter_failed(self, version: str, error: RequestError) -> None:
        """Ends the requests that wait for a version which cannot be loaded."""
        self._hand_out(self._scheduler.fail_adapter(version, error))
        self._wake.set()

    def load(self) -> Load:
        """How busy the engine is."""
        return self._scheduler.load()

    async def run(self) -> None:
        """Runs until cancelled. Raises ShardLost when a shard is lost; whatever it raises, every request was ended."""
        receiving: asyncio.Task[StepResult] | None = None
        waking: asyncio.Task[bool] | None = None
        try:
            while True:
                self._wake.clear()
                self._send_ahead()
                if self._scheduler.num_unanswered_steps and receiving is None:
                    receiving = asyncio.create_task(self._link.receive())
                if receiving is None or self._scheduler.num_unanswered_steps <= self._run_ahead:
                    waking = waking or asyncio.create_task(self._wake.wait())
                    await self._wait(receiving, waking)
                    waking = None if waking.done() else waking
                else:  # Nothing more can be sent, so a new request has to wait anyway.
                    await self._wait(receiving)
                if receiving is not None and receiving.done():
                    result, receiving = receiving.result(), None
                    self._take(result)
                    await asyncio.sleep(0)  # Streams write before the next step is made, even if its answer is here.
        except Exception:
            self._is_over = True
            self._hand_out(self._scheduler.fail_all("the shards are gone"))
            self._report_load()
            raise
        finally:
            for task in (receiving, waking):
                if task is not None:
                    task.cancel()

    def _send_ahead(self) -> None:
        now_s = time.monotonic()
        self._hand_out(self._scheduler.expire(now_s))
        while self._scheduler.num_unanswered_steps <= self._run_ahead:
            step = self._scheduler.schedule(now_s)
            if step is None:
                break
            self._sent[step.step_id] = step
            self._link.send(step)

    async def _wait(self, *tasks: asyncio.Task[Any] | None) -> None:
        """Waits for one of the tasks or the next deadline. Once idle for a while, checks that nothing leaked."""
        deadline_s = self._scheduler.next_deadline_s
        timeout_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        is_check_due = self._scheduler.is_idle and not self._is_checked
        if is_check_due:
            timeout_s = IDLE_CHECK_S
            self._report_load()
        waited = [task for task in tasks if task is not None]
        done, _ = await asyncio.wait(waited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if is_check_due and not done:
            self._scheduler.check_integrity()
        self._is_checked = self._scheduler.is_idle and not done

    def _take(self, result: StepResult) -> None:
        step = self._sent.pop(result.step_id)
        self._hand_out(self._scheduler.postprocess(result, time.monotonic()))
        num_tokens = sum(row.num_tokens for row in step.scheduled)
        num_decodes = sum(row.num_tokens == 1 for row in step.scheduled)
        kind = "decode" if num_decodes == len(step.scheduled) else "mixed" if num_decodes else "prefill"
        self._metrics.step(kind, result.step_s, result.device_idle_s, num_tokens)
        tally = self._scheduler.take_tally()
        self._metrics.generation_tokens(tally.num_generated_tokens)
        if tally.num_prompt_tokens:
            self._metrics.prompt_tokens(tally.num_prompt_tokens)
        if tally.num_preemptions:
            self._metrics.preempted(tally.num_preemptions)
        for name, count in tally.num_adapter_tokens.items():
            self._metrics.adapter_tokens(name, count)
        for seconds in tally.first_token_latencies_s:
            self._metrics.first_token(seconds)
        for seconds in tally.token_latencies_s:
            self._metrics.token_latency(seconds)
        self._report_load()

    def _report_load(self) -> None:
        load = self._scheduler.load()
        self._metrics.set_load(load.num_running, load.num_waiting, load.kv_cache_usage)
        if self._adapters is not None:
            self._metrics.set_adapter_load(self._adapters.load, time.time())

    def _hand_out(self, events: list[Event]) -> None:
        if not events:
            return
        for item in events:
            match item:
                case SequenceDelta(finish=Finish(reason=reason)):
                    self._finish_reasons.setdefault(item.key, []).append(reason)
                case RequestDone():
                    self._metrics.request_done(self._finish_reasons.pop(item.key), item)
                case RequestFailed():
                    self._finish_reasons.pop(item.key, None)
                    if isinstance(item.error, InternalError):
                        logger.error("request failed: %s", item.error)
        self._deliver(events)
