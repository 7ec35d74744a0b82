"""The facts of a PEFT adapter_config.json: ranks, scales and targets; what would change the maths is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from model.config_reader import ConfigReader
from model.errors import AdapterError, ModelError
from model.lora_targets import Targets, check_expression, read_targets

Number = TypeVar("Number", int, float)
CONFIG_FILE = "adapter_config.json"
DEFAULT_RANK = DEFAULT_ALPHA = 8  # PEFT's
MAX_RANK = 256
# Ways to start a training that leave the base weights as they are; the others store an adapter to changed ones.
PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal", "mica")
# Keys whose every value is right here: they describe where an adapter comes from or act in training only.
# fan_in_fan_out is about the base weight's layout: PEFT itself corrects it for a linear module, A and B never change.
HARMLESS = frozenset(
    [
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_alpha",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "r",
        "rank_pattern",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
        "use_rslora",
        "velora_config",
    ]
)
REASONS = {
    "use_dora": "DoRA rescales the base weights",
    "modules_to_save": "whole modules inside an adapter would replace the base model's for every request",
    "lora_bias": "a bias on B is not applied",
    "trainable_token_indices": "embeddings are shared by all adapters",
    "megatron_config": "Megatron's layers are not these",
    "alora_invocation_tokens": "adapters that begin in the middle of a prompt are not applied",
    "layer_replication": "it changes the number of layers",
    "target_parameters": "only the weights of linear modules are adapted",
}


@dataclasses.dataclass(frozen=True, slots=True)
class LoraConfig:
    """Rank, alpha and targets of every module, by PEFT's rules for names such as model.layers.0.mlp.up_proj.

    A pattern's key is a regular expression for the end of a name, from one of its dots on; the first that fits counts.
    """

    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]
    targets: Targets

    def rank_of(self, name: str) -> int:
        """r of a module."""
        return next(_fitting(self.rank_pattern, name), self.rank)

    def scale_of(self, name: str) -> float:
        """What B (A x) is multiplied by: alpha / r, or alpha / sqrt(r) with rsLoRA."""
        rank = self.rank_of(name)
        alpha = next(_fitting(self.alpha_pattern, name), self.alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def read_lora_config(folder: Path) -> LoraConfig:
    """Reads `folder`/adapter_config.json.

    Raises:
        AdapterError: no file, no JSON, another method than LoRA, or a key with a value that is not applied exactly.
    """
    path = folder / CONFIG_FILE
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(f"{CONFIG_FILE} cannot be read: {error}.") from None
    if not isinstance(raw, dict):
        raise AdapterError(f"{CONFIG_FILE} must hold a JSON object, not a {type(raw).__name__}.")
    try:
        return parse_lora_config(raw)
    except ModelError as error:
        raise AdapterError(f"{CONFIG_FILE}: {error}") from None


def parse_lora_config(raw: dict[str, Any]) -> LoraConfig:
    """Turns the object of an adapter_config.json into a LoraConfig; raises ModelError for what is not applied."""
    reader = ConfigReader(raw)
    if reader.text("peft_type", None) != "LORA":
        raise AdapterError(f"peft_type {reader.get('peft_type')!r} is not supported; only LORA adapters are.")
    _check_keys(raw)
    _check_start(reader.get("init_lora_weights"))
    return LoraConfig(
        rank=_rank("r", reader.integer("r", DEFAULT_RANK)),
        alpha=_finite("lora_alpha", reader.number("lora_alpha", DEFAULT_ALPHA)),
        use_rslora=reader.boolean("use_rslora", False),
        rank_pattern={key: _rank(f"rank_pattern.{key}", value) for key, value in _pattern(reader, "rank_pattern")},
        alpha_pattern={key: _finite(f"alpha_pattern.{key}", value) for key, value in _pattern(reader, "alpha_pattern")},
        targets=read_targets(reader),
    )


def _check_keys(raw: dict[str, Any]) -> None:
    for key, value in raw.items():
        if key in HARMLESS or key in ("peft_type", "init_lora_weights") or not value:
            continue
        if key == "bias":
            if value != "none":
                raise AdapterError(f"bias {value!r} is not supported; trained biases would be lost, so only 'none' is.")
            continue
        reason = REASONS.get(key, "the key is unknown here and may change what the adapter computes")
        raise AdapterError(f"{key} {value!r} is not supported: {reason}.")


def _check_start(start: object) -> None:
    if start is None or (start.lower() if isinstance(start, str) else start) in PLAIN_STARTS:
        return
    raise AdapterError(
        f"init_lora_weights {start!r} is not supported: training began by changing the base weights, which this "
        "adapter then needs; save it with path_initial_model_for_weight_conversion, which makes it a plain one."
    )


def _pattern(reader: ConfigReader, key: str) -> list[tuple[str, Any]]:
    value = reader.get(key)
    if value is None:
        return []
    if not isinstance(value, dict):
        raise AdapterError(f"{key} must be an object of names and numbers, not {value!r}.")
    for name in value:
        check_expression(key, name)
    return list(value.items())


def _fitting(pattern: dict[str, Number], name: str) -> Iterator[Number]:
    """Values of the keys that fit the end of a name."""
    return (value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", name))


def _rank(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_RANK:
        raise AdapterError(f"{key} must be a rank from 1 to {MAX_RANK}, not {value!r}.")
    return value


def _finite(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise AdapterError(f"{key} must be a finite number, not {value!r}.")
    return float(value)
