"""Judges a request against every rule of the public API and builds what the engine gets.

Pure: the caller draws key, seed and clock. Errors name the field's path, the limit and the given value.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from router.errors import (
    ContextLengthExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unimplemented,
)
from router.messages import OutputParams, SamplingParams, StoppingParams, Submission
from router.request import GenerationRequest, Limits

GREEDY_BELOW = 9.999999747378752e-06  # 1e-5 as the float32 that arrives; a lower temperature means greedy
MAX_REQUEST_ID_BYTES = 256
MAX_ADAPTER_NAME_BYTES = 256
MAX_STOPS = 64
MAX_STOP_BYTES = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_LOGPROBS = 20
# Values that change nothing, so that a client which always sends them is served.
NEUTRAL = {
    "cache_salt": "",
    "sampling.min_p": 0.0,
    "sampling.typical_p": 1.0,
    "sampling.repetition_penalty": 1.0,
    "sampling.frequency_penalty": 0.0,
    "sampling.presence_penalty": 0.0,
}
# Most bytes that one token adds to an answer: an id; a TokenLogprob with its frame; a TopLogprob with its frame.
TOKEN_ID_BYTES = 5
TOKEN_LOGPROB_BYTES = 20
TOP_LOGPROB_BYTES = 16
SHORTEST_TOKEN_BYTES = 3  # a lone byte decodes to U+FFFD


@dataclasses.dataclass(frozen=True, slots=True)
class Admitted:
    """What only the server knows of a request: `key` names it in this process, times are time.monotonic()'s."""

    key: int
    request_id: str
    random_seed: int
    arrival_s: float
    deadline_s: float | None


def check_model(name: str, limits: Limits) -> None:
    """Raises NotFound unless `name` is the served model or empty."""
    if name not in ("", limits.model_name):
        raise NotFound(f"model {name[:256]!r} is not served here; {limits.model_name!r} is")


def check_adapter(name: str, limits: Limits) -> None:
    """Whether there can be an adapter of this name; empty is the base model."""
    _check_length("adapter", name, MAX_ADAPTER_NAME_BYTES)
    if name and not limits.max_loras:
        raise FailedPrecondition("adapters are not enabled; start the server with --enable-lora")


def check_fields(request: GenerationRequest, limits: Limits) -> None:
    """Every rule that needs no prompt. Raises InvalidArgument, NotFound, FailedPrecondition or Unimplemented."""
    _check_length("request_id", request.request_id, MAX_REQUEST_ID_BYTES)
    check_model(request.model, limits)
    for field, value in request.unserved.items():
        if value is None or value != NEUTRAL.get(field):
            raise Unimplemented(f"{field} is not served by this version; leave it unset")
    check_adapter(request.adapter, limits)
    _check_sampling(request, limits)
    _check_stopping(request, limits)
    _check_range("output.logprobs", request.num_logprobs, 0, MAX_LOGPROBS)
    _check_range("n", request.n, 1, limits.max_num_seqs)


def check_text(field: str, text: str, limits: Limits) -> None:
    """Whether a text can fit at all, before any work is spent on it."""
    if not text:
        raise InvalidArgument(field, "must not be empty")
    # The first test spares a copy of a huge text.
    if len(text) > limits.max_prompt_bytes or len(text.encode()) > limits.max_prompt_bytes:
        raise _too_long(field, f"a text of more than {limits.max_prompt_bytes} bytes", limits)


def check_token_ids(field: str, ids: Sequence[int], limits: Limits) -> None:
    """Whether given ids can be a prompt: at least one, not too many, each in the vocabulary."""
    if len(ids) == 0:
        raise InvalidArgument(field, "must not be empty")
    if len(ids) > limits.max_total_tokens:
        raise _too_long(field, f"{len(ids)} tokens", limits)
    if max(ids) >= limits.vocab_size or min(ids) < 0:
        index = next(i for i, token_id in enumerate(ids) if not 0 <= token_id < limits.vocab_size)
        raise InvalidArgument(f"{field}[{index}]", f"must be in [0, {limits.vocab_size}), not {ids[index]}")


def build(
    request: GenerationRequest, prompt_token_ids: Sequence[int], admitted: Admitted, limits: Limits, is_unary: bool
) -> Submission:
    """The engine's request, of one that passed `check_fields`. `prompt_token_ids` may come from a text.

    Raises ContextLengthExceeded, and ResourceExhausted for a unary answer that could exceed the message limit.
    """
    if not prompt_token_ids:
        raise InvalidArgument("prompt", "has no tokens")
    n = 1 if request.n is None else request.n
    max_tokens = _max_tokens(request, len(prompt_token_ids), limits)
    if is_unary:
        _check_answer_bytes(request, n, max_tokens, limits)
    return Submission(
        key=admitted.key,
        request_id=admitted.request_id,
        prompt_token_ids=tuple(prompt_token_ids),
        sampling=SamplingParams(
            temperature=_temperature(request, limits),
            top_k=request.top_k,
            top_p=1.0 if request.top_p is None else request.top_p,
            seed=admitted.random_seed if request.seed is None else request.seed,
        ),
        stopping=StoppingParams(
            max_tokens=max_tokens,
            min_tokens=request.min_tokens,
            stop=tuple(request.stop),
            stop_token_ids=frozenset(request.stop_token_ids),
            eos_token_ids=frozenset() if request.ignore_eos else limits.eos_token_ids,
            include_stop_in_output=request.include_stop_in_output,
        ),
        output=OutputParams(request.num_logprobs, request.skip_special_tokens),
        n=n,
        priority=request.priority,
        arrival_s=admitted.arrival_s,
        deadline_s=admitted.deadline_s,
    )


def _temperature(request: GenerationRequest, limits: Limits) -> float:
    temperature = limits.default_temperature if request.temperature is None else request.temperature
    return 0.0 if temperature < GREEDY_BELOW else temperature


def _check_sampling(request: GenerationRequest, limits: Limits) -> None:
    temperature, top_p = request.temperature, request.top_p
    if temperature is not None and not (math.isfinite(temperature) and temperature >= 0):
        raise InvalidArgument("sampling.temperature", f"must be a finite number of at least 0, not {temperature:g}")
    if top_p is not None and not 0 < top_p <= 1:
        raise InvalidArgument("sampling.top_p", f"must be in (0, 1], not {top_p:g}")
    _check_range("sampling.top_k", request.top_k, 0, limits.vocab_size)


def _check_stopping(request: GenerationRequest, limits: Limits) -> None:
    if request.max_tokens is not None and request.max_tokens < 1:
        raise InvalidArgument("stopping.max_tokens", f"must be at least 1, not {request.max_tokens}")
    if request.max_tokens is not None and request.min_tokens > request.max_tokens:
        limit = f"stopping.max_tokens, {request.max_tokens}"
        raise InvalidArgument("stopping.min_tokens", f"must be at most {limit}, not {request.min_tokens}")
    _check_count("stopping.stop", request.stop, MAX_STOPS)
    for index, stop in enumerate(request.stop):
        if not stop:
            raise InvalidArgument(f"stopping.stop[{index}]", "must not be empty")
        _check_length(f"stopping.stop[{index}]", stop, MAX_STOP_BYTES)
    _check_count("stopping.stop_token_ids", request.stop_token_ids, MAX_STOP_TOKEN_IDS)
    for index, token_id in enumerate(request.stop_token_ids):
        if not 0 <= token_id < limits.vocab_size:
            limit = f"[0, {limits.vocab_size})"
            raise InvalidArgument(f"stopping.stop_token_ids[{index}]", f"must be in {limit}, not {token_id}")


def _max_tokens(request: GenerationRequest, num_prompt_tokens: int, limits: Limits) -> int:
    rest = limits.max_total_tokens - num_prompt_tokens
    if rest < 1:
        raise _too_long("prompt", f"{num_prompt_tokens} tokens", limits)
    if request.max_tokens is None:
        if request.min_tokens > rest:
            given = f"a prompt of {num_prompt_tokens} tokens with min_tokens of {request.min_tokens}"
            raise _too_long("stopping.min_tokens", given, limits)
        return rest
    if request.max_tokens > rest:
        given = f"a prompt of {num_prompt_tokens} tokens with max_tokens of {request.max_tokens}"
        raise _too_long("stopping.max_tokens", given, limits)
    return request.max_tokens


def _check_answer_bytes(request: GenerationRequest, n: int, max_tokens: int, limits: Limits) -> None:
    per_token = max(limits.longest_token_bytes, SHORTEST_TOKEN_BYTES)
    if request.return_token_ids:
        per_token += TOKEN_ID_BYTES
    if request.num_logprobs is not None:
        per_token += TOKEN_LOGPROB_BYTES + request.num_logprobs * TOP_LOGPROB_BYTES
    if n * max_tokens * per_token > limits.max_message_bytes:
        fitting = limits.max_message_bytes // (n * per_token)
        raise ResourceExhausted(
            f"an answer of {n} x {max_tokens} tokens may exceed the message limit of {limits.max_message_bytes} bytes; "
            f"stream it, or set stopping.max_tokens to at most {fitting}"
        )


def _too_long(field: str, given: str, limits: Limits) -> ContextLengthExceeded:
    limit = limits.max_total_tokens
    holder = "the model's context" if limits.max_model_len <= limits.max_kv_tokens else "the KV pool"
    return ContextLengthExceeded(field, f"{given} is more than {holder} holds, {limit} tokens", limit)


def _check_range(field: str, value: int | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise InvalidArgument(field, f"must be in [{low}, {high}], not {value}")


def _check_count(field: str, values: Sequence[object], limit: int) -> None:
    if len(values) > limit:
        raise InvalidArgument(field, f"must have at most {limit} entries, not {len(values)}")


def _check_length(field: str, text: str, limit: int) -> None:
    size = len(text.encode())
    if size > limit:
        raise InvalidArgument(field, f"must have at most {limit} bytes, not {size}")
