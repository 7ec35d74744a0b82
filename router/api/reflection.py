"""Server reflection, so that grpcurl and its kind need no proto files."""

from __future__ import annotations

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from router.api.health import SERVICE as HEALTH


def reflection_handler(services: tuple[str, ...]) -> grpc.GenericRpcHandler:
    """A handler that describes `services`, health and itself."""
    servicer = reflection.aio.ReflectionServicer((*services, HEALTH, reflection.SERVICE_NAME))
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(reflection.SERVICE_NAME, {"ServerReflectionInfo": method})
