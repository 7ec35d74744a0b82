"""Chooses each row's next token from this rank's slice of the logits, so that every rank chooses the same."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from model.parallel import TensorParallel
from shard_server import candidates, device_draw
from shard_server.draw import draw_among, draw_plain, top_p_keys
from shard_server.logprobs import Logprobs, LogprobStats
from shard_server.sampling_rows import DrawRows, SamplingRows
from shard_server.staging import Staging

CHUNK_ROWS = 64
"""Rows with top_k or top_p that are sampled at once."""


@dataclasses.dataclass(frozen=True, slots=True)
class Samples:
    """Tensors on the device.

    Attributes:
        token_ids: int32 `[R]`; 0 where the row is not finite.
        is_finite: int32 `[R]`; 0 where a logit is NaN or +inf, or all are -inf.
        logprobs: of the rows that want them; None if no row does.
    """

    token_ids: torch.Tensor
    is_finite: torch.Tensor
    logprobs: Logprobs | None


class Sampler:
    """Decides over all ranks from candidates: each rank's best tokens cross between ranks, not its logits.

    Only rows cut by top_p alone, where no bound on the number of candidates is known, gather all their logits. What is
    gathered has the same bits on all ranks, hence so have the decisions, however the ranks' own logits came about.
    """

    def __init__(self, parallel: TensorParallel, vocab_start: int) -> None:
        """`vocab_start` is the token id of the logits' first column; higher ranks hold higher ids."""
        self._parallel = parallel
        self._vocab_start = vocab_start

    def sample(self, logits: torch.Tensor, rows: SamplingRows, staging: Staging) -> Samples:
        """Samples every row.

        Args:
            logits: float32 `[R, V_local]`, -inf in padding columns; overwritten.
            rows: what each row wants.
            staging: the way of host arrays to the device.
        """
        stats = None
        if len(rows.logprob_rows):
            # Before anything is masked: log-probabilities are those of the model.
            stats = LogprobStats.of(logits, rows, self._vocab_start, self._parallel, staging)
        if len(rows.forbidden_rows):
            self._forbid(logits, rows, staging)
        is_greedy = rows.plain is None and rows.top_k is None and rows.top_p is None
        if logits.device.type == "cpu":
            values, columns = _largest(logits)
            if is_greedy and self._parallel.world_size == 1:
                is_finite = torch.isfinite(values)
                return Samples((columns * is_finite).int(), is_finite.int(), stats.finish(values) if stats else None)
            keys = candidates.pack(values, columns + self._vocab_start)
            raw = values.clone()
            if rows.plain is not None:
                self._draw_locally(logits, rows.plain, keys, raw, staging)
        else:
            temperature, seeds, positions = _draw_columns(len(logits), rows, staging)
            keys, raw, values = device_draw.draw(logits, temperature, seeds, positions, self._vocab_start)
        keys, raw, largest = self._best_over_ranks(keys, raw, values)
        for group in (rows.top_k, rows.top_p):
            if group is not None:
                self._draw_filtered(logits, group, keys, raw, staging)
        is_finite = torch.isfinite(largest)
        token_ids = candidates.unpack(keys)[1].masked_fill_(~is_finite, 0).int()
        return Samples(token_ids, is_finite.int(), stats.finish(raw) if stats else None)

    def draw_plainly(
        self, logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens of rows that no filter cuts, without the host's help: what a CUDA graph may hold.

        Args:
            logits: float32 `[R, V_local]` on a CUDA device.
            temperature: float32 `[R]`; 0 takes the likeliest token.
            seeds, positions: int64 `[R]`.

        Returns:
            int32 `[R]` token ids and bool `[R]` flags, as in Samples.
        """
        if self._parallel.world_size == 1:
            samples = device_draw.sample(logits, temperature, seeds, positions, self._vocab_start)
            return samples.tokens, samples.is_finite
        drawn = device_draw.draw(logits, temperature, seeds, positions, self._vocab_start)
        keys, _, largest = self._best_over_ranks(*drawn)
        is_finite = torch.isfinite(largest)
        return candidates.unpack(keys)[1].masked_fill_(~is_finite, 0).int(), is_finite

    def _forbid(self, logits: torch.Tensor, rows: SamplingRows, staging: Staging) -> None:
        columns = rows.forbidden_ids - self._vocab_start
        is_here = (columns >= 0) & (columns < logits.shape[1])
        row_index, column_index = staging.upload(rows.forbidden_rows[is_here], columns[is_here])
        logits.index_put_((row_index, column_index), logits.new_full((), -torch.inf))

    def _draw_locally(
        self, logits: torch.Tensor, group: DrawRows, keys: torch.Tensor, raw: torch.Tensor, staging: Staging
    ) -> None:
        """Puts the rank's winners of rows without a filter into `keys`, and their logits into `raw`."""
        index, temperature, seeds, positions = staging.upload(
            group.rows, group.temperature, group.seeds, group.positions
        )
        own = logits.index_select(0, index)
        won = draw_plain(own, temperature, seeds, positions, self._vocab_start)
        keys[index] = won
        columns = candidates.unpack(won)[1] - self._vocab_start
        raw[index] = own.gather(1, columns.unsqueeze(1)).squeeze(1)

    def _best_over_ranks(
        self, keys: torch.Tensor, raw: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Winning keys `[R]`, their logits, and each row's largest logit, which is NaN where any logit is."""
        if self._parallel.world_size == 1:
            return keys, raw, values
        floats = torch.stack([raw, values], dim=1).view(torch.int64)  # two float32 in the room of one int64
        mine = torch.cat([keys.unsqueeze(1), floats], dim=1)
        gathered = self._parallel.all_gather(mine.unsqueeze(0), dim=0)  # [world_size, R, 2]
        best, winner = gathered[..., 0].max(dim=0)
        parts = gathered[..., 1:].contiguous().view(torch.float32)  # [world_size, R, 2]
        return best, parts[..., 0].gather(0, winner.unsqueeze(0)).squeeze(0), parts[..., 1].amax(dim=0)

    def _draw_filtered(
        self, logits: torch.Tensor, group: DrawRows, keys: torch.Tensor, raw: torch.Tensor, staging: Staging
    ) -> None:
        """Puts the winners of rows with top_k or top_p into `keys`, and their logits into `raw`, on all ranks alike."""
        index, temperature, seeds, positions, top_k, top_p = staging.upload(
            group.rows, group.temperature, group.seeds, group.positions, group.top_k, group.top_p
        )
        most = int(group.top_k.max())
        # Rows apart in chunks: a whole vocabulary of sortable keys and its noise take much memory.
        for first in range(0, len(index), CHUNK_ROWS):
            chunk = slice(first, first + CHUNK_ROWS)
            own = logits.index_select(0, index[chunk])
            if most:
                kept = candidates.largest(own, self._vocab_start, most)
                kept = self._parallel.all_gather(kept, dim=1)
                kept = kept.topk(min(most, kept.shape[1]), dim=1).values
                normaliser = None
            else:
                whole = self._parallel.all_gather(own, dim=1)
                kept, normaliser = top_p_keys(whole, temperature[chunk], group.top_p[chunk])
            winner = draw_among(
                kept, normaliser, temperature[chunk], top_k[chunk], top_p[chunk], seeds[chunk], positions[chunk]
            )
            raw[index[chunk]], keys[index[chunk]] = candidates.unpack(winner)[0], winner


def _draw_columns(num_rows: int, rows: SamplingRows, staging: Staging) -> list[torch.Tensor]:
    """Temperature, seeds and positions `[num_rows]` on the device; rows that are not drawn plainly have 0."""
    temperature = np.zeros(num_rows, np.float32)
    seeds, positions = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)
    if (plain := rows.plain) is not None:
        temperature[plain.rows], seeds[plain.rows] = plain.temperature, plain.seeds
        positions[plain.rows] = plain.positions
    return staging.upload(temperature, seeds, positions)


def _largest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's largest logit (NaN where any is) and the lowest column that has it, on a CPU."""
    # numpy's search is vectorised, torch's for a value with its index is not.
    columns = torch.from_numpy(logits.numpy().argmax(axis=1))
    return logits.gather(1, columns.unsqueeze(1)).squeeze(1), columns
