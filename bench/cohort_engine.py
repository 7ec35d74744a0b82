"""Cohort through gRPC: every request of a workload is a stream of its own, all opened at once."""

from __future__ import annotations

import asyncio
from typing import cast

import grpc.aio
from cohort.v1 import generation_pb2, generation_pb2_grpc

from bench.workloads import Request, Workload

CHANNEL_OPTIONS = [("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", 32 * 2**20)]


def stream_request(request: Request) -> generation_pb2.GenerateStreamRequest:
    """Token ids in and out, greedy, exactly as many tokens as asked."""
    return generation_pb2.GenerateStreamRequest(
        request=generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=request.prompt),
            sampling=generation_pb2.SamplingParams(temperature=0.0),
            stopping=generation_pb2.StoppingParams(max_tokens=request.num_output_tokens, ignore_eos=True),
            output=generation_pb2.OutputOptions(return_token_ids=True),
        )
    )


class CohortEngine:
    """A client of the server at `address`. Close it when done."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._runner = asyncio.Runner()
        self._channel = self._runner.run(self._connect())
        self._stub = cast(
            "generation_pb2_grpc.GenerationServiceAsyncStub", generation_pb2_grpc.GenerationServiceStub(self._channel)
        )

    @property
    def name(self) -> str:
        """Its name in tables."""
        return "Cohort"

    async def _connect(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self._address, CHANNEL_OPTIONS)

    def run(self, workload: Workload) -> list[list[int]]:
        """Generated ids per request."""
        return self._runner.run(self._stream_all(workload.requests))

    async def _stream_all(self, requests: list[Request]) -> list[list[int]]:
        return list(await asyncio.gather(*[self._stream(request) for request in requests]))

    async def _stream(self, request: Request) -> list[int]:
        ids: list[int] = []
        async for response in self._stub.GenerateStream(stream_request(request)):
            if response.HasField("delta"):
                ids.extend(response.delta.token_ids)
        return ids

    def close(self) -> None:
        """Closes the channel and the event loop."""
        self._runner.run(self._channel.close())
        self._runner.close()
