"""What this machine can do at best: how fast it reads memory and multiplies matrices."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from router.bench.machine import machine_facts

PACKAGES = ("torch", "transformers", "grpcio")
CPU_BUFFER_BYTES = 2**30  # far more than any cache
GPU_BUFFER_BYTES = 2**33
PRODUCT_SIZE = 8192
TRIES = 5


def _best_s(action: Callable[[], object], device: str) -> float:
    def timed() -> float:
        start = time.perf_counter()
        action()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    timed()
    return min(timed() for _ in range(TRIES))


def read_bandwidth(device: str) -> float:
    """Bytes a second that a sum over a large float32 buffer reads, with torch's current number of threads."""
    num_bytes = GPU_BUFFER_BYTES if device == "cuda" else CPU_BUFFER_BYTES
    buffer = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    return num_bytes / _best_s(buffer.sum, device)


def product_rate(device: str, dtype: torch.dtype = torch.bfloat16, size: int = PRODUCT_SIZE) -> float:
    """Floating point operations a second of a size³ product: 2 size³ of them."""
    left = torch.randn(size, size, device=device).to(dtype)
    right = torch.randn(size, size, device=device).to(dtype)
    return 2.0 * size**3 / _best_s(lambda: left @ right, device)


def cpu_facts() -> dict[str, object]:
    """Facts of a CPU run."""
    facts = machine_facts(PACKAGES)
    facts["threads"] = torch.get_num_threads()
    facts["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    facts["read_gb_s"] = round(read_bandwidth("cpu") / 1e9, 1)
    return facts


def gpu_facts() -> dict[str, object]:
    """Facts of a GPU run: the device, its read bandwidth and its bfloat16 product rate, measured now."""
    facts = machine_facts((*PACKAGES, "flash-attn", "triton"))
    facts["gpu"] = torch.cuda.get_device_name()
    facts["read_tb_s"] = round(read_bandwidth("cuda") / 1e12, 3)
    facts["product_tflop_s"] = round(product_rate("cuda") / 1e12, 1)
    torch.cuda.empty_cache()
    return facts
