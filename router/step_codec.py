"""Steps and their results as the packed columns of proto/cohort/shard/v1/shard.proto."""

from __future__ import annotations

import itertools
import sys
from array import array

from cohort.shard.v1 import shard_pb2

from router.step import RowResult, SampledToken, Step, StepResult

assert sys.byteorder == "little", "the link's columns are little-endian"


def pack_step(step: Step) -> shard_pb2.ExecuteRequest:
    """The message that carries a step."""
    message = shard_pb2.Step(step_id=step.step_id, closed_slots=_column("i", step.closed_slots))
    rows = step.scheduled
    message.scheduled.slots = _column("i", [row.slot for row in rows])
    message.scheduled.starts = _column("i", [row.start for row in rows])
    message.scheduled.num_tokens = _column("i", [row.num_tokens for row in rows])
    message.scheduled.is_sampled = bytes([row.is_sampled for row in rows])
    message.scheduled.new_block_counts = _column("i", [len(row.new_block_ids) for row in rows])
    message.scheduled.new_block_ids = _column("i", [block for row in rows for block in row.new_block_ids])
    if step.opened:
        _pack_opened(step, message.opened)
    if step.filled:
        message.filled.slots = _column("i", [fill.slot for fill in step.filled])
        message.filled.starts = _column("i", [fill.start for fill in step.filled])
        message.filled.counts = _column("i", [len(fill.token_ids) for fill in step.filled])
        message.filled.token_ids = _column("i", [token for fill in step.filled for token in fill.token_ids])
    if step.bindings:
        message.bindings.slots = _column("i", [binding.slot for binding in step.bindings])
        message.bindings.versions.extend(binding.version for binding in step.bindings)
    return shard_pb2.ExecuteRequest(step=message)


def _pack_opened(step: Step, message: shard_pb2.OpenedRows) -> None:
    rows = step.opened
    message.slots = _column("i", [row.slot for row in rows])
    message.num_prompt_tokens = _column("i", [row.num_prompt_tokens for row in rows])
    message.seeds = _column("Q", [row.seed for row in rows])
    message.temperature = _column("f", [row.temperature for row in rows])
    message.top_k = _column("i", [row.top_k for row in rows])
    message.top_p = _column("f", [row.top_p for row in rows])
    message.min_tokens = _column("i", [row.min_tokens for row in rows])
    message.num_logprobs = _column("i", [row.num_logprobs for row in rows])
    message.stop_id_counts = _column("i", [len(row.stop_ids) for row in rows])
    message.stop_ids = _column("i", [token for row in rows for token in row.stop_ids])
    message.adapter_slots = _column("i", [row.adapter_slot for row in rows])


def unpack_result(message: shard_pb2.StepResult, step: Step, num_logprobs: dict[int, int]) -> StepResult:
    """Rank 0's answer to `step`. `num_logprobs` is by slot, as it was when the step was sent.

    Raises ValueError if the answer's columns do not have the lengths that the step asks for.
    """
    is_out_of_memory = message.status == shard_pb2.STEP_STATUS_OUT_OF_MEMORY
    if is_out_of_memory:
        rows = [RowResult(True, None) for _ in step.scheduled]
    else:
        sampled = iter(_sampled_tokens(message, [num_logprobs[row.slot] for row in step.scheduled if row.is_sampled]))
        rows = []
        for row, is_finite in zip(step.scheduled, message.is_finite, strict=True):
            token = next(sampled) if row.is_sampled else None
            rows.append(RowResult(bool(is_finite), token if is_finite else None))
    return StepResult(message.step_id, is_out_of_memory, rows, message.step_s, message.device_idle_s)


def _sampled_tokens(message: shard_pb2.StepResult, num_logprobs: list[int]) -> list[SampledToken]:
    """One per sampled row; a row that is not finite has a token too, which means nothing."""
    token_ids = _integers(message.token_ids)
    if len(token_ids) != len(num_logprobs):
        raise ValueError(f"{len(token_ids)} tokens for {len(num_logprobs)} sampled rows")
    logprobs = _floats(message.logprobs)
    top_ids, top_logprobs = _integers(message.top_token_ids), _floats(message.top_logprobs)
    asked = [count for count in num_logprobs if count >= 0]
    if len(logprobs) != len(asked) or not len(top_ids) == len(top_logprobs) == sum(asked):
        raise ValueError("the log-probability columns have other lengths than the rows asked for")
    if not asked:
        return [SampledToken(token_id) for token_id in token_ids]
    own, top = iter(logprobs), iter(zip(top_ids, top_logprobs, strict=True))
    return [
        SampledToken(token_id) if count < 0 else SampledToken(token_id, next(own), tuple(itertools.islice(top, count)))
        for token_id, count in zip(token_ids, num_logprobs, strict=True)
    ]


def _column(kind: str, values: list[int] | list[float]) -> bytes:
    return array(kind, values).tobytes()


def _integers(column: bytes) -> array[int]:
    values = array("i")
    values.frombytes(column)
    return values


def _floats(column: bytes) -> array[float]:
    values = array("f")
    values.frombytes(column)
    return values
