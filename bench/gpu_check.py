"""Checks the shard's engine on a GPU and times its decode steps: `python -m bench.gpu_check --out FOLDER`.

Sections: `parity` with transformers on tiny random checkpoints, `paths` (graphs, launching ahead, no hidden wait),
`sampler` against the CPU's, `timing` of decode steps on a published geometry with random weights, by kernel.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from bench.gpu_checks import parity, paths, sampler
from bench.gpu_timing import timing

SECTIONS: dict[str, Callable[[argparse.Namespace, Path], dict[str, object]]] = {
    "parity": parity,
    "paths": paths,
    "sampler": sampler,
    "timing": timing,
}


def say(text: str) -> None:
    """A line of the report."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    """Runs the chosen sections; 1 if any failed. What is said is also kept as JSON under --out."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_check", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--backends", nargs="+", choices=("triton", "flash"), default=["triton", "flash"])
    parser.add_argument("--geometry", default="aya-8b")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 64, 256])
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tries the script")
    flags = parser.parse_args()
    flags.out.mkdir(parents=True, exist_ok=True)
    facts: dict[str, object] = {"gpu": torch.cuda.get_device_name()} if flags.device == "cuda" else {}
    has_failed = False
    for name in flags.sections:
        start_s = time.perf_counter()
        say(f"\n== {name}")
        try:
            with tempfile.TemporaryDirectory(prefix="cohort-check-") as folder:
                found = SECTIONS[name](flags, Path(folder))
            has_failed |= found.get("failed", 0) != 0
        except Exception as error:
            traceback.print_exc(file=sys.stdout)
            found, has_failed = {"failed": 1, "error": f"{type(error).__name__}: {error}"}, True
        found["seconds"] = round(time.perf_counter() - start_s, 1)
        facts[name] = found
        say(f"-- {name}: {'FAILED' if found.get('failed') else 'ok'} in {found['seconds']} s")
        (flags.out / "gpu_check.json").write_text(json.dumps(facts, indent=1, default=str))
    return int(has_failed)


if __name__ == "__main__":
    import logging

    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(name)s: %(message)s")
    sys.exit(main())
