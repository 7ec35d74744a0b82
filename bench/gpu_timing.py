"""Times decode steps of a geometry with random weights, in this process, and says which kernels take the time."""

from __future__ import annotations

import argparse
import collections
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.checkpoint import write_geometry
from bench.geometries import GEOMETRIES
from bench.runner_driver import Driver, Row, make_runner

PROMPT_TOKENS = 128
WARM_STEPS, TIMED_STEPS, PROFILED_STEPS = 8, 80, 6
NUM_AHEAD = 1
NUM_KERNELS_SHOWN = 16


def say(text: str) -> None:
    """A line of the report."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def timing(flags: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Start-up, then for each batch milliseconds a step, idle time, and kernels."""
    geometry = GEOMETRIES[flags.geometry]
    write_geometry(folder, geometry)
    start_s = time.perf_counter()
    runner, facts = make_runner(
        folder,
        device=flags.device,
        dtype="bfloat16",
        load_format="dummy",
        attention_backend=flags.attention_backend,
        max_num_seqs=max(flags.batches),
        max_num_batched_tokens=8192 if flags.device == "cuda" else 512,
        max_model_len=min(8192, int(str(geometry["max_position_embeddings"]))),
    )
    ready_s = time.perf_counter() - start_s
    phases = {name: round(seconds, 2) for name, seconds in facts.startup_phase_s.items()}
    say(f"{flags.geometry}: ready after {ready_s:.1f} s {phases}, {facts.num_blocks} blocks of {facts.block_size}")
    results = []
    for batch in flags.batches:
        results.append(_one_batch(runner, facts, batch, int(str(geometry["vocab_size"])), flags.device))
    return {"ready_s": ready_s, "phases": phases, "num_blocks": facts.num_blocks, "batches": results}


def _one_batch(runner: Any, facts: Any, batch: int, vocab_size: int, device: str) -> dict[str, object]:  # noqa: ANN401
    generator = np.random.default_rng(batch)
    prompts = generator.integers(3, vocab_size, (batch, PROMPT_TOKENS)).tolist()
    driver = Driver(runner, facts, [Row(tuple(prompt)) for prompt in prompts], PROMPT_TOKENS)
    start_s = time.perf_counter()
    driver.prefill(NUM_AHEAD)
    driver.drain()
    prefill_s = time.perf_counter() - start_s
    driver.decode(WARM_STEPS, NUM_AHEAD)
    driver.drain()
    driver.outcomes.clear()
    start_s = time.perf_counter()
    driver.decode(TIMED_STEPS, NUM_AHEAD)
    driver.drain()
    wall_ms = (time.perf_counter() - start_s) / TIMED_STEPS * 1e3
    step_ms = statistics.median(outcome.step_s for outcome in driver.outcomes) * 1e3
    idle = sum(o.device_idle_s for o in driver.outcomes[1:]) / sum(o.step_s for o in driver.outcomes)
    launch_ms = _launch_ms(driver)
    found: dict[str, object] = {
        "batch": batch, "wall_ms": wall_ms, "step_ms": step_ms, "idle_share": idle, "launch_ms": launch_ms,
        "tokens_per_s": batch / wall_ms * 1e3, "prefill_tokens_per_s": batch * PROMPT_TOKENS / prefill_s,
    }  # fmt: skip
    text = f"b{batch}: {wall_ms:.3f} ms a step ({step_ms:.3f} on the device, idle {idle:.2%}), launching takes "
    text += f"{launch_ms:.3f} ms, {batch / wall_ms * 1e3:,.0f} tok/s"
    say(f"{text}, prefill {found['prefill_tokens_per_s']:,.0f} tok/s")
    if device == "cuda":
        try:
            found["kernels"] = _kernels(driver)
        except Exception as error:
            say(f"no kernels: {type(error).__name__}: {error}")
    return found


def _launch_ms(driver: Driver) -> float:
    """The host's part of a step: decoding excluded, results not awaited."""
    times = []
    for _ in range(10):
        driver.drain()
        start_s = time.perf_counter()
        driver.decode(1, 1)
        times.append(time.perf_counter() - start_s)
    driver.drain()
    return statistics.median(times) * 1e3


def _kernels(driver: Driver) -> list[dict[str, object]]:
    """Kernels of a decode step, by time."""
    from torch.autograd.profiler_util import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        driver.decode(PROFILED_STEPS, NUM_AHEAD)
        driver.drain()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = collections.defaultdict(list)
    for event in profiler.events():
        if event.device_type == DeviceType.CUDA:
            times[event.name].append(event.time_range.elapsed_us())
    rows = sorted(
        ((sum(us) / PROFILED_STEPS, len(us) / PROFILED_STEPS, name) for name, us in times.items()), reverse=True
    )
    for us, count, name in rows[:NUM_KERNELS_SHOWN]:
        say(f"  {us:9.1f} us  {count:6.1f} x {us / count:8.2f}  {name:.90}")
    say(f"  {sum(us for us, _, _ in rows):9.1f} us in all, {sum(count for _, count, _ in rows):.0f} launches a step")
    return [{"kernel": name, "per_step": count, "us_per_step": us} for us, count, name in rows]
