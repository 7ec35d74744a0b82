"""Tokens with a value as one sortable int64: the larger value first, and among equal values the lower token id.

    bit 63                              32  31  30                     0
    [ float32 as an ordered signed integer ][ 0 ][ 2^31 - 1 - token id ]

Such keys need no care for ties in a maximum, a top-k or a sort, on one rank or over several.
"""

from __future__ import annotations

import torch

LARGEST_ID = 0x7FFFFFFF
FLOAT_BITS = 0x7FFFFFFF


def pack(values: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """int64 keys of float32 values and int64 token ids of broadcastable shapes. A NaN gives some key."""
    bits = (values + 0.0).view(torch.int32)  # the sum turns -0 into 0, which equals it
    ordered = bits ^ ((bits >> 31) & FLOAT_BITS)
    return (ordered.long() << 32) + (LARGEST_ID - token_ids)


def unpack(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The float32 values and int64 token ids of keys."""
    ordered = (keys >> 32).int()
    bits = ordered ^ ((ordered >> 31) & FLOAT_BITS)
    return bits.view(torch.float32), LARGEST_ID - (keys & FLOAT_BITS)
