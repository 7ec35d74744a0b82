"""Answers on the screen while they grow: a table redrawn in place on a terminal, plain lines elsewhere."""

import shutil
import sys
import time
import unicodedata
from dataclasses import dataclass, field
from typing import TextIO

CLEAR_LINE = "\x1b[2K"
UP = "\x1b[{}A"


@dataclass
class Answer:
    """A prompt and what has come back for it; times are `time.monotonic()` seconds."""

    label: str
    question: str
    sent_at: float = field(default_factory=time.monotonic)
    text: str = ""
    first_at: float | None = None
    last_at: float | None = None
    num_tokens: int = 0
    is_done: bool = False

    def add(self, text: str) -> None:
        """Append a delta that has just arrived."""
        self.last_at = time.monotonic()
        self.first_at = self.first_at or self.last_at
        self.text += text

    @property
    def time_to_first_token_s(self) -> float:
        """Seconds from sending the prompt to its first text, or nan."""
        return self.first_at - self.sent_at if self.first_at else float("nan")

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second after the first one, or nan."""
        if self.first_at is None or self.last_at is None or self.last_at <= self.first_at:
            return float("nan")
        return (self.num_tokens - 1) / (self.last_at - self.first_at)


def cut(text: str, width: int) -> str:
    """Return the start of a text that fits in `width` terminal columns; wide characters take two."""
    used = 0
    for index, character in enumerate(text):
        used += 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if used > width:
            return text[:index]
    return text


class LiveTable:
    """Shows a list of answers and repaints them as they grow."""

    def __init__(self, answers: list[Answer], out: TextIO = sys.stdout) -> None:
        """Keep the answers to show; nothing is written before the first `show`."""
        self._answers = answers
        self._out = out
        self._is_terminal = out.isatty()
        self._num_painted = 0
        self._started = time.monotonic()

    def show(self, answer: Answer, delta: str) -> None:
        """Show that `delta` was just added to an answer."""
        if self._is_terminal:
            self._paint()
            return
        elapsed_ms = (time.monotonic() - self._started) * 1e3
        self._out.write(f"  {elapsed_ms:7.1f} ms  {answer.label:<18}{delta!r}\n")
        self._out.flush()

    def finish(self) -> None:
        """Leave the whole answers on the screen."""
        if self._is_terminal:
            self._paint()
            return
        for answer in self._answers:
            self._out.write(f"  {answer.label:<18}{answer.question}\n  {'':<18}{answer.text}\n")
        self._out.flush()

    def _paint(self) -> None:
        width = shutil.get_terminal_size().columns - 1
        lines = [line for answer in self._answers for line in self._lines_of(answer)]
        back = UP.format(self._num_painted) if self._num_painted else ""
        self._out.write(back + "".join(f"\r{CLEAR_LINE}{cut(line, width)}\n" for line in lines))
        self._out.flush()
        self._num_painted = len(lines)

    @staticmethod
    def _lines_of(answer: Answer) -> list[str]:
        cursor = "" if answer.is_done else "▌"
        return [f"  {answer.label:<18}{answer.question}", f"  {'':<18}{answer.text}{cursor}", ""]
