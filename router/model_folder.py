"""Finds the checkpoint's folder and reads what the router needs to know of it; the weights are the shards' part."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from router.errors import StartupError

# What is served, as (model_type, architecture).
FAMILIES = {"cohere": "CohereForCausalLM", "cohere2": "Cohere2ForCausalLM"}
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]
WEIGHTS_FILE, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclasses.dataclass(frozen=True, slots=True)
class ModelFacts:
    """The geometry that GetModel reports, and the default temperature."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    sliding_window: int  # 0: no layer slides
    default_temperature: float = 1.0


def resolve_model(model: str) -> Path:
    """The checkpoint's folder: `model` itself, or the Hub id's snapshot, fetched with a progress bar if need be.

    Raises StartupError if there is none.
    """
    if not model:
        raise StartupError("--model is required: a checkpoint folder or a Hugging Face Hub id")
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise StartupError(f"the model folder {model} does not exist or is no folder")
    return _from_hub(model)


def _from_hub(model: str) -> Path:
    import huggingface_hub  # Slow to import, and most starts do without.
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=HUB_PATTERNS))
    except HFValidationError as error:
        raise StartupError(f"{model!r} is neither a folder nor a Hugging Face Hub id") from error
    except LocalEntryNotFoundError as error:
        offline = huggingface_hub.constants.HF_HUB_OFFLINE
        why = "HF_HUB_OFFLINE is set and it is not in the cache" if offline else "the Hub cannot be reached"
        raise StartupError(f"the model {model!r} is no folder here and was not found on the Hub: {why}") from error
    except Exception as error:  # The Hub's client raises errors of several HTTP libraries.
        reason = str(error).strip().partition("\n")[0]
        raise StartupError(f"the model {model!r} is no folder here and could not be fetched: {reason}") from error


def read_model_facts(folder: Path, is_dummy: bool = False) -> ModelFacts:
    """Reads config.json and generation_config.json and looks that the weights' files are there.

    Raises StartupError that names the file and key at fault. `is_dummy`: the weights are random, no file is needed.
    """
    config = read_json(folder / "config.json")
    if config is None:
        raise StartupError(f"{folder} has no config.json; --model needs a checkpoint folder as published")
    model_type = _family(config, folder)
    if not is_dummy:
        _check_weight_files(folder)
    heads = _count(config, "num_attention_heads", folder)
    hidden_size = _count(config, "hidden_size", folder)
    return ModelFacts(
        model_type=model_type,
        hidden_size=hidden_size,
        intermediate_size=_count(config, "intermediate_size", folder),
        num_hidden_layers=_count(config, "num_hidden_layers", folder),
        num_attention_heads=heads,
        num_key_value_heads=_count(config, "num_key_value_heads", folder, heads),
        head_dim=_count(config, "head_dim", folder, hidden_size // heads),
        sliding_window=_count(config, "sliding_window", folder, 4096) if model_type == "cohere2" else 0,
        default_temperature=_default_temperature(read_json(folder / "generation_config.json") or {}, folder),
    )


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None where there is no such file. Raises StartupError if it is anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise StartupError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise StartupError(f"{path} has to hold a JSON object")
    return value


def _family(config: dict[str, Any], folder: Path) -> str:
    model_type = config.get("model_type")
    architectures = config.get("architectures") or []
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = " and ".join(FAMILIES)
        raise StartupError(f"{folder}/config.json: model_type {model_type!r} is not served; {known} are")
    if architectures and architectures != [FAMILIES[model_type]]:
        raise StartupError(
            f"{folder}/config.json: architectures {architectures} does not fit model_type {model_type!r}, "
            f"which is {FAMILIES[model_type]}"
        )
    return model_type


def _check_weight_files(folder: Path) -> None:
    index = read_json(folder / WEIGHTS_INDEX)
    if index is None:
        if not (folder / WEIGHTS_FILE).exists():
            raise StartupError(f"{folder} has neither {WEIGHTS_FILE} nor {WEIGHTS_INDEX}")
        return
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise StartupError(f"{folder / WEIGHTS_INDEX} has no weight_map")
    for name in sorted({str(name) for name in weight_map.values()}):
        if not (folder / name).exists():
            raise StartupError(f"{folder} lacks {name}, which {WEIGHTS_INDEX} names")


def _count(config: dict[str, Any], key: str, folder: Path, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise StartupError(f"{folder}/config.json: {key} must be a whole number of at least 1, not {value!r}")
    return value


def _default_temperature(generation_config: dict[str, Any], folder: Path) -> float:
    value = generation_config.get("temperature")
    if value is None:
        return 1.0
    if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise StartupError(f"{folder}/generation_config.json: temperature must be at least 0, not {value!r}")
    return float(value)
