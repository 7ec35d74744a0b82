"""cohort.v1.AdapterService: loads, unloads and lists adapters."""

from __future__ import annotations

import grpc
from cohort.v1 import adapter_pb2 as pb

from router.adapter_places import Tier
from router.adapters import Adapters, AdapterState
from router.api import convert
from router.api.calls import Call, Calls
from router.errors import FailedPrecondition
from router.readiness import Readiness

SERVICE = "cohort.v1.AdapterService"
TIERS = {
    Tier.DISK: pb.ADAPTER_TIER_DISK,
    Tier.HOST: pb.ADAPTER_TIER_HOST,
    Tier.DEVICE: pb.ADAPTER_TIER_DEVICE,
}


class AdapterService:
    """LoadAdapter, UnloadAdapter and ListAdapters; `adapters` None: LoRA is off."""

    def __init__(self, adapters: Adapters | None, readiness: Readiness) -> None:
        self._adapters = adapters
        self._readiness = readiness

    def handlers(self, calls: Calls) -> grpc.GenericRpcHandler:
        """What to register with the server."""
        methods = {
            "LoadAdapter": calls.unary(f"{SERVICE}/LoadAdapter", pb.LoadAdapterRequest, self.load),
            "UnloadAdapter": calls.unary(f"{SERVICE}/UnloadAdapter", pb.UnloadAdapterRequest, self.unload),
            "ListAdapters": calls.unary(f"{SERVICE}/ListAdapters", pb.ListAdaptersRequest, self.list),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def load(self, request: pb.LoadAdapterRequest, call: Call) -> pb.LoadAdapterResponse:
        """Answers when every shard has the adapter. See Adapters.load."""
        adapters = self._enabled(request)
        self._readiness.check()
        return pb.LoadAdapterResponse(adapter=_message(await adapters.load(request.name, request.path, request.pin)))

    async def unload(self, request: pb.UnloadAdapterRequest, call: Call) -> pb.UnloadAdapterResponse:
        """See Adapters.unload."""
        await self._enabled(request).unload(request.name, request.wait)
        return pb.UnloadAdapterResponse()

    async def list(self, request: pb.ListAdaptersRequest, call: Call) -> pb.ListAdaptersResponse:
        """See Adapters.list."""
        states = await self._enabled(request).list()
        return pb.ListAdaptersResponse(adapters=[_message(state) for state in states])

    def _enabled(self, request: pb.LoadAdapterRequest | pb.UnloadAdapterRequest | pb.ListAdaptersRequest) -> Adapters:
        convert.refuse_unknown_fields(request)
        if self._adapters is None:
            raise FailedPrecondition("adapters are not enabled; start the server with --enable-lora")
        return self._adapters


def _message(state: AdapterState) -> pb.Adapter:
    return pb.Adapter(
        name=state.name,
        version=state.version,
        path=state.path,
        rank=state.rank,
        is_pinned=state.is_pinned,
        tier=TIERS[state.tier],
        num_requests=state.num_requests,
    )
