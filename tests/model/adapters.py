"""Adapters with random weights, made, saved and read by PEFT itself; and runs of our model with several of them."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from model.lora import BASE
from model.lora_stacks import LoraStacks
from model.lora_weights import load_adapter
from model.parallel import TensorParallel
from tests.model.checkpoints import reference_logits
from tests.model.generation import generate_with, load

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MAX_RANK = 64

Answers = list[tuple[list[int], torch.Tensor]]


def save_adapter(base: Any, folder: Path, seed: int = 0, **keys: Any) -> Path:
    """An adapter of `base` whose A and B are normal numbers, as PEFT saves it; all seven modules unless told."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's hints, as on fan_in_fan_out
        model = get_peft_model(copy.deepcopy(base), LoraConfig(**{"target_modules": ALL, **keys}))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter.copy_(noise * parameter.shape[-1] ** -0.5)
        model.save_pretrained(folder)
    return folder


def peft_logits(base: Any, adapter: Path, tokens: list[int]) -> torch.Tensor:
    """PEFT's logits `[len, vocab]` with the adapter of a folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(copy.deepcopy(base), adapter).eval()
    return reference_logits(model, tokens)


def generate_adapted(
    parallel: TensorParallel,
    folder: str,
    adapters: list[str],
    prompts: list[list[int]],
    slots: list[int],
    num_new: int = 3,
    chunk: int = 10**6,
) -> Answers:
    """Greedy tokens and logits of one batch in which prompt i uses the adapter `slots[i]` of the list (-1: none)."""
    model = load(parallel, folder)
    stacks = LoraStacks(model.config, parallel, max(1, len(adapters)), MAX_RANK, torch.float32)
    for slot, adapter in enumerate(adapters):
        stacks.bind(slot, load_adapter(Path(adapter), model.config, parallel, MAX_RANK, torch.float32))
    assert max(slots, default=BASE) < len(adapters)
    return generate_with(model, prompts, num_new, chunk, stacks, slots)
