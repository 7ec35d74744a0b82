"""Tables on the device that are written from the host: what has to change is gathered and sent with the next step."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shard_server.link import Int32, Int64


@dataclasses.dataclass(frozen=True, slots=True)
class TableWrite:
    """target[places[i]] = values[i]; `target` is a table flattened, `places` are distinct."""

    target: torch.Tensor
    places: Int64
    values: npt.NDArray[Any]


class DeviceTable:
    """A table `[num_rows, width]` of zeros at first; on a CPU it is written in place."""

    def __init__(self, num_rows: int, width: int, dtype: npt.DTypeLike, device: torch.device) -> None:
        torch_dtype = torch.from_numpy(np.zeros(0, dtype)).dtype
        self.tensor = torch.zeros((num_rows, width), dtype=torch_dtype, device=device)
        self._host: npt.NDArray[Any] | None = self.tensor.numpy() if device.type == "cpu" else None
        self._waiting: list[tuple[Int64, npt.NDArray[Any]]] = []

    def write(self, rows: Int32, columns: Int32, values: npt.NDArray[Any]) -> None:
        """table[rows[i], columns[i]] = values[i]; all are `[n]`. Acts at once on a CPU, else with `take_writes`."""
        if self._host is not None:
            self._host[rows, columns] = values
        elif len(rows):
            places = rows.astype(np.int64) * self.tensor.shape[1] + columns
            self._waiting.append((places, values))

    def take_writes(self) -> list[TableWrite]:
        """What was written since the last call, in order."""
        writes = [TableWrite(self.tensor.view(-1), places, values) for places, values in self._waiting]
        self._waiting.clear()
        return writes
