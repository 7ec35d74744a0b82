"""Stop rules: what is held back, what is cut, and that the pieces of a stream add up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.messages import Finish, FinishReason, StoppingParams
from router.step import SampledToken
from router.stopping import Piece, StopChecker
from router.tokenizer import Tokenizer
from tests.router.tokenizer_files import byte_level


class Spelled:
    """A detokenizer whose token i has the text words[i]; an ending of "…" is written at the flush if `tail` is set."""

    def __init__(self, words: list[str], tail: str = "") -> None:
        self._words = words
        self._tail = tail

    def push(self, token_id: int) -> str:
        return self._words[token_id]

    def flush(self) -> str:
        return self._tail


def run(words: list[str], tail: str = "", **rules: object) -> list[Piece]:
    stopping = StoppingParams(**{"max_tokens": len(words), **rules})  # type: ignore[arg-type]
    checker = StopChecker(stopping, Spelled(words, tail))
    pieces = []
    for token_id in range(len(words)):
        pieces.append(checker.accept(SampledToken(token_id, -float(token_id))))
        if pieces[-1].finish:
            break
    assert pieces[-1].finish is not None
    return pieces


def texts(pieces: list[Piece]) -> list[str]:
    return [piece.text for piece in pieces]


def total(pieces: list[Piece]) -> tuple[str, list[int], Finish | None]:
    for piece in pieces:
        assert [entry.token_id for entry in piece.logprobs] == piece.token_ids
        assert [entry.logprob for entry in piece.logprobs] == [-float(token) for token in piece.token_ids]
    ids = [token for piece in pieces for token in piece.token_ids]
    return "".join(texts(pieces)), ids, pieces[-1].finish


STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def test_text_without_stop_strings_is_let_go_token_by_token() -> None:
    assert texts(run(["a", "b", "c"])) == ["a", "b", "c"]
    assert total(run(["a", "b", "c"])) == ("abc", [0, 1, 2], Finish(LENGTH))


def test_a_stop_string_over_several_tokens_never_shows_in_part() -> None:
    pieces = run(["DEF", "G", "HI", "J", "x"], stop=("DEFGHIJ",))
    assert texts(pieces) == ["", "", "", ""]
    assert total(pieces) == ("", [], Finish(STOP, "DEFGHIJ"))


def test_held_text_is_let_go_when_it_can_no_longer_match() -> None:
    assert texts(run(["DEF", "G", "X", "y"], stop=("DEFGHIJ",))) == ["", "", "DEFGX", "y"]


def test_held_text_is_let_go_at_the_end_by_length() -> None:
    assert total(run(["ab", "DEF"], stop=("DEFGHIJ",))) == ("abDEF", [0, 1], Finish(LENGTH))


def test_text_that_cannot_match_is_not_delayed_by_a_long_stop_string() -> None:
    assert texts(run(["a", "b", "c"], stop=("x" * 40,))) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("include", "by_id", "expected"),
    [
        (False, False, ("one ", [0], Finish(STOP, "two"))),
        (True, False, ("one two", [0, 1], Finish(STOP, "two"))),
        (False, True, ("one ", [0], Finish(STOP, 1))),
        (True, True, ("one two", [0, 1], Finish(STOP, 1))),
    ],
)
def test_both_kinds_of_stop_are_hidden_or_shown_alike(
    include: bool, by_id: bool, expected: tuple[str, list[int], Finish]
) -> None:
    rules: dict[str, object] = {"stop_token_ids": frozenset({1})} if by_id else {"stop": ("two",)}
    assert total(run(["one ", "two", "three"], include_stop_in_output=include, **rules)) == expected


def test_a_token_that_spans_the_cut_keeps_its_id_and_loses_its_rest() -> None:
    assert total(run(["ab", "cSTO", "Pd", "e"], stop=("STOP",))) == ("abc", [0, 1], Finish(STOP, "STOP"))
    shown = run(["ab", "cSTO", "Pd", "e"], stop=("STOP",), include_stop_in_output=True)
    assert total(shown) == ("abcSTOP", [0, 1, 2], Finish(STOP, "STOP"))


def test_the_first_match_counts_and_of_those_at_one_place_the_longest() -> None:
    assert total(run(["xabcd"], stop=("bc", "abc", "a", "d")))[::2] == ("x", Finish(STOP, "abc"))


def test_stop_wins_over_length_at_the_same_token() -> None:
    assert run(["a", "b"], stop_token_ids=frozenset({1}))[-1].finish == Finish(STOP, 1)
    assert run(["a", "b"], stop=("b",))[-1].finish == Finish(STOP, "b")


def test_min_tokens_holds_off_every_kind_of_stop() -> None:
    words = ["a", "a", "a", "a", "a"]
    assert len(run(words, stop=("a",), min_tokens=3)) == 4
    assert len(run(words, eos_token_ids=frozenset({0, 1, 2, 3, 4}), min_tokens=3)) == 4


def test_half_a_character_at_the_end_has_one_outcome() -> None:
    assert total(run(["a", ""], tail="\ufffd")) == ("a\ufffd", [0, 1], Finish(LENGTH))
    assert total(run(["a", "", "!"], tail="\ufffd", eos_token_ids=frozenset({2})))[0] == "a\ufffd"


def test_tokens_without_text_are_let_go_with_no_stop_in_sight() -> None:
    pieces = run(["", "é", "x"], stop=("zz",))
    assert [piece.token_ids for piece in pieces] == [[0], [1], [2]]


BYTE_LEVEL = byte_level()
TOKENIZER = Tokenizer(BYTE_LEVEL, {}, BYTE_LEVEL.get_vocab_size())


def answer(ids: list[int], **rules: object) -> list[Piece]:
    """The pieces of an answer of real byte-level tokens."""
    stopping = StoppingParams(**{"max_tokens": len(ids), **rules})  # type: ignore[arg-type]
    checker = StopChecker(stopping, TOKENIZER.detokenizer())
    pieces: list[Piece] = []
    while not (pieces and pieces[-1].finish):
        pieces.append(checker.accept(SampledToken(ids[len(pieces)])))
    return pieces


def plain_ids(text: str) -> list[int]:
    ids: list[int] = BYTE_LEVEL.encode(text, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize("text", ["👩‍👩‍👧‍👦", "🇫🇷", "한국어 닭", "ไทยฎ", "हिन्दीऋ", "עברית"])
@pytest.mark.parametrize("stop", [(), ("zz",), ("👽",)])
def test_every_length_of_an_answer_adds_up_to_its_decoding_at_one_stroke(text: str, stop: tuple[str, ...]) -> None:
    ids = plain_ids(text)
    for length in range(1, len(ids) + 1):
        pieces = answer(ids, max_tokens=length, stop=stop)
        assert "".join(texts(pieces)) == BYTE_LEVEL.decode(ids[:length])
        assert [token for piece in pieces for token in piece.token_ids] == ids[:length]


def test_the_first_bytes_of_a_stop_string_are_held_like_its_text() -> None:
    before, stop, after = plain_ids("a"), plain_ids("🦊"), plain_ids("b")
    assert len(stop) > 1
    pieces = answer(before + stop + after, stop=("🦊",))
    assert [piece.token_ids for piece in pieces] == [before] + [[]] * len(stop)
    assert "".join(texts(pieces)) == "a"
    shown = answer(before + stop + after, stop=("🦊",), include_stop_in_output=True)
    assert [token for piece in shown for token in piece.token_ids] == before + stop
    other = answer(plain_ids("a🦉b"), stop=("🦊",))
    assert [token for piece in other for token in piece.token_ids] == plain_ids("a🦉b")
    assert texts(other)[-2:] == ["🦉", "b"]


@given(
    st.lists(st.text("ab", max_size=3), min_size=1, max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
)
def test_pieces_add_up_to_the_text_before_the_first_stop(words: list[str], stops: list[str], include: bool) -> None:
    text, ids, finish = total(run(words, stop=tuple(stops), include_stop_in_output=include))
    so_far = ""
    for num_tokens, word in enumerate(words, 1):
        so_far += word
        found = [(so_far.find(stop), -len(stop), stop) for stop in stops if stop in so_far]
        if found:
            start, _, stop = min(found)
            end = start + len(stop) if include else start
            assert (text, finish) == (so_far[:end], Finish(STOP, stop))
            begins = [len("".join(words[:index])) for index in range(num_tokens)]
            kept = [index for index, begin in enumerate(begins) if words[index] and begin < end]
            assert [index for index in ids if words[index]] == kept
            return
    assert (text, ids, finish) == ("".join(words), list(range(len(words))), Finish(LENGTH))
