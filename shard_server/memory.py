"""How much of a GPU's memory is left for KV blocks: measured, after the steps that need the most."""

from __future__ import annotations

import dataclasses
import gc
import logging

import torch

from model.errors import ModelError
from shard_server.config import ShardConfig

logger = logging.getLogger(__name__)

GIB = 1 << 30
GRAPH_BYTES = 8 << 20
"""What the driver keeps of one captured decode step, generously."""
ACTIVATION_MARGIN = 1.25
"""Captured steps place their tensors apart from those of other steps, and less tightly."""


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes on one GPU.

    Attributes:
        total: of the device.
        elsewhere: held by other processes, by CUDA itself and by libraries.
        weights: of the model.
        peak: what this process's tensors took at most, weights included.
        decode: what the largest decode step took at most beside the weights.
    """

    total: int
    elsewhere: int
    weights: int
    peak: int
    decode: int

    def left_for_blocks(self, utilization: float, num_graphs: int) -> int:
        """Bytes that KV blocks may take if `utilization` of the device is used; may be negative."""
        graphs = int(self.decode * ACTIVATION_MARGIN) + num_graphs * GRAPH_BYTES if num_graphs else 0
        return int(self.total * utilization) - self.elsewhere - self.peak - graphs


class MemoryProbe:
    """Measures a device around the largest steps. Make it when the weights are loaded."""

    def __init__(self, device: torch.device) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        self._device = device
        self._weights = torch.cuda.memory_allocated(device)

    def start(self) -> None:
        """Forgets earlier peaks."""
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        """Most bytes in use since `start`."""
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device)

    def result(self, largest: int, decode: int) -> MemoryUse:
        """Joins the peaks of all steps and of the decode step with what the device says now."""
        gc.collect()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        elsewhere = total - free - torch.cuda.memory_reserved(self._device)
        use = MemoryUse(total, max(elsewhere, 0), self._weights, largest, max(decode - self._weights, 0))
        logger.info(
            "memory of %.1f GiB: weights %.1f, steps at most %.1f, elsewhere %.1f GiB",
            use.total / GIB,
            use.weights / GIB,
            (use.peak - use.weights) / GIB,
            use.elsewhere / GIB,
        )
        return use


def explain_shortage(config: ShardConfig) -> ModelError:
    """What to change when the weights or the largest step do not fit."""
    return ModelError(
        f"The GPU's memory is too small for the weights and a step of {config.max_num_batched_tokens} tokens and "
        f"{config.max_num_seqs} sequences; use a smaller --max-num-batched-tokens or --max-num-seqs, or more shards "
        "(--tensor-parallel-size)."
    )


def explain_graph_shortage() -> ModelError:
    """What to change when CUDA graphs do not fit beside the KV blocks."""
    return ModelError(
        "The GPU's memory ran out while CUDA graphs were captured; use a smaller --gpu-memory-utilization, fewer "
        "--cuda-graph-sizes, or --enforce-eager."
    )
