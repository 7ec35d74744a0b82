"""Triton kernels of the model, which read and write columns of the fused projections in place."""

from model.kernels.decode_attention import decode_attention, num_decode_splits
from model.kernels.gated_activation import silu_and_mul
from model.kernels.lora import add_lora_input, add_lora_output
from model.kernels.norms import head_norm, layer_norm
from model.kernels.prefill_attention import prefill_attention
from model.kernels.rotary import rotary_and_cache
from model.kernels.sampling import sample

__all__ = [
    "add_lora_input",
    "add_lora_output",
    "decode_attention",
    "head_norm",
    "layer_norm",
    "num_decode_splits",
    "prefill_attention",
    "rotary_and_cache",
    "sample",
    "silu_and_mul",
]
