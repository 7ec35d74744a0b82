"""Text from token ids as they come: concatenated, the pieces equal one decoding of all the generated ids.

Only generated ids count. A prompt that ends within a character therefore never makes the answer repeat prompt text; an
answer that begins or ends within a character has U+FFFD there, as its decoding at one stroke has.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import Protocol

REPLACEMENT = "\ufffd"
Decode = Callable[[list[int]], str]


class Detokenizer(Protocol):
    """One sequence's decoder."""

    def push(self, token_id: int) -> str:
        """Takes the next id; returns the text that has become certain, which may be none."""

    def flush(self) -> str:
        """What is left at the end: characters whose last bytes never came, as U+FFFD."""


class ByteDetokenizer:
    """For byte-level BPE: every token stands for bytes, whatever surrounds it."""

    def __init__(self, token_bytes: list[bytes]) -> None:
        """`token_bytes[id]`: the token's bytes; empty for special tokens that are to be skipped."""
        self._token_bytes = token_bytes
        # Replaces what is no UTF-8 by the same rule as Rust's from_utf8_lossy: one U+FFFD for each maximal subpart.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """See Detokenizer."""
        return self._decoder.decode(self._token_bytes[token_id])

    def flush(self) -> str:
        """See Detokenizer."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For every other decoder: decodes a short run of tokens with and without the newest, and takes the difference.

    The run starts at a token before which the text is certain; its earlier part gives the decoder the context that
    spaces depend on:   ids  ... [start ....... read) ....... newest]
                                  context        not yet certain
    """

    def __init__(self, decode: Decode) -> None:
        """`decode(ids)` is the tokenizer's own."""
        self._decode = decode
        self._ids: list[int] = []
        self._start = self._read = 0

    def push(self, token_id: int) -> str:
        """See Detokenizer."""
        self._ids.append(token_id)
        text = self._new_text()
        if not text or text.endswith(REPLACEMENT):  # Perhaps the first bytes of a character.
            return ""
        self._start, self._read = self._read, len(self._ids)
        return text

    def flush(self) -> str:
        """See Detokenizer."""
        text = self._new_text()
        self._start = self._read = len(self._ids)
        return text

    def _new_text(self) -> str:
        before = self._decode(self._ids[self._start : self._read])
        after = self._decode(self._ids[self._start :])
        return after[len(before) :]
