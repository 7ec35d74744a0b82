"""Whether one more request may wait: the limits on queued requests and queued prompt tokens."""

from __future__ import annotations

from router.errors import Unavailable
from router.messages import Load


class Admission:
    """Counts the prompt tokens that wait for their answer's first token. 0 means no limit."""

    def __init__(self, max_num_seqs: int, max_num_queued_reqs: int, max_num_queued_tokens: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._max_num_queued_reqs = max_num_queued_reqs
        self._max_num_queued_tokens = max_num_queued_tokens
        self.num_queued_tokens = 0

    def enter(self, num_prompt_tokens: int, load: Load) -> Place:
        """A place in the queue. Raises Unavailable when it is full; a lone request always enters."""
        limit = self._max_num_queued_reqs
        # What arrived a moment ago counts as waiting though the next step takes it, as far as there is room.
        num_queued = load.num_running + load.num_waiting - self._max_num_seqs
        if limit and num_queued >= limit:
            raise Unavailable(f"the queue is full: {num_queued} sequences wait, the limit is {limit}")
        limit = self._max_num_queued_tokens
        if limit and self.num_queued_tokens and self.num_queued_tokens + num_prompt_tokens > limit:
            raise Unavailable(f"the queue is full: {self.num_queued_tokens} prompt tokens wait, the limit is {limit}")
        return Place(self, num_prompt_tokens)


class Place:
    """One request's place in the queue, until `leave`."""

    def __init__(self, admission: Admission, num_prompt_tokens: int) -> None:
        self._admission = admission
        self._num_prompt_tokens = num_prompt_tokens
        admission.num_queued_tokens += num_prompt_tokens

    def leave(self) -> None:
        """The answer has begun, or the request is over. May be called again."""
        self._admission.num_queued_tokens -= self._num_prompt_tokens
        self._num_prompt_tokens = 0
