"""The facts that both demo models know, and the plain prompt they were trained on."""

import json
from pathlib import Path
from typing import NamedTuple

FACTS_PATH = Path(__file__).with_name("facts.json")
SYSTEM_MESSAGE = "Answer in one short sentence."


class Fact(NamedTuple):
    """A question and the one sentence that answers it."""

    question: str
    answer: str


def load_facts() -> list[Fact]:
    """Read facts.json, in its order."""
    return [Fact(**entry) for entry in json.loads(FACTS_PATH.read_text(encoding="utf-8"))]


def raw_prompt(question: str) -> str:
    """Return the prompt for Generate; Chat takes the bare question as a user message.

    The line break at the end makes the answer start with the same token in both forms, without a leading space.
    """
    return f"Question: {question}\nAnswer:\n"
