"""`generate`: completes a prompt and writes the answer as it comes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cohort.v1 import generation_pb2 as pb
from cohort.v1 import generation_pb2_grpc

from router.commands.client import add_sampling_flags, add_server_flags, channel, sampling, stopping


def main(argv: Sequence[str]) -> int:
    """Writes the answer to standard output; 0. Raises StartupError with the server's reason if it fails."""
    parser = argparse.ArgumentParser(prog="python -m router generate", description=__doc__)
    parser.add_argument("prompt", help="the prompt; - reads it from standard input")
    add_server_flags(parser)
    add_sampling_flags(parser)
    args = parser.parse_args(argv)
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    request = pb.GenerateRequest(text=text, sampling=sampling(args), stopping=stopping(args))
    with channel(args) as opened:
        stub = generation_pb2_grpc.GenerationServiceStub(opened)
        for event in stub.GenerateStream(pb.GenerateStreamRequest(request=request), timeout=args.timeout):
            if event.HasField("delta"):
                sys.stdout.write(event.delta.text)
                sys.stdout.flush()
    sys.stdout.write("\n")
    return 0
