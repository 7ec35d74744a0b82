"""The page of `bench.gpu`: each workload beside vLLM's figure, also scaled to the machine that vLLM was measured on."""

from __future__ import annotations

import dataclasses

from bench.measurement import Measurement
from bench.peers import GPU_AIMS, GPU_PEERS, GPU_PRODUCT_TFLOP_S, GPU_READ_TB_S
from bench.results import facts_line, figure, markdown_table


@dataclasses.dataclass(frozen=True, slots=True)
class GpuWorkloadResult:
    """One workload. `idle_share`: time that the device waited between steps, of all its time."""

    name: str
    title: str
    measurement: Measurement
    idle_share: float
    num_steps: int


@dataclasses.dataclass(frozen=True, slots=True)
class GpuResult:
    """Everything one run measured. `settings` are the shards' facts and the run's own."""

    geometry: str
    facts: dict[str, object]
    settings: dict[str, object]
    start_to_ready_s: float
    workloads: list[GpuWorkloadResult]


HEAD = (
    "workload",
    "tok/s",
    "best",
    "spread",
    "vLLM 0.24.0",
    "ratio",
    "aim",
    f"at {GPU_READ_TB_S} TB/s",
    f"at {GPU_PRODUCT_TFLOP_S:.0f} TFLOP/s",
    "device idle",
    "steps",
)


def scale(facts: dict[str, object], name: str, reference: float) -> float | None:
    """How much faster the peers' machine was in one respect; None where it was not measured."""
    measured = facts.get(name)
    return reference / float(measured) if isinstance(measured, int | float) and measured else None


def _row(geometry: str, facts: dict[str, object], result: GpuWorkloadResult) -> list[str]:
    rate = result.measurement.tokens_per_s
    peer = GPU_PEERS.get(geometry, {}).get(result.name)
    aim = GPU_AIMS.get(geometry, {}).get(result.name)
    scales = [scale(facts, "read_tb_s", GPU_READ_TB_S), scale(facts, "product_tflop_s", GPU_PRODUCT_TFLOP_S)]
    return [
        f"{result.name}: {result.title}",
        figure(rate),
        figure(result.measurement.num_counted_tokens / min(result.measurement.rounds_s)),
        f"{result.measurement.spread:.1%}",
        figure(peer) if peer else "-",
        f"{rate / peer:.2f}" if peer else "-",
        f"{aim:.2f}" if aim else "-",
        *[figure(rate * factor) if factor else "-" for factor in scales],
        f"{result.idle_share:.1%}",
        str(result.num_steps),
    ]


def render_page(result: GpuResult) -> str:
    """The whole page, in Markdown."""
    rows = [_row(result.geometry, result.facts, workload) for workload in result.workloads]
    return "\n".join(
        [
            f"# Cohort offline, {result.geometry}\n",
            f"Machine: {facts_line(result.facts)}.\n",
            f"Shards: {facts_line(result.settings)}.\n",
            "The router's engine over the shard link, random weights, greedy, token ids in and out. Output tokens a "
            "second, for prefill prompt tokens; median of the rounds, and the best one. The peer's figures are of "
            "another sitting; the two scaled columns multiply ours by what its GPU does better (read bandwidth, "
            f"bfloat16 product). Shards ready after {result.start_to_ready_s:.1f} s.\n",
            markdown_table(HEAD, rows),
        ]
    )


def result_json(result: GpuResult) -> dict[str, object]:
    """The same for programs."""
    return {
        "geometry": result.geometry,
        "machine": result.facts,
        "settings": result.settings,
        "start_to_ready_s": result.start_to_ready_s,
        "workloads": [
            {
                "workload": workload.name,
                "tokens": workload.measurement.num_counted_tokens,
                "rounds_s": workload.measurement.rounds_s,
                "tokens_per_s": workload.measurement.tokens_per_s,
                "idle_share": workload.idle_share,
                "num_steps": workload.num_steps,
            }
            for workload in result.workloads
        ],
    }
