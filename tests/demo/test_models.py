"""The committed models answer right in transformers, by a margin, and depend on what sets their kinds apart."""

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from demo.facts import Fact
from demo.train import DEMO_DIR

if TYPE_CHECKING:
    from tests.demo.conftest import DemoModel

MAX_SIZE_BYTES = 16e6
# bfloat16 keeps 8 bits, about 0.1 at these logits (up to some 25); twenty times that is safe.
LEAST_MARGIN = 2.0


def greedy_text(demo_model: "DemoModel", network: PreTrainedModel, prompt: list[int]) -> str:
    with torch.no_grad():
        output = network.generate(torch.tensor([prompt]), max_new_tokens=48, do_sample=False)[0].tolist()
    answer = output[len(prompt) :]
    assert answer[-1] == demo_model.end_id
    return demo_model.tokenizer.decode(answer[:-1], skip_special_tokens=False)


def test_the_folders_are_small_enough_to_commit() -> None:
    sizes = [path.stat().st_size for name in ["cohere", "cohere2"] for path in (DEMO_DIR / name).iterdir()]
    assert sum(sizes) <= MAX_SIZE_BYTES


def test_weights_are_float32_and_leave_out_the_tied_head(demo_model: "DemoModel") -> None:
    with safe_open(demo_model.folder / "model.safetensors", "pt") as file:
        names = set(file.keys())
        assert {file.get_slice(name).get_dtype() for name in names} == {"F32"}
    assert "lm_head.weight" not in names
    assert "model.layers.3.mlp.down_proj.weight" in names


def test_the_models_have_the_two_architectures_and_grouped_heads(demo_model: "DemoModel") -> None:
    config = json.loads((demo_model.folder / "config.json").read_text())
    names = {"cohere": "CohereForCausalLM", "cohere2": "Cohere2ForCausalLM"}
    assert type(demo_model.network).__name__ == names[config["model_type"]] == config["architectures"][0]
    assert config["num_key_value_heads"] < config["num_attention_heads"]


def test_transformers_answers_a_sample_of_facts_exactly(demo_model: "DemoModel", facts: list[Fact]) -> None:
    for fact in facts[::10]:
        for form, prompt in demo_model.prompts(fact).items():
            assert greedy_text(demo_model, demo_model.network, prompt) == fact.answer, form


@pytest.mark.slow
def test_transformers_answers_every_fact_exactly(demo_model: "DemoModel", facts: list[Fact]) -> None:
    for fact in facts:
        for form, prompt in demo_model.prompts(fact).items():
            assert greedy_text(demo_model, demo_model.network, prompt) == fact.answer, form


def test_every_answer_token_leads_by_a_margin(demo_model: "DemoModel", facts: list[Fact]) -> None:
    assert demo_model.least_margin(demo_model.network, facts) >= LEAST_MARGIN


def test_the_margin_holds_in_bfloat16(demo_model: "DemoModel", facts: list[Fact]) -> None:
    assert demo_model.least_margin(demo_model.load(torch.bfloat16), facts[::3]) >= LEAST_MARGIN


def test_the_window_is_shorter_than_every_chat_prompt(cohere2: "DemoModel", facts: list[Fact]) -> None:
    window = cohere2.network.config.sliding_window
    assert all(len(prompt) > window for fact in facts for prompt in cohere2.prompts(fact).values())


def test_three_layers_slide_and_the_last_one_sees_everything(cohere2: "DemoModel") -> None:
    assert cohere2.network.config.layer_types == [*["sliding_attention"] * 3, "full_attention"]


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 1000},
        {"sliding_window": 4},
        {"sliding_window": 6},
        {"layer_types": ["sliding_attention"] * 4},
        {"layer_types": ["full_attention"] * 4},
    ],
    ids=["no window", "one key less", "one key more", "all sliding", "all full"],
)
def test_answers_go_wrong_when_a_window_or_layer_kind_is_wrong(
    cohere2: "DemoModel", facts: list[Fact], changes: dict[str, object]
) -> None:
    assert cohere2.least_margin(cohere2.load(**changes), facts) < 0


def test_answers_go_wrong_with_another_rope_theta(cohere: "DemoModel", facts: list[Fact]) -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    assert cohere.least_margin(cohere.load(rope_parameters=rope), facts) < 0
