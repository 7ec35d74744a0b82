"""The router's whole edge in this process, over real gRPC, with scripted shards behind the real engine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from cohort.v1 import adapter_pb2_grpc, generation_pb2_grpc, model_pb2, model_pb2_grpc
from cohort.v1 import generation_pb2 as pb
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2_grpc
from grpc_status import rpc_status

from router.adapter_settings import AdapterSettings
from router.api.calls import Calls
from router.api.health import HealthService
from router.application import Application
from router.chat import ChatTemplates
from router.config import RouterConfig
from router.metrics import Metrics
from router.model_folder import read_model_facts
from router.readiness import Readiness
from router.server import SERVER_OPTIONS, SERVICES
from router.step import ShardInfo
from router.tokenizer import Tokenizer
from tests.fake_shards import INFO, FakeLink, FakeShards

DEMO = Path(__file__).resolve().parents[3] / "demo" / "cohere"
TIMEOUT_S = 30
TOKENIZER = Tokenizer.from_dir(DEMO)
TEMPLATES = ChatTemplates.from_dir(DEMO, TOKENIZER)
FACTS = read_model_facts(DEMO)


@dataclasses.dataclass
class Edge:
    """A client of the server, and what is behind it."""

    port: int
    channel: grpc.aio.Channel
    link: FakeLink
    application: Application
    calls: Calls
    readiness: Readiness
    metrics: Metrics
    engine: asyncio.Task[None]

    def __post_init__(self) -> None:
        self.generation: Any = generation_pb2_grpc.GenerationServiceStub(self.channel)
        self.adapters: Any = adapter_pb2_grpc.AdapterServiceStub(self.channel)
        self.model: Any = model_pb2_grpc.ModelServiceStub(self.channel)
        self.health: Any = health_pb2_grpc.HealthStub(self.channel)

    @property
    def shards(self) -> FakeShards:
        return self.link.shards

    async def load(self) -> model_pb2.GetLoadResponse:
        answer: model_pb2.GetLoadResponse = await self.model.GetLoad(model_pb2.GetLoadRequest(), timeout=TIMEOUT_S)
        return answer

    async def until(self, condition: Callable[[model_pb2.GetLoadResponse], bool]) -> None:
        """Waits for a load that is as asked."""
        async with asyncio.timeout(TIMEOUT_S):
            while not condition(await self.load()):  # noqa: ASYNC110 (nothing tells of it)
                await asyncio.sleep(0.001)

    async def assert_idle(self) -> None:
        """Nothing runs, nothing waits, every block is free and accounted for."""
        await self.until(lambda load: not (load.num_running or load.num_waiting or load.kv_cache_usage))
        # Answers of steps may still be under way.
        await self.until(lambda _: self.application._engine._scheduler.is_idle)
        self.application._engine._scheduler.check_integrity()

    async def assert_serves(self) -> None:
        """A plain request is answered, and nothing is left of it or of those before."""
        answer = await self.generation.Generate(plain(max_tokens=3), timeout=TIMEOUT_S)
        assert answer.usage.completion_tokens == 3
        await self.assert_idle()

    async def metric(self, name: str, **labels: str) -> float:
        """A sample's value, 0 where it was never fed."""
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


@contextlib.asynccontextmanager
async def edge(
    step_s: float = 0.0,
    info: dict[str, Any] | None = None,
    channel_options: Sequence[tuple[str, int]] = (),
    **settings: object,
) -> AsyncIterator[Edge]:
    """A ready edge; `info` changes the shards' facts, `settings` the configuration."""
    facts: ShardInfo = dataclasses.replace(INFO, vocab_size=TOKENIZER.vocab_size, **(info or {}))
    link = FakeLink(FakeShards(facts), step_s=step_s)
    config = RouterConfig(model=str(DEMO), served_model_name="command", **settings)  # type: ignore[arg-type]
    metrics, readiness = Metrics("command", config.vllm_metric_aliases), Readiness()
    calls = Calls(metrics)
    adapters = AdapterSettings.from_config(config)
    application = Application(config, FACTS, TOKENIZER, TEMPLATES, link, readiness, metrics, adapters)  # type: ignore[arg-type]
    server = grpc.aio.server(options=SERVER_OPTIONS)
    health = HealthService(readiness, SERVICES)
    server.add_generic_rpc_handlers((health.handlers(calls), *application.handlers(calls)))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    readiness.set_ready()
    engine = asyncio.create_task(application.run())
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1), *channel_options]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) as channel:
        yield Edge(port, channel, link, application, calls, readiness, metrics, engine)
    await server.stop(0)
    engine.cancel()
    await asyncio.wait((engine,))
    await application.close()


def plain(max_tokens: int = 8, **fields: object) -> pb.GenerateRequest:
    """A prompt of three ids, never ended by a token."""
    stopping = pb.StoppingParams(max_tokens=max_tokens, ignore_eos=True)
    values = {"token_ids": pb.TokenIds(ids=[9, 10, 11]), "stopping": stopping} | fields
    return pb.GenerateRequest(**values)  # type: ignore[arg-type]


def streamed(request: pb.GenerateRequest) -> pb.GenerateStreamRequest:
    return pb.GenerateStreamRequest(request=request)


async def failure(call: Awaitable[object] | AsyncIterable[object]) -> grpc.aio.AioRpcError:
    """The error that ends a unary call or a stream."""
    try:
        if isinstance(call, AsyncIterable):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("it was served")


def details(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    """The google.rpc details of a failed call by the message's name."""

    class Sync:
        code, details = staticmethod(error.code), staticmethod(error.details)
        trailing_metadata = staticmethod(lambda: tuple(error.trailing_metadata()))

    status = rpc_status.from_call(Sync())  # type: ignore[arg-type]
    found: dict[str, Message] = {}
    for packed in status.details if status else ():
        name = packed.TypeName().rpartition(".")[2]
        found[name] = getattr(error_details_pb2, name)()
        assert packed.Unpack(found[name])
    return found


def joined(events: Iterable[pb.GenerateStreamResponse]) -> pb.GenerateResponse:
    """What a unary call would have answered, from a stream's events; the order of events is checked."""
    events = list(events)
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[0] == "started" and kinds[-1] == "done" and set(kinds[1:-1]) <= {"delta", "finished"}
    sequences: dict[int, pb.GeneratedSequence] = {}
    for event in events[1:-1]:
        part = event.delta if event.HasField("delta") else event.finished
        sequence = sequences.setdefault(part.index, pb.GeneratedSequence(index=part.index))
        assert sequence.finish_reason == pb.FINISH_REASON_UNSPECIFIED, "something follows the end of a sequence"
        if event.HasField("delta"):
            sequence.text += part.text
            sequence.token_ids.extend(part.token_ids)
            sequence.logprobs.extend(part.logprobs)
        else:
            sequence.finish_reason = part.finish_reason
            if part.HasField("matched_stop"):
                sequence.matched_stop.CopyFrom(part.matched_stop)
    return pb.GenerateResponse(
        request_id=events[0].started.request_id,
        sequences=[sequences[index] for index in sorted(sequences)],
        usage=events[-1].done.usage,
    )
