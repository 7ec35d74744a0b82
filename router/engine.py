"""The loop that keeps the shards busy: sends steps ahead of their answers and hands out what the answers mean."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from router.adapter_places import AdapterPlaces
from router.errors import InternalError, RequestError, Unavailable
from router.messages import Event, Finish, FinishReason, Load, RequestDone, RequestFailed, SequenceDelta, Submission
from router.metrics import Metrics
from router.scheduler import MakeDetokenizer, Scheduler
from router.shard_client import ShardLink, ShardLost, ShardsHang
from router.step import Step, StepResult

logger = logging.getLogger(__name__)

IDLE_CHECK_S = 1.0  # a check walks the whole pool, so the next request must not have to wait for it

STALLED_SHARE = 0.25  # of the step timeout after which a step without an answer makes the server look unready

Deliver = Callable[[list[Event]], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Recovered:
    """Shards that are there again; `blames_rows`: a sequence may have been the cause of their loss."""

    link: ShardLink
    blames_rows: bool


class Supervision(Protocol):
    """What the engine tells of its shards, and who brings them back."""

    def stalled(self) -> None:
        """A step has waited for its answer for long."""

    def answered(self) -> None:
        """The answer came after all."""

    async def recover(self, lost: ShardLost, link: ShardLink) -> Recovered:
        """Shards like those of `link`. Raises what should end the engine."""
        ...

    async def restore(self) -> None:
        """Called when no sequence runs any more, before the new shards get a step."""


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
        supervision: Supervision | None = None,
        step_timeout_s: float = 0.0,
        enable_prefix_caching: bool = True,
    ) -> None:
        """`run_ahead` is how many steps are sent before the oldest one's answer is here, beside that one.

        Without `supervision` the loss of a shard ends the engine; `step_timeout_s` 0: a step may take for ever.
        """
        self._link = link
        self._adapters = adapters
        self._scheduler = Scheduler(link.info, make_detokenizer, adapters, enable_prefix_caching)
        self._metrics = metrics
        self._deliver = deliver
        self._run_ahead = run_ahead
        self._supervision = supervision
        self._step_timeout_s = step_timeout_s
        self._turn_s: float | None = None  # when the oldest unanswered step's turn began
        self._is_stalled = False
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
        """Runs until cancelled. Raises ShardLost when a shard is lost for good; every request was ended then."""
        try:
            while True:
                try:
                    await self._run_epoch()
                except ShardLost as lost:
                    if self._supervision is None:
                        raise
                    self._begin_again(await self._recover(self._supervision, lost))
                    await self._supervision.restore()
        except Exception:
            self._is_over = True
            self._hand_out(self._scheduler.fail_all("the shards are gone"))
            self._report_load()
            raise

    async def _run_epoch(self) -> None:
        receiving: asyncio.Task[StepResult] | None = None
        waking: asyncio.Task[bool] | None = None
        try:
            while True:
                self._wake.clear()
                self._send_ahead()
                if self._scheduler.num_unanswered_steps and receiving is None:
                    receiving = asyncio.create_task(self._link.receive())
                    self._turn_s = time.monotonic()
                if receiving is None or self._scheduler.num_unanswered_steps <= self._run_ahead:
                    waking = waking or asyncio.create_task(self._wake.wait())
                    await self._wait(receiving, waking)
                    waking = None if waking.done() else waking
                else:  # Nothing more can be sent, so a new request has to wait anyway.
                    await self._wait(receiving)
                if receiving is not None and receiving.done():
                    result, receiving, self._turn_s = receiving.result(), None, None
                    self._take(result)
                    await asyncio.sleep(0)  # Streams write before the next step is made, even if its answer is here.
                elif receiving is not None:
                    self._check_age()
        finally:
            self._turn_s = None
            for task in (receiving, waking):
                if task is not None:
                    task.cancel()

    async def _recover(self, supervision: Supervision, lost: ShardLost) -> Recovered:
        """Waits for the shards to be back; requests come, wait, pass their deadlines and leave meanwhile."""
        recovering = asyncio.create_task(supervision.recover(lost, self._link))
        try:
            while not recovering.done():
                self._hand_out(self._scheduler.expire(time.monotonic()))
                self._wake.clear()
                waking = asyncio.create_task(self._wake.wait())
                await self._wait(recovering, waking)
                waking.cancel()
            return recovering.result()
        finally:
            recovering.cancel()

    def _begin_again(self, recovered: Recovered) -> None:
        self._link = recovered.link
        self._sent.clear()
        self._is_stalled = False
        self._hand_out(self._scheduler.end_epoch(recovered.blames_rows))
        self._report_load()

    def _check_age(self) -> None:
        """Raises ShardsHang if the oldest unanswered step has had its time."""
        if not self._step_timeout_s or self._turn_s is None:
            return
        age_s = time.monotonic() - self._turn_s
        if age_s >= self._step_timeout_s:
            raise ShardsHang(self._link.silent_ranks(), self._step_timeout_s)
        if age_s >= self._step_timeout_s * STALLED_SHARE and not self._is_stalled and self._supervision is not None:
            self._is_stalled = True
            self._supervision.stalled()

    def _age_limit_s(self) -> float | None:
        """When `_check_age` has something to say next."""
        if not self._step_timeout_s or self._turn_s is None:
            return None
        return self._turn_s + self._step_timeout_s * (1 if self._is_stalled else STALLED_SHARE)

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
        limits_s = [limit for limit in (self._scheduler.next_deadline_s, self._age_limit_s()) if limit is not None]
        timeout_s = max(0.0, min(limits_s) - time.monotonic()) if limits_s else None
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
        if self._is_stalled and self._supervision is not None:
            self._is_stalled = False
            self._supervision.answered()
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
            self._metrics.cached_prompt_tokens(tally.num_cached_prompt_tokens)
        if tally.num_looked_up_tokens:
            self._metrics.prefix_cache(tally.num_looked_up_tokens, tally.num_found_tokens)
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
