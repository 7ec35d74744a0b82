"""The rules of the public API, one by one, on plain values."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router import validation
from router.errors import (
    ContextLengthExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unimplemented,
)
from router.messages import Submission
from router.request import GenerationRequest, Limits

LIMITS = Limits(
    model_name="command",
    vocab_size=1000,
    max_model_len=128,
    max_kv_tokens=256,
    max_num_seqs=8,
    max_message_bytes=32 * 2**20,
    longest_token_bytes=20,
    eos_token_ids=frozenset({5, 7}),
    default_temperature=0.3,
)
ADMITTED = validation.Admitted(key=1, request_id="id", random_seed=77, arrival_s=1.0, deadline_s=2.0)
NAN, INF = math.nan, math.inf


def build(prompt: int = 3, limits: Limits = LIMITS, is_unary: bool = True, **fields: object) -> Submission:
    request = GenerationRequest(**fields)  # type: ignore[arg-type]
    validation.check_fields(request, limits)
    return validation.build(request, [9] * prompt, ADMITTED, limits, is_unary)


@pytest.mark.parametrize(
    ("fields", "path", "limit", "given_value"),
    [
        ({"temperature": -0.1}, "sampling.temperature", "at least 0", "-0.1"),
        ({"temperature": NAN}, "sampling.temperature", "finite", "nan"),
        ({"temperature": INF}, "sampling.temperature", "finite", "inf"),
        ({"top_p": 0.0}, "sampling.top_p", "(0, 1]", "0"),
        ({"top_p": -0.1}, "sampling.top_p", "(0, 1]", "-0.1"),
        ({"top_p": 1.0001}, "sampling.top_p", "(0, 1]", "1.0001"),
        ({"top_p": NAN}, "sampling.top_p", "(0, 1]", "nan"),
        ({"top_k": 1001}, "sampling.top_k", "[0, 1000]", "1001"),
        ({"max_tokens": 0}, "stopping.max_tokens", "at least 1", "0"),
        ({"max_tokens": 3, "min_tokens": 4}, "stopping.min_tokens", "3", "4"),
        ({"stop": ["a", ""]}, "stopping.stop[1]", "empty", ""),
        ({"stop": ["a"] * 65}, "stopping.stop", "64", "65"),
        ({"stop": ["é" * 513]}, "stopping.stop[0]", "1024 bytes", "1026"),
        ({"stop_token_ids": [4, 1000]}, "stopping.stop_token_ids[1]", "[0, 1000)", "1000"),
        ({"stop_token_ids": [1] * 65}, "stopping.stop_token_ids", "64", "65"),
        ({"num_logprobs": 21}, "output.logprobs", "[0, 20]", "21"),
        ({"n": 0}, "n", "[1, 8]", "0"),
        ({"n": 9}, "n", "[1, 8]", "9"),
        ({"request_id": "x" * 257}, "request_id", "256 bytes", "257"),
    ],
)
def test_a_broken_rule_names_field_limit_and_value(
    fields: dict[str, Any], path: str, limit: str, given_value: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        build(**fields)
    assert refused.value.field == path
    assert limit in refused.value.description and given_value in refused.value.description


@pytest.mark.parametrize(
    "fields",
    [
        {"top_p": 1e-9},
        {"top_p": 1.0},
        {"temperature": 100.0},
        {"top_k": 1000},
        {"num_logprobs": 0},
        {"num_logprobs": 20},
        {"n": 8},
        {"stop": [" "]},
        {"stop": ["x" * 1024] * 64},
        {"stop_token_ids": [0, 999]},
        {"max_tokens": 3, "min_tokens": 3},
        {"request_id": "x" * 256},
        {"model": "command"},
    ],
)
def test_the_border_of_a_rule_is_served(fields: dict[str, Any]) -> None:
    build(**fields)


@pytest.mark.parametrize(
    ("given_temperature", "served"),
    [(0.0, 0.0), (1e-8, 0.0), (1e-6, 0.0), (1e-4, 1e-4), (9.999999747378752e-06, 9.999999747378752e-06), (None, 0.3)],
)
def test_a_temperature_below_a_hundred_thousandth_is_greedy(given_temperature: float | None, served: float) -> None:
    assert build(temperature=given_temperature).sampling.temperature == served


def test_unset_fields_take_their_defaults() -> None:
    submission = build()
    assert (submission.sampling.top_p, submission.sampling.top_k, submission.sampling.seed) == (1.0, 0, 77)
    assert submission.stopping.max_tokens == 128 - 3
    assert submission.stopping.eos_token_ids == {5, 7}
    assert (submission.n, submission.output.num_logprobs, submission.deadline_s) == (1, None, 2.0)


def test_given_fields_arrive() -> None:
    submission = build(seed=2**64 - 1, max_tokens=4, ignore_eos=True, stop_token_ids=[3, 3], priority=-2, n=2)
    assert submission.sampling.seed == 2**64 - 1
    assert submission.stopping.max_tokens == 4
    assert submission.stopping.eos_token_ids == frozenset() and submission.stopping.stop_token_ids == {3}
    assert (submission.priority, submission.n) == (-2, 2)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "is_served"),
    [(3, 125, True), (3, 126, False), (127, None, True), (127, 1, True), (128, None, False), (128, 1, False)],
)
def test_prompt_and_answer_fit_the_context(prompt: int, max_tokens: int | None, is_served: bool) -> None:
    if is_served:
        assert build(prompt, max_tokens=max_tokens).stopping.max_tokens == (max_tokens or 128 - prompt)
        return
    with pytest.raises(ContextLengthExceeded) as refused:
        build(prompt, max_tokens=max_tokens)
    assert refused.value.limit == 128 and "the model's context" in refused.value.description


def test_what_the_whole_pool_cannot_hold_is_refused_though_the_context_could() -> None:
    limits = dataclasses.replace(LIMITS, max_kv_tokens=48)  # Three blocks of 16.
    assert build(5, limits).stopping.max_tokens == 43
    with pytest.raises(ContextLengthExceeded, match="the KV pool"):
        build(50, limits)
    with pytest.raises(ContextLengthExceeded, match="the KV pool"):
        build(5, limits, max_tokens=44)


def test_min_tokens_beyond_what_is_left_is_refused_when_max_tokens_is_unset() -> None:
    with pytest.raises(ContextLengthExceeded):
        build(100, min_tokens=29)
    assert build(100, min_tokens=28).stopping.max_tokens == 28


@pytest.mark.parametrize("model", ["Command", "command ", "gpt"])
def test_another_model_is_not_found(model: str) -> None:
    with pytest.raises(NotFound, match="command"):
        build(model=model)


def test_an_adapter_is_refused_at_once_while_lora_is_off() -> None:
    """Public bug predibase/lorax#65: it failed late, with an attribute error."""
    with pytest.raises(FailedPrecondition, match="--enable-lora"):
        build(adapter="a")
    with_lora = dataclasses.replace(LIMITS, max_loras=2)
    assert build(adapter="a", limits=with_lora) == build(), "its version is filled in when it is known"
    with pytest.raises(InvalidArgument, match="adapter: must have at most 256 bytes, not 257"):
        build(adapter="a" * 257, limits=with_lora)


NEUTRAL = {
    "cache_salt": "",
    "sampling.min_p": 0.0,
    "sampling.typical_p": 1.0,
    "sampling.repetition_penalty": 1.0,
    "sampling.frequency_penalty": -0.0,
    "sampling.presence_penalty": 0.0,
}


def test_neutral_values_of_unserved_fields_change_nothing() -> None:
    assert build(unserved=NEUTRAL) == build()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((field, "a" if value == "" else 0.5) for field, value in NEUTRAL.items()),
        ("sampling.min_p", NAN),
        ("adapter_merge", None),
        ("constraint", None),
        ("sampling.logit_bias", None),
        ("output.prompt_logprobs", None),
    ],
)
def test_an_unserved_field_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(Unimplemented, match=field):
        build(unserved={field: value})


@pytest.mark.parametrize("ids", [[-1], [1000], [200_000], [3, 4, 1000]])
def test_prompt_ids_outside_the_vocabulary_are_refused_by_place(ids: list[int]) -> None:
    with pytest.raises(InvalidArgument) as refused:
        validation.check_token_ids("token_ids", ids, LIMITS)
    assert refused.value.field == f"token_ids[{len(ids) - 1}]"


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="empty"):
        validation.check_token_ids("token_ids", [], LIMITS)
    with pytest.raises(InvalidArgument, match="empty"):
        validation.check_text("text", "", LIMITS)
    with pytest.raises(InvalidArgument, match="no tokens"):
        build(prompt=0)


def test_a_text_that_cannot_fit_is_refused_by_its_bytes() -> None:
    limit = 3 * 20 * 128
    validation.check_text("text", "a" * limit, LIMITS)
    with pytest.raises(ContextLengthExceeded):
        validation.check_text("text", "a" * (limit + 1), LIMITS)
    with pytest.raises(ContextLengthExceeded):
        validation.check_text("text", "é" * (limit // 2 + 1), LIMITS)


def test_an_answer_that_could_exceed_the_message_limit_is_refused_unless_streamed() -> None:
    # Per token 20 bytes of text, 5 of its id, 20 + 20 x 16 of log-probabilities.
    most = LIMITS.max_message_bytes // (8 * (20 + 5 + 20 + 20 * 16))
    limits = dataclasses.replace(LIMITS, max_model_len=10**6, max_kv_tokens=10**6)
    fields: dict[str, Any] = {"n": 8, "num_logprobs": 20, "return_token_ids": True}
    build(3, limits, max_tokens=most, **fields)
    with pytest.raises(ResourceExhausted, match=str(most)):
        build(3, limits, max_tokens=most + 1, **fields)
    build(3, limits, is_unary=False, max_tokens=most + 1, **fields)


@given(
    prompt=st.integers(1, 200),
    max_tokens=st.none() | st.integers(0, 200),
    min_tokens=st.integers(0, 200),
    n=st.none() | st.integers(0, 10),
)
def test_whatever_is_let_in_fits(prompt: int, max_tokens: int | None, min_tokens: int, n: int | None) -> None:
    try:
        submission = build(prompt, max_tokens=max_tokens, min_tokens=min_tokens, n=n)
    except InvalidArgument:
        return
    stopping = submission.stopping
    assert 1 <= stopping.max_tokens <= LIMITS.max_total_tokens - prompt
    assert stopping.min_tokens <= stopping.max_tokens and 1 <= submission.n <= LIMITS.max_num_seqs
