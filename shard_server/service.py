"""The shard link's RPCs. Steps run on the worker thread, so the event loop always answers."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import NoReturn, Protocol

import grpc
from cohort.shard.v1 import shard_pb2, shard_pb2_grpc

from model.errors import ModelError
from shard_server.adapters import AdapterRecipe, AdapterSource, StagedAdapters
from shard_server.errors import ProtocolError
from shard_server.link import LINK_VERSION, StepOutcome, StepWork, decode_step, encode_outcome
from shard_server.loader import ShardFacts
from shard_server.worker import Worker

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[shard_pb2.ExecuteRequest, shard_pb2.ExecuteResponse]
LoadContext = grpc.aio.ServicerContext[shard_pb2.LoadAdapterRequest, shard_pb2.LoadAdapterResponse]
UnloadContext = grpc.aio.ServicerContext[shard_pb2.UnloadAdapterRequest, shard_pb2.UnloadAdapterResponse]
InfoContext = grpc.aio.ServicerContext[shard_pb2.GetInfoRequest, shard_pb2.GetInfoResponse]


class LaunchedStep(Protocol):
    """What the service needs of a PendingStep."""

    def finish(self) -> StepOutcome:
        """Waits for the step's end, on another thread than the one that launches."""


class StepRunner(Protocol):
    """What the service needs of a ModelRunner."""

    def launch(self, work: StepWork) -> LaunchedStep:
        """Begins one step."""

    def reset(self) -> None:
        """Drops all rows."""


@dataclasses.dataclass(slots=True)
class Epoch:
    """One open stream. `is_broken` is set by the worker; steps queued behind a failed one must not run."""

    number: int
    router_id: str
    is_broken: bool = False


class ShardService(shard_pb2_grpc.ShardServiceServicer):
    """GetInfo and Execute. `fail` is called with an error of a step, before the stream ends; its text is sent."""

    def __init__(self, worker: Worker, fail: Callable[[BaseException], str]) -> None:
        self._worker = worker
        self._fail = fail
        self._runner: StepRunner | None = None
        self._facts: ShardFacts | None = None
        self._adapters: StagedAdapters | None = None
        self._open: Epoch | None = None
        self._last_epoch = 0

    def set_ready(self, runner: StepRunner, facts: ShardFacts, adapters: StagedAdapters | None = None) -> None:
        """Steps may come from now on; `adapters` None: LoRA is off."""
        self._runner, self._facts, self._adapters = runner, facts, adapters

    async def GetInfo(self, request: shard_pb2.GetInfoRequest, context: InfoContext) -> shard_pb2.GetInfoResponse:
        """This shard's facts; UNAVAILABLE while the model loads."""
        if self._facts is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the model is still loading")
            raise AssertionError
        staged = self._adapters.versions if self._adapters is not None else []
        facts = dataclasses.asdict(self._facts)
        return shard_pb2.GetInfoResponse(link_version=LINK_VERSION, adapter_versions=staged, **facts)

    async def LoadAdapter(
        self, request: shard_pb2.LoadAdapterRequest, context: LoadContext
    ) -> shard_pb2.LoadAdapterResponse:
        """Stages an adapter beside the steps; FAILED_PRECONDITION with the reason where it cannot be applied."""
        if self._adapters is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "LoRA is off on this shard")
            raise AssertionError
        start_s = time.perf_counter()
        try:
            slices = await self._adapters.load(_recipe(request))
        except (ModelError, OSError) as error:
            logger.warning("adapter %s cannot be applied: %s", request.version, error)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            raise AssertionError from error
        except Exception as error:
            logger.exception("adapter %s could not be loaded", request.version)
            await context.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")
            raise AssertionError from error
        return shard_pb2.LoadAdapterResponse(rank=slices.rank, load_s=time.perf_counter() - start_s)

    async def UnloadAdapter(
        self, request: shard_pb2.UnloadAdapterRequest, context: UnloadContext
    ) -> shard_pb2.UnloadAdapterResponse:
        """Drops a staged adapter."""
        if self._adapters is not None:
            await self._adapters.unload(request.version)
        return shard_pb2.UnloadAdapterResponse()

    async def Execute(
        self, requests: AsyncIterator[shard_pb2.ExecuteRequest], context: Context
    ) -> AsyncIterator[shard_pb2.ExecuteResponse]:
        """One epoch: hello, then steps, answered in order until the router ends the stream or a step fails."""
        runner = self._runner
        if runner is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the model is still loading")
            raise AssertionError
        epoch = await self._hello(requests, context)
        self._open, self._last_epoch = epoch, epoch.number
        logger.info("epoch %d opened by router %s", epoch.number, epoch.router_id)
        try:
            # Behind whatever an earlier epoch left in the queue: once this is answered, no old step runs any more.
            await self._worker.submit_halves(lambda: _reset(runner))
            yield shard_pb2.ExecuteResponse(hello=shard_pb2.HelloAck(epoch=epoch.number))
            async for result in self._run_steps(epoch, runner, requests, context):
                yield result
        finally:
            logger.info("epoch %d ended", epoch.number)
            self._open = None

    async def _hello(self, requests: AsyncIterator[shard_pb2.ExecuteRequest], context: Context) -> Epoch:
        """The epoch that the first message opens; aborts the call if it must not."""
        first = await anext(aiter(requests), None)
        if first is None or first.WhichOneof("message") != "hello":
            await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "the stream's first message must be hello")
        hello = first.hello
        if hello.link_version != LINK_VERSION:
            text = f"link_version is {hello.link_version}, but this shard speaks {LINK_VERSION}"
            await _refuse(context, grpc.StatusCode.FAILED_PRECONDITION, text)
        if self._open is not None:
            text = f"router {self._open.router_id} holds epoch {self._open.number}; its stream must end first"
            await _refuse(context, grpc.StatusCode.FAILED_PRECONDITION, text)
        if hello.epoch <= self._last_epoch:
            text = f"epoch {hello.epoch} is not above {self._last_epoch}, the last one"
            await _refuse(context, grpc.StatusCode.FAILED_PRECONDITION, text)
        return Epoch(hello.epoch, hello.router_id)

    async def _run_steps(
        self,
        epoch: Epoch,
        runner: StepRunner,
        requests: AsyncIterator[shard_pb2.ExecuteRequest],
        context: Context,
    ) -> AsyncIterator[shard_pb2.ExecuteResponse]:
        queued: asyncio.Queue[asyncio.Future[shard_pb2.ExecuteResponse] | None] = asyncio.Queue()
        reader = asyncio.create_task(self._read_steps(epoch, runner, requests, queued))
        try:
            while (future := await queued.get()) is not None:
                try:
                    response = await future
                except ProtocolError as error:
                    logger.error("epoch %d: %s", epoch.number, error)
                    await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
                except Exception as error:
                    logger.exception("epoch %d: a step failed", epoch.number)
                    await _refuse(context, grpc.StatusCode.INTERNAL, self._fail(error))
                yield response
            await reader
        finally:
            reader.cancel()

    async def _read_steps(
        self,
        epoch: Epoch,
        runner: StepRunner,
        requests: AsyncIterator[shard_pb2.ExecuteRequest],
        queued: asyncio.Queue[asyncio.Future[shard_pb2.ExecuteResponse] | None],
    ) -> None:
        """Hands each step to the worker as it arrives, long before earlier ones are answered."""
        rank = self._facts.rank if self._facts else 0
        try:
            async for request in requests:
                work = _StepJob(request, epoch, runner, rank)
                future = self._worker.submit_halves(work.launch)
                future.add_done_callback(_see_exception)
                queued.put_nowait(future)
        finally:
            queued.put_nowait(None)


@dataclasses.dataclass(frozen=True, slots=True)
class _StepJob:
    request: shard_pb2.ExecuteRequest
    epoch: Epoch
    runner: StepRunner
    rank: int

    def launch(self) -> Callable[[], shard_pb2.ExecuteResponse]:
        """On the thread that launches: decodes and begins; gives what waits for the end and encodes."""
        try:
            if self.epoch.is_broken:
                raise ProtocolError("an earlier step of this epoch failed")
            if self.request.WhichOneof("message") != "step":
                raise ProtocolError("hello comes once, then steps")
            step = self.runner.launch(decode_step(self.request.step))
        except BaseException:
            self.epoch.is_broken = True
            raise
        return lambda: self._finish(step)

    def _finish(self, step: LaunchedStep) -> shard_pb2.ExecuteResponse:
        try:
            outcome = step.finish()
        except BaseException:
            self.epoch.is_broken = True
            raise
        return shard_pb2.ExecuteResponse(result=encode_outcome(outcome, self.rank))


def _recipe(request: shard_pb2.LoadAdapterRequest) -> AdapterRecipe:
    sources = tuple(AdapterSource(source.path, source.sha256, source.weight) for source in request.sources)
    return AdapterRecipe(request.version, sources, request.combination_type, request.density, request.seed)


def _reset(runner: StepRunner) -> Callable[[], None]:
    runner.reset()
    return lambda: None


def _see_exception(future: asyncio.Future[shard_pb2.ExecuteResponse]) -> None:
    """Nobody waits for a step whose stream is gone; without this asyncio would complain of its error."""
    if not future.cancelled():
        future.exception()


async def _refuse(context: Context, code: grpc.StatusCode, text: str) -> NoReturn:
    await context.abort(code, text)
    raise AssertionError  # abort always raises
