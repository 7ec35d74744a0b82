"""Flags of `python -m router bench`: the names and meanings of `vllm bench serve`, and two of our own."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

MEASURES = ("ttft", "tpot", "itl", "e2el")
DEFAULT_PORT = 50051

Number = TypeVar("Number", int, float)


@dataclasses.dataclass(frozen=True, slots=True)
class BenchOptions:
    """A benchmark run. Lengths are in tokens, rates in requests a second, objectives in seconds."""

    address: str
    model: str  # empty: the served one
    num_prompts: int
    request_rate: float  # inf: all at once
    burstiness: float
    max_concurrency: int | None
    input_len: int
    output_len: int
    range_ratio: float
    prefix_len: int
    seed: int
    ignore_eos: bool
    temperature: float
    percentile_metrics: tuple[str, ...]
    metric_percentiles: tuple[float, ...]
    goodput_s: dict[str, float]
    num_warmups: int
    num_processes: int
    has_channel_per_client: bool
    ready_timeout_s: float
    save_result: bool
    save_detailed: bool
    result_dir: str
    result_filename: str | None
    label: str | None
    metadata: dict[str, str]


def _number(
    convert: Callable[[str], Number], low: float, high: float = math.inf, is_open: bool = False
) -> Callable[[str], Number]:
    """A converter that refuses numbers outside [low, high], or (low, high] if `is_open`."""

    def parse(text: str) -> Number:
        value = convert(text)
        if not (low <= value <= high) or (is_open and value == low):
            raise argparse.ArgumentTypeError(f"{text} is not in {'(' if is_open else '['}{low:g}, {high:g}]")
        return value

    parse.__name__ = getattr(convert, "__name__", "number")  # argparse names it in its own errors
    return parse


def _percentiles(text: str) -> tuple[float, ...]:
    return tuple(_number(float, 0, 100)(part) for part in text.split(",") if part.strip())


def _measures(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if unknown := [name for name in names if name not in MEASURES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(MEASURES)}")
    return names


def _pair(separator: str) -> Callable[[str], tuple[str, str]]:
    def parse(text: str) -> tuple[str, str]:
        key, found, value = text.partition(separator)
        if not found or not key or not value:
            raise argparse.ArgumentTypeError(f"{text!r} is not KEY{separator}VALUE")
        return key, value

    return parse


def _objective(text: str) -> tuple[str, float]:
    name, value = _pair(":")(text)
    if name not in MEASURES or name == "itl":
        raise argparse.ArgumentTypeError(f"{name!r} is none of ttft, tpot, e2el")
    return name, _number(float, 0)(value) / 1000


def make_parser() -> argparse.ArgumentParser:
    """The parser; its help says what each flag means."""
    parser = argparse.ArgumentParser(prog="python -m router bench", description=__doc__)
    target = parser.add_argument_group("server")
    target.add_argument("--host", default="127.0.0.1")
    target.add_argument("--port", type=_number(int, 1, 65535), default=DEFAULT_PORT)
    target.add_argument("--model", default="", help="served model's name (default: the one that is served)")
    target.add_argument("--ready-check-timeout-sec", type=_number(float, 0), default=600.0, help="wait for the server")

    load = parser.add_argument_group("load")
    load.add_argument("--num-prompts", type=_number(int, 1), default=1000)
    load.add_argument(
        "--request-rate", type=_number(float, 0, is_open=True), default=math.inf, help="requests a second"
    )
    load.add_argument(
        "--burstiness",
        type=_number(float, 0, is_open=True),
        default=1.0,
        help="shape of the gamma distribution of the gaps between requests; 1 is a Poisson process, less is burstier",
    )
    load.add_argument("--max-concurrency", type=_number(int, 1), help="most requests under way at once")
    load.add_argument("--num-warmups", type=_number(int, 0), default=0, help="requests before the clock starts")
    load.add_argument("--num-processes", type=_number(int, 1), default=2, help="client processes (ours)")
    load.add_argument(
        "--channels",
        choices=("one", "per-client"),
        default="one",
        help="one gRPC channel per process, or one per request under way (ours)",
    )

    prompts = parser.add_argument_group("prompts")
    prompts.add_argument("--dataset-name", choices=("random",), default="random", help="random token ids")
    prompts.add_argument("--random-input-len", type=_number(int, 1), default=1024)
    prompts.add_argument("--random-output-len", type=_number(int, 1), default=128)
    prompts.add_argument(
        "--random-range-ratio",
        type=_number(float, 0, 1),
        default=0.0,
        help="lengths are drawn evenly from [length x (1 - ratio), length x (1 + ratio)]",
    )
    prompts.add_argument(
        "--random-prefix-len", type=_number(int, 0), default=0, help="shared tokens before each prompt"
    )
    prompts.add_argument("--seed", type=_number(int, 0), default=0)
    prompts.add_argument("--ignore-eos", action="store_true", help="generate exactly the asked number of tokens")
    prompts.add_argument("--temperature", type=_number(float, 0), default=0.0)

    result = parser.add_argument_group("result")
    result.add_argument("--percentile-metrics", type=_measures, default=("ttft", "tpot", "itl", "e2el"))
    result.add_argument("--metric-percentiles", type=_percentiles, default=(90.0, 99.0))
    result.add_argument(
        "--goodput",
        nargs="+",
        type=_objective,
        default=[],
        metavar="KEY:VALUE",
        help="ttft, tpot, e2el in milliseconds",
    )
    result.add_argument("--save-result", action="store_true", help="write a JSON file")
    result.add_argument("--save-detailed", action="store_true", help="with every request's times in it")
    result.add_argument("--result-dir", default=".")
    result.add_argument("--result-filename")
    result.add_argument("--label", help="prefix of the file's name")
    result.add_argument("--metadata", nargs="*", type=_pair("="), default=[], metavar="KEY=VALUE")
    return parser


def parse_options(argv: Sequence[str]) -> BenchOptions:
    """Parses flags; like argparse, ends the process with status 2 on a bad one."""
    flags = make_parser().parse_args(argv)
    return BenchOptions(
        address=f"{flags.host}:{flags.port}",
        model=flags.model,
        num_prompts=flags.num_prompts,
        request_rate=flags.request_rate,
        burstiness=flags.burstiness,
        max_concurrency=flags.max_concurrency,
        input_len=flags.random_input_len,
        output_len=flags.random_output_len,
        range_ratio=flags.random_range_ratio,
        prefix_len=flags.random_prefix_len,
        seed=flags.seed,
        ignore_eos=flags.ignore_eos,
        temperature=flags.temperature,
        percentile_metrics=flags.percentile_metrics,
        metric_percentiles=flags.metric_percentiles,
        goodput_s=dict(flags.goodput),
        num_warmups=flags.num_warmups,
        num_processes=min(flags.num_processes, flags.num_prompts, flags.max_concurrency or flags.num_prompts),
        has_channel_per_client=flags.channels == "per-client",
        ready_timeout_s=flags.ready_check_timeout_sec,
        save_result=flags.save_result or flags.save_detailed,
        save_detailed=flags.save_detailed,
        result_dir=flags.result_dir,
        result_filename=flags.result_filename,
        label=flags.label,
        metadata=dict(flags.metadata),
    )
