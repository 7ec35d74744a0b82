"""Tokens with a value as one sortable int64: the larger value first, and among equal values the lower token id.

    bit 63                              32  31  30                     0
    [ float32 as an ordered signed integer ][ 0 ][ 2^31 - 1 - token id ]

Such keys need no care for ties in a maximum, a top-k or a sort, on one rank or over several.
"""

from __future__ import annotations

import numpy as np
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


def largest(logits: torch.Tensor, first_id: int, count: int) -> torch.Tensor:
    """int64 `[N, min(count, V)]` keys of the largest of float32 `[N, V]` logits, the largest first.

    `first_id` is the token id of column 0. A row with a NaN gives keys of some of its tokens.
    """
    count = min(count, logits.shape[1])
    if logits.device.type != "cpu" or count * 4 > logits.shape[1]:
        ids = torch.arange(first_id, first_id + logits.shape[1], device=logits.device)
        return pack(logits, ids).topk(count, dim=1).values
    # numpy's partition is vectorised, torch's topk is not; more than `count` are above the bound where values tie.
    values = logits.numpy()
    bound = np.partition(values, -count, axis=1)[:, -count, None]
    rows, columns = (torch.from_numpy(index) for index in np.nonzero(values >= bound))
    num_found = torch.bincount(rows, minlength=len(logits))
    places = torch.arange(len(rows)) - (num_found.cumsum(0) - num_found)[rows]
    lowest = pack(logits.new_full((1,), -torch.inf), torch.tensor([first_id]))
    keys = lowest.repeat(len(logits), max(count, int(num_found.max())))
    keys[rows, places] = pack(logits[rows, columns], columns + first_id)
    return keys.topk(count, dim=1).values
