"""`health`: whether a server is alive and ready; the exit code says the same, for scripts and probes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from router.commands.client import add_server_flags, channel

SERVICES = {"live": "", "ready": "cohort.v1.GenerationService"}


def main(argv: Sequence[str]) -> int:
    """0 if everything asked for is SERVING, 1 otherwise. Raises StartupError if nobody answers."""
    parser = argparse.ArgumentParser(prog="python -m router health", description=__doc__)
    add_server_flags(parser)
    parser.set_defaults(timeout=5.0)
    parser.add_argument("--only", choices=sorted(SERVICES), help="ask for this alone (default: both)")
    args = parser.parse_args(argv)
    is_well = True
    with channel(args) as opened:
        stub: Any = health_pb2_grpc.HealthStub(opened)  # Its methods are not in its type.
        for name in [args.only] if args.only else SERVICES:
            status = stub.Check(health_pb2.HealthCheckRequest(service=SERVICES[name]), timeout=args.timeout).status
            is_well &= status == health_pb2.HealthCheckResponse.SERVING
            sys.stdout.write(f"{name}: {health_pb2.HealthCheckResponse.ServingStatus.Name(status)}\n")
    return 0 if is_well else 1
