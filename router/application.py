"""The parts of a serving router, put together once the shards are there."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import grpc

from router.adapter_places import AdapterPlaces
from router.adapter_settings import AdapterSettings
from router.adapters import Adapters
from router.admission import Admission
from router.api.adapter import AdapterService
from router.api.calls import Calls
from router.api.chat import ChatCalls
from router.api.encoding import EncodingPool
from router.api.generation import GenerationService
from router.api.model import ModelService
from router.api.requests import Requests
from router.chat import ChatTemplates
from router.config import RouterConfig
from router.engine import Engine
from router.engine_client import EngineClient
from router.errors import StartupError
from router.metrics import Metrics
from router.model_folder import ModelFacts
from router.readiness import Readiness
from router.request import MAX_MESSAGE_BYTES, Limits
from router.shard_client import GrpcShardLink, ShardLost
from router.step import ShardInfo
from router.tokenizer import Tokenizer

CONNECT_TIMEOUT_S = 3600.0  # Large checkpoints load for minutes; a shard that ends meanwhile ends the wait.


class Application:
    """Engine, services and the threads that encode prompts."""

    def __init__(
        self,
        config: RouterConfig,
        facts: ModelFacts,
        tokenizer: Tokenizer,
        templates: ChatTemplates,
        link: GrpcShardLink,
        readiness: Readiness,
        metrics: Metrics,
        adapter_settings: AdapterSettings | None = None,
    ) -> None:
        """`adapter_settings` None: LoRA is off. Raises StartupError if the shards do not fit them."""
        settings = adapter_settings or AdapterSettings()
        _check_shards(settings, link.info)
        self._link = link
        self._metrics = metrics
        self._pool = EncodingPool()
        client = EngineClient()
        places = AdapterPlaces(link.info.max_loras, settings.max_cpu_loras) if settings.is_enabled else None
        self._engine = Engine(link, tokenizer.detokenizer, metrics, client.deliver, config.run_ahead_depth, places)
        client.attach(self._engine)
        self._adapters = None
        if places is not None:
            self._adapters = Adapters(settings, places, link.adapters, self._engine, metrics)
            metrics.set_max_loras(places.max_loras)
        limits = _limits(config, facts, tokenizer, link.info, 0 if places is None else places.max_loras)
        admission = Admission(link.info.max_num_seqs, config.max_num_queued_reqs, config.max_num_queued_tokens)
        requests = Requests(limits, client, admission, readiness, metrics, config.default_deadline, self._adapters)
        chat = ChatCalls(requests, templates, self._pool)
        self._generation = GenerationService(requests, tokenizer, self._pool, chat)
        self._model = ModelService(facts, link.info, limits, templates.names, client, readiness)
        self._adapter_service = AdapterService(self._adapters, readiness)
        for rank in range(link.info.world_size):
            metrics.shard_up(rank, True)
        for phase, seconds in link.startup_phase_s.items():
            metrics.startup_phase(f"shard_{phase}", seconds)

    def handlers(self, calls: Calls) -> list[grpc.GenericRpcHandler]:
        """The public services, for the server."""
        services = (self._generation, self._model, self._adapter_service)
        return [service.handlers(calls) for service in services]

    async def load_adapters(self) -> None:
        """Loads what --lora-modules names, while the engine runs or before. Raises StartupError."""
        if self._adapters is not None:
            await self._adapters.load_modules()

    async def run(self) -> None:
        """Runs the engine until cancelled. Raises ShardLost when a shard is lost."""
        try:
            await self._engine.run()
        except ShardLost as lost:
            self._metrics.shard_up(lost.rank, False)
            raise

    async def close(self) -> None:
        """Ends the link and the threads."""
        self._pool.close()
        if self._adapters is not None:
            await self._adapters.close()
        await self._link.close()


async def open_application(
    config: RouterConfig,
    facts: ModelFacts,
    tokenizer: Tokenizer,
    templates: ChatTemplates,
    addresses: Sequence[str],
    readiness: Readiness,
    metrics: Metrics,
) -> Application:
    """Waits for the shards and puts the parts together. Raises StartupError if the shards cannot be used."""
    settings = AdapterSettings.from_config(config)
    link = await GrpcShardLink.connect(addresses, router_id=uuid.uuid4().hex, timeout_s=CONNECT_TIMEOUT_S)
    application: Application | None = None
    try:
        application = Application(config, facts, tokenizer, templates, link, readiness, metrics, settings)
        await application.load_adapters()
    except BaseException:
        await (link.close() if application is None else application.close())
        raise
    return application


def _check_shards(settings: AdapterSettings, info: ShardInfo) -> None:
    if settings.is_enabled and not info.max_loras:
        raise StartupError("--enable-lora is set here but not on the shards; start them with --enable-lora")


def _limits(config: RouterConfig, facts: ModelFacts, tokenizer: Tokenizer, info: ShardInfo, max_loras: int) -> Limits:
    return Limits(
        model_name=config.model_name,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        max_kv_tokens=(info.num_blocks - 1) * info.block_size,
        max_num_seqs=info.max_num_seqs,
        max_message_bytes=MAX_MESSAGE_BYTES,
        longest_token_bytes=tokenizer.longest_token_bytes,
        eos_token_ids=tokenizer.eos_token_ids,
        default_temperature=facts.default_temperature,
        max_loras=max_loras,
    )
