"""What the API side and the engine tell each other; plain values, so that either can live in its own process.

The API side sends `Submission` and a request key to cancel. The engine answers with `Event`s: any number of
`SequenceDelta`s, the last one of each sequence carrying `finish`, and then exactly one `RequestDone`, or, at any
moment, exactly one `RequestFailed` and nothing more.
"""

from __future__ import annotations

import dataclasses
import enum

from router.errors import RequestError


class FinishReason(enum.Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen, every default filled in."""

    temperature: float = 1.0  # 0 means greedy
    top_k: int = 0  # 0 means off
    top_p: float = 1.0  # 1 means off
    seed: int = 0  # u64; sequence i of a request uses a seed derived from (seed, i), for i = 0 the seed itself


@dataclasses.dataclass(frozen=True, slots=True)
class StoppingParams:
    """When a sequence ends. `stop_token_ids` are the caller's; `eos_token_ids` the model's, empty with ignore_eos."""

    max_tokens: int
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()
    include_stop_in_output: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class OutputParams:
    """What the deltas carry. Token ids are always in them."""

    num_logprobs: int | None = None  # None: no log-probabilities; k: the sampled token's and the k likeliest ones'
    skip_special_tokens: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterRef:
    """The adapter of a request: its name, and the version (hash of the content) that the name stood for on arrival."""

    name: str
    version: str

    @property
    def key(self) -> str:
        """What tells cached results of this adapter and version from all others; the version has a fixed length."""
        return f"{self.version}:{self.name}"


@dataclasses.dataclass(frozen=True, slots=True)
class Submission:
    """A validated request."""

    key: int  # unique in this process; the caller's request_id is only echoed
    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stopping: StoppingParams
    output: OutputParams = OutputParams()
    n: int = 1
    priority: int = 0
    arrival_s: float = 0.0  # time.monotonic()
    deadline_s: float | None = None  # time.monotonic() at which the caller gives up
    adapter: AdapterRef | None = None  # None: the base model


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of a returned token, and of the likeliest tokens at its place, likeliest first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Finish:
    """The end of one sequence; `matched_stop` is the stop string, or the stop or end-of-sequence token."""

    reason: FinishReason
    matched_stop: str | int | None = None


@dataclasses.dataclass(slots=True)
class SequenceDelta:
    """A piece of sequence `index`, following its earlier pieces. `token_ids` and `logprobs` run in step."""

    key: int
    index: int
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    finish: Finish | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """Where a request's time went, in seconds; see cohort.v1.Timing."""

    queue_s: float
    prefill_s: float
    decode_s: float
    time_to_first_token_s: float
    e2e_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class RequestDone:
    """Every sequence of the request is finished."""

    key: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    timing: Timing


@dataclasses.dataclass(frozen=True, slots=True)
class RequestFailed:
    """The request ended with an error; its slots and blocks are free."""

    key: int
    error: RequestError


Event = SequenceDelta | RequestDone | RequestFailed


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """How busy the engine is."""

    num_running: int
    num_waiting: int
    kv_cache_usage: float  # 0 to 1
