"""What the client commands share: the flags that name a server, the channel to it, and its errors as sentences."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator

import grpc
from cohort.v1 import generation_pb2 as pb

from router.errors import StartupError
from router.ports import join
from router.request import MAX_MESSAGE_BYTES


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Where the server is."""
    parser.add_argument("--host", default="localhost", help="the server's address (default: %(default)s)")
    parser.add_argument("--port", type=int, default=50051, help="the server's gRPC port (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=None, metavar="S", help="seconds for a call (default: none)")


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """How the answer is made."""
    parser.add_argument("--temperature", type=float, help="0 is greedy (default: the server's)")
    parser.add_argument("--top-k", type=int, default=0, help="keep the k likeliest tokens; 0: all")
    parser.add_argument("--top-p", type=float, help="keep the likeliest tokens of this mass (default: 1)")
    parser.add_argument("--seed", type=int, help="the same seed gives the same answer")
    parser.add_argument("--max-tokens", type=int, help="most tokens of the answer (default: what fits)")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="text that ends the answer")


def sampling(args: argparse.Namespace) -> pb.SamplingParams:
    """The flags as a message."""
    return pb.SamplingParams(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed)


def stopping(args: argparse.Namespace) -> pb.StoppingParams:
    """The flags as a message."""
    return pb.StoppingParams(max_tokens=args.max_tokens, stop=args.stop)


@contextlib.contextmanager
def channel(args: argparse.Namespace) -> Iterator[grpc.Channel]:
    """A channel to the server. A call's failure leaves as StartupError with a sentence."""
    options = [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ]
    address = join(args.host, args.port)
    with grpc.insecure_channel(address, options) as opened:
        try:
            yield opened
        except grpc.RpcError as error:
            raise StartupError(f"{error.code().name}: {error.details()} ({address})") from error
