"""Steps of padding that meet every variant of every kernel, so that none is compiled while requests are served.

Kernels are compiled apart by what their launchers choose and by facts of their arguments. What differs from step to
step and makes a variant: the size of the longest prompt (tiles of prefill attention), whether contexts are split
(decode attention), how many tokens a step has (elementwise kernels), and whether a count is 1 or a multiple of 16.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from shard_server.graph_sizes import PROGRAMS_THAT_FILL
from shard_server.sampling_rows import DrawRows, SamplingRows

PROMPT_SIZES = (16, 32, 64, 128)
"""Lengths of a step's longest prompt that give prefill attention different tiles; see its `block_m`."""
FEW_TOKENS = 256
"""Up to here the elementwise kernels run smaller programs."""
MANY_TOKENS = 512
ADAPTER_TOKENS = (1, 9, 513)
"""Tokens of a step that give the adapters' kernels different tiles; see `lora_tilings`."""
MULTIPLE = 16
"""Counts that are multiples of it are told apart from others."""
NUM_LIKELIEST = 20


@dataclasses.dataclass(frozen=True, slots=True)
class PaddedStep:
    """So many rows that decode, each at the end of a context of `context_len` tokens, and new prompts beside them."""

    num_decode_rows: int
    context_len: int
    prompt_lens: tuple[int, ...] = ()
    has_adapters: bool = False


def padded_steps(
    max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, num_kv_heads: int, has_adapters: bool = False
) -> list[PaddedStep]:
    """All steps that a fresh process runs once; `num_kv_heads` is this rank's number."""
    most = min(max_num_seqs, max_num_batched_tokens)
    enough = -(-PROGRAMS_THAT_FILL // num_kv_heads)  # rows whose contexts are never split
    row_counts = sorted({1, min(enough, most)})
    contexts = sorted({1, max_model_len})
    steps = [PaddedStep(rows, context) for rows in row_counts for context in contexts]
    longest = min(max_model_len, max_num_batched_tokens)
    for prompt_len in sorted({min(size, longest) for size in PROMPT_SIZES if longest > 1}):
        steps.append(PaddedStep(0, 0, (prompt_len,)))
        for rows in row_counts:
            beside = min(rows, most - 1, max_num_batched_tokens - prompt_len)
            if beside > 0:
                steps.append(PaddedStep(beside, max_model_len, (prompt_len,)))
    steps += [PaddedStep(0, 0, lens) for lens in _wide_prompts(max_num_seqs, max_num_batched_tokens, max_model_len)]
    if has_adapters:
        most_tokens = min(max_num_batched_tokens, max_num_seqs * max_model_len)
        for num_tokens in ADAPTER_TOKENS:
            if num_tokens <= most_tokens:
                steps.append(PaddedStep(0, 0, _prompts(num_tokens, max_model_len), has_adapters=True))
    return list(dict.fromkeys(steps))


def _wide_prompts(max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> list[tuple[int, ...]]:
    """Prompts of more than FEW_TOKENS together, a multiple of MULTIPLE and another number."""
    most = min(MANY_TOKENS, max_num_batched_tokens, max_num_seqs * max_model_len)
    found = []
    for num_tokens in sorted({most // MULTIPLE * MULTIPLE, most, most - 1}):
        if num_tokens > FEW_TOKENS:
            found.append(_prompts(num_tokens, max_model_len))
    return found


def _prompts(num_tokens: int, max_model_len: int) -> tuple[int, ...]:
    """As few prompts as have so many tokens together."""
    whole, rest = divmod(num_tokens, max_model_len)
    return (max_model_len,) * whole + ((rest,) if rest else ())


def every_way_to_sample(vocab_size: int) -> SamplingRows:
    """Row 0 in every group at once: plain, top_k, top_p, log-probabilities and a forbidden token."""
    row, one = np.zeros(1, np.int64), np.ones(1, np.int64)
    plain = DrawRows(row, np.ones(1, np.float32), np.zeros(1, np.int32), np.ones(1, np.float32), row, one)
    count = np.full(1, min(NUM_LIKELIEST, vocab_size), np.int32)
    half = np.full(1, 0.5, np.float32)
    return SamplingRows(
        plain=plain,
        top_k=dataclasses.replace(plain, top_k=count, top_p=half),
        top_p=dataclasses.replace(plain, top_p=half),
        logprob_rows=row,
        num_logprobs=count,
        forbidden_rows=row,
        forbidden_ids=row,
    )
