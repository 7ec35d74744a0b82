"""The tokenizer and the incremental detokenizer against the tokenizers library."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from router.errors import StartupError
from router.tokenizer import Tokenizer
from tests.router.tokenizer_files import byte_level, metaspace, save, word_level

BYTE_LEVEL, WORD_LEVEL, METASPACE = byte_level(), word_level(), metaspace()
BACKENDS = {"byte level": BYTE_LEVEL, "word level": WORD_LEVEL, "metaspace": METASPACE}
TRICKY = [
    "\nline\n\n### x\n",
    "\t\ttabs   three spaces\r\nCRLF",
    "a , b . c ? x != y n't",
    "👩‍👩‍👧‍👦 🇫🇷 한국어 ไทย हिन्दी עברית",
    "",
    " ",
]


def make(backend: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(backend, {}, backend.get_vocab_size())


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_dir(save(tmp_path_factory.mktemp("model"), BYTE_LEVEL))


@pytest.mark.parametrize("text", TRICKY)
def test_ids_are_those_of_the_published_file_and_text_comes_back_unchanged(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text) == BYTE_LEVEL.encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("skip", [False, True])
def test_pieces_equal_one_decoding_of_all_ids(name: str, skip: bool) -> None:
    backend = BACKENDS[name]
    tokenizer = make(backend)

    @given(st.lists(st.integers(0, backend.get_vocab_size() - 1), max_size=30))
    def check(ids: list[int]) -> None:
        detokenizer = tokenizer.detokenizer(skip)
        pieces = [detokenizer.push(token) for token in ids]
        assert "".join(pieces) + detokenizer.flush() == backend.decode(ids, skip_special_tokens=skip)

    check()


@pytest.mark.parametrize("text", TRICKY)
def test_no_piece_of_a_whole_text_has_a_replacement_mark(tokenizer: Tokenizer, text: str) -> None:
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push(token) for token in tokenizer.encode(text)]
    assert not any("\ufffd" in piece for piece in pieces) and not detokenizer.flush()


def test_an_answer_cut_within_a_character_ends_with_one_mark(tokenizer: Tokenizer) -> None:
    first_bytes = next(
        ids[:-1] for ids in (BYTE_LEVEL.encode(c, add_special_tokens=False).ids for c in "𐍈𝕏🜁") if len(ids) > 1
    )
    detokenizer = tokenizer.detokenizer()
    assert [detokenizer.push(token) for token in first_bytes] == [""] * len(first_bytes)
    assert detokenizer.flush() == "\ufffd" == BYTE_LEVEL.decode(first_bytes)


def test_bos_comes_once_whether_the_text_has_it_or_not(tokenizer: Tokenizer) -> None:
    bos = BYTE_LEVEL.token_to_id("<BOS_TOKEN>")
    for text in ("hello", "<BOS_TOKEN>hello"):
        assert tokenizer.encode(text).count(bos) == 1
    assert tokenizer.encode("hello", add_special_tokens=False).count(bos) == 0
    assert tokenizer.encode("") == [bos]


def test_special_tokens_are_recognised_in_raw_text_and_not_in_plain_text(tokenizer: Tokenizer) -> None:
    marker = "<|END_OF_TURN_TOKEN|>"
    marker_id = BYTE_LEVEL.token_to_id(marker)
    assert tokenizer.encode(marker, add_special_tokens=False) == [marker_id]
    plain = tokenizer.encode_plain(marker)
    assert marker_id not in plain and BYTE_LEVEL.decode(plain) == marker


@pytest.mark.parametrize(
    ("in_config", "in_generation", "in_tokenizer"), list(itertools.product([None, 7, [7, 9], "missing"], repeat=3))
)
def test_end_tokens_are_the_union_of_the_three_files(
    tmp_path: Path, in_config: object, in_generation: object, in_tokenizer: object
) -> None:
    def entry(value: object) -> dict[str, object]:
        return {} if value == "missing" else {"eos_token_id": value}

    token = None if in_tokenizer in (None, "missing") else BYTE_LEVEL.id_to_token(7)
    folder = save(
        tmp_path,
        BYTE_LEVEL,
        config={"vocab_size": BYTE_LEVEL.get_vocab_size(), **entry(in_config)},
        generation_config=entry(in_generation),
        tokenizer_config={"eos_token": {"content": token} if in_tokenizer == 7 and token else token},
    )
    wanted = {7} if token else set()
    for value in (in_config, in_generation):
        wanted |= {7} if value == 7 else {7, 9} if value == [7, 9] else set()
    assert Tokenizer.from_dir(folder).eos_token_ids == wanted


def test_a_folder_without_tokenizer_and_one_that_does_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"no tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)
    with pytest.raises(StartupError, match="vocab_size is 5"):
        Tokenizer.from_dir(save(tmp_path / "small", BYTE_LEVEL, config={"vocab_size": 5}))
    (tmp_path / "small" / "tokenizer.json").write_text("{}")
    with pytest.raises(StartupError, match="is not a tokenizer"):
        Tokenizer.from_dir(tmp_path / "small")


def test_ids_that_only_the_model_has_decode_to_nothing(tmp_path: Path) -> None:
    size = BYTE_LEVEL.get_vocab_size()
    tokenizer = Tokenizer.from_dir(save(tmp_path, BYTE_LEVEL, config={"vocab_size": size + 8}))
    detokenizer = tokenizer.detokenizer()
    assert tokenizer.vocab_size == size + 8
    assert detokenizer.push(size + 3) == "" == BYTE_LEVEL.decode([size + 3])
