"""The link to the shards: one ordered stream to each, every step to all of them, one answer when all have answered."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

import grpc
import grpc.aio
from cohort.shard.v1 import shard_pb2, shard_pb2_grpc

from router.adapter_link import AdapterLink, GrpcAdapterLink
from router.errors import StartupError
from router.step import LINK_VERSION, ShardInfo, Step, StepResult
from router.step_codec import pack_step, unpack_result

if TYPE_CHECKING:
    Stub: TypeAlias = shard_pb2_grpc.ShardServiceAsyncStub

CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),  # A corporate proxy must not see calls to our own sockets.
    # A peer that vanished without a word is noticed within half a minute; through a unix socket at once.
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.keepalive_timeout_ms", 15_000),
    ("grpc.http2.max_pings_without_data", 0),
    # While a shard starts its socket is not there yet; it should be found soon after it is.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
]
RETRY_S = 0.1
STATUS_S = 0.05
NOT_YET = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class ShardLost(Exception):
    """A shard's stream ended; the text says which and why."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"shard {rank} was lost: {reason}")
        self.rank = rank


class _BadAnswer(Exception):
    """The shard `rank` broke the protocol."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(reason)
        self.rank = rank


class ShardLink(Protocol):
    """What the engine needs of the shards; tests put scripted ones here."""

    info: ShardInfo
    startup_phase_s: dict[str, float]

    @property
    def adapters(self) -> AdapterLink:
        """What goes to the shards about adapters beside the steps."""

    def send(self, step: Step) -> None:
        """Queues a step for every shard; never blocks."""

    async def receive(self) -> StepResult:
        """The oldest unanswered step's result, once all ranks have answered. Raises ShardLost."""

    async def close(self) -> None:
        """Ends the streams."""


@dataclasses.dataclass(slots=True)
class _Sent:
    """A step under way."""

    step: Step
    num_logprobs: dict[int, int]  # by slot, of the sampled rows
    num_missing: int
    message: shard_pb2.StepResult | None = None  # rank 0's answer
    is_out_of_memory: bool = False  # on any rank

    def unpack(self) -> StepResult:
        """The step's result, when every rank has answered. Raises _BadAnswer."""
        assert self.message is not None
        if self.is_out_of_memory:
            self.message.status = shard_pb2.STEP_STATUS_OUT_OF_MEMORY
        try:
            return unpack_result(self.message, self.step, self.num_logprobs)
        except ValueError as error:
            raise _BadAnswer(0, f"its answer to step {self.step.step_id} does not fit the step: {error}") from error


class GrpcShardLink:
    """ShardLink over gRPC. Lives on the loop that made it."""

    def __init__(
        self,
        info: ShardInfo,
        channels: list[grpc.aio.Channel],
        streams: list[Any],
        startup_phase_s: dict[str, float] | None = None,
        staged_adapters: Sequence[frozenset[str]] = (),
    ) -> None:
        """`startup_phase_s`: seconds of each phase of the shards' start, of the slowest rank; `staged_adapters`: the
        versions that each rank has staged."""
        self.info = info
        self.startup_phase_s = startup_phase_s or {}
        self.adapters: AdapterLink = GrpcAdapterLink(channels, staged_adapters)
        self._channels = channels
        self._streams = streams
        self._outgoing: list[asyncio.Queue[shard_pb2.ExecuteRequest]] = [asyncio.Queue() for _ in streams]
        self._sent: collections.deque[_Sent] = collections.deque()
        self._num_answered = [0] * len(streams)  # by rank
        self._num_received = 0
        self._num_logprobs: dict[int, int] = {}  # by slot
        self._results: asyncio.Queue[StepResult | ShardLost] = asyncio.Queue()
        self._tasks = [
            asyncio.create_task(carry(rank), name=f"shard-{rank}")
            for rank in range(len(streams))
            for carry in (self._write, self._read)
        ]

    @classmethod
    async def connect(
        cls, addresses: Sequence[str], router_id: str, timeout_s: float, epoch: int | None = None
    ) -> GrpcShardLink:
        """Waits until every shard has loaded, checks that they belong together, and opens an epoch.

        Args:
            addresses: one per rank, in order; unix:PATH or HOST:PORT.
            router_id: who we are, for the shards' logs and refusals.
            timeout_s: for the whole of it, loading included.
            epoch: larger than any before on these shards; by default made of the clock.

        A launcher that sees a shard's process end cancels this call.

        Raises:
            StartupError: a shard does not answer in time, refuses us, or does not fit the others.
        """
        channels = [grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) for address in addresses]
        # One generated class serves both kinds of channel; with an asynchronous one it is of this type.
        stubs = [cast("Stub", shard_pb2_grpc.ShardServiceStub(channel)) for channel in channels]
        deadline_s = time.monotonic() + timeout_s
        try:
            infos = await asyncio.gather(
                *(_info(stub, address, deadline_s) for stub, address in zip(stubs, addresses, strict=True))
            )
            info = _agreed(infos, addresses)
            hello = shard_pb2.Hello(
                link_version=LINK_VERSION, epoch=epoch or time.time_ns() // 1_000_000, router_id=router_id
            )
            streams = await asyncio.gather(
                *(_open(stub, hello, address, deadline_s) for stub, address in zip(stubs, addresses, strict=True))
            )
        except BaseException:
            for channel in channels:
                await channel.close()
            raise
        staged = [frozenset(info.adapter_versions) for info in infos]
        return cls(info, channels, streams, _slowest(infos), staged)

    def send(self, step: Step) -> None:
        """See ShardLink."""
        for row in step.opened:
            self._num_logprobs[row.slot] = row.num_logprobs
        num_logprobs = {row.slot: self._num_logprobs[row.slot] for row in step.scheduled if row.is_sampled}
        self._sent.append(_Sent(step, num_logprobs, len(self._streams)))
        message = pack_step(step)
        for queue in self._outgoing:
            queue.put_nowait(message)

    async def receive(self) -> StepResult:
        """See ShardLink."""
        item = await self._results.get()
        if isinstance(item, ShardLost):
            self._results.put_nowait(item)  # Whoever asks again is told again.
            raise item
        return item

    async def close(self) -> None:
        """See ShardLink."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for stream in self._streams:
            stream.cancel()
        for channel in self._channels:
            await channel.close()

    async def _write(self, rank: int) -> None:
        queue, stream = self._outgoing[rank], self._streams[rank]
        try:
            while True:
                await stream.write(await queue.get())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # The reader sees the end of the stream and tells why.

    async def _read(self, rank: int) -> None:
        stream = self._streams[rank]
        reason = "its stream ended"
        try:
            while (message := await stream.read()) is not grpc.aio.EOF:
                self._take(rank, message.result)
        except grpc.aio.AioRpcError:
            # A write that the break interrupts first sets a status of grpc's own; the shard's replaces it soon after.
            await asyncio.sleep(STATUS_S)
            reason = f"{(await stream.code()).name}: {await stream.details()}"
        except _BadAnswer as error:
            rank, reason = error.rank, str(error)
        self._results.put_nowait(ShardLost(rank, reason))

    def _take(self, rank: int, message: shard_pb2.StepResult) -> None:
        """Counts an answer; the oldest step's result is handed out when the last rank has answered it."""
        place = self._num_answered[rank] - self._num_received
        if place >= len(self._sent) or message.step_id != self._sent[place].step.step_id:
            raise _BadAnswer(rank, f"it answered step {message.step_id} out of order")
        sent = self._sent[place]
        self._num_answered[rank] += 1
        sent.num_missing -= 1
        sent.is_out_of_memory |= message.status == shard_pb2.STEP_STATUS_OUT_OF_MEMORY
        if rank == 0:
            sent.message = message
        if sent.num_missing == 0:  # Every rank answers in order, so this is the oldest.
            self._sent.popleft()
            self._num_received += 1
            self._results.put_nowait(sent.unpack())


async def _info(stub: Stub, address: str, deadline_s: float) -> shard_pb2.GetInfoResponse:
    while True:
        try:
            return await stub.GetInfo(shard_pb2.GetInfoRequest(), timeout=max(0.1, deadline_s - time.monotonic()))
        except grpc.aio.AioRpcError as error:
            if error.code() not in NOT_YET or time.monotonic() > deadline_s:
                raise StartupError(f"the shard at {address} does not answer: {error.details()}") from error
        await asyncio.sleep(RETRY_S)


async def _open(stub: Stub, hello: shard_pb2.Hello, address: str, deadline_s: float) -> Any:  # noqa: ANN401
    stream = stub.Execute()
    try:
        async with asyncio.timeout_at(deadline_s):  # The loop's clock is time.monotonic().
            await stream.write(shard_pb2.ExecuteRequest(hello=hello))
            answer = await stream.read()
        if answer is grpc.aio.EOF:
            raise StartupError(f"the shard at {address} refused the stream: {await stream.details()}")
    except TimeoutError as error:
        raise StartupError(f"the shard at {address} does not answer the stream's first message in time") from error
    except asyncio.InvalidStateError as error:  # It ended before the first message was written.
        raise StartupError(f"the shard at {address} refused the stream: {await stream.details()}") from error
    except grpc.aio.AioRpcError as error:
        raise StartupError(f"the shard at {address} refused the stream: {error.details()}") from error
    return stream


def _slowest(infos: Sequence[shard_pb2.GetInfoResponse]) -> dict[str, float]:
    phases = {phase for info in infos for phase in info.startup_phase_s}
    return {phase: max(info.startup_phase_s.get(phase, 0.0) for info in infos) for phase in sorted(phases)}


def _agreed(infos: Sequence[shard_pb2.GetInfoResponse], addresses: Sequence[str]) -> ShardInfo:
    """The facts that all shards share. Raises StartupError where they do not."""
    names = [field.name for field in dataclasses.fields(ShardInfo)]
    first = infos[0]
    for rank, (info, address) in enumerate(zip(infos, addresses, strict=True)):
        if info.link_version != LINK_VERSION:
            raise StartupError(
                f"the shard at {address} speaks link version {info.link_version}, this router {LINK_VERSION}; "
                "run the same release on both"
            )
        if info.rank != rank or info.world_size != len(infos):
            raise StartupError(
                f"the shard at {address} is rank {info.rank} of {info.world_size}, but stands at place {rank} "
                f"of {len(infos)} addresses; list every rank once, in order"
            )
        for name in names:
            if getattr(info, name) != getattr(first, name):
                raise StartupError(
                    f"the shards disagree on {name}: {getattr(first, name)} at {addresses[0]}, "
                    f"{getattr(info, name)} at {address}; start them with the same flags and files"
                )
    return ShardInfo(**{name: getattr(first, name) for name in names})
