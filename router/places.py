"""Where running sequences live: slots of the shards' tables, and KV blocks."""

from __future__ import annotations

import bisect
import itertools

from router.block_manager import BlockManager
from router.prefix_cache import block_digest, root_digest
from router.sequence import Sequence
from router.step import ShardInfo

# Blocks kept free when a sequence joins others, so that it is not preempted at their next growth.
FREE_SHARE_AT_START = 0.01


class Places:
    """Slots and blocks, and the running sequences that hold them, in order of priority, then arrival.

    A place given up is free at once, steps under way or not: the shards run steps in order.
    """

    def __init__(self, info: ShardInfo, enable_prefix_caching: bool = True) -> None:
        self._info = info
        self._is_caching = enable_prefix_caching
        self._reserve = int(info.num_blocks * FREE_SHARE_AT_START)
        self.running: list[Sequence] = []
        self.reset()

    def reset(self) -> None:
        """All places are free and nothing is cached, whoever held them: the shards' tables and cache are gone."""
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
        """Share of the blocks that sequences hold, 0 to 1; idle cached ones do not count."""
        return self._blocks.usage

    @property
    def has_slot(self) -> bool:
        """Whether one more sequence may run."""
        return bool(self._free_slots)

    def take(self, sequence: Sequence) -> list[int] | None:
        """Gives `sequence` a slot and blocks for all its known tokens: the blocks, or None where too few are free.

        The first of them are cached ones as far as there are any; it starts after their tokens.
        """
        cached = self._cached_blocks(sequence)
        needed = self._blocks.blocks_for(sequence.num_tokens) - len(cached)
        num_left = self._blocks.num_free - self._blocks.num_idle(cached) - needed
        if num_left < (self._reserve if self.running else 0):
            return None
        self._blocks.share(cached)  # Before allocating, which may evict what nobody refers to.
        allocated = self._blocks.allocate(needed)
        assert allocated is not None, "they were counted"
        sequence.slot, sequence.block_table = self._free_slots.pop(), cached + allocated
        sequence.num_offered_blocks = len(cached)
        sequence.num_computed_tokens = sequence.num_shard_tokens = len(cached) * self._info.block_size
        bisect.insort(self.running, sequence, key=lambda running: running.order)
        return sequence.block_table[:]

    def _cached_blocks(self, sequence: Sequence) -> list[int]:
        """The cached blocks that `sequence` can start with; at least its last known token has to be computed."""
        blocks: list[int] = []
        if self._is_caching:
            for index in range((sequence.num_tokens - 1) // self._info.block_size):
                block = self._blocks.cache.find(self._digest(sequence, index))
                if block is None:
                    break
                blocks.append(block)
        return blocks

    def offer(self, sequence: Sequence, num_tokens: int) -> None:
        """The first `num_tokens` tokens of a running sequence are in its blocks, by the shards' answer: full blocks
        can be shared from now on."""
        if not self._is_caching:
            return
        for index in range(sequence.num_offered_blocks, num_tokens // self._info.block_size):
            self._blocks.cache.register(sequence.block_table[index], self._digest(sequence, index))
            sequence.num_offered_blocks = index + 1

    def waits_for_sibling(self, sequence: Sequence) -> bool:
        """Whether the prompt's full blocks are being computed for another answer to the same request."""
        group = sequence.group
        if not self._is_caching or len(group.members) == 1:
            return False
        first = next((member for member in group.members if member.slot is not None), None)
        num_shared = (sequence.num_prompt_tokens - 1) // self._info.block_size
        return first is not None and first.num_offered_blocks < num_shared

    def _digest(self, sequence: Sequence, index: int) -> bytes:
        """The key of the sequence's block `index`, all of whose tokens are known. Each is hashed once."""
        digests, size = sequence.block_digests, self._info.block_size
        if not digests and sequence.index:  # The prompt's are those of its sibling.
            digests += sequence.group.members[0].block_digests[: sequence.num_prompt_tokens // size]
        while len(digests) <= index:
            submission = sequence.group.submission
            adapter_key = submission.adapter.key if submission.adapter else ""
            parent = digests[-1] if digests else root_digest(adapter_key, submission.cache_salt)
            start = len(digests) * size
            digests.append(block_digest(parent, sequence.tokens(start, start + size)))
        return digests[index]

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
