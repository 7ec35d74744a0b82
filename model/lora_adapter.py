"""An adapter as values: its low-rank pairs in full, and the slices of them that one rank computes with."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch

from model.config import ModelConfig
from model.parallel import TensorParallel

INPUT_MODULES = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Modules of the input projection, in the order of its columns."""

OUTPUT_MODULES = ("o_proj", "down_proj")
"""Modules of the output projection, in the order of the columns it reads."""

MODULES = (*INPUT_MODULES, *OUTPUT_MODULES)

Place = tuple[int, str]
"""Layer and one of MODULES."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModuleSizes:
    """Whole or local sizes of the projections' parts; `q` and `kv` count heads times head_dim, `inner` the MLP."""

    hidden: int
    q: int
    kv: int
    inner: int

    @classmethod
    def whole(cls, config: ModelConfig) -> ModuleSizes:
        """Of the unsharded model."""
        heads = config.num_attention_heads, config.num_key_value_heads
        return cls(config.hidden_size, heads[0] * config.head_dim, heads[1] * config.head_dim, config.intermediate_size)

    @classmethod
    def local(cls, config: ModelConfig, parallel: TensorParallel) -> ModuleSizes:
        """Of one rank; raises ModelError where the ranks do not divide the model."""
        rows = _local_rows(config, parallel)
        q, kv, inner = (rows[name].stop - rows[name].start for name in ("q_proj", "k_proj", "gate_proj"))
        return cls(config.hidden_size, q, kv, inner)

    @property
    def inputs(self) -> tuple[int, ...]:
        """Columns of the input projection that each of INPUT_MODULES has."""
        return (self.q, self.kv, self.kv, self.inner, self.inner)

    @property
    def outputs(self) -> tuple[int, ...]:
        """Columns that each of OUTPUT_MODULES reads."""
        return (self.q, self.inner)

    def shape(self, module: str) -> tuple[int, int]:
        """(in, out) of a module's weight."""
        if module in OUTPUT_MODULES:
            return self.outputs[OUTPUT_MODULES.index(module)], self.hidden
        return self.hidden, self.inputs[INPUT_MODULES.index(module)]


@dataclasses.dataclass(frozen=True, slots=True)
class LoraPair:
    """What one module of one layer adds: y += scale * B (A x). `a` is `[r, in]`, `b` `[out, r]`, both float32."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float

    @property
    def rank(self) -> int:
        """r."""
        return self.a.shape[0]


@dataclasses.dataclass(frozen=True, slots=True)
class LoraSlices:
    """One rank's part of an adapter on the host, in the layout of `LoraStacks` but only `rank` wide; scale is in B.

    Zero where a layer lacks a module or has a smaller rank. L layers, `in_columns` = q + 2 kv + 2 inner, all local.
    """

    ranks: tuple[int, ...]
    """The largest rank over the layers of each of MODULES; 0 where the adapter has none."""
    a_in: torch.Tensor
    """`[L, 5, rank, hidden]`, a block for each of INPUT_MODULES."""
    b_in: torch.Tensor
    """`[L, in_columns, rank]`."""
    a_out: torch.Tensor
    """`[L, rank, q + inner]`: columns of o, then of down."""
    b_out: torch.Tensor
    """`[L, hidden, 2, rank]`, a block for each of OUTPUT_MODULES."""

    @property
    def rank(self) -> int:
        """The width of the blocks."""
        return max(self.ranks)

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """a_in, b_in, a_out, b_out."""
        return self.a_in, self.b_in, self.a_out, self.b_out

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def pin(self) -> LoraSlices:
        """The same in page-locked memory, from which a device copies beside its computing."""
        return LoraSlices(self.ranks, *(tensor.pin_memory() for tensor in self.tensors))


@dataclasses.dataclass(frozen=True, slots=True)
class Adapter:
    """A whole adapter; `pairs[layer, module]` with a module of MODULES.

    `is_rslora` tells that its configuration has `use_rslora`. The pairs' scales say so already; a merge asks for it.
    """

    pairs: dict[Place, LoraPair]
    is_rslora: bool = False

    @property
    def ranks(self) -> tuple[int, ...]:
        """The largest rank over the layers of each of MODULES; 0: none."""
        return tuple(
            max((pair.rank for (_, name), pair in self.pairs.items() if name == module), default=0)
            for module in MODULES
        )

    def slices(
        self, config: ModelConfig, parallel: TensorParallel, dtype: torch.dtype, is_pinned: bool = False
    ) -> LoraSlices:
        """This rank's part; see slice_pairs."""
        return slice_pairs(self.pairs.items(), self.ranks, config, parallel, dtype, is_pinned)


def slice_pairs(
    pairs: Iterable[tuple[Place, LoraPair]],
    ranks: tuple[int, ...],
    config: ModelConfig,
    parallel: TensorParallel,
    dtype: torch.dtype,
    is_pinned: bool = False,
) -> LoraSlices:
    """One rank's part of pairs: B by the columns of the input projection, A by the columns that the output one reads.

    Args:
        pairs: read once.
        ranks: the largest rank that pairs of each of MODULES have.
        config, parallel: the model and the rank.
        dtype: of the result; the scale is multiplied into B before, in float32.
        is_pinned: make the result in page-locked memory, from which a device copies beside its computing.
    """
    sizes, rows = ModuleSizes.local(config, parallel), _local_rows(config, parallel)
    rank, num_layers = max(ranks), config.num_hidden_layers

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=is_pinned)

    a_in = zeros(num_layers, len(INPUT_MODULES), rank, sizes.hidden)
    b_in = zeros(num_layers, sum(sizes.inputs), rank)
    a_out = zeros(num_layers, rank, sum(sizes.outputs))
    b_out = zeros(num_layers, sizes.hidden, len(OUTPUT_MODULES), rank)
    in_parts = dict(zip(INPUT_MODULES, torch.split(b_in, list(sizes.inputs), dim=1), strict=True))
    out_parts = dict(zip(OUTPUT_MODULES, torch.split(a_out, list(sizes.outputs), dim=2), strict=True))
    for (layer, module), pair in pairs:
        scaled = pair.b * pair.scale
        if module in INPUT_MODULES:
            a_in[layer, INPUT_MODULES.index(module), : pair.rank] = pair.a
            in_parts[module][layer, :, : pair.rank] = scaled[rows[module]]
        else:
            out_parts[module][layer, : pair.rank] = pair.a[:, rows[module]]
            b_out[layer, :, OUTPUT_MODULES.index(module), : pair.rank] = scaled
    return LoraSlices(ranks, a_in, b_in, a_out, b_out)


def _local_rows(config: ModelConfig, parallel: TensorParallel) -> dict[str, slice]:
    """What of each module a rank has: output rows of the input projection, input columns of the output projection."""
    dim = config.head_dim
    heads = parallel.share("num_attention_heads", config.num_attention_heads)
    kv_heads = parallel.kv_share(config.num_key_value_heads)
    inner = parallel.share("intermediate_size", config.intermediate_size)
    queries, keys = (slice(part.start * dim, part.stop * dim) for part in (heads, kv_heads))
    return dict(zip(MODULES, (queries, keys, keys, inner, inner, queries, inner), strict=True))
