"""The block pool against a set of owned blocks."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.block_manager import BlockManager


class Pool(RuleBasedStateMachine):
    """Owners take and give back blocks at random."""

    @initialize(num_blocks=st.integers(2, 12))
    def make(self, num_blocks: int) -> None:
        self.manager = BlockManager(num_blocks, block_size=4)
        self.tables: list[list[int]] = []

    @rule(num_blocks=st.integers(0, 6))
    def allocate(self, num_blocks: int) -> None:
        free = self.manager.num_blocks - 1 - sum(map(len, self.tables))
        taken = self.manager.allocate(num_blocks)
        if num_blocks > free:
            assert taken is None
        else:
            assert taken is not None and len(taken) == num_blocks and 0 not in taken
            self.tables.append(taken)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.tables:
            self.manager.free(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "manager"):
            self.manager.check_integrity(self.tables)
            assert self.manager.num_free == self.manager.num_blocks - 1 - sum(map(len, self.tables))


TestPool = Pool.TestCase


def test_every_block_but_the_padding_block_can_be_taken() -> None:
    manager = BlockManager(5, block_size=4)
    assert manager.allocate(4) == [1, 2, 3, 4] and manager.allocate(1) is None and manager.usage == 1.0


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_a_partly_filled_block_counts(num_tokens: int, num_blocks: int) -> None:
    assert BlockManager(5, block_size=4).blocks_for(num_tokens) == num_blocks


@pytest.mark.parametrize("tables", [[[1], [1]], [[1, 2]], [[]], [[3]]])
def test_the_integrity_check_sees_double_lost_and_free_blocks(tables: list[list[int]]) -> None:
    manager = BlockManager(5, block_size=4)
    manager.allocate(1)
    manager.check_integrity([[1]])
    with pytest.raises(AssertionError):
        manager.check_integrity(tables)


def test_a_block_cannot_be_given_back_twice() -> None:
    manager = BlockManager(3, block_size=4)
    block = manager.allocate(1)
    assert block is not None
    manager.free(block)
    with pytest.raises(AssertionError, match="given back twice"):
        manager.free(block)
