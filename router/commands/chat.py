"""`chat`: a conversation in the terminal, one line a turn; end it with Ctrl-D."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cohort.v1 import generation_pb2 as pb
from cohort.v1 import generation_pb2_grpc

from router.commands.client import add_sampling_flags, add_server_flags, channel, sampling, stopping


def main(argv: Sequence[str]) -> int:
    """Talks until the end of standard input; 0. Raises StartupError with the server's reason if a turn fails."""
    parser = argparse.ArgumentParser(prog="python -m router chat", description=__doc__)
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    add_server_flags(parser)
    add_sampling_flags(parser)
    args = parser.parse_args(argv)
    messages = [_message(pb.CHAT_ROLE_SYSTEM, args.system)] if args.system else []
    with channel(args) as opened:
        stub = generation_pb2_grpc.GenerationServiceStub(opened)
        while line := _ask():
            messages.append(_message(pb.CHAT_ROLE_USER, line))
            request = pb.ChatRequest(messages=messages, sampling=sampling(args), stopping=stopping(args))
            messages.append(_message(pb.CHAT_ROLE_ASSISTANT, _answer(stub, request, args.timeout)))
    return 0


def _ask() -> str:
    """The next line with something in it; "" at the end of the input."""
    while True:
        if sys.stdin.isatty():
            sys.stdout.write("> ")
            sys.stdout.flush()
        line = sys.stdin.readline()
        if not line or line.strip():
            return line.strip()


def _answer(stub: generation_pb2_grpc.GenerationServiceStub, request: pb.ChatRequest, timeout_s: float | None) -> str:
    texts = []
    for event in stub.ChatStream(pb.ChatStreamRequest(request=request), timeout=timeout_s):
        if event.HasField("text_delta"):
            texts.append(event.text_delta.text)
            sys.stdout.write(texts[-1])
            sys.stdout.flush()
    sys.stdout.write("\n")
    return "".join(texts)


def _message(role: pb.ChatRole.ValueType, text: str) -> pb.ChatMessage:
    return pb.ChatMessage(role=role, content=[pb.ContentPart(text=text)])
