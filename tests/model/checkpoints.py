"""Tiny random checkpoints, saved by transformers' own classes, whose logits are large enough to tell errors apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Cohere2Config, Cohere2ForCausalLM, CohereConfig, CohereForCausalLM

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 263,  # divided by none of 2, 3 and 4
    "max_position_embeddings": 2048,
    "logit_scale": 0.25,
    "rope_theta": 10000.0,
    "eos_token_id": 3,
    "bos_token_id": 2,
    "pad_token_id": 0,
}


def cohere(**overrides: Any) -> CohereForCausalLM:
    """A Cohere model with random weights of a realistic spread."""
    return randomize(CohereForCausalLM(CohereConfig(**{**TINY, **overrides})))


def cohere2(**overrides: Any) -> Cohere2ForCausalLM:
    """The same for Cohere2: four layers and a window of eight."""
    shape = {**TINY, "num_hidden_layers": 4, "sliding_window": 8}
    return randomize(Cohere2ForCausalLM(Cohere2Config(**{**shape, **overrides})))


def randomize(model: Any) -> Any:
    """Fills every parameter anew: products keep the size of their input, norms' weights lie around one."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = "norm" in name
            scale = 0.3 if is_norm or name.endswith("bias") else parameter.shape[-1] ** -0.5
            if "embed" in name or "lm_head" in name:
                scale = 1.0
            parameter.copy_(noise * scale + (1.0 if is_norm else 0.0))
    return model.eval()


def save(model: Any, folder: Path) -> Path:
    """Writes config.json and model.safetensors."""
    model.save_pretrained(folder)
    return folder


@torch.inference_mode()
def reference_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """transformers' logits `[len, vocab]` of one whole sequence without a cache."""
    logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits
