"""One client process: reads its job from standard input, streams its requests, writes what it saw as JSON.

Standard input: a JSON line with the job, answered by the line `ready` once the channels are up; then a line with the
`time.monotonic()` at which to start, a clock that all processes of a machine share. Standard output then gets one
JSON line: a list of records.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import time
from typing import Any, TypeAlias, cast

import grpc.aio
from cohort.v1 import generation_pb2, generation_pb2_grpc

OPTIONS: list[tuple[str, int]] = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", 32 * 2**20),
    ("grpc.max_send_message_length", 32 * 2**20),
]
CONNECT_TIMEOUT_S = 60.0

Stub: TypeAlias = "generation_pb2_grpc.GenerationServiceAsyncStub"  # Known to type checkers only.


@dataclasses.dataclass(slots=True)
class Record:
    """What one request saw. Times are `time.monotonic()` seconds; `arrivals` has one entry per message with tokens."""

    prompt_len: int
    due: float
    sent: float = 0.0
    ended: float = 0.0
    arrivals: list[float] = dataclasses.field(default_factory=list)
    num_tokens: int = 0
    error: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """A process's share of the run; `requests` are (prompt, output_len, due_s)."""

    address: str
    model: str
    ignore_eos: bool
    temperature: float
    max_concurrency: int | None
    has_channel_per_client: bool
    requests: list[tuple[list[int], int, float]]


def stream_request(job: Job, prompt: list[int], output_len: int) -> generation_pb2.GenerateStreamRequest:
    """The message for one request: token ids in and out."""
    return generation_pb2.GenerateStreamRequest(
        request=generation_pb2.GenerateRequest(
            model=job.model,
            token_ids=generation_pb2.TokenIds(ids=prompt),
            sampling=generation_pb2.SamplingParams(temperature=job.temperature),
            stopping=generation_pb2.StoppingParams(max_tokens=output_len, ignore_eos=job.ignore_eos),
            output=generation_pb2.OutputOptions(return_token_ids=True),
        )
    )


class Client:
    """Runs a job: each request at its time, at most `max_concurrency` under way."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._places = asyncio.Semaphore(job.max_concurrency or len(job.requests))
        num_clients = min(job.max_concurrency or len(job.requests), len(job.requests))
        num_channels = num_clients if job.has_channel_per_client else 1
        # Without a pool of its own a channel shares the connection of others to the same server.
        options = [*OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
        self._channels = [grpc.aio.insecure_channel(job.address, options) for _ in range(num_channels)]
        self._idle = [cast("Stub", generation_pb2_grpc.GenerationServiceStub(channel)) for channel in self._channels]

    async def connect(self) -> None:
        """Waits until every channel has its connection."""
        waits = [asyncio.wait_for(channel.channel_ready(), CONNECT_TIMEOUT_S) for channel in self._channels]
        await asyncio.gather(*waits)

    async def run(self, start: float) -> list[Record]:
        """All requests, from `start` on."""
        messages = [stream_request(self._job, prompt, num_output) for prompt, num_output, _ in self._job.requests]
        records = [Record(len(prompt), start + due_s) for prompt, _, due_s in self._job.requests]
        await asyncio.gather(*[self._one(*pair) for pair in zip(messages, records, strict=True)])
        for channel in self._channels:
            await channel.close()
        return records

    async def _one(self, message: generation_pb2.GenerateStreamRequest, record: Record) -> None:
        await asyncio.sleep(record.due - time.monotonic())
        async with self._places:
            stub = self._idle.pop() if self._job.has_channel_per_client else self._idle[0]
            record.sent = time.monotonic()
            try:
                await _read(stub, message, record)
            except grpc.aio.AioRpcError as error:
                record.error = f"{error.code().name}: {error.details()}"
            record.ended = time.monotonic()
            if self._job.has_channel_per_client:
                self._idle.append(stub)


async def _read(
    stub: Stub,
    message: generation_pb2.GenerateStreamRequest,
    record: Record,
) -> None:
    async for response in stub.GenerateStream(message):
        if num_tokens := len(response.delta.token_ids):
            record.arrivals.append(time.monotonic())
            record.num_tokens += num_tokens


async def _serve(line: str) -> None:
    fields: dict[str, Any] = json.loads(line)
    client = Client(Job(**fields))
    await client.connect()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    start = float(await asyncio.to_thread(sys.stdin.readline))
    records = await client.run(start)
    sys.stdout.write(json.dumps([dataclasses.asdict(record) for record in records]) + "\n")


if __name__ == "__main__":
    asyncio.run(_serve(sys.stdin.readline()))
