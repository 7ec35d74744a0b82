"""The adapters of a batch, as the model's forward takes them."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterBatchData:
    """Which adapter slot each row of a step uses: `slots[s]` for sequence s."""

    slots: tuple[int, ...]
