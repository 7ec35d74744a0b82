"""Logits, greedy tokens and log-probabilities equal those of transformers, on 1, 2 and 4 ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model.checkpoints import cohere, cohere2, reference_logits, save
from tests.model.generation import generate
from tests.model.rank_pool import RankPool

LOGITS_TOLERANCE = 1e-4
LOGPROBS_TOLERANCE = 1e-3
NUM_NEW = 6
WINDOW = 8
WHOLE = 10**6

Pools = Callable[[int], RankPool]


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(4, 263) for _ in range(length)] for length in lengths]


MIXED = prompts(5, 1, 17, 40)
AROUND_WINDOW = prompts(WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW, 5 * WINDOW)
FULL, SLIDING = "full_attention", "sliding_attention"

CASES: dict[str, tuple[Callable[[], Any], list[list[int]], int]] = {
    "plain heads": (lambda: cohere(num_key_value_heads=4), MIXED, WHOLE),
    "grouped heads": (lambda: cohere(), MIXED, WHOLE),
    "one kv head": (lambda: cohere(num_key_value_heads=1), MIXED, WHOLE),
    "q/k norm with distinct rows": (lambda: cohere(use_qk_norm=True), MIXED, WHOLE),
    "q/k norm, one kv head": (lambda: cohere(use_qk_norm=True, num_key_value_heads=1), MIXED, WHOLE),
    "attention bias": (lambda: cohere(attention_bias=True), MIXED, WHOLE),
    "untied head": (lambda: cohere(tie_word_embeddings=False), MIXED, WHOLE),
    "even vocabulary": (lambda: cohere(vocab_size=264), MIXED, WHOLE),
    "head_dim of its own": (lambda: cohere(head_dim=16), MIXED, WHOLE),
    "large theta, long prompts": (lambda: cohere(rope_theta=8e6), prompts(700, 300), WHOLE),
    "prompts that fill their blocks": (lambda: cohere(), prompts(16, 32, 64), WHOLE),
    "chunks beside decoding rows": (lambda: cohere(), MIXED, 7),
    "chunks of one token": (lambda: cohere(), prompts(9, 3), 1),
    "cohere2, default kinds": (lambda: cohere2(), AROUND_WINDOW, WHOLE),
    "cohere2, explicit kinds": (lambda: cohere2(layer_types=[FULL, SLIDING, FULL, SLIDING]), AROUND_WINDOW, WHOLE),
    "cohere2, all sliding": (lambda: cohere2(layer_types=[SLIDING] * 4), AROUND_WINDOW, WHOLE),
    "cohere2, bias": (lambda: cohere2(attention_bias=True, num_key_value_heads=1), AROUND_WINDOW, WHOLE),
    "cohere2, chunks across the window": (lambda: cohere2(), AROUND_WINDOW, 5),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    made: dict[str, tuple[Path, Any]] = {}

    def get(name: str) -> tuple[Path, Any]:
        if name not in made:
            model = CASES[name][0]()
            made[name] = save(model, tmp_path_factory.mktemp("model")), model
        return made[name]

    return get


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_logits_tokens_and_logprobs_equal_those_of_transformers(
    saved: Callable[[str], tuple[Path, Any]], rank_pools: Pools, name: str, world_size: int
) -> None:
    folder, reference = saved(name)
    _, asked, chunk = CASES[name]
    answers = rank_pools(world_size).run(generate, str(folder), asked, NUM_NEW, chunk)
    for prompt, (tokens, logits), *others in zip(asked, *answers, strict=True):
        expected = reference_logits(reference, tokens[:-1])
        assert (logits - expected).abs().max() < LOGITS_TOLERANCE
        assert tokens[len(prompt) :] == expected[len(prompt) - 1 :].argmax(-1).tolist()
        logprobs, wanted = logits.log_softmax(-1), expected.log_softmax(-1)
        assert (logprobs - wanted).abs().max() < LOGPROBS_TOLERANCE
        for other_tokens, other_logits in others:
            assert other_tokens == tokens and torch.equal(other_logits, logits), "ranks differ"


def test_decoding_far_past_the_window_equals_a_run_without_a_cache(
    saved: Callable[[str], tuple[Path, Any]], rank_pools: Pools
) -> None:
    folder, reference = saved("cohere2, default kinds")
    ((tokens, logits),) = rank_pools(1).run(generate, str(folder), prompts(3), 64)[0]
    assert (logits - reference_logits(reference, tokens[:-1])).abs().max() < LOGITS_TOLERANCE


def test_whole_and_chunked_prefill_agree(saved: Callable[[str], tuple[Path, Any]], rank_pools: Pools) -> None:
    for name in ("grouped heads", "cohere2, default kinds"):
        folder, _ = saved(name)
        whole, chunked = (rank_pools(1).run(generate, str(folder), prompts(50), 4, size)[0][0] for size in (WHOLE, 7))
        assert whole[0] == chunked[0]
        assert (whole[1] - chunked[1]).abs().max() < LOGITS_TOLERANCE


@pytest.mark.parametrize("name", ["grouped heads", "cohere2, default kinds", "q/k norm with distinct rows"])
def test_bfloat16_is_as_close_to_float32_as_transformers_own(
    saved: Callable[[str], tuple[Path, Any]], rank_pools: Pools, tmp_path: Path, name: str
) -> None:
    folder, reference = saved(name)
    ((tokens, logits),) = rank_pools(1).run(generate, str(folder), prompts(40), 8, WHOLE, torch.bfloat16)[0]
    exact = reference_logits(reference, tokens[:-1])
    rounded = type(reference).from_pretrained(folder, dtype=torch.bfloat16).eval()
    theirs = (reference_logits(rounded, tokens[:-1]).float() - exact).abs().mean()
    ours = (logits - exact).abs().mean()
    assert logits.dtype == torch.float32
    assert ours < 1.5 * theirs, (ours, theirs)
