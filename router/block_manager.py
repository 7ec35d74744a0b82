"""Who owns which KV block."""

from __future__ import annotations

import collections

from router.prefix_cache import PrefixCache


class BlockManager:
    """The blocks of the pool: free, referenced by one table or more, or idle in the prefix cache.

    Block 0 is never allocated: padding writes there. Only registered blocks are shared; they are full, so that nobody
    writes to them.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """`num_blocks` counts block 0; `block_size` is in tokens."""
        assert num_blocks >= 2, "a pool needs a block beside block 0"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.cache = PrefixCache()
        self._num_refs = [0] * num_blocks
        # Last in, first out, so that a small load stays on few blocks; low ids first at the start.
        self._free = list(range(num_blocks - 1, 0, -1))

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now; those that the cache would give up count."""
        return len(self._free) + self.cache.num_idle

    @property
    def usage(self) -> float:
        """Share of the pool that is referenced, 0 to 1."""
        return 1.0 - self.num_free / (self.num_blocks - 1)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def num_idle(self, blocks: list[int]) -> int:
        """How many of `blocks` nobody refers to: those that sharing takes from `num_free`."""
        return sum(map(self.cache.is_idle, blocks))

    def share(self, blocks: list[int]) -> None:
        """One more table refers to these registered blocks."""
        for block in blocks:
            if not self._num_refs[block]:
                self.cache.use(block)
            self._num_refs[block] += 1

    def allocate(self, num_blocks: int) -> list[int] | None:
        """That many blocks that nobody else has, or None, and nothing changed, if fewer can be had."""
        if num_blocks > self.num_free:
            return None
        num_plain = min(num_blocks, len(self._free))
        start = len(self._free) - num_plain
        taken = self._free[start:]
        del self._free[start:]
        taken.reverse()
        taken += [self.cache.evict() for _ in range(num_blocks - num_plain)]
        for block in taken:
            self._num_refs[block] = 1
        return taken

    def free(self, table: list[int]) -> None:
        """A table lets go of its blocks. A step already sent may still write to plain ones: ranks run steps in order.

        The tail becomes idle before the head, so that it is evicted first: without its head it cannot be found.
        """
        for block in reversed(table):
            assert self._num_refs[block], "a block is given back twice"
            self._num_refs[block] -= 1
            if not self._num_refs[block] and not self.cache.keep(block):
                self._free.append(block)

    def check_integrity(self, tables: list[list[int]]) -> None:
        """Asserts that every block but 0 is free, referenced by as many of the owners' `tables` as counted, or idle."""
        counts = collections.Counter(block for table in tables for block in table)
        everything = range(1, self.num_blocks)
        assert counts.keys() <= set(everything), "a block is out of range"
        assert all(self._num_refs[block] == counts[block] for block in everything), "a reference is lost or imagined"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & counts.keys(), "a block is free and referenced"
        idle = {block for block in everything if self.cache.is_idle(block)}
        assert not idle & counts.keys() and not idle & free, "an idle block is free or referenced"
        self.cache.check_integrity()
        assert all(self.cache.is_registered(block) for block, count in counts.items() if count > 1), (
            "a block that is not registered is shared"
        )
        assert len(free) + len(counts) + len(idle) == self.num_blocks - 1, "a block is lost"
