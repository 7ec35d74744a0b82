"""The embedding and the head, whose vocabulary is cut into equal padded slices, one per rank."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from model.config import ModelConfig
from model.errors import ModelError
from model.linear import Linear
from model.parallel import TensorParallel
from model.weights import WeightSource

ALIGNMENT = 8  # products run fastest with a multiple of this many columns


class VocabularySlice:
    """Ids [start, start + num_real) are this rank's; its tables have `size` rows, the same on every rank."""

    def __init__(self, vocab_size: int, parallel: TensorParallel) -> None:
        """Cuts `vocab_size` ids over the ranks; the last slices may be partly or wholly padding."""
        per_rank = -(-vocab_size // parallel.world_size)
        self.size = -(-per_rank // ALIGNMENT) * ALIGNMENT
        self.start = min(parallel.rank * self.size, vocab_size)
        self.num_real = min(self.size, vocab_size - self.start)

    def take(self, name: str, config: ModelConfig, weights: WeightSource) -> torch.Tensor:
        """The slice's rows `[size, hidden]` of a `[vocab_size, hidden]` tensor, padding rows zero."""
        rows = slice(self.start, self.start + self.num_real)
        real = weights.take(name, (config.vocab_size, config.hidden_size), rows)
        return real if self.num_real == self.size else F.pad(real, (0, 0, 0, self.size - self.num_real))


class VocabularyEmbedding:
    """Looks up ids; each rank gives the rows it has, and their sum is the whole."""

    def __init__(self, prefix: str, config: ModelConfig, weights: WeightSource) -> None:
        """Takes `prefix`.weight."""
        self.parallel = weights.parallel
        self.slice = VocabularySlice(config.vocab_size, weights.parallel)
        self.weight = self.slice.take(f"{prefix}.weight", config, weights)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 `[T]` ids below vocab_size give `[T, hidden]`."""
        if self.parallel.world_size == 1:
            return F.embedding(input_ids, self.weight)
        local = input_ids - self.slice.start
        is_elsewhere = (local < 0) | (local >= self.slice.num_real)
        rows = F.embedding(local.masked_fill(is_elsewhere, 0), self.weight)
        return self.parallel.all_reduce(rows.masked_fill_(is_elsewhere.unsqueeze(1), 0))


class VocabularyHead:
    """Logits of this rank's slice."""

    def __init__(self, name: str, config: ModelConfig, weights: WeightSource, embedding: VocabularyEmbedding) -> None:
        """Takes the tensor `name`, or shares `embedding`'s; a tied tensor that is stored as well is compared.

        Raises:
            ModelError: it is stored, although tied, and differs from the embedding.
        """
        self.slice = embedding.slice
        self.logit_scale = config.logit_scale
        if config.tie_word_embeddings:
            weight = embedding.weight
            if weights.has(name) and not torch.equal(self.slice.take(name, config, weights), weight):
                raise ModelError(
                    f"{name} differs from the embedding, but tie_word_embeddings is true; set it to false to use both."
                )
        else:
            weight = self.slice.take(name, config, weights)
        self.projection = Linear(weight)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[R, hidden]` gives float32 `[R, size]`, times logit_scale, -inf in the padding columns."""
        if hidden_states.is_cuda:
            logits = self._multiply_on_cuda(hidden_states)
        else:
            logits = self.projection.forward(hidden_states).float().mul_(self.logit_scale)
        if self.slice.num_real < self.slice.size:
            logits[:, self.slice.num_real :] = -torch.inf
        return logits

    def _multiply_on_cuda(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The product written in float32 at once: the logits are the largest tensor of a decode step by far."""
        # A power of two may as well scale the few hidden states: no bit of the product changes.
        is_exact = math.frexp(self.logit_scale)[0] == 0.5
        if is_exact:
            hidden_states = hidden_states * self.logit_scale
        logits = self.projection.to_float32(hidden_states)
        return logits if is_exact else logits.mul_(self.logit_scale)
