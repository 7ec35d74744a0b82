"""Geometries and the model folders made from them."""

import json
from pathlib import Path

import pytest

from bench.checkpoint import write_checkpoint, write_geometry
from bench.geometries import GEOMETRIES, num_parameters


@pytest.mark.parametrize(
    ("name", "billions"),
    # The sizes that the models' cards state.
    [("aya-8b", 8.0), ("command-r-32b", 32.3), ("command-r7b", 8.0), ("command-a", 111.0), ("cpu-107m", 0.107)],
)
def test_a_geometry_has_as_many_weights_as_its_model(name: str, billions: float) -> None:
    assert num_parameters(GEOMETRIES[name]) / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_geometry_folder_has_a_word_for_every_token_and_no_weights(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    write_geometry(tmp_path, GEOMETRIES["tiny"])
    assert json.loads((tmp_path / "config.json").read_text())["hidden_size"] == 256
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 1024
    assert tokenizer.decode([5, 1023]) == "w5w1023"
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_checkpoint_is_the_same_each_time_and_transformers_reads_its_config_back(tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoConfig

    config = GEOMETRIES["tiny"] | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    folders = [tmp_path / "a", tmp_path / "b"]
    counts = [write_checkpoint(folder, config) for folder in folders]
    assert counts == [num_parameters(config)] * 2
    first, second = [load_file(folder / "model.safetensors") for folder in folders]
    assert all((first[name] == second[name]).all() for name in first) and first.keys() == second.keys()
    read = AutoConfig.from_pretrained(folders[0])
    assert read.model_type == "cohere" and read.num_key_value_heads == 2 and read.logit_scale == 0.0625
    assert read.rope_parameters["rope_theta"] == 10000.0
