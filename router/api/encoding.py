"""Turns prompts into token ids in threads, so that a long prompt never holds up the event loop.

`tokenizers` works without Python's lock, but making the list of ids needs it. So a text that is far too long is found
out from its beginning.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from router.errors import ContextLengthExceeded
from router.request import Limits

Result = TypeVar("Result")

NUM_THREADS = 4
PROBE_CHARS_PER_TOKEN = 8  # twice what prose takes


class EncodingPool:
    """Threads for tokenizing and templates."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="encode")

    async def run(self, work: Callable[[], Result]) -> Result:
        """`work()`'s result, computed in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        """Gives the threads up; work that has begun goes on and nobody waits for it."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def encode_within(text: str, encode: Callable[[str], list[int]], field: str, limits: Limits) -> list[int]:
    """`encode(text)`, unless its beginning alone has more tokens than fit. Raises ContextLengthExceeded."""
    limit = limits.max_total_tokens
    beginning = _beginning(text, PROBE_CHARS_PER_TOKEN * limit)
    if beginning and len(encode(beginning)) > limit:
        raise ContextLengthExceeded(field, f"a text of {len(text)} characters has more than {limit} tokens", limit)
    return encode(text)


def _beginning(text: str, num_chars: int) -> str:
    """About the first `num_chars` characters, cut before white space, where no token reaches across; "" if there is no
    such place or the text is hardly longer."""
    if len(text) <= 2 * num_chars:
        return ""
    end = next((i for i in range(num_chars, num_chars // 2, -1) if text[i].isspace() and not text[i - 1].isspace()), 0)
    return text[:end]
