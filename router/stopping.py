"""When a sequence ends, and what of its last text, ids and log-probabilities the caller gets.

Text that might be the beginning of a stop string is held back, with its tokens, until it can no longer become one; then
it is let go, at the latest at the end. At a match everything is cut at one place, the start of the stop string (with
include_stop_in_output: its end). A token is kept if its text begins before the cut; one that spans the cut keeps its id
and log-probability while its text is cut short. A token without text yet, as the first bytes of a character have none,
waits for its character if a stop string could begin with that, and else goes at once.
"""

from __future__ import annotations

import dataclasses

from router.detokenizer import Detokenizer
from router.messages import Finish, FinishReason, StoppingParams, TokenLogprob
from router.step import SampledToken


@dataclasses.dataclass(slots=True)
class Piece:
    """What one accepted token lets go; `logprobs` runs in step with `token_ids`, or is empty if not asked for."""

    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    finish: Finish | None = None


class StopChecker:
    """One sequence's stopping rules."""

    def __init__(self, stopping: StoppingParams, detokenizer: Detokenizer) -> None:
        self._stopping = stopping
        self._detokenizer = detokenizer
        self._held_text = ""
        # Tokens not let go, each with the place in the held text where its own text begins.
        self._held: list[tuple[int, SampledToken]] = []
        self._waits_for_text = any(not stop[0].isascii() for stop in stopping.stop)
        self.num_generated = 0

    def accept(self, token: SampledToken) -> Piece:
        """Takes the next generated token."""
        stopping = self._stopping
        self.num_generated += 1
        token_id = token.token_id
        is_stop = token_id in stopping.eos_token_ids or token_id in stopping.stop_token_ids
        if is_stop and self.num_generated > stopping.min_tokens:
            return self._end_at_token(token)
        text = self._detokenizer.push(token_id)
        is_last = self.num_generated >= stopping.max_tokens
        if not stopping.stop and not is_last:
            return Piece(text, [token_id], _logprobs([token]))
        self._hold(token, text)
        if is_last:
            self._held_text += self._detokenizer.flush()
        if (match := self._match()) is not None:
            return self._cut(*match)
        if is_last:
            return self._let_go(len(self._held_text), Finish(FinishReason.LENGTH))
        return self._let_go(len(self._held_text) - self._num_possible())

    def _hold(self, token: SampledToken, text: str) -> None:
        self._held.append((len(self._held_text), token))
        self._held_text += text

    def _end_at_token(self, token: SampledToken) -> Piece:
        """At a stop or end-of-sequence token; a stop string cannot be completed by it."""
        if self._stopping.include_stop_in_output:
            self._hold(token, self._detokenizer.push(token.token_id))
        self._held_text += self._detokenizer.flush()
        return self._let_go(len(self._held_text), Finish(FinishReason.STOP, token.token_id))

    def _match(self) -> tuple[int, str] | None:
        """Where the first stop string in the held text starts, and which; of several there, the longest."""
        if self.num_generated <= self._stopping.min_tokens:
            return None
        found = [(self._held_text.find(stop), -len(stop), stop) for stop in self._stopping.stop]
        found = [entry for entry in found if entry[0] >= 0]
        if not found:
            return None
        start, _, stop = min(found)
        return start, stop

    def _cut(self, start: int, stop: str) -> Piece:
        end = start + len(stop) if self._stopping.include_stop_in_output else start
        self._held_text = self._held_text[:end]
        self._held = [entry for entry in self._held if entry[0] < end]
        return self._let_go(end, Finish(FinishReason.STOP, stop))

    def _num_possible(self) -> int:
        """Length of the longest tail of the held text that is a proper beginning of a stop string."""
        text = self._held_text
        longest = max(len(stop) for stop in self._stopping.stop) - 1
        for length in range(min(longest, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stopping.stop):
                return length
        return 0

    def _let_go(self, length: int, finish: Finish | None = None) -> Piece:
        """The first `length` characters and the tokens whose text begins in them; all tokens at the end, and where
        nothing is held and none of them awaits its text."""
        is_all = finish is not None or (length == len(self._held_text) and not self._is_within_character())
        tokens = [token for place, token in self._held if is_all or place < length]
        piece = Piece(self._held_text[:length], [token.token_id for token in tokens], _logprobs(tokens), finish)
        self._held_text = self._held_text[length:]
        self._held = [(place - length, token) for place, token in self._held[len(tokens) :]]
        return piece

    def _is_within_character(self) -> bool:
        """Whether the newest token is without text, and its character might begin a stop string."""
        return self._waits_for_text and bool(self._held) and self._held[-1][0] == len(self._held_text)


def _logprobs(tokens: list[SampledToken]) -> list[TokenLogprob]:
    return [TokenLogprob(t.token_id, t.logprob, t.top) for t in tokens if t.logprob is not None]
