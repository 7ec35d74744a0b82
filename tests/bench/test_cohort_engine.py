"""The client side of `make bench` against a small server that answers by script."""

import asyncio
from collections.abc import AsyncIterator

import grpc.aio
from cohort.v1 import generation_pb2, generation_pb2_grpc

from bench.cohort_engine import CohortEngine
from bench.workloads import Request, Workload

Context = grpc.aio.ServicerContext


class EchoGeneration(generation_pb2_grpc.GenerationServiceServicer):
    """Answers with the prompt's first token, as often as asked, once all `num_expected` requests are there."""

    def __init__(self, num_expected: int) -> None:
        self._barrier = asyncio.Barrier(num_expected)
        self.seen: list[generation_pb2.GenerateRequest] = []

    async def GenerateStream(
        self, request: generation_pb2.GenerateStreamRequest, context: Context
    ) -> AsyncIterator[generation_pb2.GenerateStreamResponse]:
        self.seen.append(request.request)
        await self._barrier.wait()
        for _ in range(request.request.stopping.max_tokens):
            delta = generation_pb2.SequenceDelta(token_ids=request.request.token_ids.ids[:1])
            yield generation_pb2.GenerateStreamResponse(delta=delta)
        yield generation_pb2.GenerateStreamResponse(done=generation_pb2.StreamDone())


def run(address: str, workload: Workload) -> list[list[int]]:
    engine = CohortEngine(address)
    try:
        return engine.run(workload)
    finally:
        engine.close()


async def test_all_requests_are_open_at_once_greedy_and_of_exact_length() -> None:
    servicer = EchoGeneration(num_expected=3)
    server = grpc.aio.server()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    workload = Workload("w", "three", [Request([5, 6], 2), Request([7], 1), Request([8], 3)])
    try:
        # The barrier lets nobody go on before all three have arrived.
        outputs = await asyncio.wait_for(asyncio.to_thread(run, f"127.0.0.1:{port}", workload), 30)
    finally:
        await server.stop(None)
    assert outputs == [[5, 5], [7], [8, 8, 8]]
    assert all(request.sampling.temperature == 0 and request.stopping.ignore_eos for request in servicer.seen)
