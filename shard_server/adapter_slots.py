"""Adapter slots on the device, bound by steps from what is staged."""

from __future__ import annotations

import numpy as np

from model.lora_stacks import LoraStacks
from shard_server.adapters import StagedAdapters
from shard_server.errors import ProtocolError
from shard_server.link import Bindings, Int32
from shard_server.tables import RowTables


class AdapterSlots:
    """The stacks of all slots. Used by the thread that launches; copies to the device follow what is queued there."""

    def __init__(self, stacks: LoraStacks, staged: StagedAdapters) -> None:
        self.stacks = stacks
        self.staged = staged
        self._is_bound = np.zeros(stacks.max_loras, np.bool_)

    def reset(self) -> None:
        """A new epoch: the router binds again whatever it wants. What is staged stays."""
        self._is_bound[:] = False

    def bind(self, bindings: Bindings, tables: RowTables) -> None:
        """Copies staged adapters into slots; raises ProtocolError for a slot in use and a version not staged."""
        for slot, version in zip(bindings.slots.tolist(), bindings.versions, strict=True):
            if not 0 <= slot < self.stacks.max_loras:
                raise ProtocolError(f"bindings.slots: {slot} is outside [0, {self.stacks.max_loras})")
            if (tables.is_open & (tables.adapter_slots == slot)).any():
                raise ProtocolError(f"bindings.slots: an open row uses adapter slot {slot}")
            slices = self.staged.get(version)
            if slices is None:
                raise ProtocolError(f"bindings.versions: {version} is not staged")
            self.stacks.bind(slot, slices)
            self._is_bound[slot] = True

    def check_opened(self, adapter_slots: Int32) -> None:
        """Raises ProtocolError for a slot that nothing is bound to."""
        for slot in adapter_slots[adapter_slots >= 0].tolist():
            if slot >= self.stacks.max_loras or not self._is_bound[slot]:
                raise ProtocolError(f"opened.adapter_slots: nothing is bound to adapter slot {slot}")
