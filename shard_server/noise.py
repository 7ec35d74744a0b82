"""Counter-based Gumbel noise: a function of (seed, position, token id) alone, the same on every device.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", 2011) with the key (low and
high half of the seed) and the counter (token id >> 2, position, 0, 0); a token's word is number token id & 3. The word
gives u = ((word >> 8) + 1/2) / 2^24 in float32, and u gives -log(-log(u)). The float32 sum rounds up to 2^24 for the
largest word, so u is kept below 1. The arg max of logits / temperature + noise is a draw from the softmax.
"""

from __future__ import annotations

import torch

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
NUM_ROUNDS = 10
LOW = 0xFFFFFFFF
LARGEST_UNIFORM = 1 - 2.0**-24
# Bounds of the noise: of the largest uniform number and of the smallest, 2^-25, widened by a little for rounding.
LARGEST_NOISE = 16.7
SMALLEST_NOISE = -2.9

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Philox4x32-10. Every tensor is int64 and holds a u32; shapes broadcast.

    The product of two u32 wraps in int64 without losing a bit; the shift then copies the sign, which the mask removes.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        first, second = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0 = ((second >> 32) ^ c1 ^ k0) & LOW
        c2 = ((first >> 32) ^ c3 ^ k1) & LOW
        c1, c3 = second & LOW, first & LOW
        k0, k1 = (k0 + KEY_STEPS[0]) & LOW, (k1 + KEY_STEPS[1]) & LOW
    return c0, c1, c2, c3


def gumbel(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """float32 noise of each (seed, position, token id); int64 tensors whose shapes broadcast."""
    words = _quads(seeds, positions, token_ids >> 2)
    which = token_ids & 3
    upper = torch.where(which == 3, words[3], words[2])
    lower = torch.where(which == 1, words[1], words[0])
    return _from_words(torch.where(which >= 2, upper, lower))


def gumbel_range(seeds: torch.Tensor, positions: torch.Tensor, first: int, size: int) -> torch.Tensor:
    """float32 `[R, size]` noise of the token ids [first, first + size) for int64 `[R]` seeds and positions."""
    quads = torch.arange(first >> 2, (first + size + 3) >> 2, device=seeds.device)
    words = torch.stack(_quads(seeds.unsqueeze(1), positions.unsqueeze(1), quads), dim=-1).flatten(1)
    offset = first & 3
    return _from_words(words[:, offset : offset + size])


def _quads(seeds: torch.Tensor, positions: torch.Tensor, quads: torch.Tensor) -> Words:
    zero = torch.zeros_like(quads)
    return philox((quads, positions & LOW, zero, zero), (seeds & LOW, (seeds >> 32) & LOW))


def _from_words(words: torch.Tensor) -> torch.Tensor:
    uniform = (words >> 8).float().add_(0.5).mul_(2.0**-24).clamp_(max=LARGEST_UNIFORM)
    return uniform.log_().neg_().log_().neg_()
