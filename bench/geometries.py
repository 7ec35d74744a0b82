"""Published Cohere geometries as config.json facts, so that weights can be drawn at random in their shape.

aya-8b is Aya 23 8B, command-r-32b Command R 08-2024, command-r7b Command R7B 12-2024, command-a Command A 03-2025;
tiny is ours, for trying the machinery on any machine, and cpu-107m is the one that `make bench` serves.
"""

from __future__ import annotations

Config = dict[str, object]

_COHERE: Config = {
    "architectures": ["CohereForCausalLM"],
    "model_type": "cohere",
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "layer_norm_eps": 1e-5,
    "use_qk_norm": False,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "use_cache": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 256000,
    "pad_token_id": 0,
    "bos_token_id": 5,
    "eos_token_id": 255001,
}
_COHERE2: Config = _COHERE | {
    "architectures": ["Cohere2ForCausalLM"],
    "model_type": "cohere2",
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "rope_theta": 50000.0,
    "logit_scale": 0.25,
}


def _shape(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, positions: int) -> Config:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": positions,
    }


GEOMETRIES: dict[str, Config] = {
    "tiny": _COHERE
    | _shape(256, 512, 4, 4, 2, 2048)
    | {"vocab_size": 1024, "eos_token_id": 3, "logit_scale": 0.0625, "rope_theta": 10000.0},
    "cpu-107m": _COHERE
    | _shape(768, 2304, 12, 12, 4, 2048)
    | {"vocab_size": 32000, "bos_token_id": 2, "eos_token_id": 3, "logit_scale": 0.0625, "rope_theta": 10000.0},
    "aya-8b": _COHERE | _shape(4096, 14336, 32, 32, 8, 8192) | {"logit_scale": 0.125, "rope_theta": 10000.0},
    "command-r-32b": _COHERE
    | _shape(8192, 24576, 40, 64, 8, 131072)
    | {"logit_scale": 0.0625, "rope_theta": 4000000.0},
    "command-r7b": _COHERE2 | _shape(4096, 14336, 32, 32, 8, 132096),
    "command-a": _COHERE2 | _shape(12288, 36864, 64, 96, 8, 131072),
}
"""config.json by name. The Cohere2 ones carry no `layer_types`: their pattern, three sliding to one full, says it."""


def num_parameters(config: Config) -> int:
    """Weights of a geometry, the tied embedding counted once, norms included."""
    size = {name: value for name, value in config.items() if isinstance(value, int)}
    hidden, heads, kv_heads = size["hidden_size"], size["num_attention_heads"], size["num_key_value_heads"]
    head_dim = hidden // heads
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    layer = attention + 3 * hidden * size["intermediate_size"] + hidden
    return size["vocab_size"] * hidden + size["num_hidden_layers"] * layer + hidden
