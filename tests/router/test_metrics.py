"""The exposition as prometheus_client's own parser reads it."""

from __future__ import annotations

import re
import urllib.request

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from router.adapter_places import AdapterLoad
from router.messages import FinishReason, RequestDone, Timing
from router.metrics import MAX_ADAPTER_LABELS, REQUEST_SECONDS, TOKEN_SECONDS, Metrics
from router.metrics_http import MetricsServer

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]

DONE = RequestDone(1, 10, 20, 0, Timing(0.5, 0.25, 2.0, 0.75, 3.0))


def fed(has_aliases: bool = True) -> Metrics:
    """Every method called at least once."""
    metrics = Metrics("command", has_aliases)
    metrics.step("decode", 0.003, 0.0001, 5)
    metrics.step("prefill", 0.3, 0.0, 512)
    metrics.preempted(2)
    metrics.set_load(3, 4, 0.25)
    metrics.first_token(0.75)
    metrics.token_latency(0.004)
    metrics.prompt_tokens(10)
    metrics.generation_tokens(20)
    metrics.request_done([FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH], DONE)
    metrics.request_failed("UNAVAILABLE")
    metrics.shard_up(0, True)
    metrics.shard_up(1, False)
    metrics.adapter_request("polite")
    metrics.adapter_tokens("polite", 7)
    metrics.adapter_loaded(0.02)
    metrics.set_adapter_tiers({"device": 1, "host": 0, "disk": 2})
    metrics.startup_phase("shards", 1.5)
    metrics.rpc_started("cohort.v1.GenerationService/Generate")
    metrics.rpc_handled("cohort.v1.GenerationService/Generate", "OK")
    metrics.rpc_started("cohort.v1.GenerationService/ChatStream", "server_stream")
    metrics.rpc_handled("cohort.v1.GenerationService/ChatStream", "INVALID_ARGUMENT", "server_stream")
    return metrics


def families(metrics: Metrics) -> list[prometheus_client.Metric]:
    text = prometheus_client.generate_latest(metrics.registry).decode()
    return list(text_string_to_metric_families(text))


def samples(metrics: Metrics) -> Samples:
    return {(s.name, frozenset(s.labels.items())): s.value for family in families(metrics) for s in family.samples}


def value(found: Samples, name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


def test_what_was_fed_comes_out() -> None:
    found = samples(fed())
    assert value(found, "cohort_requests_running") == 3
    assert value(found, "cohort_requests_waiting") == 4
    assert value(found, "cohort_kv_cache_usage_ratio") == 0.25
    assert value(found, "cohort_preemptions_total") == 2
    assert value(found, "cohort_prompt_tokens_total") == 10
    assert value(found, "cohort_generation_tokens_total") == 20
    assert value(found, "cohort_request_success_total", finish_reason="stop") == 2
    assert value(found, "cohort_request_success_total", finish_reason="length") == 1
    assert value(found, "cohort_request_failure_total", code="UNAVAILABLE") == 1
    assert value(found, "cohort_shard_up", rank="0") == 1 and value(found, "cohort_shard_up", rank="1") == 0
    assert value(found, "cohort_startup_phase_seconds", phase="shards") == 1.5
    assert value(found, "cohort_step_seconds_sum", kind="decode") == pytest.approx(0.003)
    assert value(found, "cohort_step_tokens_sum") == 517
    for name, seconds in (
        ("time_to_first_token", 0.75),
        ("inter_token_latency", 0.004),
        ("e2e_request_latency", 3.0),
        ("queue_time", 0.5),
        ("prefill_time", 0.25),
        ("decode_time", 2.0),
    ):
        assert value(found, f"cohort_{name}_seconds_sum") == seconds
        assert value(found, f"cohort_{name}_seconds_count") == 1


def test_calls_are_counted_under_the_names_of_grpc_dashboards() -> None:
    found = samples(fed())
    unary = {"grpc_type": "unary", "grpc_service": "cohort.v1.GenerationService", "grpc_method": "Generate"}
    stream = unary | {"grpc_type": "server_stream", "grpc_method": "ChatStream"}
    assert value(found, "grpc_server_started_total", **unary) == 1
    assert value(found, "grpc_server_handled_total", **unary, grpc_code="OK") == 1
    assert value(found, "grpc_server_handled_total", **stream, grpc_code="InvalidArgument") == 1


def test_names_help_and_types_follow_the_naming_rules() -> None:
    for family in families(fed(has_aliases=False)):
        assert re.fullmatch(r"[a-z][a-z0-9_]*", family.name), family.name
        assert family.documentation.strip(), family.name
        # As promtool reads it: _total on counters alone, no reserved endings, base units only.
        sample_names = {sample.name for sample in family.samples}
        assert all(name.endswith("_total") == (family.type == "counter") for name in sample_names), family.name
        assert not family.name.endswith(("_count", "_sum", "_bucket", "_milliseconds", "_ms", "_percent"))
        for sample in family.samples:
            assert all(re.fullmatch(r"[a-z][a-z0-9_]*", label) for label in sample.labels)


def test_vllm_names_carry_the_same_numbers_and_the_model() -> None:
    found = samples(fed())
    model = {"model_name": "command"}
    for alias, name in (
        ("num_requests_running", "cohort_requests_running"),
        ("num_requests_waiting", "cohort_requests_waiting"),
        ("kv_cache_usage_perc", "cohort_kv_cache_usage_ratio"),
        ("gpu_cache_usage_perc", "cohort_kv_cache_usage_ratio"),
        ("num_preemptions_total", "cohort_preemptions_total"),
        ("prompt_tokens_total", "cohort_prompt_tokens_total"),
        ("generation_tokens_total", "cohort_generation_tokens_total"),
        ("time_to_first_token_seconds_sum", "cohort_time_to_first_token_seconds_sum"),
        ("inter_token_latency_seconds_count", "cohort_inter_token_latency_seconds_count"),
        ("e2e_request_latency_seconds_sum", "cohort_e2e_request_latency_seconds_sum"),
    ):
        assert value(found, f"vllm:{alias}", **model) == value(found, name) > 0
    assert value(found, "vllm:request_success_total", finished_reason="stop", **model) == 2


def test_the_aliases_can_be_left_out() -> None:
    assert not [family.name for family in families(fed(has_aliases=False)) if family.name.startswith("vllm")]


def test_every_series_without_labels_is_there_before_anything_happened() -> None:
    found = samples(Metrics("command", False))
    assert value(found, "cohort_generation_tokens_total") == 0
    assert value(found, "cohort_time_to_first_token_seconds_count") == 0
    assert value(found, "cohort_request_success_total", finish_reason="stop") == 0


@given(st.lists(st.floats(0, 5000) | st.sampled_from(TOKEN_SECONDS)))
def test_buckets_count_as_prometheus_own_histogram(seconds: list[float]) -> None:
    metrics = Metrics("command", False)
    registry = prometheus_client.CollectorRegistry()
    oracle = prometheus_client.Histogram(
        "cohort_inter_token_latency_seconds", "oracle", buckets=TOKEN_SECONDS, registry=registry
    )
    for second in seconds:
        metrics.token_latency(second)
        oracle.observe(second)
    ours = {s.labels["le"]: s.value for s in metrics.itl.family().samples if s.name.endswith("_bucket")}
    theirs = {s.labels["le"]: s.value for f in registry.collect() for s in f.samples if s.name.endswith("_bucket")}
    assert {float(end): count for end, count in ours.items()} == {float(end): count for end, count in theirs.items()}


def test_adapters_are_counted_by_name_until_they_are_gone_and_never_without_bound() -> None:
    metrics = Metrics("command", True)
    for number in range(MAX_ADAPTER_LABELS + 5):
        metrics.adapter_request(f"a{number}")
        metrics.adapter_tokens(f"a{number}", 3)
    found = samples(metrics)
    assert value(found, "cohort_adapter_requests_total", adapter="a0") == 1
    assert value(found, "cohort_adapter_requests_total", adapter="other") == 5
    assert value(found, "cohort_adapter_generation_tokens_total", adapter="other") == 15
    metrics.adapter_gone("a0")
    metrics.adapter_request("new")
    found = samples(metrics)
    assert value(found, "cohort_adapter_requests_total", adapter="new") == 1
    assert ("cohort_adapter_requests_total", frozenset({("adapter", "a0")})) not in found


def test_vllms_adapter_series_has_names_in_labels_and_the_time_as_its_value() -> None:
    metrics = Metrics("command", True)
    assert not [family for family in families(metrics) if family.name == "vllm:lora_requests_info"], "LoRA is off"
    metrics.set_max_loras(4)
    metrics.set_adapter_load(AdapterLoad(("a", "b"), ("c",)), 12.5)
    labels = {"max_lora": "4", "running_lora_adapters": "a,b", "waiting_lora_adapters": "c"}
    assert value(samples(metrics), "vllm:lora_requests_info", **labels) == 12.5


@pytest.mark.parametrize("bounds", [TOKEN_SECONDS, REQUEST_SECONDS])
def test_bounds_ascend(bounds: tuple[float, ...]) -> None:
    assert list(bounds) == sorted(set(bounds))


def test_the_metrics_are_served_over_http_and_the_port_is_free_afterwards() -> None:
    server = MetricsServer(fed().registry, "127.0.0.1", 0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
    finally:
        server.close()
    assert any(family.name == "cohort_requests_running" for family in text_string_to_metric_families(text))
    MetricsServer(fed().registry, "127.0.0.1", server.port).close()
