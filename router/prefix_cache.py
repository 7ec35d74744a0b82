"""Which blocks hold which text: full blocks by the hash of everything up to their end."""

from __future__ import annotations

import collections
import hashlib
import struct
from array import array
from collections.abc import Sequence

DIGEST_BYTES = 32


def root_digest(adapter_key: str, cache_salt: str) -> bytes:
    """What a chain of blocks starts from. Texts of different adapters or salts share nothing.

    Both parts are framed by their lengths, so that no adapter's name can pass for a salt; a root has a domain of its
    own, so that no chosen salt can pass for the middle of another chain.
    """
    parts = [part.encode() for part in (adapter_key, cache_salt)]
    framed = b"".join(struct.pack("<I", len(part)) + part for part in parts)
    return hashlib.blake2b(framed, digest_size=DIGEST_BYTES, person=b"root").digest()


def block_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of a full block: its own tokens, and through `parent` all those before it."""
    packed = array("i", token_ids).tobytes()
    return hashlib.blake2b(parent + packed, digest_size=DIGEST_BYTES, person=b"block").digest()


class PrefixCache:
    """Blocks by digest. One that nobody refers to stays, idle, until `evict` needs it: least recently used first."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}
        self._idle: collections.OrderedDict[int, None] = collections.OrderedDict()

    @property
    def num_idle(self) -> int:
        """Blocks here that nobody refers to."""
        return len(self._idle)

    def find(self, digest: bytes) -> int | None:
        """The block with this text, idle or in use."""
        return self._blocks.get(digest)

    def register(self, block: int, digest: bytes) -> None:
        """`block`, which is in use, holds the text from now on. Where another one holds it already, that one stays."""
        assert block not in self._digests, "a block is registered twice"
        if digest not in self._blocks:
            self._blocks[digest] = block
            self._digests[block] = digest

    def is_registered(self, block: int) -> bool:
        """Whether the block can be found."""
        return block in self._digests

    def is_idle(self, block: int) -> bool:
        """Whether the block is here and nobody refers to it."""
        return block in self._idle

    def keep(self, block: int) -> bool:
        """Nobody refers to `block` any more; False if it is not registered, and therefore not kept here."""
        if block not in self._digests:
            return False
        self._idle[block] = None
        return True

    def use(self, block: int) -> None:
        """Somebody refers to an idle block again."""
        del self._idle[block]

    def evict(self) -> int:
        """Takes out the block that was idle for longest; there has to be one."""
        block, _ = self._idle.popitem(last=False)
        del self._blocks[self._digests.pop(block)]
        return block

    def check_integrity(self) -> None:
        """Asserts that every block has one digest and every digest one block."""
        assert {block: digest for digest, block in self._blocks.items()} == self._digests, "the two maps differ"
        assert self._idle.keys() <= self._digests.keys(), "an idle block has no digest"
