"""Runs our model on a batch as a shard would: paged cache full of NaN, chunks, rows that decode beside prompts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from model.attention import Seqlen, create_attention
from model.config import load_model_config
from model.flash_cohere import FlashCohereForCausalLM
from model.lora import BASE, AdapterBatchData
from model.lora_stacks import LoraStacks
from model.parallel import TensorParallel
from model.weights import Weights

BLOCK_SIZE = 16


@dataclasses.dataclass
class Row:
    """A sequence under way and the logits of its computed positions."""

    tokens: list[int]
    num_wanted: int
    table: list[int]
    num_computed: int = 0
    slot: int = BASE
    logits: list[torch.Tensor] = dataclasses.field(default_factory=list)


def load(parallel: TensorParallel, folder: str, dtype: torch.dtype = torch.float32) -> FlashCohereForCausalLM:
    """The model of a folder with the torch backend."""
    config = load_model_config(Path(folder))
    attention = create_attention("torch", config, "cpu", BLOCK_SIZE)
    return FlashCohereForCausalLM("", config, Weights(Path(folder), config, parallel, dtype), attention)


def nan_cache(model: FlashCohereForCausalLM, num_blocks: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A pool in which whatever was not written shows."""
    config, world_size = model.config, model.parallel.world_size
    heads = max(1, config.num_key_value_heads // world_size)
    dtype = model.model.embed_tokens.weight.dtype
    shape = (num_blocks, model.attention.block_size, heads, config.head_dim)
    return [
        (torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype))
        for _ in range(config.num_hidden_layers)
    ]


@torch.inference_mode()
def forward(
    model: FlashCohereForCausalLM,
    cache: list[tuple[torch.Tensor, torch.Tensor]],
    rows: list[Row],
    chunks: list[int],
    stacks: LoraStacks | None = None,
) -> list[torch.Tensor]:
    """Computes `chunks[i]` more tokens of each row; logits `[chunk, vocab]` per row. Rows of one token come first."""
    adapters = None
    if stacks is not None:
        token_slots = [row.slot for row, chunk in zip(rows, chunks, strict=True) for _ in range(chunk)]
        adapters = AdapterBatchData.build(token_slots, stacks)
    size = model.attention.block_size
    starts = [row.num_computed for row in rows]
    ends = [start + chunk for start, chunk in zip(starts, chunks, strict=True)]
    spans = list(zip(rows, starts, ends, strict=True))
    positions = [p for _, start, end in spans for p in range(start, end)]
    places = [row.table[p // size] * size + p % size for row, start, end in spans for p in range(start, end)]
    width = max(len(row.table) for row in rows)
    int32 = {"dtype": torch.int32}
    seqlen = Seqlen(
        torch.tensor(chunks, **int32),
        torch.tensor(starts, **int32),
        torch.tensor(ends, **int32),
        num_decode_rows=sum(chunk == 1 for chunk in chunks),
        max_input_len=max(chunks),
        max_context_len=max(ends),
    )
    borders = torch.tensor([0, *torch.tensor(chunks).cumsum(0).tolist()], **int32)
    logits, _ = model.forward(
        torch.tensor([token for row, start, end in spans for token in row.tokens[start:end]]),
        torch.tensor(positions),
        None if max(chunks) == 1 else borders,
        cache,
        torch.tensor([row.table + [0] * (width - len(row.table)) for row in rows], **int32),
        torch.tensor(places),
        seqlen,
        max(ends),
        adapters,
    )
    return list(model.gather_logits(logits).split(chunks))


def generate(
    parallel: TensorParallel,
    folder: str,
    prompts: list[list[int]],
    num_new: int,
    chunk: int = 10**6,
    dtype: torch.dtype = torch.float32,
) -> list[tuple[list[int], torch.Tensor]]:
    """Greedy tokens (the prompt included) and the logits `[len - 1, vocab]` of each prompt, all in one batch.

    `chunk` bounds the prompt tokens of a row in a step; shorter prompts then decode beside longer ones.
    """
    return generate_with(load(parallel, folder, dtype), prompts, num_new, chunk)


def generate_with(
    model: FlashCohereForCausalLM,
    prompts: list[list[int]],
    num_new: int,
    chunk: int = 10**6,
    stacks: LoraStacks | None = None,
    slots: list[int] | None = None,
) -> list[tuple[list[int], torch.Tensor]]:
    """The same with a model that is loaded; prompt i goes through the adapter in `slots[i]` of the stacks."""
    generator = torch.Generator().manual_seed(1)
    blocks_each = [-(-(len(prompt) + num_new) // BLOCK_SIZE) for prompt in prompts]
    shuffled = (torch.randperm(sum(blocks_each), generator=generator) + 1).tolist()
    rows = []
    for prompt, count, slot in zip(prompts, blocks_each, slots or [BASE] * len(prompts), strict=True):
        rows.append(Row(list(prompt), len(prompt) + num_new, shuffled[:count], slot=slot))
        shuffled = shuffled[count:]
    cache = nan_cache(model, sum(blocks_each) + 1)
    while active := [row for row in rows if len(row.tokens) < row.num_wanted]:
        chunks = {id(row): min(chunk, len(row.tokens) - row.num_computed) for row in active}
        active.sort(key=lambda row: chunks[id(row)] != 1)
        for row, logits in zip(
            active, forward(model, cache, active, [chunks[id(r)] for r in active], stacks), strict=True
        ):
            row.logits.append(logits)
            row.num_computed += len(logits)
            if row.num_computed == len(row.tokens):
                row.tokens.append(int(logits[-1].argmax()))
    return [(row.tokens, torch.cat(row.logits)) for row in rows]
