"""Where a setting's value comes from, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from router.config import FIELDS, RouterConfig, effective, load_config
from router.errors import StartupError

NUMBERS = [name for name, field in FIELDS.items() if type(field.default) in (int, float)]
SWITCHES = [name for name, field in FIELDS.items() if isinstance(field.default, bool)]
TEXTS = [name for name, field in FIELDS.items() if isinstance(field.default, str) and not field.metadata["choices"]]
LISTS = [name for name, field in FIELDS.items() if isinstance(field.default, tuple)]


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    return "COHORT_" + name.upper()


def from_both(name: str, text: str) -> list[Any]:
    """The value by flag, and by environment variable."""
    by_flag = load_config([f"{flag(name)}={text}"], {})
    by_variable = load_config([], {variable(name): text})
    return [getattr(by_flag, name), getattr(by_variable, name)]


def refusal(argv: list[str], environ: dict[str, str]) -> str:
    with pytest.raises(StartupError) as refused:
        load_config(argv, environ)
    return str(refused.value)


def test_the_flag_wins_over_the_variable_over_the_file_over_the_default(tmp_path: Path) -> None:
    path = tmp_path / "cohort.yaml"
    path.write_text("port: 3\nmax-num-seqs: 33\nmax_model_len: 333\n")
    environ = {"COHORT_PORT": "2", "COHORT_MAX_NUM_SEQS": "22"}
    config = load_config(["--config", str(path), "--port", "1"], environ)
    assert (config.port, config.max_num_seqs, config.max_model_len) == (1, 22, 333)
    assert config.run_ahead == RouterConfig().run_ahead


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "cohort.yaml"
    path.write_text("port: 4\n")
    assert load_config([], {"COHORT_CONFIG": str(path)}).port == 4


@pytest.mark.parametrize("name", NUMBERS)
def test_an_explicit_zero_is_honoured_or_refused_and_never_taken_for_unset(name: str) -> None:
    minimum = FIELDS[name].metadata["minimum"]
    if minimum <= 0:
        assert from_both(name, "0") == [0, 0]
    else:
        assert flag(name) in refusal([f"{flag(name)}=0"], {})
        assert variable(name) in refusal([], {variable(name): "0"})


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("text", ["", "false", "nan", "x"])
def test_what_is_no_number_is_refused_with_its_source(name: str, text: str) -> None:
    assert flag(name) in refusal([f"{flag(name)}={text}"], {})
    assert variable(name) in refusal([], {variable(name): text})


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize(("text", "value"), [("0", False), ("false", False), ("", False), ("1", True), ("True", True)])
def test_a_switch_is_set_and_unset_by_either_source(name: str, text: str, value: bool) -> None:
    assert from_both(name, text) == [value, value]


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_has_a_bare_and_a_negative_form(name: str) -> None:
    assert getattr(load_config([flag(name)], {variable(name): "false"}), name) is True
    assert getattr(load_config(["--no-" + name.replace("_", "-")], {variable(name): "true"}), name) is False
    assert "true or false" in refusal([f"{flag(name)}=maybe"], {})


@pytest.mark.parametrize("name", [*TEXTS, *LISTS])
def test_an_empty_text_overrides_what_comes_after_it(name: str, tmp_path: Path) -> None:
    path = tmp_path / "cohort.yaml"
    path.write_text(f"{name}: from-file\n")
    empty = "" if name in TEXTS else ()
    assert getattr(load_config(["--config", str(path), f"{flag(name)}="], {}), name) == empty
    assert getattr(load_config(["--config", str(path)], {variable(name): ""}), name) == empty


@pytest.mark.parametrize(
    ("argv", "environ", "nearest"),
    [
        (["--max-num-seq", "3"], {}, "--max-num-seqs"),
        (["--prot=3"], {}, "--port"),
        ([], {"COHORT_MAX_NUM_SEQ": "3"}, "COHORT_MAX_NUM_SEQS"),
    ],
)
def test_an_unknown_name_is_an_error_that_names_the_nearest(
    argv: list[str], environ: dict[str, str], nearest: str
) -> None:
    text = refusal(argv, environ)
    assert text.endswith(f"did you mean {nearest}?") and "unknown" in text


def test_a_flag_is_not_guessed_from_its_beginning() -> None:
    assert "unknown flag --tensor" in refusal(["--tensor", "2"], {})


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("max-num-seq: 3\n", "did you mean max-num-seqs?"),
        ("port: 1\nport_: 2\n", "unknown key"),
        ("max-num-seqs: 1\nmax_num_seqs: 2\n", "given twice"),
        ("port:\n", "needs one value"),
        ("port: [1, 2]\n", "needs one value"),
        ("port: 1.5\n", "whole number"),
        ("- port\n", "mapping"),
        ("port: {\n", "not YAML"),
    ],
)
def test_a_faulty_file_is_refused_by_its_path(tmp_path: Path, content: str, reason: str) -> None:
    path = tmp_path / "cohort.yaml"
    path.write_text(content)
    text = refusal(["--config", str(path)], {})
    assert reason in text and str(path) in text


def test_a_missing_file_is_refused() -> None:
    assert "cannot read" in refusal(["--config", "/does/not/exist.yaml"], {})


@pytest.mark.parametrize(
    ("argv", "limit"),
    [
        (["--port", "65536"], "0 to 65535"),
        (["--metrics-port", "-2"], "-1 to 65535"),
        (["--tensor-parallel-size", "0"], "at least 1"),
        (["--default-deadline", "-1"], "at least 0"),
        (["--dtype", "float16"], "auto, float32, bfloat16"),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_range(argv: list[str], limit: str) -> None:
    assert limit in refusal(argv, {})


def test_other_names_of_a_flag_act() -> None:
    config = load_config(["--model-id", "m", "--num-shard", "2", "--prometheus-port", "0"], {})
    assert (config.model, config.tensor_parallel_size, config.metrics_port) == ("m", 2, 0)


def test_shard_addresses_are_a_list_in_every_source(tmp_path: Path) -> None:
    wanted = ("unix:/a", "b:1")
    path = tmp_path / "cohort.yaml"
    path.write_text("shard-addresses: ['unix:/a', 'b:1']\n")
    assert from_both("shard_addresses", "unix:/a, b:1") == [wanted, wanted]
    assert load_config(["--config", str(path)], {}).shard_addresses == wanted


def test_the_effective_configuration_is_a_file_that_gives_it_again(tmp_path: Path) -> None:
    config = load_config(["--model", "m", "--port", "0", "--no-vllm-metric-aliases", "--shard-addresses", "a:1,b"], {})
    path = tmp_path / "cohort.yaml"
    path.write_text(yaml.safe_dump(effective(config)))
    assert load_config(["--config", str(path)], {}) == config


def test_the_served_name_is_the_folder_or_the_hub_id_unless_given(tmp_path: Path) -> None:
    folder = tmp_path / "command-r"
    folder.mkdir()
    assert RouterConfig(model=f"{folder}/").model_name == "command-r"
    assert RouterConfig(model="org/name").model_name == "org/name"
    assert dataclasses.replace(RouterConfig(model=str(folder)), served_model_name="x").model_name == "x"


@pytest.mark.parametrize(
    ("device", "run_ahead", "depth"), [("cpu", -1, 0), ("cuda", -1, 1), ("cpu", 2, 2), ("cuda", 0, 0)]
)
def test_steps_are_sent_ahead_on_a_gpu_unless_told_otherwise(device: str, run_ahead: int, depth: int) -> None:
    assert RouterConfig(device=device, run_ahead=run_ahead).run_ahead_depth == depth
