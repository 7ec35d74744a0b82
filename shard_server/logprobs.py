"""Log-probabilities of the sampled and of the likeliest tokens: the raw log-softmax of the model's logits."""

from __future__ import annotations

import dataclasses

import torch

from model.parallel import TensorParallel
from shard_server import candidates
from shard_server.sampling_rows import SamplingRows
from shard_server.staging import Staging

FLOOR = -9999.0
"""Stands for -inf and for what a row that is not finite has; infinities have no place in JSON, nor on the link."""


@dataclasses.dataclass(frozen=True, slots=True)
class Logprobs:
    """Of the L rows that want them; K is the most that any row wants.

    Attributes:
        sampled: float32 `[L]`.
        top_token_ids: int32 `[L, K]`, the likeliest first, the lower id among equals.
        top: float32 `[L, K]`.
    """

    sampled: torch.Tensor
    top_token_ids: torch.Tensor
    top: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class LogprobStats:
    """What is taken from the logits before masks overwrite them.

    Attributes:
        rows: int64 `[L]`.
        logsumexp: float32 `[L]`, over the whole vocabulary.
        keys: int64 `[L, K]`, the likeliest tokens.
    """

    rows: torch.Tensor
    logsumexp: torch.Tensor
    keys: torch.Tensor

    @classmethod
    def of(
        cls, logits: torch.Tensor, rows: SamplingRows, vocab_start: int, parallel: TensorParallel, staging: Staging
    ) -> LogprobStats:
        """Reads float32 `[R, V_local]` logits; a collective where there are several ranks."""
        (index,) = staging.upload(rows.logprob_rows)
        own = logits.index_select(0, index)
        lse = parallel.all_gather(torch.logsumexp(own, dim=1, keepdim=True), dim=1)
        most = int(rows.num_logprobs.max())
        keys = torch.empty((len(index), 0), dtype=torch.int64, device=logits.device)
        if most:
            keys = candidates.largest(own, vocab_start, most)
            keys = parallel.all_gather(keys, dim=1).topk(most, dim=1).values
        return cls(index, torch.logsumexp(lse, dim=1), keys)

    def finish(self, raw: torch.Tensor) -> Logprobs:
        """Joins them with `raw`, float32 `[R]`, the logits of the sampled tokens."""
        values, token_ids = candidates.unpack(self.keys)
        sampled = _finite(raw.index_select(0, self.rows) - self.logsumexp)
        return Logprobs(sampled, token_ids.int(), _finite(values - self.logsumexp.unsqueeze(1)))


def _finite(logprobs: torch.Tensor) -> torch.Tensor:
    return logprobs.nan_to_num_(nan=FLOOR, posinf=FLOOR, neginf=FLOOR).clamp_(min=FLOOR)
