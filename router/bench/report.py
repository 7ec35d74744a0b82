"""A run's result for people, as a table, and for programs, as JSON."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
from pathlib import Path

from router.bench.client import Record
from router.bench.options import BenchOptions
from router.bench.summary import Distribution, Summary

TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token, first excluded",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}


def render_table(options: BenchOptions, summary: Summary, facts: dict[str, object]) -> str:
    """Counts and rates, one line each, then a row of milliseconds per measure."""
    rows: list[tuple[str, str]] = [
        ("server", options.address),
        ("load", _load(options)),
        ("completed / failed", f"{summary.completed} / {summary.failed}"),
        ("duration", f"{summary.duration_s:.2f} s"),
        ("most requests under way", str(summary.max_concurrent)),
        ("input / output tokens", f"{summary.input_tokens} / {summary.output_tokens}"),
        ("tokens that shared a message", str(summary.merged_tokens)),
        ("request throughput", f"{summary.request_throughput:.2f} req/s"),
        ("output throughput", f"{summary.output_throughput:.1f} tok/s"),
        ("total throughput", f"{summary.total_throughput:.1f} tok/s"),
    ]
    if summary.goodput is not None:
        limits = ", ".join(f"{name} {limit * 1000:g} ms" for name, limit in options.goodput_s.items())
        rows.append((f"goodput ({limits})", f"{summary.goodput:.2f} req/s"))
    rows += [("failed", f"{count} x {text}") for text, count in summary.errors.items()]
    rows += [(name, str(value)) for name, value in facts.items()]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    return "\n".join([*lines, "", *_measure_lines(options, summary)]) + "\n"


def _load(options: BenchOptions) -> str:
    arrivals = "all at once" if math.isinf(options.request_rate) else f"{options.request_rate:g} req/s"
    if not math.isinf(options.request_rate) and options.burstiness != 1:
        arrivals += f", burstiness {options.burstiness:g}"
    limit = f", at most {options.max_concurrency} under way" if options.max_concurrency else ""
    channels = "one channel per client" if options.has_channel_per_client else "one channel per process"
    return f"{options.num_prompts} requests {arrivals}{limit}; {options.num_processes} processes, {channels}"


def _measure_lines(options: BenchOptions, summary: Summary) -> list[str]:
    names = [f"p{percent:g}" for percent in options.metric_percentiles]
    head = f"{'milliseconds':<40}" + "".join(f"{name:>10}" for name in ("mean", "median", *names, "max"))
    lines = [head]
    for measure in options.percentile_metrics:
        figures = summary.measures[measure]
        values = (figures.mean, figures.median, *figures.percentiles.values(), figures.max)
        title = f"{TITLES[measure]} ({measure})"
        lines.append(f"{title:<40}" + "".join(f"{value * 1000:>10.2f}" for value in values))
    return lines


def result_json(
    options: BenchOptions, summary: Summary, facts: dict[str, object], start: float, records: list[Record]
) -> dict[str, object]:
    """Everything about the run; the throughput and latency keys are those that `vllm bench serve` writes."""
    result: dict[str, object] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "label": options.label,
        "model": options.model,
        "num_prompts": options.num_prompts,
        "request_rate": "inf" if math.isinf(options.request_rate) else options.request_rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        "num_processes": options.num_processes,
        "channels": "per-client" if options.has_channel_per_client else "one",
        "random_input_len": options.input_len,
        "random_output_len": options.output_len,
        "random_range_ratio": options.range_ratio,
        "seed": options.seed,
        "machine": facts,
        "metadata": options.metadata,
        "duration": summary.duration_s,
        "completed": summary.completed,
        "failed": summary.failed,
        "errors": summary.errors,
        "total_input_tokens": summary.input_tokens,
        "total_output_tokens": summary.output_tokens,
        "merged_tokens": summary.merged_tokens,
        "request_throughput": summary.request_throughput,
        "request_goodput": summary.goodput,
        "output_throughput": summary.output_throughput,
        "total_token_throughput": summary.total_throughput,
        "max_concurrent_requests": summary.max_concurrent,
    }
    for measure in options.percentile_metrics:
        result |= _measure_json(measure, summary.measures[measure])
    if options.save_detailed:
        result["requests"] = [_record_json(record, start) for record in records]
    return result


def _measure_json(measure: str, figures: Distribution) -> dict[str, float]:
    values = {
        f"mean_{measure}_ms": figures.mean,
        f"median_{measure}_ms": figures.median,
        f"std_{measure}_ms": figures.std,
        f"max_{measure}_ms": figures.max,
    } | {f"p{percent:g}_{measure}_ms": value for percent, value in figures.percentiles.items()}
    return {name: value * 1000 for name, value in values.items()}


def _record_json(record: Record, start: float) -> dict[str, object]:
    """Times as seconds after the run's start."""
    shifted = dataclasses.replace(
        record,
        due=record.due - start,
        sent=record.sent - start,
        ended=record.ended - start,
        arrivals=[arrival - start for arrival in record.arrivals],
    )
    return dataclasses.asdict(shifted)


def save_json(options: BenchOptions, result: dict[str, object]) -> Path:
    """Writes the result into the folder of `--result-dir`, made if needed; returns the file."""
    rate = "inf" if math.isinf(options.request_rate) else f"{options.request_rate:g}"
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    concurrency = f"-concurrency{options.max_concurrency}" if options.max_concurrency else ""
    name = options.result_filename or f"{options.label or 'cohort'}-{rate}qps{concurrency}-{stamp}.json"
    path = Path(options.result_dir) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    return path
