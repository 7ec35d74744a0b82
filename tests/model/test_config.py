"""Configuration files as real checkpoints have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Cohere2Config, CohereConfig

from model.config import load_model_config, parse_model_config
from model.errors import ModelError

V1: dict[str, Any] = {"model_type": "cohere", "architectures": ["CohereForCausalLM"]}
V2: dict[str, Any] = {"model_type": "cohere2", "architectures": ["Cohere2ForCausalLM"]}


@pytest.mark.parametrize("raw", [V1, V2])
def test_missing_and_null_keys_have_the_defaults_of_transformers(raw: dict[str, Any]) -> None:
    reference = CohereConfig() if raw is V1 else Cohere2Config()
    nulls = dict.fromkeys(["use_qk_norm", "logit_scale", "tie_word_embeddings", "head_dim", "layer_norm_eps"])
    for given in (raw, {**raw, **nulls}):
        config = parse_model_config(given)
        for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
            assert getattr(config, name) == getattr(reference, name)
        assert config.logit_scale == 0.0625 == reference.logit_scale
        assert config.tie_word_embeddings and not config.use_qk_norm and not config.attention_bias
        assert config.rope_theta == (500000.0 if raw is V1 else 10000.0)
        assert config.head_dim == config.hidden_size // config.num_attention_heads


@pytest.mark.parametrize(
    ("keys", "theta"),
    [
        ({"rope_theta": 8e6}, 8e6),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 8e6}}, 8e6),
        ({"rope_theta": 8e6, "rope_parameters": {"rope_theta": 8e6}}, 8e6),
        ({"rope_theta": None, "rope_scaling": None, "rope_parameters": None}, 500000.0),
    ],
)
def test_the_rope_base_is_found_wherever_it_stands(keys: dict[str, Any], theta: float) -> None:
    assert parse_model_config({**V1, **keys}).rope_theta == theta


def test_two_different_rope_bases_are_an_error_that_names_both() -> None:
    with pytest.raises(ModelError, match=r"rope_theta = 8e\+06, rope_parameters.rope_theta = 10000"):
        parse_model_config({**V1, "rope_theta": 8e6, "rope_parameters": {"rope_theta": 1e4}})


@pytest.mark.parametrize("value", ["missing", None, 0, -1, 4096])
def test_a_cohere_model_has_no_window_whatever_its_key_says(value: object) -> None:
    raw = V1 if value == "missing" else {**V1, "sliding_window": value}
    config = parse_model_config(raw)
    assert config.sliding_window is None and not any(config.layer_is_sliding)
    assert all(config.has_rotary(layer) for layer in range(config.num_hidden_layers))


def test_cohere2_layers_slide_three_times_and_rotate_only_then() -> None:
    config = parse_model_config({**V2, "num_hidden_layers": 8, "sliding_window": 8})
    assert config.layer_is_sliding == (True, True, True, False) * 2
    assert [config.window(layer) for layer in range(4)] == [8, 8, 8, None]
    assert [config.has_rotary(layer) for layer in range(4)] == [True, True, True, False]
    every_other = parse_model_config({**V2, "num_hidden_layers": 4, "sliding_window_pattern": 2})
    assert every_other.layer_is_sliding == (True, False, True, False)


def test_explicit_layer_kinds_win_over_the_pattern() -> None:
    kinds = ["full_attention", "sliding_attention"]
    config = parse_model_config({**V2, "num_hidden_layers": 2, "layer_types": kinds, "sliding_window_pattern": 4})
    assert config.layer_is_sliding == (False, True)


def test_cohere2_never_has_query_and_key_norms() -> None:
    assert not parse_model_config({**V2, "use_qk_norm": True}).use_qk_norm


@pytest.mark.parametrize(
    ("keys", "longest"),
    [
        ({"max_position_embeddings": 8192, "model_max_length": 131072}, 131072),
        ({"max_position_embeddings": 8192}, 8192),
        ({"max_position_embeddings": 131072, "model_max_length": 8192}, 131072),
    ],
)
def test_the_longest_context_is_the_larger_of_both_keys(keys: dict[str, Any], longest: int) -> None:
    assert parse_model_config({**V1, **keys}).longest_context == longest


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        ({**V1, "model_type": "llama"}, "llama"),
        ({**V1, "model_type": "cohere2_moe", "architectures": ["Cohere2MoeForCausalLM"]}, "cohere2_moe"),
        ({**V2, "model_type": "cohere"}, "Cohere2ForCausalLM"),
        ({**V1, "model_type": "cohere2"}, "CohereForCausalLM"),
        ({**V2, "architectures": ["Cohere2VisionForConditionalGeneration"]}, "Cohere2Vision"),
        ({**V1, "rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling"),
        ({**V1, "rope_parameters": {"rope_type": "yarn"}}, "yarn"),
        ({**V1, "hidden_act": "gelu"}, "hidden_act"),
        ({**V1, "quantization_config": {"bits": 4}}, "quantization_config"),
        ({**V1, "num_key_value_heads": 3}, "num_key_value_heads"),
        ({**V1, "hidden_size": "big"}, "hidden_size"),
        ({**V2, "num_hidden_layers": 2, "layer_types": ["full_attention"]}, "layer_types"),
        ({**V2, "num_hidden_layers": 1, "layer_types": ["linear_attention"]}, "linear_attention"),
    ],
)
def test_what_is_not_built_is_refused_by_name(raw: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        parse_model_config(raw)


@pytest.mark.parametrize("content", ["{", "[]", b"\xff\xfe"])
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, content: str | bytes) -> None:
    (tmp_path / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model_config(tmp_path)


@pytest.mark.parametrize(("key", "name"), [("torch_dtype", "bfloat16"), ("dtype", "float32")])
def test_the_dtype_key_may_have_either_name(tmp_path: Path, key: str, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**V1, key: f"torch.{name}"}))
    assert load_model_config(tmp_path).torch_dtype == name
