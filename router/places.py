"""Where running sequences live: slots of the shards' tables, and KV blocks."""

from __future__ import annotations

import bisect
import itertools

from router.block_manager import BlockManager
from router.sequence import Sequence
from router.step import ShardInfo

# Blocks kept free when a sequence joins others, so that it is not preempted at their next growth.
FREE_SHARE_AT_START = 0.01


class Places:
    """Slots and blocks, and the running sequences that hold them, in order of priority, then arrival.

    A place given up is free at once, steps under way or not: the shards run steps in order.
    """

    def __init__(self, info: ShardInfo) -> None:
        self._info = info
        self._reserve = int(info.num_blocks * FREE_SHARE_AT_START)
        self.running: list[Sequence] = []
        self.reset()

    def reset(self) -> None:
        """All places are free, whoever held them: the shards' tables and cache are gone."""
        for sequence in self.running:
            sequence.slot, sequence.block_table = None, []
        self._blocks = BlockManager(self._info.num_blocks, self._info.block_size)
        self._free_slots = list(range(self._info.max_num_seqs - 1, -1, -1))
        self._closed_slots: list[int] = []
        self.running = []

    @property
    def max_kv_tokens(self) -> int:
        """Most tokens that one sequence can hold in the pool."""
        return (self._blocks.num_blocks - 1) * self._blocks.block_size

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return self._blocks.usage

    @property
    def has_slot(self) -> bool:
        """Whether one more sequence may run."""
        return bool(self._free_slots)

    def take(self, sequence: Sequence) -> list[int] | None:
        """Gives `sequence` a slot and blocks for all its known tokens: the blocks, or None where too few are free."""
        needed = self._blocks.blocks_for(sequence.num_tokens)
        if self.running and self._blocks.num_free - needed < self._reserve:
            return None
        blocks = self._blocks.allocate(needed)
        if blocks is None:
            return None
        sequence.slot, sequence.block_table = self._free_slots.pop(), blocks
        bisect.insort(self.running, sequence, key=lambda running: running.order)
        return blocks

    def grow(self, sequence: Sequence, num_tokens: int) -> list[int] | None:
        """The blocks that `sequence` needs beside its own for `num_tokens`, or None where too few are free."""
        missing = self._blocks.blocks_for(num_tokens) - len(sequence.block_table)
        if missing <= 0:
            return []
        blocks = self._blocks.allocate(missing)
        if blocks is not None:
            sequence.block_table += blocks
        return blocks

    def take_or_grow(self, sequence: Sequence) -> list[int] | None:
        """Whatever `sequence` still needs of a slot and blocks for its known tokens."""
        if sequence.slot is not None:
            return self.grow(sequence, sequence.num_tokens)
        return self.take(sequence) if self._free_slots else None

    def give_up(self, sequence: Sequence) -> None:
        """Takes slot and blocks back."""
        assert sequence.slot is not None
        self.running.remove(sequence)
        self._blocks.free(sequence.block_table)
        self._closed_slots.append(sequence.slot)
        self._free_slots.append(sequence.slot)
        sequence.slot, sequence.block_table = None, []

    def take_closed_slots(self) -> list[int]:
        """The slots given up since the last call; the next step has to close them."""
        closed, self._closed_slots = self._closed_slots, []
        return closed

    def check_integrity(self, members: list[Sequence]) -> None:
        """Asserts that slots and blocks add up, `members` being all sequences there are."""
        placed = [member for member in members if member.slot is not None]
        assert sorted(map(id, placed)) == sorted(map(id, self.running)), "running sequences are those with a slot"
        assert all(a.order < b.order for a, b in itertools.pairwise(self.running)), "running is not in order"
        slots = [*self._free_slots, *(member.slot for member in placed if member.slot is not None)]
        assert sorted(slots) == list(range(self._info.max_num_seqs)), "a slot is lost or has two owners"
        self._blocks.check_integrity([member.block_table for member in placed])
