"""Adapter folders in PEFT's format, written by hand, and the dense weights that they amount to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from model.config import load_model_config
from model.lora_adapter import MODULES, ModuleSizes
from model.lora_targets import module_name


def write_adapter(
    folder: Path, model: Path, seed: int, rank: int = 4, strength: float = 1.0, modules: Sequence[str] = MODULES
) -> dict[str, torch.Tensor]:
    """Random matrices for `modules` of every layer; what each adds to its weight, by the weight's name."""
    config = load_model_config(model)
    sizes, generator = ModuleSizes.whole(config), torch.Generator().manual_seed(seed)
    tensors, deltas = {}, {}
    for layer in range(config.num_hidden_layers):
        for module in modules:
            name, (num_in, num_out) = module_name(layer, module), sizes.shape(module)
            a = torch.randn(rank, num_in, generator=generator) / num_in**0.5
            b = torch.randn(num_out, rank, generator=generator) * strength / rank**0.5
            tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
            deltas[f"{name}.weight"] = 2.0 * b @ a
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(modules)}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return deltas
