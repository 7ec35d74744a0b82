"""The engine's side of the shard link as plain values; `shard_client` packs them (proto/cohort/shard/v1/shard.proto).

A step is applied in this order: closes, adapter bindings, opens, fills, scheduled rows.
"""

from __future__ import annotations

import dataclasses

LINK_VERSION = 2


@dataclasses.dataclass(frozen=True, slots=True)
class OpenRow:
    """Gives `slot` to a sequence and clears its block table. `stop_ids` are what `min_tokens` forbids."""

    slot: int
    num_prompt_tokens: int
    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_tokens: int
    num_logprobs: int  # -1: none at all
    stop_ids: tuple[int, ...]
    adapter_slot: int = -1  # -1: the base model


@dataclasses.dataclass(frozen=True, slots=True)
class BindAdapter:
    """Gives the adapter slot `slot` to a version that every shard has staged. No open row uses the slot."""

    slot: int
    version: str


@dataclasses.dataclass(frozen=True, slots=True)
class FillTokens:
    """Writes `token_ids` into the slot's token row from position `start` on."""

    slot: int
    start: int
    token_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduledRow:
    """Computes positions [start, start + num_tokens) of `slot`, after `new_block_ids` joined its block table."""

    slot: int
    start: int
    num_tokens: int
    is_sampled: bool
    new_block_ids: tuple[int, ...] = ()


@dataclasses.dataclass(slots=True)
class Step:
    """One step. At most one scheduled row per slot."""

    step_id: int
    closed_slots: list[int] = dataclasses.field(default_factory=list)
    opened: list[OpenRow] = dataclasses.field(default_factory=list)
    filled: list[FillTokens] = dataclasses.field(default_factory=list)
    scheduled: list[ScheduledRow] = dataclasses.field(default_factory=list)
    bindings: list[BindAdapter] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class SampledToken:
    """What a sampled row gave; `logprob` and `top` only if the row was opened with num_logprobs >= 0."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class RowResult:
    """One scheduled row's outcome. `sampled` is None where nothing was sampled or the numbers are not finite."""

    is_finite: bool
    sampled: SampledToken | None


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """A step's outcome, rows in the order of Step.scheduled."""

    step_id: int
    is_out_of_memory: bool
    rows: list[RowResult]
    step_s: float
    device_idle_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class ShardInfo:
    """Facts that all ranks agree on. `num_blocks` counts block 0, which is never allocated."""

    model_fingerprint: str
    world_size: int
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int
    dtype: str
    device: str
    attention_backend: str
    max_loras: int = 0  # adapter slots; 0: LoRA is off
    max_lora_rank: int = 0
