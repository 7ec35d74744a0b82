"""The tokenizer and the incremental detokenizer against the tokenizers library."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

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


@pytest.mark.parametrize("text", ["👩‍👩‍👧‍👦", "🇫🇷", "한국어"])
def test_an_answer_that_goes_on_within_a_character_has_marks_and_no_text_before_it(text: str) -> None:
    tokenizer = make(BYTE_LEVEL)
    ids = BYTE_LEVEL.encode("the prompt " + text, add_special_tokens=False).ids
    for split in range(1, len(ids)):
        detokenizer = tokenizer.detokenizer()
        pieces = [detokenizer.push(token) for token in ids[split:]] + [detokenizer.flush()]
        assert "".join(pieces) == BYTE_LEVEL.decode(ids[split:])


def test_added_tokens_of_any_spelling_decode_as_the_library_decodes_them() -> None:
    backend = byte_level()
    backend.add_tokens([AddedToken(text) for text in ("naïve é", "<a b>", "é", "\u0120x", "日")])
    backend.add_special_tokens([AddedToken("<|ü|>", special=True)])
    tokenizer, size = make(backend), backend.get_vocab_size()

    @given(st.lists(st.integers(size - 6, size - 1) | st.integers(0, size - 1), max_size=12), st.booleans())
    def check(ids: list[int], skip: bool) -> None:
        detokenizer = tokenizer.detokenizer(skip)
        pieces = [detokenizer.push(token) for token in ids]
        assert "".join(pieces) + detokenizer.flush() == backend.decode(ids, skip_special_tokens=skip)

    check()


def test_truncation_and_padding_in_the_file_do_not_act(tmp_path: Path) -> None:
    backend = byte_level()
    wanted = backend.encode("hello there, a text of more than five tokens").ids
    backend.enable_truncation(5)
    backend.enable_padding(length=64)
    tokenizer = Tokenizer.from_dir(save(tmp_path, backend))
    assert tokenizer.encode("hello there, a text of more than five tokens") == wanted
    assert len(tokenizer.encode_plain("a")) == 1


def whole_words() -> tokenizers.Tokenizer:
    """A byte-level tokenizer that looks every word up before it merges, and cuts none."""
    data = json.loads(byte_level().to_str())
    data["model"]["ignore_merges"] = True
    data["pre_tokenizer"]["use_regex"] = False
    return tokenizers.Tokenizer.from_str(json.dumps(data))


def word_level_with_marker() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<UNK>": 0, "<PAD>": 1, "a": 2}, unk_token="<UNK>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<PAD>"])
    return backend


@pytest.mark.parametrize("backend", [whole_words(), word_level_with_marker()], ids=["whole words", "word level"])
def test_plain_text_is_never_a_special_token_as_a_whole_word(backend: tokenizers.Tokenizer) -> None:
    assert backend.encode("<PAD>", add_special_tokens=False).ids == [backend.token_to_id("<PAD>")]
    assert backend.token_to_id("<PAD>") not in make(backend).encode_plain("<PAD>")


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


@pytest.mark.parametrize("value", [5, {"x": 1}, ["<BOS_TOKEN>"]])
def test_a_special_token_that_is_no_text_is_refused_by_name(tmp_path: Path, value: object) -> None:
    with pytest.raises(StartupError, match="bos_token has to be a text"):
        Tokenizer.from_dir(save(tmp_path, BYTE_LEVEL, tokenizer_config={"bos_token": value}))


@pytest.mark.parametrize("value", ["420", 0, True, [420]])
def test_a_vocabulary_size_that_is_no_number_is_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(StartupError, match="vocab_size must be a whole number"):
        Tokenizer.from_dir(save(tmp_path, BYTE_LEVEL, config={"vocab_size": value}))


@pytest.mark.parametrize("config", [{}, {"vocab_size": None}])
def test_without_a_vocabulary_size_it_is_that_of_transformers(tmp_path: Path, config: dict[str, object]) -> None:
    tokenizer = Tokenizer.from_dir(save(tmp_path, BYTE_LEVEL, config=config))
    assert tokenizer.vocab_size == transformers.CohereConfig().vocab_size
    assert tokenizer.detokenizer().push(tokenizer.vocab_size - 1) == ""


def test_bos_is_known_from_the_model_configuration_alone(tmp_path: Path) -> None:
    bos = BYTE_LEVEL.token_to_id("<BOS_TOKEN>")
    config = {"vocab_size": BYTE_LEVEL.get_vocab_size(), "bos_token_id": bos}
    tokenizer = Tokenizer.from_dir(save(tmp_path, BYTE_LEVEL, config=config, tokenizer_config={}))
    assert tokenizer.encode("<BOS_TOKEN>hello").count(bos) == 1


def test_no_end_token_anywhere_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = Tokenizer.from_dir(save(tmp_path, BYTE_LEVEL, tokenizer_config={"eos_token": None}))
    assert tokenizer.eos_token_ids == frozenset()
    assert "names no end-of-sequence token" in caplog.text


def test_ids_that_only_the_model_has_decode_to_nothing(tmp_path: Path) -> None:
    size = BYTE_LEVEL.get_vocab_size()
    tokenizer = Tokenizer.from_dir(save(tmp_path, BYTE_LEVEL, config={"vocab_size": size + 8}))
    detokenizer = tokenizer.detokenizer()
    assert tokenizer.vocab_size == size + 8
    assert detokenizer.push(size + 3) == "" == BYTE_LEVEL.decode([size + 3])
