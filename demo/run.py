"""The demo: start a server, stream three prompts at once, and show speed and metrics (`make demo`)."""

import argparse
import asyncio
import re
import signal
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, cast

import grpc
from cohort.v1 import generation_pb2, generation_pb2_grpc

from demo.facts import Fact, load_facts, raw_prompt
from demo.live_table import Answer, LiveTable
from demo.server_process import Ports, ServerFailed, ServerProcess

if TYPE_CHECKING:
    # It exists in the type stubs only: the class is GenerationServiceStub, on an asyncio channel.
    from cohort.v1.generation_pb2_grpc import GenerationServiceAsyncStub

DEMO_DIR = Path(__file__).resolve().parent
START_TIMEOUT_S = 180.0
CALL_TIMEOUT_S = 60.0
# One plain completion and two chats; each asks one of facts.json's questions.
SHOWN = (
    ("GenerateStream", "In Japan, which city is the capital of the whole country?"),
    ("ChatStream", "Which gas do plants take from the air to grow?"),
    ("ChatStream", "In Germany, which currency do people use to pay for things?"),
)
SHOWN_METRICS = (
    "cohort_prompt_tokens_total",
    "cohort_generation_tokens_total",
    "cohort_request_success_total",
    "cohort_time_to_first_token_seconds_count",
    "cohort_step_seconds_count",
    "cohort_kv_cache_usage_ratio",
    "cohort_shard_up",
)
METRIC_LINE = re.compile(r"^([a-z_]+)(\{[^}]*\})? (\S+)$")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m demo.run", description=__doc__)
    parser.add_argument("--model", type=Path, default=DEMO_DIR / "cohere", help="model folder (default: %(default)s)")
    parser.add_argument("--shards", type=int, default=2, metavar="N", help="tensor-parallel shards (default: 2)")
    parser.add_argument("--keep", action="store_true", help="leave the server running until Ctrl-C")
    return parser.parse_args()


def say(text: str = "") -> None:
    """Write a line to the screen at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class StartProgress:
    """Shows that the server is starting: one changing line on a terminal, each new server line elsewhere."""

    def __init__(self) -> None:
        """Show nothing yet."""
        self._is_terminal = sys.stdout.isatty()
        self._shown = ""

    def __call__(self, waited_s: float, line: str) -> None:
        """Show the seconds waited and the server's latest line."""
        if self._is_terminal:
            sys.stdout.write(f"\r\x1b[2K  {waited_s:5.1f} s  {line[:90]}")
            sys.stdout.flush()
        elif line and line != self._shown:
            say(f"  {waited_s:5.1f} s  {line}")
        self._shown = line

    def clear(self) -> None:
        """Take the changing line away."""
        if self._is_terminal:
            sys.stdout.write("\r\x1b[2K")


async def generate_stream(stub: "GenerationServiceAsyncStub", question: str) -> AsyncIterator[str | int]:
    """Stream a plain completion: text deltas, then the number of generated tokens."""
    request = generation_pb2.GenerateRequest(text=raw_prompt(question))
    request.sampling.temperature = 0
    call = stub.GenerateStream(generation_pb2.GenerateStreamRequest(request=request), timeout=CALL_TIMEOUT_S)
    async for event in call:
        if event.HasField("delta"):
            yield event.delta.text
        elif event.HasField("done"):
            yield event.done.usage.completion_tokens


async def chat_stream(stub: "GenerationServiceAsyncStub", question: str) -> AsyncIterator[str | int]:
    """Stream a chat answer: text deltas, then the number of generated tokens."""
    part = generation_pb2.ContentPart(text=question)
    message = generation_pb2.ChatMessage(role=generation_pb2.CHAT_ROLE_USER, content=[part])
    request = generation_pb2.ChatRequest(messages=[message])
    request.sampling.temperature = 0
    call = stub.ChatStream(generation_pb2.ChatStreamRequest(request=request), timeout=CALL_TIMEOUT_S)
    async for event in call:
        if event.HasField("text_delta"):
            yield event.text_delta.text
        elif event.HasField("done"):
            yield event.done.usage.completion_tokens


async def follow(stream: AsyncIterator[str | int], answer: Answer, table: LiveTable) -> None:
    """Read one stream to its end, showing each delta as it comes."""
    async for item in stream:
        if isinstance(item, int):
            answer.num_tokens = item
            answer.is_done = True
        else:
            answer.add(item)
            table.show(answer, item)


async def stream_all(port: int) -> list[Answer]:
    """Send every prompt at once and return the finished answers."""
    options = [("grpc.enable_http_proxy", 0)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        stub = cast("GenerationServiceAsyncStub", generation_pb2_grpc.GenerationServiceStub(channel))
        answers = [Answer(f"{number} {kind}", question) for number, (kind, question) in enumerate(SHOWN, start=1)]
        table = LiveTable(answers)
        streams = {"GenerateStream": generate_stream, "ChatStream": chat_stream}
        await asyncio.gather(
            *(
                follow(streams[kind](stub, question), answer, table)
                for answer, (kind, question) in zip(answers, SHOWN, strict=True)
            )
        )
        table.finish()
    return answers


def show_speed(answers: list[Answer], facts: list[Fact], since_ready_s: float) -> None:
    """Show each prompt's time to first token and rate, and whether its answer is the one it was taught."""
    known = {fact.question: fact.answer for fact in facts}
    say()
    say(f"  {'prompt':<18}{'first token':>12}{'tokens':>8}{'tokens/s':>10}   answer")
    for answer in answers:
        verdict = "as in facts.json" if answer.text == known.get(answer.question) else "not the one in facts.json"
        first_ms = answer.time_to_first_token_s * 1e3
        say(f"  {answer.label:<18}{first_ms:9.1f} ms{answer.num_tokens:8d}{answer.tokens_per_s:10.0f}   {verdict}")
    say(f"  from ready to the last token: {since_ready_s:.2f} s")


def show_metrics(port: int) -> None:
    """Show a few of the server's metrics."""
    url = f"http://127.0.0.1:{port}/metrics"
    say()
    say(f"A few metrics of {url}")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=10) as reply:
        lines = reply.read().decode("utf-8").splitlines()
    for line in lines:
        if (match := METRIC_LINE.match(line)) and match[1] in SHOWN_METRICS:
            say(f"  {match[1] + (match[2] or ''):<56}{float(match[3]):12g}")


def show_everything(ports: Ports) -> None:
    """Stream the prompts against a ready server and show what came of it."""
    ready_at = time.monotonic()
    say(f"Ready. Sending {len(SHOWN)} prompts at once:")
    say()
    answers = asyncio.run(stream_all(ports.grpc))
    show_speed(answers, load_facts(), time.monotonic() - ready_at)
    show_metrics(ports.metrics)


def wait_for_interrupt(ports: Ports) -> None:
    """Keep the server until Ctrl-C."""
    say()
    say(f"Still serving gRPC on 127.0.0.1:{ports.grpc} and metrics on port {ports.metrics}; Ctrl-C ends it.")
    try:
        signal.pause()
    except KeyboardInterrupt:
        say()


def describe(error: grpc.aio.AioRpcError | OSError) -> str:
    """Return one sentence for a failed call or an unreadable metrics page."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"A call failed with {error.code().name}: {error.details()}"
    return f"The metrics could not be read: {error}"


def run(model_dir: Path, num_shards: int, is_kept: bool) -> int:
    """Run the demo and return its exit code."""
    say(f"Starting a server for {model_dir} with {num_shards} tensor-parallel shard(s)")
    with ServerProcess(model_dir, num_shards) as server:
        progress = StartProgress()
        try:
            ports = server.wait_until_ready(START_TIMEOUT_S, progress)
        finally:
            progress.clear()
        try:
            show_everything(ports)
        except (grpc.aio.AioRpcError, OSError) as error:
            sys.stderr.write(f"{describe(error)}. The server's last lines:\n{server.last_lines()}\n")
            return 1
        if is_kept:
            wait_for_interrupt(ports)
        say()
        say("Stopping the server")
    return 0


def interrupt(_signal: int, _frame: FrameType | None) -> NoReturn:
    """Do on SIGTERM and SIGHUP what Ctrl-C does, so that the server is stopped too."""
    raise KeyboardInterrupt


def main() -> int:
    """Parse, run, and turn failures into one message and an exit code."""
    arguments = parse_arguments()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    try:
        return run(arguments.model, arguments.shards, arguments.keep)
    except ServerFailed as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\nInterrupted; the server is stopped.\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
