"""Draws by Gumbel noise: from the whole vocabulary, or from the tokens that top_k and top_p keep."""

from __future__ import annotations

import torch

from shard_server import candidates, noise
from shard_server.link import Float32

# On a CPU, noise is made for each token only where more than this share of the tokens could win.
SPARSE_SHARE = 0.1
# On a CPU, top_p is first tried on so many of the likeliest tokens.
FEW = 512


def draw_plain(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, vocab_start: int
) -> torch.Tensor:
    """Keys `[N]` of the winners of logits / temperature + noise.

    Args:
        logits: float32 `[N, V]`; column 0 is the token `vocab_start`.
        temperature: float32 `[N]`, above 0.
        seeds, positions: int64 `[N]`.
        vocab_start: token id of column 0.
    """
    scaled = logits / temperature.unsqueeze(1)
    if logits.device.type == "cpu":
        # No token whose score lacks more than the noise can make up for will win.
        reach = noise.LARGEST_NOISE - noise.SMALLEST_NOISE
        rows, columns = torch.nonzero(scaled >= scaled.amax(dim=1, keepdim=True) - reach, as_tuple=True)
        if len(rows) < SPARSE_SHARE * scaled.numel():
            return _draw_sparsely(scaled, rows, columns, seeds, positions, vocab_start)
    scores = scaled.add_(noise.gumbel_range(seeds, positions, vocab_start, scaled.shape[1]))
    best, column = scores.max(dim=1)
    return candidates.pack(best, column + vocab_start)


def _draw_sparsely(
    scaled: torch.Tensor,
    rows: torch.Tensor,
    columns: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    vocab_start: int,
) -> torch.Tensor:
    """As draw_plain, from the places (rows, columns) alone; a row without any gets its first token."""
    token_ids = columns + vocab_start
    scores = scaled[rows, columns] + noise.gumbel(seeds[rows], positions[rows], token_ids)
    lowest = candidates.pack(scaled.new_full((1,), -torch.inf), torch.full((1,), vocab_start))
    return lowest.repeat(len(scaled)).scatter_reduce_(0, rows, candidates.pack(scores, token_ids), "amax")


def top_p_keys(logits: torch.Tensor, temperature: torch.Tensor, top_p: Float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys that hold every token which top_p keeps, the likeliest first, and the rows' normalisers.

    Args:
        logits: float32 `[N, V]` of the whole vocabulary.
        temperature: float32 `[N]`.
        top_p: on the host; the caller cuts by it.

    Returns:
        int64 `[N, K]` keys, and float32 `[N, 1]` log of the sum of exp(logits / temperature) over the vocabulary.
    """
    normaliser = torch.logsumexp(logits / temperature.unsqueeze(1), dim=1, keepdim=True)
    if logits.device.type == "cpu" and logits.shape[1] > FEW:
        few = candidates.largest(logits, 0, FEW)
        scaled = candidates.unpack(few)[0] / temperature.unsqueeze(1)
        # A margin, so that the sum over few and the one over all cannot disagree about the last kept token.
        covered = torch.exp(scaled - normaliser).sum(dim=1) - 1e-4
        if bool((covered >= torch.from_numpy(top_p)).all()):
            return few, normaliser
    keys = candidates.pack(logits, torch.arange(logits.shape[1], device=logits.device))
    return keys.sort(dim=1, descending=True).values, normaliser


def draw_among(
    keys: torch.Tensor,
    normaliser: torch.Tensor | None,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Draws from the first tokens of each row.

    The first `top_k` are kept, of these the shortest run whose probability reaches `top_p`, which holds at least the
    first (Holtzman et al. 2020, "The curious case of neural text degeneration"; temperature before both).

    Args:
        keys: int64 `[N, K]` of logits and token ids, the likeliest first.
        normaliser: float32 `[N, 1]`, log of the sum of exp(logits / temperature); None: over what top_k keeps.
        temperature, top_k, top_p, seeds, positions: `[N]`, as in DrawRows.

    Returns:
        int64 `[N]`, the winners' keys, still of logits.
    """
    values, token_ids = candidates.unpack(keys)
    scaled = values / temperature.unsqueeze(1)
    rank = torch.arange(keys.shape[1], device=keys.device)
    is_whole = normaliser is not None and keys.shape[1] > FEW  # see top_p_keys
    is_kept = (rank < top_k.unsqueeze(1)) | (top_k == 0).unsqueeze(1)
    scaled = scaled.masked_fill(~is_kept, -torch.inf)
    if normaliser is None:
        normaliser = torch.logsumexp(scaled, dim=1, keepdim=True)
    probabilities = torch.exp(scaled - normaliser)
    before = probabilities.cumsum(dim=1) - probabilities
    is_kept = (before < top_p.unsqueeze(1)) | (top_p >= 1).unsqueeze(1) | (rank == 0)
    if is_whole:
        # All ids from 0 on: four of them share one round of the generator.
        scores = scaled + noise.gumbel_range(seeds, positions, 0, keys.shape[1]).gather(1, token_ids)
    else:
        scores = scaled + noise.gumbel(seeds.unsqueeze(1), positions.unsqueeze(1), token_ids)
    scores = scores.masked_fill(~is_kept, -torch.inf)
    winner = candidates.pack(scores, token_ids).argmax(dim=1, keepdim=True)
    return keys.gather(1, winner).squeeze(1)
