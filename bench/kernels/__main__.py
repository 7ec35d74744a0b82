"""Checks every kernel of the model on the GPU and times it beside the operations of torch, cuBLAS and flash-attn.

`python -m bench.kernels --out kernels.json [--sections layers decode ...]`; inputs are drawn afresh each time, small
kernels are timed as replays of a CUDA graph, and inputs rotate where they would otherwise stay in the L2 cache.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from bench.kernels.decode import decode
from bench.kernels.layers import layers, machine
from bench.kernels.lora import lora
from bench.kernels.one_row import one_row
from bench.kernels.prefill import prefill
from bench.kernels.products import products
from bench.kernels.report import Report, tried
from bench.kernels.sampling import sampling
from bench.kernels.step import step

SECTIONS: dict[str, Callable[[Report], None]] = {
    "machine": machine,
    "layers": layers,
    "decode": decode,
    "prefill": prefill,
    "sampling": sampling,
    "products": products,
    "one_row": one_row,
    "step": step,
    "lora": lora,
}


def main() -> None:
    """Runs the chosen sections, then writes the table and the JSON file."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__)
    parser.add_argument("--out", type=Path, default=None, help="JSON file of every measurement")
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False  # what is compared with is float32 throughout
    report = Report()
    for name in arguments.sections:
        start = time.perf_counter()
        tried(name, partial(SECTIONS[name], report))
        torch.cuda.empty_cache()
        sys.stdout.write(f"-- {name} took {time.perf_counter() - start:.1f} s\n")
        if arguments.out is not None:  # after each section, so that a run cut short leaves what it has
            arguments.out.write_text(json.dumps(report.rows, indent=1))
    report.table()


if __name__ == "__main__":
    main()
