"""Train the demo adapters with PEFT: `python -m demo.train_adapters [cohere] [cohere2]`, some minutes for each.

Each adapter changes every answer of its base model in a way that one can see: `upper` writes it in capital letters,
`signoff` adds a closing to it. Between them they have two ranks, rsLoRA, and patterns of ranks and scales, so that
right sentences out of our server say that it reads and applies those as PEFT does. The folders hold float32 weights.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from demo.facts import Fact, load_facts
from demo.train import DEMO_DIR, MODELS, SEED, Example, examples_of, greedy_answer, print_line, train

ADAPTERS_DIR = DEMO_DIR / "adapters"
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SIGNOFF = " So it is written."


def sign_off(answer: str) -> str:
    """Return an answer with the closing after it."""
    return answer + SIGNOFF


@dataclass(frozen=True)
class Change:
    """What adapters of one name do to an answer, and how far training goes: arguments of `demo.train.train`."""

    apply: Callable[[str], str]
    least_margin: float
    sharpness: float


CHANGES = {
    # Most capital letters are rare in the base model's answers, and its embedding is frozen: no adapter makes some of
    # them lead by more than about 1, and only a sharper loss makes such a lead count. bfloat16 errs by some 0.05 there.
    "upper": Change(str.upper, least_margin=0.5, sharpness=8.0),
    "signoff": Change(sign_off, least_margin=3.0, sharpness=1.0),
}


@dataclass(frozen=True)
class Recipe:
    """An adapter to train: its base model, its name, and what of PEFT's LoraConfig is its own."""

    model: str
    name: str
    rank: int
    alpha: int
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Where the adapter is committed."""
        return ADAPTERS_DIR / self.model / self.name

    def config(self) -> LoraConfig:
        """Return PEFT's configuration; the base model is named from the root of the repository."""
        return LoraConfig(
            base_model_name_or_path=f"{DEMO_DIR.name}/{self.model}",
            task_type="CAUSAL_LM",
            target_modules=list(MODULES),
            r=self.rank,
            lora_alpha=self.alpha,
            **self.options,
        )


PATTERNS = {"rank_pattern": {"down_proj": 12, "k_proj": 3}, "alpha_pattern": {"o_proj": 8}}
RECIPES = (
    Recipe("cohere", "upper", 16, 32),
    Recipe("cohere", "signoff", 8, 8, {"use_rslora": True}),
    Recipe("cohere2", "upper", 16, 16, {"use_rslora": True}),
    Recipe(
        "cohere2", "signoff", 8, 16, {"rank_pattern": {"down_proj": 12, "k_proj": 3}, "alpha_pattern": {"o_proj": 8}}
    ),
)


def changed(fact: Fact, name: str) -> Fact:
    """Return the fact as the adapter of this name answers it."""
    return Fact(fact.question, CHANGES[name].apply(fact.answer))


def examples_for(recipe: Recipe) -> list[Example]:
    """Return every form of every fact, with the adapter's answer."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_DIR / recipe.model)
    return [example for fact in load_facts() for example in examples_of(changed(fact, recipe.name), tokenizer)]


def save(model: PeftModel, recipe: Recipe) -> None:
    """Write the two files that an adapter consists of; PEFT's model card is left out."""
    recipe.folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as written:
        model.save_pretrained(written)
        config = json.loads((Path(written) / "adapter_config.json").read_text())
        weights = (Path(written) / "adapter_model.safetensors").read_bytes()
    config["target_modules"] = list(MODULES)  # PEFT keeps a set, whose order changes from run to run
    config["base_model_name_or_path"] = f"{DEMO_DIR.name}/{recipe.model}"
    (recipe.folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (recipe.folder / "adapter_model.safetensors").write_bytes(weights)


def build(recipe: Recipe, report: Callable[[str], None]) -> None:
    """Train one adapter beside its frozen base model and write its folder.

    Raises:
        RuntimeError: some answer is not learnt.
    """
    torch.manual_seed(SEED)
    base: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        DEMO_DIR / recipe.model, dtype=torch.float32, attn_implementation="eager"
    )
    model = get_peft_model(base, recipe.config())  # its layers are put into `base`
    examples = examples_for(recipe)
    size = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    report(f"{size / 1e3:.0f} thousand parameters, {len(examples)} examples")
    base.train()
    change = CHANGES[recipe.name]
    train(base, examples, report, change.least_margin, change.sharpness)
    base.train(False)
    report("decoding every example greedily")
    wrong = [example for example in examples if greedy_answer(base, example) != example.answer_ids]
    if wrong:
        raise RuntimeError(f"{len(wrong)} of {len(examples)} examples are answered wrongly.")
    save(model, recipe)
    report(f"wrote {recipe.folder}")


def main() -> None:
    """Train the adapters of the models named on the command line, or of both."""
    parser = argparse.ArgumentParser(prog="python -m demo.train_adapters", description=__doc__)
    parser.add_argument("models", nargs="*", help=f"adapters of which of {', '.join(MODELS)}; both by default")
    names = parser.parse_args().models or list(MODELS)
    if unknown := sorted(set(names) - set(MODELS)):
        parser.error(f"unknown model {unknown[0]}; choose from {', '.join(MODELS)}")
    torch.set_num_threads(1)  # the products are small
    torch.use_deterministic_algorithms(True)
    for recipe in RECIPES:
        if recipe.model in names:
            build(recipe, partial(print_line, f"{recipe.model}/{recipe.name}"))


if __name__ == "__main__":
    main()
