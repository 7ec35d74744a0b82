"""Which float type a model runs in."""

from __future__ import annotations

import torch

from model.config import ModelConfig
from model.errors import ModelError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Type names in a safetensors header that can be turned into one of DTYPES without loss of range.
STORED_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def resolve_dtype(requested: str, config: ModelConfig, stored: str | None = None) -> torch.dtype:
    """The dtype of weights and activations.

    Args:
        requested: `--dtype`; auto takes the configuration's torch_dtype (or dtype) key, else `stored`.
        config: the checkpoint's configuration.
        stored: the type name of the checkpoint's own tensors, or None.

    Raises:
        ModelError: float16, in which activations of these models overflow, or a name that is unknown.
    """
    if requested != "auto":
        if requested not in DTYPES:
            raise ModelError(f"--dtype {requested} is not supported; use auto, float32 or bfloat16.")
        return DTYPES[requested]
    name = config.torch_dtype or stored or "bfloat16"
    if name not in DTYPES:
        raise ModelError(f"The checkpoint's dtype {name} is not served; pass --dtype bfloat16 or --dtype float32.")
    return DTYPES[name]
