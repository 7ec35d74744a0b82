"""The sub-commands; each is imported when asked for, so that `serve` can start its shards before gRPC is there."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from router.errors import StartupError

# name: (module with a `main(argv) -> int`, what it does)
COMMANDS = {
    "serve": (
        "router.commands.serve",
        "serve a model, with shards started here or at --shard-addresses",
    ),
    "generate": ("router.commands.generate", "complete a prompt through a running server"),
    "chat": ("router.commands.chat", "talk with a running server"),
    "adapters": ("router.commands.adapters", "load, unload and list the adapters of a running server"),
    "bench": ("router.bench.cli", "measure a running server"),
    "health": ("router.commands.health", "ask a running server whether it is alive and ready"),
    "doctor": ("router.commands.doctor", "check this machine, its packages, a model folder and the ports"),
    "config": ("router.commands.config", "print the effective configuration of `serve` and end"),
}


def main(argv: Sequence[str]) -> int:
    """Runs a sub-command; returns the exit code: 0, 1 for a failure, 2 for a wrong call."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        sys.stdout.write(_usage())
        return 0 if argv else 2
    if argv[0] not in COMMANDS:
        sys.stderr.write(f"unknown command {argv[0]!r}\n{_usage()}")
        return 2
    command = importlib.import_module(COMMANDS[argv[0]][0])
    try:
        code: int = command.main(argv[1:])
        return code
    except StartupError as error:
        sys.stderr.write(f"{argv[0]}: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130


def _usage() -> str:
    lines = [f"  {name:<10} {text}" for name, (_, text) in COMMANDS.items()]
    return "usage: python -m router COMMAND [--help] [FLAGS]\n\ncommands:\n" + "\n".join(lines) + "\n"
