"""Chat templates: messages to prompt ids, as the checkpoint's own template lays them out.

A message's content cannot write turn markers. Where a content holds the text of a special or added token, that text is
hidden behind a mark while the template runs (which may trim or test the content) and encoded as ordinary text after.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from router.errors import FailedPrecondition, InvalidArgument, StartupError
from router.model_folder import read_json
from router.tokenizer import Tokenizer

DEFAULT = "default"
MAX_CHARACTERS = 32 * 2**20  # of a rendered prompt, if the caller gives no smaller bound
# Two characters of a private-use plane; text that has them already is told apart by the numbering.
MARK_OPEN, MARK_CLOSE = "\U000ffff0", "\U000ffff1"


@dataclasses.dataclass(frozen=True, slots=True)
class ChatMessage:
    """`role` is system, user, assistant or tool."""

    role: str
    content: str


class ChatTemplates:
    """The templates of one checkpoint, by name. Thread-safe."""

    def __init__(self, sources: dict[str, str], tokenizer: Tokenizer) -> None:
        """`sources` are Jinja texts. Raises StartupError if one does not parse."""
        self._tokenizer = tokenizer
        self._templates: dict[str, jinja2.Template] = {}
        environment = _environment()
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
            except jinja2.TemplateSyntaxError as error:
                raise StartupError(f"the chat template {name!r} is broken at line {error.lineno}: {error}") from error
        self._ids = {token.text: token.token_id for token in tokenizer.added_tokens}
        by_length = sorted(self._ids, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, by_length)) or r"(?!)")

    @classmethod
    def from_dir(cls, folder: Path, tokenizer: Tokenizer) -> ChatTemplates:
        """Finds the templates wherever published checkpoints have them; there may be none."""
        return cls(_read_sources(folder), tokenizer)

    @property
    def names(self) -> list[str]:
        """The templates' names, sorted."""
        return sorted(self._templates)

    def render(self, messages: Sequence[ChatMessage], name: str = "", max_characters: int = MAX_CHARACTERS) -> str:
        """The prompt as text, ready for the model's turn.

        Raises:
            InvalidArgument: there is no template of that name, it refuses the messages, or it makes more of them than
                `max_characters`; rendering ends as soon as that shows.
            FailedPrecondition: the checkpoint has no template at all.
        """
        name = name or DEFAULT
        if not self._templates:
            raise FailedPrecondition("the model has no chat template; use Generate with a prompt of your own")
        if name not in self._templates:
            raise InvalidArgument("chat_template", f"{name!r} is unknown; the model has {', '.join(self.names)}")
        values: dict[str, Any] = {
            **self._tokenizer.special_tokens,
            "messages": [{"role": message.role, "content": message.content} for message in messages],
            "add_generation_prompt": True,
            "tools": None,
            "documents": None,
        }
        try:
            return _join(self._templates[name].generate(values), max_characters)
        except InvalidArgument:
            raise
        except Exception as error:  # A template is a program; with these messages it failed.
            raise InvalidArgument("messages", f"the chat template refuses them: {error}") from error

    def encode(
        self, messages: Sequence[ChatMessage], name: str = "", max_characters: int = MAX_CHARACTERS
    ) -> list[int]:
        """The prompt's ids. Raises as `render` does."""
        is_harmless = not any(self._special.search(message.content) for message in messages)
        if is_harmless and not self._tokenizer.matches_normalized:
            return self._tokenizer.encode(self.render(messages, name, max_characters), add_special_tokens=False)
        hidden: list[str] = []
        guarded = [dataclasses.replace(message, content=self._hide(message.content, hidden)) for message in messages]
        return self._encode_guarded(self.render(guarded, name, max_characters), hidden)

    def _hide(self, content: str, hidden: list[str]) -> str:
        def mark(match: re.Match[str]) -> str:
            hidden.append(match[0])
            return f"{MARK_OPEN}{len(hidden) - 1}{MARK_CLOSE}"

        # Marks that the caller wrote would be read as ours; they are hidden first, as themselves.
        content = re.sub(f"[{MARK_OPEN}{MARK_CLOSE}]", lambda match: mark(match), content)
        return self._special.sub(mark, content)

    def _encode_guarded(self, text: str, hidden: list[str]) -> list[int]:
        """The template's special tokens, and between them runs of ordinary text with what was hidden put back."""
        ids: list[int] = []
        end = 0
        for match in itertools.chain(self._special.finditer(text), [None]):
            run = text[end : match.start()] if match else text[end:]
            if run:
                ids += self._tokenizer.encode_plain(self._reveal(run, hidden))
            if match:
                ids.append(self._ids[match[0]])
                end = match.end()
        return ids

    @staticmethod
    def _reveal(run: str, hidden: list[str]) -> str:
        return re.sub(f"{MARK_OPEN}([0-9]+){MARK_CLOSE}", lambda match: hidden[int(match[1])], run)


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}`, by which templates mark the assistant's text for training; the text stands as it is."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The statements between the tag and `endgeneration`."""
        parser.stream.skip(1)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _join(parts: Iterable[str], max_characters: int) -> str:
    found, length = [], 0
    for part in parts:
        found.append(part)
        length += len(part)
        if length > max_characters:
            raise InvalidArgument("messages", f"the chat template makes more than {max_characters} characters of them")
    return "".join(found)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """What templates may rely on: the settings and helpers that transformers gives them."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _read_sources(folder: Path) -> dict[str, str]:
    settings = read_json(folder / "tokenizer_config.json") or {}
    alone = read_json(folder / "chat_template.json") or {}
    sources: dict[str, str] = {}
    for value in (settings.get("chat_template"), alone.get("chat_template")):
        sources |= _named(value, folder)
    if (path := folder / "chat_template.jinja").exists():
        sources[DEFAULT] = _read_text(path)
    for folder_name in ("chat_templates", "additional_chat_templates"):
        for path in sorted((folder / folder_name).glob("*.jinja")):
            sources[path.stem] = _read_text(path)
    return sources


def _named(value: object, folder: Path) -> dict[str, str]:
    """A chat_template field as checkpoints have it: one text, a list of named ones, null or missing."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT: value}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in value}  # type: ignore[attr-defined]
    except (TypeError, KeyError) as error:
        wanted = "a text or a list of objects with name and template"
        raise StartupError(f"{folder}: chat_template in a configuration file has to be {wanted}") from error


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise StartupError(f"cannot read the chat template {path}: {error}") from error
