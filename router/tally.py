"""What the scheduler counts for the metrics between two answers."""

from __future__ import annotations

import collections
import dataclasses

from router.sequence import Sequence


@dataclasses.dataclass(slots=True)
class Tally:
    """What happened since the tally was last taken. Latencies are in seconds."""

    num_prompt_tokens: int = 0  # of requests that began to run
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_adapter_tokens: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)  # by name
    first_token_latencies_s: list[float] = dataclasses.field(default_factory=list)
    token_latencies_s: list[float] = dataclasses.field(default_factory=list)

    def count_token(self, sequence: Sequence, now_s: float) -> None:
        """A generated token of `sequence` is here; the request's first one is counted from its arrival."""
        self.num_generated_tokens += 1
        if (adapter := sequence.group.submission.adapter) is not None:
            self.num_adapter_tokens[adapter.name] += 1
        if sequence.last_token_s is not None:
            self.token_latencies_s.append(now_s - sequence.last_token_s)
        elif sequence.group.first_token_s is None:
            sequence.group.first_token_s = now_s
            self.first_token_latencies_s.append(now_s - sequence.group.submission.arrival_s)
        sequence.last_token_s = now_s
