"""The device's adapter slots: every layer's low-rank matrices of all adapters that a step may use."""

from __future__ import annotations

import dataclasses

import torch

from model.config import ModelConfig
from model.lora_adapter import INPUT_MODULES, MODULES, OUTPUT_MODULES, LoraSlices, ModuleSizes
from model.parallel import TensorParallel


@dataclasses.dataclass(frozen=True, slots=True)
class LoraLayer:
    """One layer's part of the stacks, S slots of R = max_rank: views whose last two dimensions are contiguous.

    Only the first stride, from slot to slot, is larger than a slot's part, as a slot holds all layers in one piece.
    Blocks are R wide; beyond an adapter's rank, and where it lacks a module, they are zero.
    """

    a_in: torch.Tensor
    """`[S, 5 R, hidden]`: rows of q, k, v, gate, up."""
    b_in: torch.Tensor
    """`[S, in_columns, R]`: a row for each column of the input projection."""
    a_out: torch.Tensor
    """`[S, R, q + inner]`: a column for each one that the output projection reads, o's first `q`, then down's."""
    b_out: torch.Tensor
    """`[S, hidden, 2 R]`: columns of o, then of down."""


class LoraStacks:
    """`max_loras` slots of adapters up to `max_rank`, of one rank's share; empty slots add nothing.

    `sizes` are the local sizes of the projections, `layers` the stacks of each layer. `ranks`, int32
    `[max_loras, 7]` on the device, has the rank of each of MODULES in a slot (0: none); `host_ranks` is the same here.
    """

    def __init__(
        self,
        config: ModelConfig,
        parallel: TensorParallel,
        max_loras: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocates all slots, zeroed; raises ModelError where the ranks do not divide the model."""
        self.max_loras = max_loras
        self.max_rank = max_rank
        self.sizes = ModuleSizes.local(config, parallel)
        shapes = _slot_shapes(config, self.sizes, max_rank)
        self._a_in, self._b_in, self._a_out, self._b_out = (
            torch.zeros((max_loras, *shape), dtype=dtype, device=device) for shape in shapes
        )
        self.ranks = torch.zeros((max_loras, len(MODULES)), dtype=torch.int32, device=device)
        self.host_ranks: list[tuple[int, ...]] = [(0,) * len(MODULES)] * max_loras
        self.layers = [self._layer(layer) for layer in range(config.num_hidden_layers)]

    def bind(self, slot: int, slices: LoraSlices) -> None:
        """Puts an adapter into a slot, whatever was there; on a device the copies follow what is already queued there.

        Raises:
            ValueError: the adapter's rank is over max_rank.
        """
        if slices.rank > self.max_rank:
            raise ValueError(f"an adapter of rank {slices.rank} does not go into slots of {self.max_rank}")
        self.clear(slot)
        rank, is_async = slices.rank, self.ranks.is_cuda
        _blocks(self._a_in[slot], 1, len(INPUT_MODULES))[:, :, :rank].copy_(slices.a_in, is_async)
        self._b_in[slot][..., :rank].copy_(slices.b_in, is_async)
        self._a_out[slot][:, :rank].copy_(slices.a_out, is_async)
        _blocks(self._b_out[slot], 2, len(OUTPUT_MODULES))[..., :rank].copy_(slices.b_out, is_async)
        self._set_ranks(slot, slices.ranks)

    def clear(self, slot: int) -> None:
        """Makes a slot add nothing."""
        for stack in (self._a_in, self._b_in, self._a_out, self._b_out):
            stack[slot].zero_()
        self._set_ranks(slot, (0,) * len(MODULES))

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(stack.nbytes for stack in (self._a_in, self._b_in, self._a_out, self._b_out))

    def _set_ranks(self, slot: int, ranks: tuple[int, ...]) -> None:
        self.host_ranks[slot] = ranks
        for place, rank in enumerate(ranks):
            self.ranks[slot, place].fill_(rank)  # a number in the launch: no copy that would wait for the device

    def _layer(self, layer: int) -> LoraLayer:
        stacks = (self._a_in, self._b_in, self._a_out, self._b_out)
        return LoraLayer(*(stack[:, layer] for stack in stacks))


def stacks_bytes(
    config: ModelConfig, parallel: TensorParallel, max_loras: int, max_rank: int, dtype: torch.dtype
) -> int:
    """Bytes that the slots will take on a device, for planning before they are made."""
    shapes = _slot_shapes(config, ModuleSizes.local(config, parallel), max_rank)
    return sum(torch.Size(shape).numel() for shape in shapes) * max_loras * dtype.itemsize


def _slot_shapes(config: ModelConfig, sizes: ModuleSizes, max_rank: int) -> list[tuple[int, ...]]:
    """Of a_in, b_in, a_out and b_out in one slot."""
    num_layers = config.num_hidden_layers
    return [
        (num_layers, len(INPUT_MODULES) * max_rank, sizes.hidden),
        (num_layers, sum(sizes.inputs), max_rank),
        (num_layers, max_rank, sum(sizes.outputs)),
        (num_layers, sizes.hidden, len(OUTPUT_MODULES) * max_rank),
    ]


def _blocks(stack: torch.Tensor, dim: int, num_blocks: int) -> torch.Tensor:
    """A view with `dim` split into its modules' blocks and max_rank."""
    shape = stack.shape
    return stack.view(*shape[:dim], num_blocks, shape[dim] // num_blocks, *shape[dim + 1 :])
