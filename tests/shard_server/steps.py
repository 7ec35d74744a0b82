"""Builds link messages as a router would, and reads answers."""

from __future__ import annotations

import dataclasses

import numpy as np
from cohort.shard.v1 import shard_pb2


@dataclasses.dataclass
class Open:
    slot: int
    tokens: list[int]
    seed: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_tokens: int = 0
    num_logprobs: int = -1
    stop_ids: tuple[int, ...] = ()
    num_prompt_tokens: int | None = None
    adapter_slot: int = -1


@dataclasses.dataclass
class Run:
    slot: int
    start: int
    num_tokens: int = 1
    is_sampled: bool = True
    blocks: tuple[int, ...] = ()


def i32(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def f32(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


def opened(rows: list[Open]) -> shard_pb2.OpenedRows:
    return shard_pb2.OpenedRows(
        slots=i32(*[r.slot for r in rows]),
        num_prompt_tokens=i32(*[len(r.tokens) if r.num_prompt_tokens is None else r.num_prompt_tokens for r in rows]),
        seeds=np.array([r.seed for r in rows], "<u8").tobytes(),
        temperature=f32(*[r.temperature for r in rows]),
        top_k=i32(*[r.top_k for r in rows]),
        top_p=f32(*[r.top_p for r in rows]),
        min_tokens=i32(*[r.min_tokens for r in rows]),
        num_logprobs=i32(*[r.num_logprobs for r in rows]),
        stop_id_counts=i32(*[len(r.stop_ids) for r in rows]),
        stop_ids=i32(*[i for r in rows for i in r.stop_ids]),
        adapter_slots=i32(*[r.adapter_slot for r in rows]),
    )


def filled(pieces: list[tuple[int, int, list[int]]]) -> shard_pb2.FilledTokens:
    return shard_pb2.FilledTokens(
        slots=i32(*[slot for slot, _, _ in pieces]),
        starts=i32(*[start for _, start, _ in pieces]),
        counts=i32(*[len(ids) for _, _, ids in pieces]),
        token_ids=i32(*[i for _, _, ids in pieces for i in ids]),
    )


def scheduled(rows: list[Run]) -> shard_pb2.ScheduledRows:
    return shard_pb2.ScheduledRows(
        slots=i32(*[r.slot for r in rows]),
        starts=i32(*[r.start for r in rows]),
        num_tokens=i32(*[r.num_tokens for r in rows]),
        is_sampled=bytes([r.is_sampled for r in rows]),
        new_block_counts=i32(*[len(r.blocks) for r in rows]),
        new_block_ids=i32(*[i for r in rows for i in r.blocks]),
    )


def step(
    step_id: int,
    runs: list[Run],
    opens: list[Open] | None = None,
    closed: tuple[int, ...] = (),
    bindings: dict[int, str] | None = None,
) -> shard_pb2.Step:
    """Rows that are opened are filled in the same step."""
    message = shard_pb2.Step(step_id=step_id, closed_slots=i32(*closed), scheduled=scheduled(runs))
    if bindings:
        message.bindings.slots = i32(*bindings)
        message.bindings.versions.extend(bindings.values())
    if opens:
        message.opened.CopyFrom(opened(opens))
        message.filled.CopyFrom(filled([(r.slot, 0, r.tokens) for r in opens]))
    return message


def ints(column: bytes) -> list[int]:
    return np.frombuffer(column, "<i4").tolist()
