"""Finding a checkpoint and refusing what is none, before any shard starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from router.errors import StartupError
from router.model_folder import WEIGHTS_FILE, WEIGHTS_INDEX, read_model_facts, resolve_model

DEMO = Path(__file__).resolve().parents[2] / "demo"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("config.json", "generation_config.json"):
        shutil.copy(DEMO / "cohere" / name, tmp_path / name)
    (tmp_path / WEIGHTS_FILE).touch()
    return tmp_path


def change(folder: Path, name: str, **values: object) -> None:
    path = folder / name
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | values))


def refusal(folder: Path) -> str:
    with pytest.raises(StartupError) as refused:
        read_model_facts(folder)
    return str(refused.value)


def test_geometry_is_that_of_the_configuration(folder: Path) -> None:
    facts = read_model_facts(folder)
    config = json.loads((folder / "config.json").read_text())
    assert (facts.model_type, facts.hidden_size) == ("cohere", config["hidden_size"])
    assert facts.head_dim == config["hidden_size"] // config["num_attention_heads"]
    assert facts.sliding_window == 0
    assert read_model_facts(DEMO / "cohere2").sliding_window > 0


@pytest.mark.parametrize(("value", "temperature"), [(0.3, 0.3), (0, 0.0), (None, 1.0)])
def test_the_default_temperature_is_generation_configs(folder: Path, value: float | None, temperature: float) -> None:
    change(folder, "generation_config.json", temperature=value)
    assert read_model_facts(folder).default_temperature == temperature


def test_without_a_generation_config_the_temperature_is_one(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    assert read_model_facts(folder).default_temperature == 1.0


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"model_type": "llama"}, "model_type 'llama'"),
        ({"model_type": "cohere2_moe"}, "cohere2_moe"),
        ({"model_type": None}, "model_type None"),
        ({"architectures": ["Cohere2ForCausalLM"]}, "does not fit model_type 'cohere'"),
        ({"architectures": ["Cohere2VisionForConditionalGeneration"]}, "Cohere2Vision"),
        ({"hidden_size": "big"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_attention_heads": None}, "num_attention_heads"),
    ],
)
def test_a_configuration_that_is_not_served_is_refused_by_key(
    folder: Path, values: dict[str, Any], reason: str
) -> None:
    change(folder, "config.json", **values)
    assert reason in refusal(folder)


def test_files_that_are_missing_or_broken_are_named(folder: Path) -> None:
    (folder / WEIGHTS_FILE).unlink()
    assert WEIGHTS_FILE in refusal(folder)
    change(folder, WEIGHTS_INDEX, weight_map={"a": "model-00001-of-00002.safetensors"})
    assert "model-00001-of-00002.safetensors" in refusal(folder)
    change(folder, WEIGHTS_INDEX, weight_map={})
    assert "weight_map" in refusal(folder)
    (folder / WEIGHTS_INDEX).write_text("{")
    assert "not valid JSON" in refusal(folder)
    (folder / "config.json").write_text("[]")
    assert "JSON object" in refusal(folder)
    (folder / "config.json").unlink()
    assert "no config.json" in refusal(folder)


def test_random_weights_need_no_files(folder: Path) -> None:
    (folder / WEIGHTS_FILE).unlink()
    assert read_model_facts(folder, is_dummy=True).hidden_size > 0


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("", "--model is required"),
        ("./nowhere", "does not exist"),
        ("/no/where", "does not exist"),
        ("a b", "neither a folder nor"),
        ("cohort-tests/not-in-any-cache", "HF_HUB_OFFLINE is set"),
    ],
)
def test_a_model_that_is_nowhere_is_refused_in_one_sentence(
    model: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(StartupError) as refused:
        resolve_model(model)
    assert reason in str(refused.value) and "\n" not in str(refused.value)


def test_a_folder_is_taken_as_it_is(folder: Path) -> None:
    assert resolve_model(str(folder)) == folder
