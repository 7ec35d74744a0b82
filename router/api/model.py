"""cohort.v1.ModelService: what is served and how busy it is."""

from __future__ import annotations

import dataclasses
from importlib import metadata

import grpc
from cohort.v1 import generation_pb2, model_pb2

from router import validation
from router.api.calls import Call, Calls
from router.api.requests import Engine
from router.model_folder import ModelFacts
from router.readiness import Readiness
from router.request import Limits
from router.step import LINK_VERSION, ShardInfo

SERVICE = "cohort.v1.ModelService"


class ModelService:
    """GetModel and GetLoad."""

    def __init__(
        self,
        facts: ModelFacts,
        info: ShardInfo,
        limits: Limits,
        chat_templates: list[str],
        engine: Engine,
        readiness: Readiness,
    ) -> None:
        self._limits = limits
        self._engine = engine
        self._readiness = readiness
        self._model = _describe(facts, info, limits, chat_templates)

    def handlers(self, calls: Calls) -> grpc.GenericRpcHandler:
        """What to register with the server."""
        methods = {
            "GetModel": calls.unary(f"{SERVICE}/GetModel", model_pb2.GetModelRequest, self.get_model),
            "GetLoad": calls.unary(f"{SERVICE}/GetLoad", model_pb2.GetLoadRequest, self.get_load),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def get_model(self, request: model_pb2.GetModelRequest, call: Call) -> model_pb2.GetModelResponse:
        """The served model. Raises NotFound for another name."""
        validation.check_model(request.model, self._limits)
        return self._model

    async def get_load(self, request: model_pb2.GetLoadRequest, call: Call) -> model_pb2.GetLoadResponse:
        """The load at this moment."""
        load = self._engine.load()
        return model_pb2.GetLoadResponse(
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            kv_cache_usage=load.kv_cache_usage,
            is_ready=self._readiness.is_ready,
        )


def _describe(
    facts: ModelFacts, info: ShardInfo, limits: Limits, chat_templates: list[str]
) -> model_pb2.GetModelResponse:
    geometry = {
        field.name: getattr(facts, field.name)
        for field in dataclasses.fields(facts)
        if field.name in model_pb2.ModelGeometry.DESCRIPTOR.fields_by_name
    }
    return model_pb2.GetModelResponse(
        model=limits.model_name,
        geometry=model_pb2.ModelGeometry(**geometry, vocab_size=limits.vocab_size),
        limits=model_pb2.ModelLimits(
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=info.max_num_batched_tokens,
            max_kv_tokens=limits.max_kv_tokens,
            max_message_bytes=limits.max_message_bytes,
        ),
        default_sampling=generation_pb2.SamplingParams(
            temperature=limits.default_temperature, top_p=1.0, typical_p=1.0, repetition_penalty=1.0
        ),
        eos_token_ids=sorted(limits.eos_token_ids),
        dtype=info.dtype,
        block_size=info.block_size,
        num_blocks=info.num_blocks - 1,
        tensor_parallel_size=info.world_size,
        attention_backend=info.attention_backend,
        server_version=server_version(),
        link_version=LINK_VERSION,
        chat_templates=chat_templates,
    )


def server_version() -> str:
    """The installed distribution's version; a checkout that was never installed has none."""
    try:
        return metadata.version("cohort-serve")
    except metadata.PackageNotFoundError:
        return "unknown"
