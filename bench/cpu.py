"""`make bench`: Cohort through gRPC beside transformers' generate on this CPU, with the same random checkpoint.

Two threads each, never both at work at once: the server stays up while transformers runs, and the page says how much
processor time it used meanwhile.
"""

from __future__ import annotations

import argparse
import dataclasses
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench import results
from bench.checkpoint import write_checkpoint
from bench.cohort_engine import CohortEngine
from bench.core_watch import CoreWatch
from bench.cpu_report import CpuResult, WorkloadResult, render_page
from bench.geometries import GEOMETRIES
from bench.machine import cpu_facts
from bench.measurement import Engine, measure_in_turn, share_of_equal
from bench.products import product_rates
from bench.router_step import measure_apart
from bench.server_process import ServerProcess
from bench.transformers_engine import TransformersEngine, load_model
from bench.workloads import Workload, cpu_workloads

GEOMETRY = GEOMETRIES["cpu-107m"]
VOCAB_SIZE = 32000
NUM_THREADS = 2
STEP_ROWS = (1, 16, 64, 256, 1024)
DTYPES = ("float32", "bfloat16")


def say(text: str) -> None:
    """Tells what goes on, on standard error."""
    sys.stderr.write(f">> bench: {text}\n")
    sys.stderr.flush()


def _warm(engines: Sequence[Engine], workloads: Sequence[Workload]) -> None:
    """Runs each engine once on a short form of each workload, so that no first call is timed."""
    for workload in workloads:
        requests = [dataclasses.replace(request, num_output_tokens=2) for request in workload.requests[:4]]
        for engine in engines:
            engine.run(dataclasses.replace(workload, requests=requests))


def _measure(model_dir: Path, dtype: str, workloads: list[Workload], num_rounds: int, result: CpuResult) -> None:
    flags = ["--dtype", dtype, "--max-num-seqs", "64", "--log-level", "warning"]
    flags.append("--no-enable-prefix-caching")  # Every round has the same prompts, and transformers computes them all.
    result.product_gflop_s[dtype] = product_rates(dtype)
    say(f"{dtype}: starting the server")
    with ServerProcess(model_dir, flags, NUM_THREADS) as server:
        result.start_to_ready_s[dtype] = server.start_to_ready_s
        model = load_model(model_dir, dtype)
        cohort = CohortEngine(server.address)
        pair: list[Engine] = [cohort, TransformersEngine(model, is_padded=True)]
        alone = TransformersEngine(model, is_padded=False)
        _warm([*pair, alone], workloads)
        watch = CoreWatch(server.cpu_s, cohort.name)
        for workload in workloads:
            start = time.perf_counter()
            ours, padded = measure_in_turn(pair, workload, num_rounds, watch.after)
            (one_by_one,) = measure_in_turn([alone], workload, 1, watch.after)  # No ratio needs it, and it is slow.
            equal_share = share_of_equal(ours, one_by_one)
            outcome = WorkloadResult(dtype, workload.name, workload.title, ours, one_by_one, padded, equal_share)
            result.workloads.append(outcome)
            say(
                f"{dtype} {workload.name}: {ours.tokens_per_s:,.0f} tok/s, {outcome.ratio:.2f} times the padded batch "
                f"({time.perf_counter() - start:.0f} s)"
            )
        result.idle_cores[dtype] = watch.idle_server_cores
        result.other_cores[dtype] = watch.other_cores
        cohort.close()


def run(dtypes: Sequence[str], names: Sequence[str], num_rounds: int, step_rows: Sequence[int]) -> CpuResult:
    """Measures and returns everything."""
    torch.set_num_threads(NUM_THREADS)
    say("measuring the machine")
    result = CpuResult(cpu_facts(), 0, num_rounds, [], {}, {}, {}, {}, [])
    with tempfile.TemporaryDirectory(prefix="cohort-bench-") as folder:
        say("drawing a random checkpoint")
        result = dataclasses.replace(result, num_parameters=write_checkpoint(Path(folder), GEOMETRY))
        if step_rows:
            say("the router's own cost of a step")
            result.steps.extend(measure_apart(step_rows))
        workloads = [workload for workload in cpu_workloads(VOCAB_SIZE) if workload.name in names]
        for dtype in dtypes:
            _measure(Path(folder), dtype, workloads, num_rounds, result)
    return result


def _json(result: CpuResult) -> dict[str, object]:
    workloads = []
    for outcome in result.workloads:
        engines = {m.engine: m for m in (outcome.cohort, outcome.one_by_one, outcome.padded)}
        workloads.append(
            {
                "dtype": outcome.dtype,
                "workload": outcome.name,
                "tokens": outcome.cohort.num_counted_tokens,
                "rounds_s": {name: m.rounds_s for name, m in engines.items()},
                "tokens_per_s": {name: m.tokens_per_s for name, m in engines.items()},
                "spread": {name: m.spread for name, m in engines.items()},
                "ratio_to_padded": outcome.ratio,
                "share_of_equal_ids": outcome.equal_share,
            }
        )
    return {
        "machine": result.facts,
        "num_parameters": result.num_parameters,
        "num_rounds": result.num_rounds,
        "workloads": workloads,
        "start_to_ready_s": result.start_to_ready_s,
        "product_gflop_s": result.product_gflop_s,
        "idle_cores": result.idle_cores,
        "other_cores": result.other_cores,
        "router_steps": [dataclasses.asdict(cost) for cost in result.steps],
    }


def make_parser() -> argparse.ArgumentParser:
    """Flags of `make bench`."""
    names = [workload.name for workload in cpu_workloads(VOCAB_SIZE)]
    parser = argparse.ArgumentParser(prog="python -m bench.cpu", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round, no file written")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=list(DTYPES))
    parser.add_argument("--workloads", choices=names, nargs="+", default=names)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-router-steps", action="store_true", help="leave the router's cost per step out")
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs, prints the page, and keeps it unless --quick."""
    flags = make_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # So that the server is stopped too.
    step_rows = () if flags.no_router_steps else STEP_ROWS
    result = run(flags.dtype, flags.workloads, 1 if flags.quick else max(1, flags.rounds), step_rows)
    page = render_page(result)
    sys.stdout.write(page)
    if not flags.quick:
        say(f"kept in {results.save('cpu', page, _json(result))}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
