"""Who owns which KV block."""

from __future__ import annotations


class BlockManager:
    """The free blocks of the pool. Block 0 is never allocated: padding writes there."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """`num_blocks` counts block 0; `block_size` is in tokens."""
        assert num_blocks >= 2, "a pool needs a block beside block 0"
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Last in, first out, so that a small load stays on few blocks; low ids first at the start.
        self._free = list(range(num_blocks - 1, 0, -1))

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the pool in use, 0 to 1."""
        return 1.0 - len(self._free) / (self.num_blocks - 1)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """That many blocks, or None, and nothing changed, if fewer are free."""
        if num_blocks > len(self._free):
            return None
        if num_blocks == 0:
            return []
        taken = self._free[-num_blocks:]
        del self._free[-num_blocks:]
        taken.reverse()
        return taken

    def free(self, blocks: list[int]) -> None:
        """Takes blocks back. A step already sent may still write to them: ranks run steps in order."""
        self._free.extend(reversed(blocks))

    def check_integrity(self, tables: list[list[int]]) -> None:
        """Asserts that every block but 0 is either free or in exactly one of the owners' `tables`."""
        owned = [block for table in tables for block in table]
        assert len(owned) == len(set(owned)), "a block has two owners"
        assert len(self._free) == len(set(self._free)), "a block is free twice"
        assert not set(owned) & set(self._free), "a block is free and owned"
        assert len(owned) + len(self._free) == self.num_blocks - 1, "a block is lost"
        assert all(0 < block < self.num_blocks for block in (*owned, *self._free)), "a block is out of range"
