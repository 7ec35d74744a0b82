"""The sub-commands as a person types them, the client ones against a server of this process."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cohort.v1 import generation_pb2 as pb

from router.cli import COMMANDS, main
from tests.router.adapter_files import make_adapter, version_of
from tests.router.api.edge import DEMO, TIMEOUT_S, Edge, edge


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`serve` sets up logging for its process; here it must not outlive the test."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield
    root.handlers[:], root.level = handlers, level


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(argv)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


async def beside(server: Edge, *argv: str) -> int:
    """The exit code of a client command that talks to `server`."""
    flags = ("--host", "127.0.0.1", "--port", str(server.port))
    return await asyncio.to_thread(main, (*argv, *flags))


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0 and all(f"\n  {name} " in out for name in COMMANDS)
    assert run(capsys)[0] == 2


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "sevre")
    assert code == 2 and "unknown command 'sevre'" in err


@pytest.mark.parametrize("name", ["generate", "chat", "health", "serve", "config", "doctor"])
def test_every_command_tells_its_flags(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0 and "--port" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--max-num-seq", "2"], "did you mean --max-num-seqs?"),
        (["--port", "0", "--metrics-port", "-1"], "--model is required"),
        (["--model", "./nowhere", "--port", "0", "--metrics-port", "-1"], "./nowhere does not exist"),
    ],
)
def test_serve_ends_with_one_sentence_when_it_cannot_start(
    argv: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, "serve", *argv)
    last = err.splitlines()[-1]
    assert code == 1 and last.startswith("serve: ") and reason in last and "Traceback" not in err


def test_serve_logs_its_effective_configuration_first(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, err = run(capsys, "serve", "--port", "0", "--metrics-port", "-1", "--run-ahead", "0")
    first = err.splitlines()[0]
    assert " configuration " in first and " run-ahead=0 " in first and " metrics-port=-1 " in first


def test_config_prints_what_would_act(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COHORT_RUN_AHEAD", "0")
    code, out, _ = run(capsys, "config", "--no-vllm-metric-aliases")
    printed = yaml.safe_load(out)
    assert code == 0 and printed["run-ahead"] == 0 and printed["vllm-metric-aliases"] is False


def test_doctor_says_what_is_missing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ports = ("--port", "0", "--metrics-port", "0")
    code, out, _ = run(capsys, "doctor", "--model", str(DEMO), *ports)
    assert code == 0 and "MISSING" not in out and "cohere" in out
    code, out, _ = run(capsys, "doctor", "--model", str(tmp_path), *ports)
    assert code == 1 and [line for line in out.splitlines() if "MISSING" in line and "config.json" in line]


async def test_generate_writes_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    async with edge() as server:
        assert await beside(server, "generate", "What is it?", "--seed", "1", "--max-tokens", "8") == 0
        request = pb.GenerateRequest(
            text="What is it?", sampling=pb.SamplingParams(seed=1), stopping=pb.StoppingParams(max_tokens=8)
        )
        answer = await server.generation.Generate(request, timeout=TIMEOUT_S)
        assert capsys.readouterr().out == answer.sequences[0].text + "\n"


async def test_a_servers_refusal_is_a_sentence_and_a_code(capsys: pytest.CaptureFixture[str]) -> None:
    async with edge() as server:
        assert await beside(server, "generate", "x", "--top-p", "2") == 1
        err = capsys.readouterr().err
        assert err.startswith("generate: INVALID_ARGUMENT: sampling.top_p: must be in (0, 1], not 2")


async def test_chat_keeps_the_conversation(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n\nAnd then?\n"))
    async with edge() as server:
        assert await beside(server, "chat", "--system", "Be brief.", "--max-tokens", "4", "--seed", "1") == 0
        lengths = [opened.num_prompt_tokens for step in server.shards.steps for opened in step.opened]
    assert len(lengths) == 2 and lengths[1] > lengths[0]
    assert capsys.readouterr().out.count("\n") >= 2


async def test_adapters_are_loaded_listed_and_unloaded(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    version = version_of(make_adapter(tmp_path / "polite"))
    settings: dict[str, Any] = {"enable_lora": True, "adapter_dirs": (str(tmp_path),)}
    async with edge(info={"max_loras": 2}, **settings) as server:
        assert await beside(server, "adapters", "list") == 0
        assert capsys.readouterr().out.splitlines()[1].split()[:3] == ["polite", "disk", "-"]
        assert await beside(server, "adapters", "load", "p", "polite", "--pin") == 0
        row = capsys.readouterr().out.splitlines()[1].split()
        assert row == ["p", "host", "8", "0", "yes", version[:12], str(tmp_path / "polite")]
        assert await beside(server, "adapters", "unload", "p", "--wait") == 0
        assert await beside(server, "adapters", "unload", "p") == 1
        assert capsys.readouterr().err.startswith("adapters: NOT_FOUND: no adapter 'p' is loaded")
        assert await beside(server, "adapters", "load", "x", "../x") == 1
        assert "--adapter-dirs" in capsys.readouterr().err


async def test_health_tells_by_text_and_code(capsys: pytest.CaptureFixture[str]) -> None:
    async with edge() as server:
        assert await beside(server, "health") == 0
        server.readiness.set_unready("draining")
        assert await beside(server, "health") == 1
        assert await beside(server, "health", "--only", "live") == 0
    assert capsys.readouterr().out.splitlines() == [
        "live: SERVING",
        "ready: SERVING",
        "live: SERVING",
        "ready: NOT_SERVING",
        "live: SERVING",
    ]


def test_a_server_that_is_not_there_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "health", "--host", "127.0.0.1", "--port", "1")
    assert code == 1 and err.startswith("health: UNAVAILABLE")
