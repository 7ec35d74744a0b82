"""The facts of a checkpoint's config.json that the model needs, with transformers' defaults. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from model.config_reader import ConfigReader
from model.errors import ModelError

ARCHITECTURES = {"cohere": "CohereForCausalLM", "cohere2": "Cohere2ForCausalLM"}
DEFAULT_ROPE_THETA = {"cohere": 500000.0, "cohere2": 10000.0}
DEFAULT_WINDOW = 4096
DEFAULT_WINDOW_PATTERN = 4
# Keys that change the maths; any other value than these is a model that is not built here.
ONLY_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "position_embedding_type": ("rope_gptj",),
    "order_of_interleaved_layers": ("local_attn_first",),
    "use_parallel_block": (True,),
    "use_gated_activation": (True,),
    "rotary_pct": (1,),
    "partial_rotary_factor": (1,),
    "quantization_config": (),
}


@dataclasses.dataclass(frozen=True, slots=True)
class ModelConfig:
    """Geometry and constants of one Cohere or Cohere2 checkpoint.

    `rope_theta` is the base of the rotary angles, `logit_scale` multiplies every logit, `sliding_window` counts the
    query itself and is None where no layer slides; `layer_is_sliding` has one entry per layer. `torch_dtype` is the
    key as written, without "torch.", or None.
    """

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    layer_norm_eps: float
    logit_scale: float
    rope_theta: float
    attention_bias: bool
    use_qk_norm: bool
    tie_word_embeddings: bool
    max_position_embeddings: int
    model_max_length: int | None
    sliding_window: int | None
    layer_is_sliding: tuple[bool, ...]
    torch_dtype: str | None

    @property
    def longest_context(self) -> int:
        """Tokens: the larger of max_position_embeddings and model_max_length; Command R v01 says 8192 and 131072."""
        return max(self.max_position_embeddings, self.model_max_length or 0)

    def window(self, layer: int) -> int | None:
        """Keys that a query of this layer sees, itself included; None sees all."""
        return self.sliding_window if self.layer_is_sliding[layer] else None

    def has_rotary(self, layer: int) -> bool:
        """Cohere rotates on every layer; Cohere2 on sliding layers only."""
        return self.model_type == "cohere" or self.layer_is_sliding[layer]


def load_model_config(model_dir: Path) -> ModelConfig:
    """Reads `model_dir`/config.json.

    Raises:
        ModelError: no file, no JSON, an architecture or a key whose value is not built here, numbers that do not fit.
    """
    path = model_dir / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} cannot be read as a model configuration: {error}.") from None
    if not isinstance(raw, dict):
        raise ModelError(f"{path} must hold a JSON object, not a {type(raw).__name__}.")
    return parse_model_config(raw)


def parse_model_config(raw: dict[str, Any]) -> ModelConfig:
    """Turns the object of a config.json into a ModelConfig; raises ModelError as `load_model_config` does."""
    reader = ConfigReader(raw)
    model_type = _model_type(reader)
    for key, allowed in ONLY_VALUES.items():
        reader.refuse_unless(key, allowed)
    hidden_size = reader.integer("hidden_size", 8192)
    num_heads = reader.integer("num_attention_heads", 64)
    num_layers = reader.integer("num_hidden_layers", 40)
    layer_is_sliding = _layer_kinds(reader, num_layers) if model_type == "cohere2" else (False,) * num_layers
    config = ModelConfig(
        model_type=model_type,
        hidden_size=hidden_size,
        intermediate_size=reader.integer("intermediate_size", 22528),
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=reader.integer("num_key_value_heads", num_heads),
        head_dim=reader.integer("head_dim", hidden_size // num_heads),
        vocab_size=reader.integer("vocab_size", 256000),
        layer_norm_eps=reader.number("layer_norm_eps", 1e-5),
        logit_scale=reader.number("logit_scale", 0.0625),
        rope_theta=_rope_theta(reader, DEFAULT_ROPE_THETA[model_type]),
        attention_bias=reader.boolean("attention_bias", False),
        use_qk_norm=model_type == "cohere" and reader.boolean("use_qk_norm", False),
        tie_word_embeddings=reader.boolean("tie_word_embeddings", True),
        max_position_embeddings=reader.integer("max_position_embeddings", 8192),
        model_max_length=reader.integer("model_max_length", None),
        sliding_window=reader.integer("sliding_window", DEFAULT_WINDOW) if any(layer_is_sliding) else None,
        layer_is_sliding=layer_is_sliding,
        torch_dtype=_dtype(reader),
    )
    _check_geometry(config)
    return config


def _model_type(reader: ConfigReader) -> str:
    model_type = reader.text("model_type", None)
    if model_type not in ARCHITECTURES:
        raise ModelError(f"model_type {model_type!r} is not supported; it must be one of {', '.join(ARCHITECTURES)}.")
    architectures = reader.get("architectures") or [ARCHITECTURES[model_type]]
    if architectures != [ARCHITECTURES[model_type]]:
        raise ModelError(
            f"architectures {architectures!r} does not go with model_type {model_type!r}; "
            f"supported is {ARCHITECTURES[model_type]!r} alone."
        )
    return model_type


def _layer_kinds(reader: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """True for each sliding layer: `layer_types`, else every n-th layer is full by `sliding_window_pattern`."""
    kinds = reader.get("layer_types")
    if kinds is None:
        pattern = reader.integer("sliding_window_pattern", DEFAULT_WINDOW_PATTERN)
        return tuple((layer + 1) % pattern != 0 for layer in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ModelError(f"layer_types must list one kind for each of the {num_layers} layers.")
    for kind in kinds:
        if kind not in ("sliding_attention", "full_attention"):
            raise ModelError(f"layer_types has the unknown kind {kind!r}; use sliding_attention or full_attention.")
    return tuple(kind == "sliding_attention" for kind in kinds)


def _rope_theta(reader: ConfigReader, default: float) -> float:
    """The base from rope_parameters (or the older rope_scaling) and from the top level, which must agree."""
    found = {}
    if reader.get("rope_theta") is not None:
        found["rope_theta"] = reader.number("rope_theta", default)
    for key in ("rope_parameters", "rope_scaling"):
        theta = _nested_theta(reader, key)
        if theta is not None:
            found[f"{key}.rope_theta"] = theta
    if len(set(found.values())) > 1:
        said = ", ".join(f"{key} = {value:g}" for key, value in found.items())
        raise ModelError(f"The configuration contradicts itself: {said}; keep the one the model was trained with.")
    return next(iter(found.values()), default)


def _nested_theta(reader: ConfigReader, key: str) -> float | None:
    nested = reader.get(key)
    if nested is None:
        return None
    if not isinstance(nested, dict):
        raise ModelError(f"{key} must be an object or null, not {nested!r}.")
    inner = ConfigReader(nested, f"{key}.")
    for name in nested:
        if name not in ("rope_type", "type", "rope_theta", "partial_rotary_factor"):
            raise ModelError(f"{key}.{name} is not supported; only the default rotary embedding is.")
    inner.refuse_unless("rope_type", ("default",))
    inner.refuse_unless("type", ("default",))
    inner.refuse_unless("partial_rotary_factor", (1,))
    return inner.number("rope_theta", 0.0) if inner.get("rope_theta") is not None else None


def _dtype(reader: ConfigReader) -> str | None:
    written = reader.text("dtype", None) or reader.text("torch_dtype", None)
    return written.removeprefix("torch.") if written else None


def _check_geometry(config: ModelConfig) -> None:
    if config.num_attention_heads % config.num_key_value_heads:
        raise ModelError(
            f"num_attention_heads {config.num_attention_heads} must be a multiple of "
            f"num_key_value_heads {config.num_key_value_heads}."
        )
    if config.head_dim % 2:
        raise ModelError(f"head_dim {config.head_dim} must be even, as the rotary embedding turns pairs.")
