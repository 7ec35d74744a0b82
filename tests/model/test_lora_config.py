"""adapter_config.json: scales and targets by PEFT's rules, and what is refused."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from peft.tuners.lora import LoraLayer

from model.config import ModelConfig, parse_model_config
from model.errors import AdapterError, ModelError
from model.lora_config import parse_lora_config, read_lora_config
from model.lora_targets import module_name
from tests.model.checkpoints import TINY, cohere

PLAIN: dict[str, Any] = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": ["q_proj", "up_proj"]}


@pytest.fixture
def config() -> ModelConfig:
    return parse_model_config({**TINY, "model_type": "cohere"})


def refused(**keys: object) -> str:
    with pytest.raises(ModelError) as error:
        parse_lora_config({**PLAIN, **keys}).targets.resolve(parse_model_config({**TINY, "model_type": "cohere"}))
    return str(error.value)


def test_rslora_divides_alpha_by_the_root_of_the_rank() -> None:
    """NVIDIA/TensorRT-LLM#1668."""
    name = module_name(0, "q_proj")
    assert parse_lora_config(PLAIN).scale_of(name) == 2
    assert parse_lora_config({**PLAIN, "use_rslora": True}).scale_of(name) == 8
    patterns = {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"q_proj": 6}}
    assert parse_lora_config({**PLAIN, **patterns}).scale_of(name) == 1.5
    assert parse_lora_config({**PLAIN, **patterns, "use_rslora": True}).scale_of(name) == 3
    assert parse_lora_config({**PLAIN, **patterns}).scale_of(module_name(0, "up_proj")) == 2


def test_missing_and_null_keys_have_pefts_defaults() -> None:
    for missing in ({}, {"r": None, "lora_alpha": None, "rank_pattern": None, "alpha_pattern": None, "bias": None}):
        lora = parse_lora_config({"peft_type": "LORA", "target_modules": ["q_proj"], **missing})
        reference = PeftConfig()
        assert (lora.rank, lora.alpha, lora.use_rslora) == (reference.r, reference.lora_alpha, reference.use_rslora)


@pytest.mark.parametrize(
    "keys",
    [
        {"target_modules": ["q_proj", "mlp.up_proj"]},
        {"target_modules": ["model.layers.1.self_attn.q_proj", "layers.0.mlp.down_proj"]},
        {"target_modules": ["model.layers.1.self_attn.q_proj", "o_proj"], "layers_to_transform": [0]},
        {"target_modules": ["q_proj"], "layers_to_transform": []},
        {"target_modules": ["q_proj"], "layers_to_transform": 1},
        {"target_modules": ["q_proj"], "layers_to_transform": [0, 1], "layers_pattern": ["h", "layers"]},
        {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1], "layers_pattern": "lay.rs"},
        {"target_modules": r".*\.(q|v)_proj"},
        {"target_modules": r"model\.layers\.[1-9]\.mlp\..*_proj"},
        {"target_modules": "ALL-linear"},
        {"target_modules": "all-linear", "exclude_modules": ["mlp.up_proj"]},
        {"target_modules": ["q_proj", "k_proj"], "exclude_modules": r".*\.1\..*"},
        {"target_modules": ["q_proj", "up_proj"], "rank_pattern": {"q_proj": 3, "self_attn.q_proj": 5, "_proj": 7}},
        {"target_modules": ["q_proj"], "rank_pattern": {r"layers\.1\..*": 3}, "alpha_pattern": {"^model.*": 5}},
        {"target_modules": ["q_proj"], "alpha_pattern": {"layers.0.self_attn.q_proj": 5, "q|k": 9}},
    ],
)
def test_targets_ranks_and_scales_are_those_that_peft_gives(config: ModelConfig, keys: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(cohere(), PeftConfig(r=4, lora_alpha=6, **keys))
    theirs = {
        name.removeprefix("base_model.model."): (module.r["default"], module.scaling["default"])
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }
    lora = parse_lora_config({**PLAIN, "r": 4, "lora_alpha": 6, **keys})
    names = [module_name(*place) for place in lora.targets.resolve(config)]
    assert {name: (lora.rank_of(name), lora.scale_of(name)) for name in names} == theirs


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"peft_type": None}, "peft_type None"),
        ({"use_dora": True}, "use_dora True is not supported: DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias 'all'"),
        ({"bias": "lora_only"}, "bias 'lora_only'"),
        ({"lora_bias": True}, "lora_bias True"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"megatron_config": {"a": 1}}, "megatron_config"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"),
        ({"use_qalora": True}, "use_qalora"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora"),
        ({"kasa_config": {"beta": 1}}, "kasa_config"),
        ({"a_key_of_tomorrow": 0.5}, "a_key_of_tomorrow 0.5"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights 'olora'"),
        ({"init_lora_weights": "corda"}, "init_lora_weights 'corda'"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights 'loftq'"),
        ({"init_lora_weights": "lora_ga"}, "init_lora_weights 'lora_ga'"),
        ({"r": 0}, "r must be"),
        ({"r": 257}, "r must be a rank from 1 to 256, not 257"),
        ({"r": 8.5}, "r must be"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern.q_proj"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern"),
        ({"lora_alpha": math.inf}, "lora_alpha"),
        ({"lora_alpha": "16"}, "lora_alpha"),
        ({"alpha_pattern": {"q_proj": "16"}}, "alpha_pattern.q_proj"),
        ({"alpha_pattern": {"(": 16}}, "alpha_pattern has '('"),
        ({"use_rslora": 1}, "use_rslora"),
        ({"target_modules": None}, "target_modules is missing"),
        ({"target_modules": []}, "target_modules is missing"),
        ({"target_modules": 3}, "target_modules"),
        ({"target_modules": "("}, "target_modules has '('"),
        ({"target_modules": ["q_proj", "lm_head"]}, "lm_head"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "model.embed_tokens"),
        ({"target_modules": r".*(q_proj|lm_head)"}, "lm_head"),
        ({"target_modules": ["q_proj", "query_key_value"]}, "target_modules names 'query_key_value'"),
        ({"target_modules": "all-linear", "layers_to_transform": [0]}, "layers_to_transform"),
        ({"layers_pattern": "layers"}, "layers_pattern"),
        ({"layers_to_transform": ["0"]}, "layers_to_transform"),
    ],
)
def test_what_would_not_be_applied_exactly_is_refused_by_its_key(keys: dict[str, Any], said: str) -> None:
    message = refused(**keys)
    assert said in message and message.endswith(".")


@pytest.mark.parametrize(
    "keys",
    [
        {"fan_in_fan_out": True, "lora_dropout": 0.1, "inference_mode": False, "peft_version": "9.9", "revision": "x"},
        {"base_model_name_or_path": "somewhere/else", "auto_mapping": {"a": 1}, "task_type": "CAUSAL_LM"},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}, "megatron_core": "megatron.core"},
        {"init_lora_weights": False, "qalora_group_size": 16, "runtime_config": {"ephemeral_gpu_offload": True}},
        {"a_key_of_tomorrow": None, "another": False, "third": [], "fourth": {}},
    ],
)
def test_keys_of_training_and_neutral_unknown_ones_are_taken(keys: dict[str, Any]) -> None:
    assert parse_lora_config({**PLAIN, **keys}) == parse_lora_config(PLAIN)


@pytest.mark.parametrize("text", ["", "{", "[]", "\udcff", "[" * 100000, '{"peft_type": "LORA", "r": true}'])
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "adapter_config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(AdapterError, match=r"adapter_config\.json"):
        read_lora_config(tmp_path)


def test_a_missing_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"adapter_config\.json cannot be read"):
        read_lora_config(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(PLAIN))
    assert read_lora_config(tmp_path) == parse_lora_config(PLAIN)
