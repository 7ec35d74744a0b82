"""`make bench-gpu`: random weights of a published geometry, the fixed workloads, the engine through the shard link.

Needs no checkpoint. On a machine without a GPU, `--geometry tiny --device cpu` tries the machinery.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench import results
from bench.checkpoint import write_geometry
from bench.geometries import GEOMETRIES
from bench.gpu_engine import OfflineEngine
from bench.gpu_report import GpuResult, GpuWorkloadResult, render_page, result_json
from bench.machine import cpu_facts, gpu_facts
from bench.measurement import measure_in_turn
from bench.workloads import Workload, gpu_workloads
from router.config import RouterConfig

NAMES = ("b1", "b64", "b256", "prefill", "ctx", "mixed512")
SHORT_OUTPUT = 4


def say(text: str) -> None:
    """Tells what goes on, on standard error."""
    sys.stderr.write(f">> bench: {text}\n")
    sys.stderr.flush()


def make_parser() -> argparse.ArgumentParser:
    """Flags of `make bench-gpu`; those of the server have its names."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--geometry", choices=list(GEOMETRIES), default="aya-8b")
    parser.add_argument("--workloads", choices=NAMES, nargs="+", default=list(NAMES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round, at most 4 requests each, no file written")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--max-model-len", type=int, default=0, help="default: 8192, or the geometry's if less")
    parser.add_argument("--max-num-seqs", type=int, default=512)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--num-blocks-override", type=int, default=0)
    parser.add_argument("--kv-cache-memory-bytes", type=int, default=0)
    parser.add_argument("--attention-backend", choices=("auto", "torch", "triton", "flash"), default="auto")
    parser.add_argument("--run-ahead", type=int, default=1)
    parser.add_argument("--no-machine", action="store_true", help="do not measure the machine's own rates")
    return parser


def _shortened(workload: Workload) -> Workload:
    requests = [dataclasses.replace(request, num_output_tokens=min(SHORT_OUTPUT, request.num_output_tokens))
                for request in workload.requests[:4]]  # fmt: skip
    return dataclasses.replace(workload, requests=requests)


def _config(flags: argparse.Namespace, model_dir: str) -> RouterConfig:
    longest = int(str(GEOMETRIES[flags.geometry]["max_position_embeddings"]))
    return RouterConfig(
        model=model_dir,
        load_format="dummy",
        dtype=flags.dtype,
        device=flags.device,
        tensor_parallel_size=flags.tensor_parallel_size,
        max_model_len=flags.max_model_len or min(8192, longest),
        max_num_seqs=flags.max_num_seqs,
        max_num_batched_tokens=flags.max_num_batched_tokens,
        num_blocks_override=flags.num_blocks_override,
        kv_cache_memory_bytes=flags.kv_cache_memory_bytes,
        attention_backend=flags.attention_backend,
        run_ahead=flags.run_ahead,
    )


def _measure(engine: OfflineEngine, workload: Workload, num_rounds: int) -> GpuWorkloadResult:
    engine.run(_shortened(workload))
    engine.link.forget()
    (measurement,) = measure_in_turn([engine], workload, num_rounds)
    link = engine.link
    busy_s = link.step_s + link.idle_s
    idle_share = link.idle_s / busy_s if busy_s else 0.0
    say(f"{workload.name}: {measurement.tokens_per_s:,.0f} tok/s, device idle {idle_share:.1%}")
    return GpuWorkloadResult(workload.name, workload.title, measurement, idle_share, link.num_steps // num_rounds)


def run(flags: argparse.Namespace) -> GpuResult:
    """Measures and returns everything."""
    facts: dict[str, object] = {}
    if not flags.no_machine:
        say("measuring the machine")
        facts = gpu_facts() if flags.device == "cuda" else cpu_facts()
    with tempfile.TemporaryDirectory(prefix="cohort-bench-") as folder:
        write_geometry(Path(folder), GEOMETRIES[flags.geometry])
        config = _config(flags, folder)
        vocab_size = int(str(GEOMETRIES[flags.geometry]["vocab_size"]))
        workloads = [w for w in gpu_workloads(vocab_size, config.max_model_len) if w.name in flags.workloads]
        if flags.quick:
            workloads = [_shortened(workload) for workload in workloads]
        say("starting the shards")
        engine = OfflineEngine(config)
        try:
            say(f"ready after {engine.start_to_ready_s:.1f} s")
            settings = dataclasses.asdict(engine.link.info) | {"run_ahead": config.run_ahead}
            num_rounds = 1 if flags.quick else max(1, flags.rounds)
            outcomes = [_measure(engine, workload, num_rounds) for workload in workloads]
        finally:
            engine.close()
    return GpuResult(flags.geometry, facts, settings, engine.start_to_ready_s, outcomes)


def main(argv: Sequence[str]) -> int:
    """Runs, prints the page, and keeps it unless --quick."""
    flags = make_parser().parse_args(argv)
    result = run(flags)
    page = render_page(result)
    sys.stdout.write(page)
    if not flags.quick:
        say(f"kept in {results.save(f'gpu-{flags.geometry}', page, result_json(result))}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
