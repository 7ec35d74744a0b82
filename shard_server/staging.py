"""The way of small host arrays to the device and back: one copy per group of arrays, none on a CPU."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

ALIGNMENT = 16  # bytes; kernels are compiled apart for pointers that are aligned less
NUM_HOST_BUFFERS = 4
"""Steps whose uploads may be under way at once, plus the one that is being filled."""


class Waitable(Protocol):
    """A torch.cuda.Event, or what stands for one."""

    def synchronize(self) -> None:
        """Returns when it has happened."""


class Turns:
    """Takes a few buffers in turn. A buffer comes up again only when the event that was set for it has happened."""

    def __init__(self, num_buffers: int) -> None:
        self._events: list[Waitable | None] = [None] * num_buffers
        self.current = 0

    def advance(self) -> int:
        """The next buffer's number; waits where more steps are under way than there are buffers."""
        self.current = (self.current + 1) % len(self._events)
        event = self._events[self.current]
        if event is not None:
            event.synchronize()
            self._events[self.current] = None
        return self.current

    def release_after(self, event: Waitable) -> None:
        """The current buffer is in use until `event`."""
        self._events[self.current] = event


class Staging:
    """Pinned host buffers in turn and one device buffer, at a fixed address so that a CUDA graph may read it.

    Between two calls of `begin`, uploads take room one after another. The device runs steps in order, so one device
    buffer serves all steps under way; a host buffer is written by this thread while the device still reads others.
    """

    def __init__(self, device: torch.device, size_bytes: int) -> None:
        """Allocates nothing on a CPU, where arrays are used in place."""
        self._is_cpu = device.type == "cpu"
        self._used = 0
        self._size = size_bytes
        if not self._is_cpu:
            self._turns = Turns(NUM_HOST_BUFFERS)
            self._hosts = [torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(NUM_HOST_BUFFERS)]
            self.device_bytes = torch.empty(size_bytes, dtype=torch.uint8, device=device)

    def begin(self) -> None:
        """Forgets the last step's uploads."""
        self._used = 0
        if not self._is_cpu:
            self._turns.advance()

    def end(self, event: Waitable | None) -> None:
        """The step's uploads have been read when `event` happens; None on a CPU."""
        if event is not None:
            self._turns.release_after(event)

    def upload(self, *arrays: npt.NDArray[Any]) -> list[torch.Tensor]:
        """Each array as a tensor of the same shape and type on the device; the first of a step lies at its start."""
        if self._is_cpu:
            return [torch.from_numpy(array) for array in arrays]
        first = end = self._used
        host = self._hosts[self._turns.current]
        host_bytes: npt.NDArray[np.uint8] = host.numpy()
        tensors = []
        for array in arrays:
            if end + array.nbytes > self._size:
                tensors.append(self._upload_apart(array))
                continue
            host_bytes[end : end + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            tensors.append(self._view(end, array))
            end = min(end + -(-array.nbytes // ALIGNMENT) * ALIGNMENT, self._size)
        if end > first:
            self.device_bytes[first:end].copy_(host[first:end], non_blocking=True)
        self._used = end
        return tensors

    def _upload_apart(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """For lists as long as a caller likes; the allocator keeps the pinned memory until the device has read it."""
        host = torch.empty(array.shape, dtype=_torch_dtype(array), pin_memory=True)
        host.numpy()[...] = array
        return host.to(self.device_bytes.device, non_blocking=True)

    def _view(self, place: int, array: npt.NDArray[Any]) -> torch.Tensor:
        return self.device_bytes[place : place + array.nbytes].view(_torch_dtype(array)).view(array.shape)


class Readback:
    """Tensors of four-byte types on their way to the host: one copy for all of them, enqueued here."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        """The device may overwrite the tensors afterwards; on a CPU nobody may."""
        self._tensors = tensors
        self._host: torch.Tensor | None = None
        if tensors[0].device.type != "cpu":
            parts = [tensor.reshape(-1).view(torch.int32) for tensor in tensors]
            joined = parts[0] if len(parts) == 1 else torch.cat(parts)
            self._host = torch.empty(joined.shape, dtype=torch.int32, pin_memory=True)
            self._host.copy_(joined, non_blocking=True)

    def read(self) -> list[npt.NDArray[Any]]:
        """The tensors as arrays, once the device has gone past the copy."""
        if self._host is None:
            return [tensor.numpy() for tensor in self._tensors]
        parts = torch.split(self._host.clone(), [tensor.numel() for tensor in self._tensors])
        return [part.view(t.dtype).view(t.shape).numpy() for part, t in zip(parts, self._tensors, strict=True)]


def _torch_dtype(array: npt.NDArray[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype
