"""A text that cannot fit is found out without encoding all of it."""

from __future__ import annotations

import threading

import pytest

from router.api.encoding import PROBE_CHARS_PER_TOKEN, EncodingPool, encode_within
from router.errors import ContextLengthExceeded
from tests.router.test_validation import LIMITS

LIMIT = LIMITS.max_total_tokens


class Words:
    """One token per word; remembers how long the texts were."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def encode(self, text: str) -> list[int]:
        self.lengths.append(len(text))
        return list(range(len(text.split())))


def test_a_text_far_too_long_is_refused_from_its_beginning() -> None:
    words = Words()
    with pytest.raises(ContextLengthExceeded) as refused:
        encode_within("ab " * 1_000_000, words.encode, "text", LIMITS)
    assert (refused.value.field, refused.value.limit) == ("text", LIMIT)
    assert words.lengths == [n for n in words.lengths if n <= PROBE_CHARS_PER_TOKEN * LIMIT] and len(words.lengths) == 1


@pytest.mark.parametrize("num_words", [1, LIMIT, 4 * LIMIT])
def test_a_text_near_the_limit_is_encoded_whole(num_words: int) -> None:
    text = "ab " * num_words
    assert len(encode_within(text, Words().encode, "text", LIMITS)) == num_words


def test_long_words_that_fit_are_served() -> None:
    text = ("x" * 1000 + " ") * LIMIT
    assert len(encode_within(text, Words().encode, "text", LIMITS)) == LIMIT


def test_a_text_without_white_space_is_encoded_whole() -> None:
    words = Words()
    assert len(encode_within("x" * 100_000, words.encode, "text", LIMITS)) == 1
    assert words.lengths == [100_000]


async def test_work_runs_off_the_loop_and_its_errors_come_back() -> None:
    pool = EncodingPool()
    try:
        assert await pool.run(threading.get_ident) != threading.get_ident()
        with pytest.raises(ContextLengthExceeded):
            await pool.run(lambda: encode_within("a " * 10**5, Words().encode, "text", LIMITS))
    finally:
        pool.close()
