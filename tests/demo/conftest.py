"""The committed demo models, as transformers loads them."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from demo.facts import SYSTEM_MESSAGE, Fact, load_facts
from demo.train import DEMO_DIR, MODELS

START, END = "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"


class DemoModel:
    """A committed folder: its network in float32, its tokenizer as `tokenizers` reads it, and the served prompts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.network = self.load()
        self.end_id = self.tokenizer.token_to_id(END)

    def load(self, dtype: torch.dtype = torch.float32, **changes: object) -> PreTrainedModel:
        """Load the network, with some values of its config changed."""
        config = AutoConfig.from_pretrained(self.folder)
        for key, value in changes.items():
            setattr(config, key, value)
        return AutoModelForCausalLM.from_pretrained(self.folder, config=config, dtype=dtype)

    def prompts(self, fact: Fact) -> dict[str, list[int]]:
        """Return the fact's prompts, written out by hand: plain, chat, and chat with a system message."""
        system = f"{START}<|SYSTEM_TOKEN|>{SYSTEM_MESSAGE}{END}"
        turns = f"{START}<|USER_TOKEN|>{fact.question}{END}{START}<|CHATBOT_TOKEN|>"
        texts = {
            "raw": f"Question: {fact.question}\nAnswer:\n",
            "chat": turns,
            "system": system + turns,
        }
        return {form: self.tokenizer.encode(text).ids for form, text in texts.items()}

    def answer(self, fact: Fact) -> list[int]:
        """Return the ids of the fact's answer, the end of turn included."""
        return [*self.tokenizer.encode(fact.answer, add_special_tokens=False).ids, self.end_id]

    @torch.no_grad()
    def margin(self, network: PreTrainedModel, prompt: list[int], answer: list[int]) -> float:
        """Return the least distance in logits from an answer token to the best other token."""
        logits = network(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :].float()
        distances = []
        for row, token in zip(logits, answer, strict=True):
            right = row[token].item()
            row[token] = float("-inf")
            distances.append(right - row.max().item())
        return min(distances)

    def least_margin(self, network: PreTrainedModel, facts: list[Fact]) -> float:
        """Return the least margin over every form of the given facts."""
        return min(
            self.margin(network, prompt, self.answer(fact)) for fact in facts for prompt in self.prompts(fact).values()
        )


@pytest.fixture(scope="session")
def cohere() -> DemoModel:
    return DemoModel(DEMO_DIR / "cohere")


@pytest.fixture(scope="session")
def cohere2() -> DemoModel:
    return DemoModel(DEMO_DIR / "cohere2")


@pytest.fixture(scope="session", params=MODELS)
def demo_model(request: pytest.FixtureRequest) -> DemoModel:
    model: DemoModel = request.getfixturevalue(request.param)
    return model


@pytest.fixture(scope="session")
def facts() -> list[Fact]:
    return load_facts()
