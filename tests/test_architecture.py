"""The import directions of docs/architecture.md, and that the router needs no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = {"router", "shard_server", "model", "cohort", "bench", "demo", "tests"}
MAY_IMPORT = {"router": {"router", "cohort"}, "shard_server": {"shard_server", "model", "cohort"}, "model": {"model"}}
FORBIDDEN = {"router": {"torch", "transformers"}, "model": {"grpc", "google"}, "shard_server": set()}
PURE = ["scheduler", "block_manager", "validation", "stopping", "sequence", "messages", "step", "errors"]


def imports(path: Path) -> set[str]:
    """Top names of every import in a file, wherever it stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert node.module is not None
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_packages_import_only_in_the_drawn_directions(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        names = imports(path)
        assert not (names & OURS) - MAY_IMPORT[package], path
        assert not names & FORBIDDEN[package], path


@pytest.mark.parametrize("name", PURE)
def test_decision_code_has_no_io_protobuf_or_event_loop(name: str) -> None:
    names = imports(ROOT / "router" / f"{name}.py")
    assert not names & {"asyncio", "grpc", "google", "cohort", "socket", "torch", "os", "time", "random"}


def test_importing_every_router_module_leaves_torch_out() -> None:
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in (ROOT / "router").rglob("*.py")
        if path.name not in ("__main__.py", "__init__.py")
    ]
    code = f"import importlib, sys\nfor m in {modules!r}: importlib.import_module(m)\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, check=True, timeout=60)


def test_files_hold_one_thing_each_and_stay_short() -> None:
    for package in MAY_IMPORT:
        for path in (ROOT / package).rglob("*.py"):
            assert len(path.read_text().splitlines()) <= 320, path


def test_no_file_has_a_name_that_says_nothing() -> None:
    for package in MAY_IMPORT:
        for path in (ROOT / package).rglob("*.py"):
            assert path.stem not in ("utils", "util", "common", "base", "helpers", "misc"), path
