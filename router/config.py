"""The router's configuration: one dataclass, from which flags, environment variables and file keys are derived.

A value comes from the flag, else the environment variable `COHORT_<FLAG>`, else the `--config` file, else the default.
An explicit 0, false or empty text counts as given. Whatever is not known is an error that names the nearest known one.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from router.errors import StartupError

ENVIRONMENT_PREFIX = "COHORT_"
TRUE_WORDS = ("true", "1", "yes", "on")
FALSE_WORDS = ("false", "0", "no", "off", "")


def _flag(
    default: Any,  # noqa: ANN401 - as in dataclasses.field
    help: str,
    *,
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    aliases: tuple[str, ...] = (),
) -> Any:  # noqa: ANN401
    rules = {"help": help, "choices": choices, "minimum": minimum, "maximum": maximum, "aliases": aliases}
    return dataclasses.field(default=default, metadata=rules)


@dataclasses.dataclass(frozen=True, slots=True)
class RouterConfig:
    """What `serve` needs to know. Field `x_y` is the flag `--x-y`, the variable `COHORT_X_Y` and the file key `x-y`."""

    model: str = _flag("", "checkpoint folder or Hugging Face Hub id; required", aliases=("model-id",))
    served_model_name: str = _flag("", "name that requests use; empty: the folder's name or the Hub id")
    tensor_parallel_size: int = _flag(1, "shards, one slice of the model each", minimum=1, aliases=("num-shard",))
    dtype: str = _flag("auto", "type of weights and cache", choices=("auto", "float32", "bfloat16"))
    device: str = _flag("cpu", "where the shards compute", choices=("cpu", "cuda"))
    max_model_len: int = _flag(0, "most tokens of prompt and answer together; 0: the model's own limit", minimum=0)
    max_num_seqs: int = _flag(128, "most sequences that run at once", minimum=1)
    max_num_batched_tokens: int = _flag(
        2048, "most tokens computed in one step", minimum=1, aliases=("max-batch-prefill-tokens",)
    )
    num_blocks_override: int = _flag(0, "KV blocks per shard; 0: as many as the memory allows", minimum=0)
    kv_cache_memory_bytes: int = _flag(0, "memory for the KV blocks of one shard; 0: chosen by the shard", minimum=0)
    gpu_memory_utilization: float = _flag(
        0.9, "share of a GPU's memory to use, weights included", minimum=0.01, maximum=1
    )
    enforce_eager: bool = _flag(False, "launch every step kernel by kernel, without CUDA graphs")
    cuda_graph_sizes: tuple[str, ...] = _flag(
        (), "batch sizes to capture as CUDA graphs, with commas; empty: a ladder up to max-num-seqs"
    )
    attention_backend: str = _flag("auto", "attention kernels", choices=("auto", "torch", "triton", "flash"))
    load_format: str = _flag("auto", "dummy: random weights, to try out geometry", choices=("auto", "dummy"))
    enable_lora: bool = _flag(False, "serve LoRA adapters beside the base model")
    lora_modules: tuple[str, ...] = _flag((), "adapters to load at the start, name=path, with commas")
    max_loras: int = _flag(8, "adapters in one step, in slots on the device", minimum=1, maximum=1024)
    max_lora_rank: int = _flag(16, "largest rank of an adapter; the slots are made for it", minimum=1, maximum=256)
    max_cpu_loras: int = _flag(0, "adapters that the shards keep in host memory; 0: four times max-loras", minimum=0)
    adapter_dirs: tuple[str, ...] = _flag((), "folders that adapters may be loaded from by callers, with commas")
    run_ahead: int = _flag(
        -1, "steps sent before the last one's answer; -1: 1 on a GPU, 0 on a CPU", minimum=-1, maximum=8
    )
    default_deadline: float = _flag(0.0, "seconds for requests that bring no deadline; 0: none", minimum=0)
    max_num_queued_reqs: int = _flag(1024, "requests that may wait; more are UNAVAILABLE; 0: no limit", minimum=0)
    max_num_queued_tokens: int = _flag(0, "prompt tokens that may wait for an answer's start; 0: no limit", minimum=0)
    host: str = _flag("0.0.0.0", "address to listen on; :: for IPv6", aliases=("hostname",))
    port: int = _flag(50051, "gRPC port; 0: any free one, printed", minimum=0, maximum=65535)
    metrics_port: int = _flag(
        9090,
        "Prometheus port; 0: any free one, printed; -1: off",
        minimum=-1,
        maximum=65535,
        aliases=("prometheus-port",),
    )
    shard_addresses: tuple[str, ...] = _flag((), "running shards in order of rank, with commas; empty: start them")
    vllm_metric_aliases: bool = _flag(True, "also export the metrics under vLLM's names")
    shutdown_timeout: float = _flag(30.0, "seconds that running calls get after SIGTERM; 0: none", minimum=0)
    log_level: str = _flag("info", "least level that is logged", choices=("debug", "info", "warning", "error"))
    log_format: str = _flag("text", "form of a log record", choices=("text", "json"))

    @property
    def run_ahead_depth(self) -> int:
        """Steps sent ahead. On a CPU the shards compute with the cores that the router needs to make the next step."""
        if self.run_ahead >= 0:
            return self.run_ahead
        return 0 if self.device == "cpu" else 1

    @property
    def model_name(self) -> str:
        """The name that requests use."""
        if self.served_model_name:
            return self.served_model_name
        path = Path(self.model)
        return path.resolve().name if path.is_dir() else self.model


FIELDS = {field.name: field for field in dataclasses.fields(RouterConfig)}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise StartupError(message)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds one flag per field, and `--config`. Values stay text until `resolve` reads them."""
    parser.add_argument("--config", metavar="FILE", help="YAML file with any of these settings")
    for field in FIELDS.values():
        names = [f"--{name}" for name in (_dashed(field.name), *field.metadata["aliases"])]
        text = f"{field.metadata['help']} (default: {_shown(field.default) or 'none'})".replace("%", "%%")
        if isinstance(field.default, bool):
            parser.add_argument(*names, dest=field.name, nargs="?", const="true", metavar="true|false", help=text)
            parser.add_argument(f"--no-{_dashed(field.name)}", dest=field.name, action="store_const", const="false")
        else:
            metavar = "|".join(field.metadata["choices"]) or type(field.default).__name__.upper()
            parser.add_argument(*names, dest=field.name, metavar=metavar, help=text)


def load_config(argv: Sequence[str], environ: Mapping[str, str], program: str = "serve") -> RouterConfig:
    """The configuration for these arguments and this environment.

    Raises StartupError for an unknown flag, variable or key, a value of the wrong kind, and a file that does not parse.
    """
    parser = _Parser(prog=f"python -m router {program}", allow_abbrev=False)
    add_flags(parser)
    known, unknown = parser.parse_known_args(list(argv))
    if unknown:
        raise StartupError(_unknown_flag(unknown[0], parser))
    flags = {name: text for name, text in vars(known).items() if text is not None}
    variables = _from_environment(environ)
    config_file = flags.pop("config", None) or variables.pop("config", None)
    keys = _from_file(Path(config_file)) if config_file else {}
    values: dict[str, Any] = {}
    for name, field in FIELDS.items():
        for source, where in (
            (flags, f"--{_dashed(name)}"),
            (variables, ENVIRONMENT_PREFIX + name.upper()),
            (keys, f"{config_file}: {_dashed(name)}"),
        ):
            if name in source:
                values[name] = _parse(field, source[name], where)
                break
    return RouterConfig(**values)


def effective(config: RouterConfig) -> dict[str, Any]:
    """Every setting under its flag's name, as it acts."""
    return {_dashed(name): value for name, value in dataclasses.asdict(config).items()}


def _from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for variable, text in environ.items():
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        if name not in FIELDS and name != "config":
            known = [ENVIRONMENT_PREFIX + field.upper() for field in (*FIELDS, "config")]
            raise StartupError(f"unknown environment variable {variable}{_nearest(variable, known)}")
        found[name] = text
    return found


def _from_file(path: Path) -> dict[str, str]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StartupError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise StartupError(f"the configuration file {path} is not YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise StartupError(f"the configuration file {path} has to be a mapping of settings to values")
    found: dict[str, str] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in FIELDS:
            raise StartupError(f"{path}: unknown key {key!r}{_nearest(_dashed(name), [_dashed(f) for f in FIELDS])}")
        if name in found:
            raise StartupError(f"{path}: {_dashed(name)} is given twice")
        found[name] = _file_text(value, f"{path}: {key}")
    return found


def _file_text(value: object, where: str) -> str:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ",".join(value)
    if isinstance(value, str | bool | int | float):
        return str(value)
    raise StartupError(f"{where} needs one value, not {value!r}")


def _parse(field: dataclasses.Field[Any], text: str, where: str) -> Any:  # noqa: ANN401 - the field's own type
    kind = type(field.default)
    if issubclass(kind, tuple):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if issubclass(kind, bool):
        return _parse_bool(text, where)
    if issubclass(kind, str):
        choices = field.metadata["choices"]
        if choices and text not in choices:
            raise StartupError(f"{where} must be one of {', '.join(choices)}, not {text!r}{_nearest(text, choices)}")
        return text
    return _parse_number(field, kind, text, where)


def _parse_bool(text: str, where: str) -> bool:
    if text.lower() in TRUE_WORDS:
        return True
    if text.lower() in FALSE_WORDS:
        return False
    raise StartupError(f"{where} must be true or false, not {text!r}")


def _parse_number(field: dataclasses.Field[Any], kind: type, text: str, where: str) -> float:
    try:
        number: float = kind(text)
    except ValueError as error:
        noun = "a whole number" if kind is int else "a number"
        raise StartupError(f"{where} must be {noun}, not {text!r}") from error
    low, high = field.metadata["minimum"], field.metadata["maximum"]
    if not math.isfinite(number) or (low is not None and number < low) or (high is not None and number > high):
        limit = f"at least {low:g}" if high is None else f"{low:g} to {high:g}"
        raise StartupError(f"{where} must be {limit}, not {text}")
    return number


def _unknown_flag(argument: str, parser: argparse.ArgumentParser) -> str:
    if not argument.startswith("-"):
        return f"unexpected argument {argument!r}"
    flag = argument.partition("=")[0]
    return f"unknown flag {flag}{_nearest(flag, list(parser._option_string_actions))}"


def _nearest(given: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(given, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
