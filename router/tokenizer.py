"""The checkpoint's tokenizer: text to ids and back, exactly as the published tokenizer.json says."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from router.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from router.errors import StartupError
from router.model_folder import read_json

logger = logging.getLogger(__name__)

DEFAULT_VOCAB_SIZE = 256000  # of transformers' Cohere configurations, where config.json has none
SPECIAL_TOKEN_KEYS = ("bos_token", "eos_token", "pad_token", "unk_token", "cls_token", "sep_token", "mask_token")


@dataclasses.dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is matched as a whole, before any merging."""

    token_id: int
    text: str
    is_special: bool


class Tokenizer:
    """Thread-safe; encoding runs in a pool of threads."""

    def __init__(self, backend: tokenizers.Tokenizer, settings: dict[str, Any], vocab_size: int) -> None:
        """`backend` from tokenizer.json, `settings` from tokenizer_config.json, `vocab_size` from config.json.

        Raises StartupError if a special token of `settings` is neither a text nor described by one.
        """
        # Settings of a training run that some files carry; they would cut prompts short without a word.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._vocab_size = vocab_size
        data = json.loads(backend.to_str())
        self.added_tokens = [AddedToken(t["id"], t["content"], t["special"]) for t in data.get("added_tokens") or []]
        self._plain = _without_added_tokens(data)
        # Then text that is no added token can become one inside the library.
        self.matches_normalized = bool(data.get("normalizer")) and any(
            token["normalized"] for token in data.get("added_tokens") or []
        )
        self.special_tokens = {key: _token_text(key, settings[key]) for key in SPECIAL_TOKEN_KEYS if settings.get(key)}
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_ids: frozenset[int] = frozenset()
        self._token_bytes = {skip: self._bytes_of_tokens(skip) for skip in (False, True)}
        self._is_byte_level = _is_byte_level(data.get("decoder"))

    @classmethod
    def from_dir(cls, folder: Path) -> Tokenizer:
        """Reads tokenizer.json and the end-of-sequence ids of all three files that may name them.

        Raises StartupError that names the file at fault.
        """
        path = folder / "tokenizer.json"
        if not path.exists():
            raise StartupError(f"{folder} has no tokenizer.json; convert the tokenizer to the fast format first")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # The library raises bare Exception.
            raise StartupError(f"{path} is not a tokenizer: {error}") from error
        config = read_json(folder / "config.json") or {}
        settings = read_json(folder / "tokenizer_config.json") or {}
        vocab_size = _vocab_size(config, folder)
        largest = max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        if largest >= vocab_size:
            raise StartupError(f"{path} has the token id {largest}, but config.json's vocab_size is {vocab_size}")
        tokenizer = cls(backend, settings, vocab_size)
        sources = [config, read_json(folder / "generation_config.json") or {}]
        ids = {token_id for source in sources for token_id in _token_ids(source, "eos_token_id", folder)}
        if (own := tokenizer._special_id("eos_token")) is not None:
            ids.add(own)
        if tokenizer.bos_token_id is None:
            tokenizer.bos_token_id = next(iter(_token_ids(config, "bos_token_id", folder)), None)
        if not ids:
            logger.warning("%s names no end-of-sequence token; answers end by length or stop strings", folder)
        tokenizer.eos_token_ids = frozenset(ids)
        return tokenizer

    @property
    def vocab_size(self) -> int:
        """Ids of the model; the tokenizer may know fewer."""
        return self._vocab_size

    @property
    def longest_token_bytes(self) -> int:
        """Bytes of the longest token's text."""
        return max(map(len, self._token_bytes[False]), default=1)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`, special tokens in it recognised, with the tokenizer's own around it; never a second BOS."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and len(ids) > 1 and ids[0] == ids[1] == self.bos_token_id:
            return ids[1:]
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Ids of `text` in which what looks like a special or added token is ordinary text."""
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; the clean-up of spaces that some configurations ask for would damage it."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """A decoder for one sequence."""
        if self._is_byte_level:
            return ByteDetokenizer(self._token_bytes[skip_special_tokens])
        return WindowDetokenizer(lambda ids: self.decode(ids, skip_special_tokens))

    def _special_id(self, key: str) -> int | None:
        text = self.special_tokens.get(key)
        token_id: int | None = None if text is None else self._backend.token_to_id(text)
        return token_id

    def _bytes_of_tokens(self, skip_special_tokens: bool) -> list[bytes]:
        table = [b""] * self._vocab_size
        for text, token_id in self._backend.get_vocab(with_added_tokens=True).items():
            table[token_id] = _token_bytes(text)
        if skip_special_tokens:
            for token in self.added_tokens:
                if token.is_special:
                    table[token.token_id] = b""
        return table


def _byte_of_character() -> dict[str, int]:
    """The alphabet of byte-level BPE (Radford et al. 2019): printable bytes as they are, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_of_character()


def _token_bytes(text: str) -> bytes:
    """As the byte-level decoder has it: a token with a character outside the alphabet stands for its own UTF-8."""
    try:
        return bytes([BYTE_OF_CHARACTER[character] for character in text])
    except KeyError:
        return text.encode()


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    if decoder is None:
        return False
    if decoder.get("type") == "Sequence":
        steps = decoder.get("decoders") or []
        return len(steps) == 1 and _is_byte_level(steps[0])
    return decoder.get("type") == "ByteLevel"


def _without_added_tokens(data: dict[str, Any]) -> tokenizers.Tokenizer:
    """A tokenizer that cannot make an added token: neither matched as a whole nor found as a whole word."""
    model, added = data["model"], {token["content"] for token in data.get("added_tokens") or []}
    if isinstance(model.get("vocab"), dict):
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model.get("merges") or []]
        # Single characters, and what merges build, are ordinary text that was added as well.
        ordinary = {left + right for left, right in pairs} | {model.get("unk_token")}
        hidden = {text for text in added - ordinary if len(text) > 1}
        model = {**model, "vocab": {text: i for text, i in model["vocab"].items() if text not in hidden}}
    plain = {**data, "model": model, "added_tokens": [], "post_processor": None}
    return tokenizers.Tokenizer.from_str(json.dumps(plain))


def _token_text(key: str, value: object) -> str:
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise StartupError(f"tokenizer_config.json: {key} has to be a text or an object with content, not {value!r}")
    return text


def _vocab_size(config: dict[str, Any], folder: Path) -> int:
    value = config.get("vocab_size")
    if value is None:
        return DEFAULT_VOCAB_SIZE
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise StartupError(f"{folder}/config.json: vocab_size must be a whole number of at least 1, not {value!r}")
    return value


def _token_ids(source: dict[str, Any], key: str, folder: Path) -> list[int]:
    """An id field as checkpoints have it: an int, a list of ints, null or missing."""
    value = source.get(key)
    values: list[object] = value if isinstance(value, list) else [] if value is None else [value]
    ids = [item for item in values if isinstance(item, int) and not isinstance(item, bool)]
    if len(ids) < len(values):
        raise StartupError(f"{folder}: {key} has to be a token id, a list of them or null, not {value!r}")
    return ids
