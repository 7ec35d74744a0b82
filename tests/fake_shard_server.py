"""FakeShards behind the real link: a gRPC server on a socket, which unpacks steps with the shard's own code."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio
import numpy as np
from cohort.shard.v1 import shard_pb2, shard_pb2_grpc

from router.step import BindAdapter, FillTokens, OpenRow, SampledToken, ScheduledRow, Step, StepResult
from shard_server.link import LINK_VERSION, RowResults, StepOutcome, StepWork, decode_step, encode_outcome
from tests.fake_shards import FakeShards

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


async def at_once(what: object) -> None:
    """Lets a step or a load begin without a pause."""


class FakeShardServer(shard_pb2_grpc.ShardServiceServicer):
    """One rank. `before_step(step_id)` may sleep or raise; `facts` are laid over what GetInfo says."""

    def __init__(self, address: str, shards: FakeShards | None = None, rank: int = 0, world_size: int = 1) -> None:
        self.address = address
        self.shards = shards or FakeShards()
        self.rank = rank
        self.world_size = world_size
        self.is_loaded = True
        self.is_silent = False  # Execute never answers.
        self.before_step: Callable[[int], Awaitable[None]] = at_once
        self.before_load: Callable[[shard_pb2.LoadAdapterRequest], Awaitable[None]] = at_once
        self.change_answer: Callable[[shard_pb2.StepResult], None] = lambda result: None
        self.facts: dict[str, Any] = {}
        self.hellos: list[shard_pb2.Hello] = []
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Listens."""
        self._server = grpc.aio.server()
        shard_pb2_grpc.add_ShardServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(self.address)
        await self._server.start()

    async def stop(self) -> None:
        """Is gone, as after a kill."""
        if self._server is not None:
            await self._server.stop(None)

    async def GetInfo(self, request: shard_pb2.GetInfoRequest, context: Context) -> shard_pb2.GetInfoResponse:
        """The facts of FakeShards."""
        if not self.is_loaded:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the model is still loading")
        facts = dataclasses.asdict(self.shards.info) | {"rank": self.rank, "world_size": self.world_size}
        staged = {"adapter_versions": sorted(self.shards.staged or ())}
        return shard_pb2.GetInfoResponse(**({"link_version": LINK_VERSION} | facts | staged | self.facts))

    async def LoadAdapter(
        self, request: shard_pb2.LoadAdapterRequest, context: Context
    ) -> shard_pb2.LoadAdapterResponse:
        """Stages a version after `before_load`, whose RuntimeError is a refusal."""
        try:
            await self.before_load(request)
        except RuntimeError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        assert self.shards.staged is not None
        self.shards.staged.add(request.version)
        return shard_pb2.LoadAdapterResponse(rank=8)

    async def UnloadAdapter(
        self, request: shard_pb2.UnloadAdapterRequest, context: Context
    ) -> shard_pb2.UnloadAdapterResponse:
        """Drops a version."""
        assert self.shards.staged is not None
        self.shards.staged.discard(request.version)
        return shard_pb2.UnloadAdapterResponse()

    async def Execute(
        self, requests: AsyncIterator[shard_pb2.ExecuteRequest], context: Context
    ) -> AsyncIterator[shard_pb2.ExecuteResponse]:
        """One epoch."""
        hello = (await anext(aiter(requests))).hello
        if self.is_silent:
            await asyncio.Event().wait()
        if self.hellos:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"router {self.hellos[0].router_id} is served")
        self.hellos.append(hello)
        yield shard_pb2.ExecuteResponse(hello=shard_pb2.HelloAck(epoch=hello.epoch))
        async for request in requests:
            try:
                await self.before_step(request.step.step_id)
            except RuntimeError as error:
                await context.abort(grpc.StatusCode.INTERNAL, str(error))
            step = to_step(decode_step(request.step))
            result = encode_outcome(to_outcome(self.shards.execute(step), step, self.shards), self.rank)
            self.change_answer(result)
            yield shard_pb2.ExecuteResponse(result=result)


def to_step(work: StepWork) -> Step:
    """A step's arrays as the router's values."""
    step = Step(work.step_id, work.closed_slots.tolist())
    if (opened := work.opened) is not None:
        stop_ids = np.split(opened.stop_ids, np.cumsum(opened.stop_id_counts)[:-1])
        columns = (opened.slots, opened.num_prompt_tokens, opened.seeds.view(np.uint64), opened.temperature)
        columns += (opened.top_k, opened.top_p, opened.min_tokens, opened.num_logprobs)
        adapter_slots = opened.adapter_slots.tolist()
        for ids, slot, *values in zip(stop_ids, adapter_slots, *(column.tolist() for column in columns), strict=True):
            step.opened.append(OpenRow(*values, stop_ids=tuple(ids.tolist()), adapter_slot=slot))
    if (bindings := work.bindings) is not None:
        step.bindings = [BindAdapter(*pair) for pair in zip(bindings.slots.tolist(), bindings.versions, strict=True)]
    if (filled := work.filled) is not None:
        pieces = np.split(filled.token_ids, np.cumsum(filled.counts)[:-1])
        for slot, start, ids in zip(filled.slots.tolist(), filled.starts.tolist(), pieces, strict=True):
            step.filled.append(FillTokens(slot, start, tuple(ids.tolist())))
    rows = work.scheduled
    blocks = np.split(rows.new_block_ids, np.cumsum(rows.new_block_counts)[:-1])
    columns = (rows.slots, rows.starts, rows.num_tokens, rows.is_sampled)
    for ids, *values in zip(blocks, *(column.tolist() for column in columns), strict=True):
        step.scheduled.append(ScheduledRow(*values, new_block_ids=tuple(ids.tolist())))
    return step


def to_outcome(result: StepResult, step: Step, shards: FakeShards) -> StepOutcome:
    """A result as a shard has it before packing."""
    if result.is_out_of_memory:
        return StepOutcome(result.step_id, result.step_s, result.device_idle_s, None)
    sampled = []
    for row, scheduled in zip(result.rows, step.scheduled, strict=True):
        if scheduled.is_sampled:  # A row without finite numbers fills its places with what means nothing.
            count = shards.rows[scheduled.slot].num_logprobs
            nothing = SampledToken(0) if count < 0 else SampledToken(0, math.nan, ((0, math.nan),) * count)
            sampled.append(row.sampled or nothing)
    with_logprobs = [token for token in sampled if token.logprob is not None]
    top = [entry for token in with_logprobs for entry in token.top]
    rows = RowResults(
        is_finite=np.array([row.is_finite for row in result.rows], np.bool_),
        token_ids=np.array([token.token_id for token in sampled], np.int32),
        logprobs=np.array([token.logprob for token in with_logprobs], np.float32),
        top_token_ids=np.array([token_id for token_id, _ in top], np.int32),
        top_logprobs=np.array([logprob for _, logprob in top], np.float32),
    )
    return StepOutcome(result.step_id, result.step_s, result.device_idle_s, rows)
