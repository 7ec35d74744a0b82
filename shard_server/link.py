"""The shard link's packed columns as numpy arrays, and results back (proto/cohort/shard/v1/shard.proto)."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
from cohort.shard.v1 import shard_pb2

from shard_server.errors import ProtocolError

LINK_VERSION = 2

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]


@dataclasses.dataclass(frozen=True, slots=True)
class OpenedRows:
    """Rows given to sequences; `seeds` are the bits of the u64. `stop_ids` is the rows' lists one after another."""

    slots: Int32
    num_prompt_tokens: Int32
    seeds: Int64
    temperature: Float32
    top_k: Int32
    top_p: Float32
    min_tokens: Int32
    num_logprobs: Int32
    stop_id_counts: Int32
    stop_ids: Int32
    adapter_slots: Int32


@dataclasses.dataclass(frozen=True, slots=True)
class Bindings:
    """Adapter slots and the staged versions that they get."""

    slots: Int32
    versions: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class FilledTokens:
    """Pieces of token rows."""

    slots: Int32
    starts: Int32
    counts: Int32
    token_ids: Int32


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduledRows:
    """Rows that compute."""

    slots: Int32
    starts: Int32
    num_tokens: Int32
    is_sampled: Bool
    new_block_counts: Int32
    new_block_ids: Int32


@dataclasses.dataclass(frozen=True, slots=True)
class StepWork:
    """One step. Everything is read-only memory of the message it came in."""

    step_id: int
    closed_slots: Int32
    opened: OpenedRows | None
    filled: FilledTokens | None
    scheduled: ScheduledRows
    bindings: Bindings | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class RowResults:
    """What a step's rows gave, in the order of the scheduled rows.

    Attributes:
        is_finite: `[S]`.
        token_ids: `[sampled rows]`.
        logprobs: `[sampled rows with num_logprobs >= 0]`.
        top_token_ids, top_logprobs: `[sum of num_logprobs over those rows]`.
    """

    is_finite: Bool
    token_ids: Int32
    logprobs: Float32
    top_token_ids: Int32
    top_logprobs: Float32


@dataclasses.dataclass(frozen=True, slots=True)
class StepOutcome:
    """How a step ended; `rows` is None where it ran out of device memory."""

    step_id: int
    step_s: float
    device_idle_s: float
    rows: RowResults | None


def decode_step(step: shard_pb2.Step) -> StepWork:
    """Views of a step's columns; raises ProtocolError where lengths disagree."""
    opened = _opened(step.opened) if step.HasField("opened") else None
    filled = _filled(step.filled) if step.HasField("filled") else None
    closed = _int32(step.closed_slots, "closed_slots")
    bindings = _bindings(step.bindings) if step.HasField("bindings") else None
    return StepWork(step.step_id, closed, opened, filled, _scheduled(step.scheduled), bindings)


def _bindings(bindings: shard_pb2.AdapterBindings) -> Bindings:
    versions = tuple(bindings.versions)
    return Bindings(_int32(bindings.slots, "bindings.slots", len(versions)), versions)


def _opened(rows: shard_pb2.OpenedRows) -> OpenedRows:
    slots = _int32(rows.slots, "opened.slots")
    n = len(slots)
    counts = _int32(rows.stop_id_counts, "opened.stop_id_counts", n)
    return OpenedRows(
        slots=slots,
        num_prompt_tokens=_int32(rows.num_prompt_tokens, "opened.num_prompt_tokens", n),
        seeds=_column(rows.seeds, np.dtype("<i8"), "opened.seeds", n),
        temperature=_column(rows.temperature, np.dtype("<f4"), "opened.temperature", n),
        top_k=_int32(rows.top_k, "opened.top_k", n),
        top_p=_column(rows.top_p, np.dtype("<f4"), "opened.top_p", n),
        min_tokens=_int32(rows.min_tokens, "opened.min_tokens", n),
        num_logprobs=_int32(rows.num_logprobs, "opened.num_logprobs", n),
        stop_id_counts=counts,
        stop_ids=_int32(rows.stop_ids, "opened.stop_ids", _total(counts, "opened.stop_id_counts")),
        adapter_slots=_int32(rows.adapter_slots, "opened.adapter_slots", n),
    )


def _filled(pieces: shard_pb2.FilledTokens) -> FilledTokens:
    slots = _int32(pieces.slots, "filled.slots")
    counts = _int32(pieces.counts, "filled.counts", len(slots))
    return FilledTokens(
        slots=slots,
        starts=_int32(pieces.starts, "filled.starts", len(slots)),
        counts=counts,
        token_ids=_int32(pieces.token_ids, "filled.token_ids", _total(counts, "filled.counts")),
    )


def _scheduled(rows: shard_pb2.ScheduledRows) -> ScheduledRows:
    slots = _int32(rows.slots, "scheduled.slots")
    n = len(slots)
    counts = _int32(rows.new_block_counts, "scheduled.new_block_counts", n)
    return ScheduledRows(
        slots=slots,
        starts=_int32(rows.starts, "scheduled.starts", n),
        num_tokens=_int32(rows.num_tokens, "scheduled.num_tokens", n),
        is_sampled=_column(rows.is_sampled, np.dtype("u1"), "scheduled.is_sampled", n) != 0,
        new_block_counts=counts,
        new_block_ids=_int32(
            rows.new_block_ids, "scheduled.new_block_ids", _total(counts, "scheduled.new_block_counts")
        ),
    )


def _int32(data: bytes, name: str, length: int | None = None) -> Int32:
    column: Int32 = _column(data, np.dtype("<i4"), name, length)
    return column


def _column(data: bytes, dtype: np.dtype, name: str, length: int | None = None) -> npt.NDArray:  # type: ignore[type-arg]
    whole, rest = divmod(len(data), dtype.itemsize)
    if rest or (length is not None and whole != length):
        wanted = f"{length} entries" if length is not None else "whole entries"
        raise ProtocolError(f"{name} has {len(data)} bytes, which are not {wanted} of {dtype.itemsize} bytes")
    return np.frombuffer(data, dtype)


def _total(counts: Int32, name: str) -> int:
    if len(counts) and counts.min() < 0:
        raise ProtocolError(f"{name} has the negative entry {counts.min()}")
    return int(counts.sum())


def encode_outcome(outcome: StepOutcome, rank: int) -> shard_pb2.StepResult:
    """The message for an outcome; only rank 0 sends the rows."""
    is_lost = outcome.rows is None
    status = shard_pb2.STEP_STATUS_OUT_OF_MEMORY if is_lost else shard_pb2.STEP_STATUS_OK
    result = shard_pb2.StepResult(
        step_id=outcome.step_id, status=status, step_s=outcome.step_s, device_idle_s=outcome.device_idle_s
    )
    rows = outcome.rows
    if rows is not None and rank == 0:
        result.is_finite = rows.is_finite.astype(np.uint8).tobytes()
        result.token_ids = rows.token_ids.tobytes()
        result.logprobs = rows.logprobs.tobytes()
        result.top_token_ids = rows.top_token_ids.tobytes()
        result.top_logprobs = rows.top_logprobs.tobytes()
    return result
