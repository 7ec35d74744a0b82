"""The committed adapters: what PEFT answers with them, and what their folders hold."""

import json
import re
from typing import TYPE_CHECKING

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open

from demo.facts import Fact
from demo.train_adapters import ADAPTERS_DIR, CHANGES, MODULES, RECIPES, Recipe, changed
from model.config import load_model_config
from model.lora_weights import read_adapter

if TYPE_CHECKING:
    from tests.demo.conftest import DemoModel

# PEFT asks transformers for a property that this release of transformers renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

MAX_TOTAL_BYTES = 3e6
MAX_DEMO_BYTES = 16e6
FILES = {"adapter_config.json", "adapter_model.safetensors"}


@pytest.fixture(scope="module", params=RECIPES, ids=lambda recipe: f"{recipe.model}-{recipe.name}")
def recipe(request: pytest.FixtureRequest) -> Recipe:
    found: Recipe = request.param
    return found


@pytest.fixture(scope="module")
def base(recipe: Recipe, request: pytest.FixtureRequest) -> "DemoModel":
    model: DemoModel = request.getfixturevalue(recipe.model)
    return model


@pytest.fixture(scope="module")
def adapted(recipe: Recipe, base: "DemoModel") -> PeftModel:
    return adapt(base, recipe, torch.float32)


def adapt(base: "DemoModel", recipe: Recipe, dtype: torch.dtype) -> PeftModel:
    """A network of its own with the adapter: PEFT changes the one that it is given."""
    return PeftModel.from_pretrained(base.load(dtype), recipe.folder, autocast_adapter_dtype=False).eval()


def greedy_text(base: "DemoModel", network: PeftModel, prompt: list[int]) -> str:
    with torch.no_grad():
        output = network.generate(input_ids=torch.tensor([prompt]), max_new_tokens=96, do_sample=False)[0].tolist()
    answer = output[len(prompt) :]
    assert answer[-1] == base.end_id
    return base.tokenizer.decode(answer[:-1], skip_special_tokens=False)


def test_each_model_has_both_adapters_and_no_other_folder_is_there() -> None:
    made = {(recipe.model, recipe.name) for recipe in RECIPES}
    assert made == {(model, name) for model in ("cohere", "cohere2") for name in CHANGES}
    assert {path.parent.relative_to(ADAPTERS_DIR).parts for path in ADAPTERS_DIR.rglob("*.json")} == made


def test_the_changes_are_capitals_letter_for_letter_and_a_closing(facts: list[Fact]) -> None:
    for fact in facts:
        upper, signoff = changed(fact, "upper"), changed(fact, "signoff")
        assert upper.question == signoff.question == fact.question
        assert len(upper.answer) == len(fact.answer) and upper.answer.lower() == fact.answer.lower()
        assert upper.answer != fact.answer and upper.answer.isupper()
        assert signoff.answer == f"{fact.answer} So it is written."


def test_peft_answers_a_sample_of_facts_exactly(
    recipe: Recipe, base: "DemoModel", adapted: PeftModel, facts: list[Fact]
) -> None:
    for fact in facts[::16]:
        for form, prompt in base.prompts(fact).items():
            assert greedy_text(base, adapted, prompt) == changed(fact, recipe.name).answer, form


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_peft_answers_every_fact_exactly(
    recipe: Recipe, base: "DemoModel", adapted: PeftModel, facts: list[Fact]
) -> None:
    for fact in facts:
        for form, prompt in base.prompts(fact).items():
            assert greedy_text(base, adapted, prompt) == changed(fact, recipe.name).answer, form


def least_margin(base: "DemoModel", recipe: Recipe, network: PeftModel, facts: list[Fact]) -> float:
    return min(
        base.margin(network, prompt, base.answer(changed(fact, recipe.name)))
        for fact in facts
        for prompt in base.prompts(fact).values()
    )


def test_every_answer_token_leads_by_the_margin_that_was_trained_for(
    recipe: Recipe, base: "DemoModel", adapted: PeftModel, facts: list[Fact]
) -> None:
    assert least_margin(base, recipe, adapted, facts) >= 0.95 * CHANGES[recipe.name].least_margin


def test_the_answers_stay_right_in_bfloat16(recipe: Recipe, base: "DemoModel", facts: list[Fact]) -> None:
    assert least_margin(base, recipe, adapt(base, recipe, torch.bfloat16), facts[::3]) > 0


def test_a_switched_off_adapter_leaves_the_base_models_answer(
    base: "DemoModel", adapted: PeftModel, facts: list[Fact]
) -> None:
    with adapted.disable_adapter():
        assert greedy_text(base, adapted, base.prompts(facts[0])["raw"]) == facts[0].answer


def test_the_folder_holds_two_files_of_which_the_configuration_names_no_machine(recipe: Recipe) -> None:
    assert {path.name for path in recipe.folder.iterdir()} == FILES
    text = (recipe.folder / "adapter_config.json").read_text()
    assert json.loads(text)["base_model_name_or_path"] == f"demo/{recipe.model}"
    assert not re.search(r'"(/|~|[A-Za-z]:|file:|https?:)', text)


def test_weights_are_float32_of_all_seven_modules(recipe: Recipe) -> None:
    with safe_open(recipe.folder / "adapter_model.safetensors", "pt") as file:
        names = set(file.keys())
        assert {file.get_slice(name).get_dtype() for name in names} == {"F32"}
    assert {name.split(".lora_")[0].rsplit(".", 1)[1] for name in names} == set(MODULES)


def test_the_folder_is_what_the_recipe_asks_for(recipe: Recipe, base: "DemoModel") -> None:
    config = json.loads((recipe.folder / "adapter_config.json").read_text())
    asked = {"r": recipe.rank, "lora_alpha": recipe.alpha, **recipe.options}
    assert {key: config[key] for key in asked} == asked
    adapter = read_adapter(recipe.folder, load_model_config(base.folder), max_rank=16)
    pattern = recipe.options.get("rank_pattern", {})
    assert {(module, pair.rank) for (_, module), pair in adapter.pairs.items()} == {
        (module, pattern.get(module, recipe.rank)) for module in MODULES
    }


def test_the_adapters_differ_in_rank_and_use_rslora_and_patterns() -> None:
    assert len({recipe.rank for recipe in RECIPES}) > 1
    for key in ("use_rslora", "rank_pattern", "alpha_pattern"):
        assert 0 < sum(key in recipe.options for recipe in RECIPES) < len(RECIPES)


def test_everything_is_small_enough_to_commit() -> None:
    assert sum(path.stat().st_size for path in ADAPTERS_DIR.rglob("*") if path.is_file()) <= MAX_TOTAL_BYTES
    files = [path for path in ADAPTERS_DIR.parent.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert sum(path.stat().st_size for path in files) <= MAX_DEMO_BYTES
