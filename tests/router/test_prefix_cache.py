"""The prefix cache alone and in the block pool, against a model that keeps whole texts instead of hashes."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.block_manager import BlockManager
from router.prefix_cache import PrefixCache, block_digest, root_digest

Text = tuple[int, ...]  # one number a block


def digest_of(text: Text) -> bytes:
    digest = root_digest("", "")
    for token in text:
        digest = block_digest(digest, (token,))
    return digest


class Pool(RuleBasedStateMachine):
    """Sequences start with what is cached, fill blocks, offer them and end, at random, over few texts and blocks."""

    @initialize(num_blocks=st.integers(2, 12))
    def make(self, num_blocks: int) -> None:
        self.manager = BlockManager(num_blocks, block_size=1)
        self.sequences: list[tuple[Text, list[int], int]] = []  # text, table, offered blocks
        self.registered: dict[Text, int] = {}
        self.idle: list[int] = []  # longest first
        self.content: dict[int, Text] = {}  # what each block of the pool holds

    def references(self, block: int) -> int:
        return sum(block in table for _, table, _ in self.sequences)

    @rule(text=st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple))
    def start(self, text: Text) -> None:
        cached: list[int] = []
        while len(cached) < len(text):
            prefix = text[: len(cached) + 1]
            block = self.manager.cache.find(digest_of(prefix))
            assert block == self.registered.get(prefix), "it finds what is registered and nothing else"
            if block is None:
                break
            assert self.content[block] == prefix, "a cached block was written over"
            cached.append(block)
        needed = len(text) - len(cached)
        num_left = self.manager.num_free - self.manager.num_idle(cached)
        assert num_left == self.manager.num_blocks - 1 - len(
            {block for _, table, _ in self.sequences for block in table} | set(cached)
        )
        if needed > num_left:
            return
        self.manager.share(cached)
        self.idle = [block for block in self.idle if block not in cached]
        num_plain = self.manager.num_blocks - 1 - len(set(self.registered.values()) | self.plain())
        allocated = self.manager.allocate(needed)
        assert allocated is not None and len(allocated) == needed
        for _ in range(needed - num_plain):  # The others are evicted, those that were idle for longest.
            block = self.idle.pop(0)
            assert block in allocated
            del self.registered[self.content[block]]
        assert all(not self.references(block) for block in allocated) and not set(allocated) & set(cached)
        table = cached + allocated
        for index in range(len(cached), len(table)):
            self.content[table[index]] = text[: index + 1]
        self.sequences.append((text, table, len(cached)))

    def plain(self) -> set[int]:
        """Blocks in use."""
        return {block for _, table, _ in self.sequences for block in table}

    @rule(data=st.data())
    def offer(self, data: st.DataObject) -> None:
        if self.sequences:
            place = data.draw(st.integers(0, len(self.sequences) - 1))
            text, table, offered = self.sequences[place]
            if offered < len(table):
                prefix = text[: offered + 1]
                self.manager.cache.register(table[offered], digest_of(prefix))
                self.registered.setdefault(prefix, table[offered])
                self.sequences[place] = (text, table, offered + 1)

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.sequences:
            _, table, _ = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
            self.manager.free(table)
            kept = set(self.registered.values())
            self.idle += [block for block in reversed(table) if block in kept and not self.references(block)]

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "manager"):
            self.manager.check_integrity([table for _, table, _ in self.sequences])
            assert list(self.manager.cache._idle) == self.idle
            assert self.manager.num_free == self.manager.num_blocks - 1 - len(self.plain())
            assert self.manager.usage == pytest.approx(len(self.plain()) / (self.manager.num_blocks - 1))


TestPool = Pool.TestCase
TestPool.settings = hypothesis.settings(max_examples=200, stateful_step_count=40, deadline=None)


def test_the_same_text_gives_the_same_key_and_any_other_another() -> None:
    texts: list[Text] = [(1,), (2,), (1, 1), (1, 2), (2, 1), (2, 2), (1, 2, 1)]
    assert len({digest_of(text) for text in texts}) == len(texts)
    assert digest_of((1, 2)) == digest_of((1, 2))


@given(st.text(max_size=4), st.text(max_size=4), st.text(max_size=4), st.text(max_size=4))
def test_roots_are_equal_only_for_equal_adapter_and_salt(a: str, b: str, c: str, d: str) -> None:
    assert (root_digest(a, b) == root_digest(c, d)) == ((a, b) == (c, d))


def test_an_adapter_named_like_a_salt_shares_nothing() -> None:
    """Public bug vllm-project/vllm#3264, its last variant."""
    assert len({root_digest("x", ""), root_digest("", "x"), root_digest("x", "x"), root_digest("", "")}) == 4


def test_a_second_block_with_the_same_text_stays_plain_and_is_free_at_once() -> None:
    manager = BlockManager(4, block_size=4)
    first, second = manager.allocate(1), manager.allocate(1)
    assert first is not None and second is not None
    for table in (first, second):
        manager.cache.register(table[0], digest_of((1,)))
    assert manager.cache.find(digest_of((1,))) == first[0]
    manager.free(first)
    manager.free(second)
    assert (manager.cache.num_idle, manager.num_free) == (1, 3)
    assert manager.allocate(2) == [second[0], 3], "the cached one goes last"
    assert manager.cache.find(digest_of((1,))) == first[0]


def test_the_tail_of_a_text_is_evicted_before_its_head() -> None:
    manager = BlockManager(4, block_size=4)
    table = manager.allocate(3)
    assert table is not None
    for index, block in enumerate(table):
        manager.cache.register(block, digest_of((1, 2, 3)[: index + 1]))
    manager.free(table)
    assert [manager.allocate(1) for _ in range(4)] == [[table[2]], [table[1]], [table[0]], None]


def test_what_was_used_last_is_evicted_last() -> None:
    manager = BlockManager(3, block_size=4)
    for token in (1, 2):
        table = manager.allocate(1)
        assert table is not None
        manager.cache.register(table[0], digest_of((token,)))
        manager.free(table)
    old, new = (manager.cache.find(digest_of((token,))) for token in (1, 2))
    assert old is not None and new is not None
    manager.share([old])
    manager.free([old])
    assert manager.allocate(1) == [new] and manager.cache.find(digest_of((2,))) is None


def test_the_integrity_check_sees_a_reference_that_no_table_has() -> None:
    manager = BlockManager(3, block_size=4)
    table = manager.allocate(1)
    assert table is not None
    manager.cache.register(table[0], digest_of((1,)))
    manager.share(table)
    manager.check_integrity([table, table])
    for tables in ([table], [table, table, table], []):
        with pytest.raises(AssertionError, match="a reference"):
            manager.check_integrity(tables)


def test_the_integrity_check_sees_a_shared_block_that_cannot_be_found() -> None:
    manager = BlockManager(3, block_size=4)
    table = manager.allocate(1)
    assert table is not None
    manager._num_refs[table[0]] = 2
    with pytest.raises(AssertionError, match="not registered"):
        manager.check_integrity([table, table])


def test_a_block_is_registered_once() -> None:
    cache = PrefixCache()
    cache.register(1, digest_of((1,)))
    with pytest.raises(AssertionError, match="twice"):
        cache.register(1, digest_of((2,)))
