"""The way of small host arrays to the device and back: one copy per group of arrays, none on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

ALIGNMENT = 8  # bytes; every column starts where its widest type may


class Staging:
    """A pinned host buffer and its device twin, at fixed addresses so that a CUDA graph may read them.

    Between two calls of `begin`, uploads take room one after another. The step's results are awaited before the next
    step begins, so nothing is overwritten in flight.
    """

    def __init__(self, device: torch.device, size_bytes: int) -> None:
        """Allocates nothing on a CPU, where arrays are used in place."""
        self._is_cpu = device.type == "cpu"
        self._used = 0
        if not self._is_cpu:
            self._host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
            self._host_bytes: npt.NDArray[np.uint8] = self._host.numpy()
            self._device = torch.empty(size_bytes, dtype=torch.uint8, device=device)

    def begin(self) -> None:
        """Forgets the last step's uploads."""
        self._used = 0

    def upload(self, *arrays: npt.NDArray[Any]) -> list[torch.Tensor]:
        """Each array, C-contiguous, as a tensor of the same shape and type on the device."""
        if self._is_cpu:
            return [torch.from_numpy(array) for array in arrays]
        first = end = self._used
        places = []
        for array in arrays:
            places.append(end)
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            self._host_bytes[end : end + flat.size] = flat
            end += -(-flat.size // ALIGNMENT) * ALIGNMENT
        self._device[first:end].copy_(self._host[first:end], non_blocking=True)
        self._used = end
        return [self._view(place, array) for place, array in zip(places, arrays, strict=True)]

    def _view(self, place: int, array: npt.NDArray[Any]) -> torch.Tensor:
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        return self._device[place : place + array.nbytes].view(dtype).view(array.shape)


def download(*tensors: torch.Tensor) -> list[npt.NDArray[Any]]:
    """The tensors, of four-byte types, as arrays: one copy and one wait for all of them."""
    if tensors[0].device.type == "cpu":
        return [tensor.numpy() for tensor in tensors]
    joined = torch.cat([tensor.reshape(-1).view(torch.int32) for tensor in tensors]).cpu()
    parts = torch.split(joined, [tensor.numel() for tensor in tensors])
    return [part.view(t.dtype).view(t.shape).numpy() for part, t in zip(parts, tensors, strict=True)]
