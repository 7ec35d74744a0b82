"""The demo client: it reads the server's ready line, streams all prompts at once, and explains a failed start."""

import asyncio
import io
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from cohort.v1 import generation_pb2 as pb
from cohort.v1 import generation_pb2_grpc as pb_grpc

from demo import run
from demo.facts import Fact
from demo.live_table import Answer, LiveTable, cut
from demo.server_process import Ports, ServerFailed, ServerProcess, ports_in


class EchoService(pb_grpc.GenerationServiceServicer):
    """Answers each prompt with its own words, and only when all the prompts have arrived."""

    def __init__(self) -> None:
        self.everyone = asyncio.Barrier(len(run.SHOWN))

    async def words(self, text: str) -> AsyncIterator[str]:
        await self.everyone.wait()
        for word in text.split():
            yield word + " "

    async def GenerateStream(
        self, request: pb.GenerateStreamRequest, context: object
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        assert request.request.sampling.temperature == 0 and request.request.sampling.HasField("temperature")
        async for word in self.words(request.request.text):
            yield pb.GenerateStreamResponse(delta=pb.SequenceDelta(text=word))
        yield pb.GenerateStreamResponse(done=pb.StreamDone(usage=pb.Usage(completion_tokens=7)))

    async def ChatStream(self, request: pb.ChatStreamRequest, context: object) -> AsyncIterator[pb.ChatStreamResponse]:
        assert request.request.messages[0].role == pb.CHAT_ROLE_USER
        async for word in self.words(request.request.messages[0].content[0].text):
            yield pb.ChatStreamResponse(text_delta=pb.SequenceDelta(text=word))
        yield pb.ChatStreamResponse(done=pb.StreamDone(usage=pb.Usage(completion_tokens=9)))


async def test_all_prompts_are_in_flight_together_and_each_answer_is_put_together() -> None:
    server = grpc.aio.server()
    pb_grpc.add_GenerationServiceServicer_to_server(EchoService(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        answers = await run.stream_all(port)
    finally:
        await server.stop(None)
    for answer, (kind, question) in zip(answers, run.SHOWN, strict=True):
        assert question in answer.text
        assert answer.is_done
        assert answer.num_tokens == (7 if kind == "GenerateStream" else 9)
        assert answer.time_to_first_token_s > 0


def test_the_shown_prompts_are_facts(facts: list[Fact]) -> None:
    assert {question for _, question in run.SHOWN} <= {fact.question for fact in facts}


@pytest.mark.parametrize(
    ("line", "ports"),
    [
        ("INFO ready: port=50051 metrics_port=9090", Ports(50051, 9090)),
        ("ready: metrics_port=9090 port=50051", Ports(50051, 9090)),
        ('{"message": "ready", "port": 50051, "metrics_port": 9090}', Ports(50051, 9090)),
        ("ready: metrics_port=9090", None),
        ("starting: port=0 metrics_port=0", None),
    ],
)
def test_the_ready_line_gives_both_ports(line: str, ports: Ports | None) -> None:
    assert ports_in(line) == ports


def test_a_server_that_cannot_start_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "absent", 1) as server, pytest.raises(ServerFailed) as failure:
        server.wait_until_ready(60, lambda waited_s, line: None)
    reason, *lines = str(failure.value).splitlines()
    assert "exit code" in reason
    assert lines and all(line.startswith("  | ") for line in lines)


def test_the_rate_counts_tokens_after_the_first() -> None:
    answer = Answer("1", "q", sent_at=10.0, first_at=10.5, last_at=12.5, num_tokens=21)
    assert answer.time_to_first_token_s == 0.5
    assert answer.tokens_per_s == 10.0


def test_wide_characters_take_two_columns() -> None:
    assert cut("日本 Japan", 5) == "日本 "
    assert cut("日本 Japan", 3) == "日"
    assert cut("short", 80) == "short"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_the_table_is_painted_over_itself() -> None:
    answer = Answer("1 ChatStream", "Why?")
    out = Terminal()
    table = LiveTable([answer], out)
    for delta in ["Because", " so."]:
        answer.add(delta)
        table.show(answer, delta)
    first, second = out.getvalue().split("\x1b[3A")
    assert "Because▌" in first
    assert "Because so.▌" in second


def test_elsewhere_each_delta_is_a_line() -> None:
    answer = Answer("1 ChatStream", "Why?")
    out = io.StringIO()
    table = LiveTable([answer], out)
    table.show(answer, "Because")
    table.show(answer, " so.")
    lines = out.getvalue().splitlines()
    assert len(lines) == 2 and lines[0].endswith("'Because'") and lines[1].endswith("' so.'")


@pytest.mark.slow
def test_the_whole_demo_runs_and_ends_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.run(run.DEMO_DIR / "cohere", num_shards=2, is_kept=False) == 0
    shown = capsys.readouterr().out
    assert shown.count("as in facts.json") == len(run.SHOWN)
    assert "cohort_generation_tokens_total" in shown
