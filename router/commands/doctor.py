"""`doctor`: looks at what `serve` would need and says what is missing, and how to mend it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Sequence

from router.chat import ChatTemplates
from router.config import RouterConfig, load_config
from router.errors import StartupError
from router.model_folder import read_model_facts, resolve_model
from router.ports import check_ports
from router.tokenizer import Tokenizer

PACKAGES = ["grpcio", "protobuf", "prometheus-client", "tokenizers", "safetensors", "torch"]
GPU_PACKAGES = ["triton", "flash-attn"]


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    name: str
    is_well: bool
    text: str


def main(argv: Sequence[str]) -> int:
    """Takes `serve`'s flags; 0 if nothing is missing, 1 otherwise."""
    config = load_config(argv, os.environ, "doctor")
    findings = [
        Finding("python", sys.version_info >= (3, 11), f"{platform.python_version()}, 3.11 or newer is needed"),
        *(_package(name) for name in PACKAGES),
        *(_package(name) for name in GPU_PACKAGES if config.device == "cuda"),
        _check("ports", lambda: _ports(config)),
        _check("model", lambda: _model(config)),
    ]
    for finding in findings:
        sys.stdout.write(f"{'ok' if finding.is_well else 'MISSING':<8} {finding.name:<18} {finding.text}\n")
    return 0 if all(finding.is_well for finding in findings) else 1


def _package(name: str) -> Finding:
    try:
        return Finding(name, True, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, False, "not installed; run `make setup`, or pip install -e '.[server]'")


def _check(name: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(name, True, look())
    except StartupError as error:
        return Finding(name, False, str(error))


def _ports(config: RouterConfig) -> str:
    check_ports(config)
    return f"{config.port} (gRPC) and {config.metrics_port} (metrics) are free"


def _model(config: RouterConfig) -> str:
    if not config.model:
        return "none given; --model FOLDER checks one"
    folder = resolve_model(config.model)
    facts = read_model_facts(folder, is_dummy=config.load_format == "dummy")
    tokenizer = Tokenizer.from_dir(folder)
    templates = ChatTemplates.from_dir(folder, tokenizer)
    return (
        f"{facts.model_type}, {tokenizer.vocab_size} token ids, chat templates: {', '.join(templates.names) or 'none'}"
    )
