"""Tensor parallelism: this process's rank, its shares, and the two collectives of the model."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist

from model.errors import ModelError


@dataclasses.dataclass(frozen=True, slots=True)
class TensorParallel:
    """One rank of a tensor-parallel group; `group` None is the default process group. World size 1 needs none."""

    rank: int = 0
    world_size: int = 1
    group: dist.ProcessGroup | None = None

    def share(self, name: str, size: int) -> slice:
        """This rank's even share of `size` things; raises ModelError naming `name` where it is not even."""
        if size % self.world_size:
            raise ModelError(
                f"--tensor-parallel-size {self.world_size} does not divide {name} {size}; choose a divisor of it."
            )
        each = size // self.world_size
        return slice(self.rank * each, (self.rank + 1) * each)

    def kv_share(self, num_kv_heads: int) -> slice:
        """This rank's KV heads; where there are fewer than ranks, several ranks hold the same one."""
        if num_kv_heads >= self.world_size:
            return self.share("num_key_value_heads", num_kv_heads)
        if self.world_size % num_kv_heads:
            raise ModelError(
                f"--tensor-parallel-size {self.world_size} is no multiple of num_key_value_heads {num_kv_heads}."
            )
        head = self.rank * num_kv_heads // self.world_size
        return slice(head, head + 1)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums a contiguous tensor over the ranks in place, in rank order, so that all ranks hold the same bits.

        gloo fixes no order, so there each rank adds the gathered parts itself, in float32; NCCL sends every rank the
        one sum it made.
        """
        if self.world_size == 1:
            return tensor
        if tensor.is_cuda:
            dist.all_reduce(tensor, group=self.group)
            return tensor
        parts = self._gather(tensor)
        total = parts[0].float()
        for part in parts[1:]:
            total = total.add_(part)
        return tensor.copy_(total)

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Joins the ranks' equally shaped tensors along `dim`, in rank order."""
        if self.world_size == 1:
            return tensor
        return torch.cat(list(self._gather(tensor.contiguous())), dim)

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """`[world_size, *tensor.shape]`."""
        parts = tensor.new_empty((self.world_size, *tensor.shape))
        dist.all_gather(list(parts), tensor, group=self.group)
        return parts
