"""grpc.health.v1: `""` is live as long as the process answers; a service's name is ready when requests are taken."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2

from router.api.calls import Call, Calls
from router.errors import NotFound
from router.readiness import Readiness

SERVICE = "grpc.health.v1.Health"


class HealthService:
    """Answers probes without the queue and the shards, so that a busy server never looks dead.

    grpcio-health-checking's own servicer forgets other watchers of a name when one of them leaves.
    """

    def __init__(self, readiness: Readiness, services: tuple[str, ...]) -> None:
        self._readiness = readiness
        self._services = services

    def handlers(self, calls: Calls) -> grpc.GenericRpcHandler:
        """What to register with the server."""
        check = calls.unary(f"{SERVICE}/Check", health_pb2.HealthCheckRequest, self.check)
        watch = calls.stream(f"{SERVICE}/Watch", health_pb2.HealthCheckRequest, self.watch, is_watch=True)
        return grpc.method_handlers_generic_handler(SERVICE, {"Check": check, "Watch": watch})

    async def check(self, request: health_pb2.HealthCheckRequest, call: Call) -> health_pb2.HealthCheckResponse:
        """The state now. Raises NotFound for a name that is not served."""
        status = self._status(request.service)
        if status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            raise NotFound(f"no service {request.service[:256]!r}")
        return health_pb2.HealthCheckResponse(status=status)

    async def watch(self, request: health_pb2.HealthCheckRequest, call: Call) -> None:
        """The state now and after every change, until the caller leaves."""
        last: int | None = None
        while True:
            status = self._status(request.service)
            if status != last:
                await call.write(health_pb2.HealthCheckResponse(status=status))
                last = status
                continue  # The state may have changed while the message was written.
            await self._readiness.changed()

    def _status(self, service: str) -> int:
        if service and service not in self._services:
            return health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        if service and not self._readiness.is_ready:
            return health_pb2.HealthCheckResponse.NOT_SERVING
        return health_pb2.HealthCheckResponse.SERVING
