"""The calls of a chaos run: what each asks for, how its caller behaves, and what may come of it."""

from __future__ import annotations

import dataclasses
import enum
import random

from cohort.v1 import generation_pb2

from demo.facts import load_facts, raw_prompt

NUM_REQUESTS = 48
OUTPUT_TOKENS = (8, 72)
MAX_CALLER_WAIT_S = 0.4
DEADLINES_S = (0.02, 1.5)


class Caller(enum.Enum):
    """How a caller behaves."""

    PATIENT = "patient"
    SLOW = "slow reader"
    CANCELLING = "cancelling"
    HURRIED = "with a deadline"
    WRONG = "bad input"


WEIGHTS = {Caller.PATIENT: 6, Caller.SLOW: 1, Caller.CANCELLING: 2, Caller.HURRIED: 2, Caller.WRONG: 1}


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One call to make. `number` is its request's place among `requests()`; `code` what bad input is answered with."""

    caller: Caller
    number: int
    request: generation_pb2.GenerateRequest
    timeout_s: float | None = None
    num_tokens_read: int = 0  # after which a cancelling caller goes away
    code: str = ""


def requests() -> list[generation_pb2.GenerateRequest]:
    """Greedy and seeded ones, one or two answers each, of fixed lengths."""
    rng = random.Random("chaos requests")
    facts = load_facts()
    made = []
    for number in range(NUM_REQUESTS):
        sampling = generation_pb2.SamplingParams(temperature=0.0 if number % 2 else 1.0, seed=rng.getrandbits(60))
        made.append(
            generation_pb2.GenerateRequest(
                text=raw_prompt(facts[number % len(facts)].question),
                sampling=sampling,
                stopping=generation_pb2.StoppingParams(max_tokens=rng.randint(*OUTPUT_TOKENS), ignore_eos=True),
                output=generation_pb2.OutputOptions(return_token_ids=True),
                n=2 if number % 8 == 0 else 1,
            )
        )
    return made


def draw(rng: random.Random, made: list[generation_pb2.GenerateRequest]) -> Call:
    """A random call."""
    (caller,) = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
    number = rng.randrange(len(made))
    if caller is Caller.WRONG:
        request, code = rng.choice(_bad(made[number]))
        return Call(caller, number, request, code=code)
    timeout_s = rng.uniform(*DEADLINES_S) if caller is Caller.HURRIED else None
    return Call(caller, number, made[number], timeout_s, num_tokens_read=rng.randint(0, OUTPUT_TOKENS[1]))


def _bad(good: generation_pb2.GenerateRequest) -> list[tuple[generation_pb2.GenerateRequest, str]]:
    """Requests with one fault each, and their statuses."""
    parts = (
        (generation_pb2.GenerateRequest(sampling=generation_pb2.SamplingParams(temperature=float("nan"))), ""),
        (generation_pb2.GenerateRequest(sampling=generation_pb2.SamplingParams(top_p=1.5)), ""),
        (generation_pb2.GenerateRequest(stopping=generation_pb2.StoppingParams(max_tokens=10**8)), ""),
        (generation_pb2.GenerateRequest(stopping=generation_pb2.StoppingParams(stop=[""])), ""),
        (generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[2**31])), ""),
        (generation_pb2.GenerateRequest(model="another"), "NOT_FOUND"),
    )
    found = []
    for fault, code in parts:
        request = generation_pb2.GenerateRequest()
        request.CopyFrom(good)
        request.MergeFrom(fault)
        found.append((request, code or "INVALID_ARGUMENT"))
    return found
