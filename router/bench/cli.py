"""The `bench` sub-command: plans the load, lets client processes run it, reports."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence

import grpc
from cohort.v1 import model_pb2, model_pb2_grpc

from router.bench.client import Job, Record
from router.bench.load import PlannedRequest, deal, plan_requests, split_concurrency
from router.bench.machine import machine_facts
from router.bench.options import BenchOptions, parse_options
from router.bench.processes import ClientFailed, ClientProcesses
from router.bench.report import render_table, result_json, save_json
from router.bench.summary import summarise

POLL_S = 0.5


def main(argv: Sequence[str]) -> int:
    """Runs a benchmark against a running server; 0 if every request completed, 1 otherwise."""
    options = parse_options(argv)
    try:
        model = _wait_for_model(options)
        requests = _plan(options, model.geometry.vocab_size)
        _check_lengths(requests, model.limits.max_model_len)
        start, records = _run(options, requests)
    except (BenchError, ClientFailed) as error:
        sys.stderr.write(f"bench: {error}\n")
        return 1
    summary = summarise(start, records, options.metric_percentiles, options.goodput_s)
    facts = _facts(model)
    sys.stdout.write(render_table(options, summary, facts))
    if options.save_result:
        path = save_json(options, result_json(options, summary, facts, start, records))
        sys.stdout.write(f"\nsaved to {path}\n")
    return 0 if not summary.failed else 1


class BenchError(Exception):
    """The run cannot be done; the text is one sentence."""


def _say(text: str) -> None:
    sys.stderr.write(f"bench: {text}\n")
    sys.stderr.flush()


def _wait_for_model(options: BenchOptions) -> model_pb2.GetModelResponse:
    """Asks the server what it serves, until it answers that it is ready or the time is up."""
    give_up_at = time.monotonic() + options.ready_timeout_s
    with grpc.insecure_channel(options.address, [("grpc.enable_http_proxy", 0)]) as channel:
        stub = model_pb2_grpc.ModelServiceStub(channel)
        while True:
            try:
                if stub.GetLoad(model_pb2.GetLoadRequest(), timeout=5).is_ready:
                    return stub.GetModel(model_pb2.GetModelRequest(model=options.model), timeout=5)
                reason = "the server is not ready"
            except grpc.RpcError as error:
                assert isinstance(error, grpc.Call)
                reason = f"{error.code().name}: {error.details()}"
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    raise BenchError(f"{options.address}: {reason}") from error
            if time.monotonic() > give_up_at:
                raise BenchError(f"{options.address}: {reason}")
            time.sleep(POLL_S)


def _plan(options: BenchOptions, vocab_size: int) -> list[PlannedRequest]:
    return plan_requests(
        seed=options.seed,
        count=options.num_prompts,
        input_len=options.input_len,
        output_len=options.output_len,
        range_ratio=options.range_ratio,
        prefix_len=options.prefix_len,
        vocab_size=vocab_size,
        rate=options.request_rate,
        burstiness=options.burstiness,
    )


def _check_lengths(requests: list[PlannedRequest], max_model_len: int) -> None:
    longest = max(len(request.prompt) + request.output_len for request in requests)
    if longest > max_model_len:
        raise BenchError(f"the longest request has {longest} tokens, the server takes at most {max_model_len}")


def _job(options: BenchOptions, requests: list[PlannedRequest], max_concurrency: int | None) -> Job:
    return Job(
        address=options.address,
        model=options.model,
        ignore_eos=options.ignore_eos,
        temperature=options.temperature,
        max_concurrency=max_concurrency,
        has_channel_per_client=options.has_channel_per_client,
        requests=[(request.prompt, request.output_len, request.due_s) for request in requests],
    )


def _run(options: BenchOptions, requests: list[PlannedRequest]) -> tuple[float, list[Record]]:
    if options.num_warmups:
        _say(f"{options.num_warmups} requests to warm up")
        first = dataclasses.replace(requests[0], due_s=0.0)
        with ClientProcesses([_job(options, [first] * options.num_warmups, options.max_concurrency)]) as processes:
            _, records = processes.run()
        if errors := [record.error for record in records if record.error]:
            raise BenchError(f"a warm-up request failed with {errors[0]}")
    shares = deal(requests, options.num_processes)
    limits = split_concurrency(options.max_concurrency, options.num_processes)
    jobs = [_job(options, share, limit) for share, limit in zip(shares, limits, strict=True)]
    with ClientProcesses(jobs) as processes:
        _say(f"{len(requests)} requests from {len(jobs)} client processes")
        return processes.run(_say)


def _facts(model: model_pb2.GetModelResponse) -> dict[str, object]:
    served = {
        "model": model.model,
        "dtype": model.dtype,
        "tensor_parallel_size": model.tensor_parallel_size,
        "attention_backend": model.attention_backend,
        "server_version": model.server_version,
    }
    return served | machine_facts(("grpcio", "numpy"))
