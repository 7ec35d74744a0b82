"""The checks of bench.gpu_check: each compares the engine on the GPU with an oracle and counts what differs."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.runner_driver import Driver, Row, make_runner
from model.parallel import TensorParallel
from shard_server.batch import Batch
from shard_server.link import OpenedRows, ScheduledRows
from shard_server.model_runner import ModelRunner
from shard_server.sampler import Sampler
from shard_server.sampling_rows import SamplingRows
from shard_server.staging import Staging
from shard_server.tables import RowTables

VOCAB = 2048
NUM_TOKENS = 24
CLOSE = 1e-4
"""Largest difference of log-probabilities in float32."""


def say(text: str) -> None:
    """A line of the report."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _write_checkpoint(folder: Path, model_type: str, head_dim: int) -> Any:  # noqa: ANN401
    """Random weights and transformers' model of them, in float32 on the CPU."""
    from transformers import Cohere2Config, Cohere2ForCausalLM, CohereConfig, CohereForCausalLM

    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 4 * head_dim,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "logit_scale": 0.25,
        "initializer_range": 0.1,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    torch.manual_seed(5)
    model: Any
    if model_type == "cohere":
        model = CohereForCausalLM(CohereConfig(**shape, use_qk_norm=head_dim == 64))
    else:
        model = Cohere2ForCausalLM(Cohere2Config(**shape, sliding_window=100, head_dim=head_dim))
    model.eval().save_pretrained(folder)
    return model


def _prompts(lengths: list[int]) -> list[tuple[int, ...]]:
    generator = np.random.default_rng(1)
    return [tuple(generator.integers(3, VOCAB, length).tolist()) for length in lengths]


@torch.inference_mode()
def _logprobs(model: Any, prompt: tuple[int, ...], tokens: list[int]) -> torch.Tensor:  # noqa: ANN401
    """The model's log-probabilities `[len(tokens), V]` after the prompt and the tokens before each."""
    ids = torch.tensor([[*prompt, *tokens[:-1]]], device=model.device)
    return torch.log_softmax(model(ids).logits[0, len(prompt) - 1 :].float(), -1)


def parity(flags: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Greedy tokens and their log-probabilities against transformers in float32 on the same device."""
    failed, rows = 0, []
    for model_type in ("cohere", "cohere2"):
        for head_dim in (64, 128):
            place = folder / f"{model_type}-{head_dim}"
            model = _write_checkpoint(place, model_type, head_dim).to(flags.device)
            for backend in flags.backends if flags.device == "cuda" else ["torch"]:
                dtype = "bfloat16" if backend == "flash" else "float32"
                for is_eager in (False, True):
                    found = _one_parity(flags, place, model, backend, dtype, is_eager)
                    case = f"{model_type} d{head_dim} {backend} {dtype} {'eager' if is_eager else 'graphs'}"
                    say(f"{case:44} {'ok' if found['is_good'] else 'FAILED':6} {found}")
                    rows.append({"case": case, **found})
                    failed += not found["is_good"]
    return {"failed": failed, "cases": rows}


def _one_parity(
    flags: argparse.Namespace,
    folder: Path,
    model: Any,  # noqa: ANN401
    backend: str,
    dtype: str,
    is_eager: bool,
) -> dict[str, Any]:
    runner, facts = _runner(flags, folder, is_eager, attention_backend=backend, dtype=dtype)
    prompts = _prompts([1, 37, 250, 700, 5])
    answers = []
    for num_logprobs in (-1, 0):  # without, a whole step is one graph
        driver = Driver(runner, facts, [Row(prompt, num_logprobs=num_logprobs) for prompt in prompts], 200)
        driver.mixed(NUM_TOKENS, 2)
        answers.append([answer.tokens for answer in driver.answers])
    num_plain = sum(a[:8] != b[:8] for a, b in zip(*answers, strict=True))
    worst, num_off, largest_gap = 0.0, 0, 0.0
    for prompt, answer in zip(prompts, driver.answers, strict=True):
        expected = _logprobs(model, prompt, answer.tokens)
        own = expected.gather(1, torch.tensor(answer.tokens, device=expected.device).unsqueeze(1)).squeeze(1)
        worst = max(worst, float((own.cpu() - torch.tensor(answer.logprobs)).abs().max()))
        gap = expected.amax(1) - own  # above 0 where transformers would have chosen another token
        num_off += int((gap > 0).sum())
        largest_gap = max(largest_gap, float(gap.max()))
    found: dict[str, Any] = {"logprob_diff": worst, "other_tokens": num_off, "largest_gap": largest_gap}
    bound = CLOSE
    if dtype == "bfloat16":
        bound = found["bound"] = 0.02 + 3 * _bfloat16_error(model, prompts[2], driver.answers[2].tokens)
    is_exact = dtype == "bfloat16" or num_plain == 0
    return found | {"plain_differ": num_plain, "is_good": worst <= bound and largest_gap <= 2 * bound and is_exact}


@torch.inference_mode()
def _bfloat16_error(model: Any, prompt: tuple[int, ...], tokens: list[int]) -> float:  # noqa: ANN401
    """How far transformers itself is off in bfloat16, at most, on the likeliest tokens."""
    import copy

    exact = _logprobs(model, prompt, tokens)
    rounded = _logprobs(copy.deepcopy(model).bfloat16(), prompt, tokens)
    best = exact.argmax(1, keepdim=True)
    return float((exact.gather(1, best) - rounded.gather(1, best)).abs().max())


def _runner(flags: argparse.Namespace, folder: Path, is_eager: bool, **options: Any) -> tuple[ModelRunner, Any]:  # noqa: ANN401
    settings: dict[str, Any] = {
        "device": flags.device,
        "max_num_seqs": 24,
        "max_num_batched_tokens": 2048,
        "max_model_len": 2048,
        "num_blocks_override": 500,
        "enforce_eager": is_eager,
        **options,
    }
    return make_runner(folder, **settings)


def _mixed_rows() -> list[Row]:
    prompts = _prompts([1 + 29 * i % 300 for i in range(11)])
    return [
        Row(prompts[0]),
        Row(prompts[1], seed=11, temperature=1.0),
        Row(prompts[2], seed=12, temperature=0.7, top_k=20),
        Row(prompts[3], seed=13, temperature=1.3, top_p=0.8),
        Row(prompts[4], seed=14, temperature=0.9, top_k=50, top_p=0.9),
        Row(prompts[5], min_tokens=6, stop_ids=tuple(range(3, 200))),
        Row(prompts[6], num_logprobs=3),
        Row(prompts[7], seed=-5, temperature=2.0, num_logprobs=0),
        *(Row(prompt, seed=i, temperature=0.5 * (i % 3)) for i, prompt in enumerate(prompts[8:])),
    ]


def paths(flags: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Graphs against single launches, launching ahead against waiting, and that launching never waits."""
    _write_checkpoint(folder, "cohere", 64)
    backend = "triton" if flags.device == "cuda" else "torch"
    plain = [Row(prompt, seed=i, temperature=i % 2) for i, prompt in enumerate(_prompts([9, 30, 200, 5, 77, 64, 3]))]
    tokens: dict[str, list[list[int]]] = {}
    for is_eager in (True, False):
        runner, facts = _runner(flags, folder, is_eager, attention_backend=backend, dtype="float32")
        for name, rows in (("plain", plain), ("mixed", _mixed_rows())):
            for num_ahead in (0, 2):
                driver = Driver(runner, facts, rows, 128)
                with _no_waiting(flags.device if num_ahead else "cpu"):
                    driver.mixed(NUM_TOKENS, num_ahead)
                key = f"{name} {'eager' if is_eager else 'graphs'} ahead {num_ahead}"
                tokens[key] = [answer.tokens[:NUM_TOKENS] for answer in driver.answers]
    differing = {}
    for key, found in tokens.items():
        reference = tokens[f"{key.split()[0]} eager ahead 0"]
        differing[key] = sum(a != b for a, b in zip(found, reference, strict=True))
        say(f"{key:28} rows that differ from eager, one by one: {differing[key]} of {len(found)}")
    return {"failed": sum(differing.values()), "differing": differing}


@contextlib.contextmanager
def _no_waiting(device: str) -> Iterator[None]:
    """torch raises where an operation would wait for the device; waits for events are not among them."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def sampler(flags: argparse.Namespace, folder: Path) -> dict[str, object]:
    """The same recorded logits through the CPU's sampler and the GPU's, all rows at once and one by one."""
    size, count = (256000, 64) if flags.device == "cuda" else (4000, 16)
    logits = torch.randn(count, size, generator=torch.Generator().manual_seed(2)) * 3
    kinds: list[dict[str, Any]] = [
        {}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 40}, {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 0.3}, {"temperature": 1.2, "top_k": 1000, "top_p": 0.7}, {"temperature": 5.0},
        {"num_logprobs": 5},
    ]  # fmt: skip
    rows = [Row((1,), seed=1000 + i, **kinds[i % len(kinds)]) for i in range(count)]
    expected = _sample(logits, rows, "cpu")
    together = _sample(logits, rows, flags.device)
    alone = np.concatenate([_sample(logits[i : i + 1], rows[i : i + 1], flags.device) for i in range(count)])
    off = {"cpu and gpu": int((expected != together).sum()), "alone and together": int((alone != together).sum())}
    say(f"of {count} rows differ: {off}; at {np.flatnonzero(expected != together).tolist()}")
    return {"failed": sum(off.values()), **off}


@torch.inference_mode()
def _sample(logits: torch.Tensor, rows: list[Row], device: str) -> Any:  # noqa: ANN401
    place, n = torch.device(device), len(rows)
    tables = RowTables(n, 64, 16, 100, logits.shape[1], torch.device("cpu"))
    ints = {f.name: np.array([getattr(row, f.name) for row in rows]) for f in dataclasses.fields(Row)
            if f.name not in ("prompt", "stop_ids")}  # fmt: skip
    slots, zeros = np.arange(n, dtype=np.int32), np.zeros(n, np.int32)
    tables.open(
        OpenedRows(
            slots=slots,
            num_prompt_tokens=zeros + 1,
            seeds=ints["seed"].astype(np.int64),
            temperature=ints["temperature"].astype(np.float32),
            top_k=ints["top_k"].astype(np.int32),
            top_p=ints["top_p"].astype(np.float32),
            min_tokens=zeros,
            num_logprobs=ints["num_logprobs"].astype(np.int32),
            stop_id_counts=zeros,
            stop_ids=zeros[:0],
            adapter_slots=zeros - 1,
            num_cached_tokens=zeros,
        )
    )
    scheduled = ScheduledRows(slots, zeros + 7, zeros + 1, np.ones(n, np.bool_), zeros, zeros[:0])
    staging = Staging(place, 1 << 16)
    staging.begin()
    wanted = SamplingRows.build(Batch.build(scheduled, tables), tables)
    samples = Sampler(TensorParallel(), 0).sample(logits.clone().to(place), wanted, staging)
    return samples.token_ids.cpu().numpy()
