"""Tiny random checkpoints, and transformers' own answers on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Cohere2Config, Cohere2ForCausalLM, CohereConfig, CohereForCausalLM

VOCAB = 320
GEOMETRY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "logit_scale": 0.5,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def make(folder: Path, model_type: str = "cohere") -> torch.nn.Module:
    """Saves random weights in float32 and returns the model."""
    torch.manual_seed(3)
    if model_type == "cohere":
        model = CohereForCausalLM(CohereConfig(**GEOMETRY))
    else:
        model = Cohere2ForCausalLM(Cohere2Config(**GEOMETRY, sliding_window=9, head_dim=16))
    model.eval().save_pretrained(folder)
    return model


@torch.inference_mode()
def greedy(model: torch.nn.Module, prompt: list[int], num_tokens: int) -> list[int]:
    """The likeliest tokens, one whole forward for each."""
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]
