"""One adapter out of several with weights, under the names and definitions of PEFT's `add_weighted_adapter`.

With s the scale of an adapter's module and w the adapter's weight, every module of the merged adapter has
- cat: all A below each other, each times w s, and all B beside each other: exactly the weighted sum of the products;
- linear: A = sum of sign(w s) sqrt(|w s|) A, B = sum of sqrt(|w s|) B, which holds products of different adapters too;
- ties: of A and of B apart, the `density` part of largest magnitude is kept, each place elects a sign, and the weighted
  values that have it are averaged (Yadav et al., "TIES-Merging", 2023);
- dare_linear, dare_ties: values are kept at random with probability `density` and divided by it, then linear or ties'
  election and average (Yu et al., "Language Models are Super Mario", 2023).
A single adapter is always merged as linear. A module that only some adapters have is merged of those. PEFT gives the
result the first adapter's configuration with alpha = r: where that one is rank-stabilized, the result is scaled by
sqrt(r), and so it is here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from model.errors import AdapterError
from model.lora_adapter import Adapter, LoraPair, Place
from model.lora_mask import dare_mask

COMBINATIONS = ("cat", "linear", "ties", "dare_linear", "dare_ties")
MAJORITY_SIGNS = ("total", "frequency")


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One adapter of a merge; `name` is for messages."""

    name: str
    adapter: Adapter
    weight: float


@dataclasses.dataclass(frozen=True, slots=True)
class Merge:
    """How to merge. `density` is the share of values that ties and dare keep; `seed`, 64 bits, decides dare's masks.

    `majority_sign` elects a place's sign by the sum of its values ("total") or by their number ("frequency").
    """

    combination: str = "linear"
    density: float = 1.0
    seed: int = 0
    majority_sign: str = "total"

    def __post_init__(self) -> None:
        """Raises AdapterError for an unknown name or a density outside (0, 1]."""
        if self.combination not in COMBINATIONS:
            raise AdapterError(f"combination is one of {', '.join(COMBINATIONS)}, not {self.combination!r}.")
        if not 0 < self.density <= 1:
            raise AdapterError(f"density is over 0 and at most 1, not {self.density:g}.")
        if self.majority_sign not in MAJORITY_SIGNS:
            raise AdapterError(f"majority_sign is one of {', '.join(MAJORITY_SIGNS)}, not {self.majority_sign!r}.")


def merge_adapters(parts: Sequence[Part], merge: Merge, max_rank: int) -> Adapter:
    """Merges whole adapters in float32, on the CPU.

    Raises:
        AdapterError: no adapters, a weight that is no finite number, unequal ranks where they must be equal, layers
            that the first adapter lacks (PEFT leaves them out), a rank over `max_rank`, or an overflow of float32.
    """
    _check_parts(parts)
    if len(parts) == 1:
        merge = Merge("linear")
    elif merge.combination != "cat":
        _check_ranks(parts, merge.combination)
    first = parts[0].adapter
    rank = sum(_rank(part) for part in parts) if merge.combination == "cat" else _rank(parts[0])
    if rank > max_rank:
        raise AdapterError(f"{merge.combination} of {_names(parts)} has rank {rank}; --max-lora-rank is {max_rank}.")
    scale = math.sqrt(rank) if first.is_rslora else 1.0
    places = sorted({place for part in parts for place in part.adapter.pairs})
    merged = Adapter({place: _merge_module(parts, merge, place, scale) for place in places}, first.is_rslora)
    for (layer, module), pair in merged.pairs.items():
        if not (pair.a.isfinite().all() and pair.b.isfinite().all()):
            raise AdapterError(f"The weights of {_names(parts)} make {module} of layer {layer} overflow float32.")
    return merged


def _merge_module(parts: Sequence[Part], merge: Merge, place: Place, scale: float) -> LoraPair:
    """Merges one module of one layer, of those adapters that have it."""
    having = [(index, part) for index, part in enumerate(parts) if place in part.adapter.pairs]
    pairs = [part.adapter.pairs[place] for _, part in having]
    factors = [part.weight * pair.scale for (_, part), pair in zip(having, pairs, strict=True)]
    if merge.combination == "cat":
        a = torch.cat([pair.a * factor for pair, factor in zip(pairs, factors, strict=True)])
        return LoraPair(a, torch.cat([pair.b for pair in pairs], dim=1), scale)
    numbers = [index for index, _ in having]
    roots = [math.sqrt(abs(factor)) for factor in factors]
    # The sign goes to one side only, else two negative ones would make the product positive.
    signed = [math.copysign(root, factor) for root, factor in zip(roots, factors, strict=True)]
    a = _merge_factor([pair.a for pair in pairs], signed, merge, numbers, place, "a")
    b = _merge_factor([pair.b for pair in pairs], roots, merge, numbers, place, "b")
    return LoraPair(a, b, scale)


def _merge_factor(
    values: list[torch.Tensor],
    weights: list[float],
    merge: Merge,
    numbers: list[int],
    place: Place,
    factor: str,
) -> torch.Tensor:
    """Merges all A or all B of a module, equally shaped; `numbers` are the adapters' places in the merge."""
    if merge.density < 1 and merge.combination == "ties":
        values = [_largest(value, merge.density) for value in values]
    elif merge.density < 1 and merge.combination in ("dare_linear", "dare_ties"):
        values = [
            value * dare_mask(value.shape, merge.density, merge.seed, number, *place, factor) / merge.density
            for number, value in zip(numbers, values, strict=True)
        ]
    stacked = torch.stack(values)
    weighted = torch.stack([value * weight for value, weight in zip(values, weights, strict=True)])
    if merge.combination in ("linear", "dare_linear"):
        return weighted.sum(dim=0)
    # The votes are without the weights: a negative weight turns a value around after its sign was elected.
    votes = stacked if merge.majority_sign == "total" else stacked.sign()
    elected = torch.where(votes.sum(dim=0) >= 0, 1.0, -1.0)
    agrees = stacked.sign() == elected
    return (weighted * agrees).sum(dim=0) / agrees.sum(dim=0).clamp(min=1)


def _largest(value: torch.Tensor, density: float) -> torch.Tensor:
    """The tensor with all but the `density` part of largest magnitude set to zero; that part is rounded down."""
    flat = value.flatten()
    kept = flat.abs().topk(int(density * flat.numel())).indices
    return torch.zeros_like(flat).index_copy_(0, kept, flat[kept]).view_as(value)


def _check_parts(parts: Sequence[Part]) -> None:
    if not parts:
        raise AdapterError("A merge needs at least one adapter.")
    for part in parts:
        if not math.isfinite(part.weight):
            raise AdapterError(f"The weight of adapter {part.name!r} is {part.weight}; it must be a finite number.")
    layers = {layer for layer, _ in parts[0].adapter.pairs}
    for part in parts[1:]:
        if lacking := sorted({layer for layer, _ in part.adapter.pairs} - layers):
            raise AdapterError(
                f"Adapter {part.name!r} has layers {', '.join(map(str, lacking))}, which the first adapter, "
                f"{parts[0].name!r}, lacks; PEFT leaves such layers out. Name the adapter with the most layers first."
            )


def _check_ranks(parts: Sequence[Part], combination: str) -> None:
    """All but cat add the factors themselves, so that they must be equally large, in each module and as a whole."""
    if len({_rank(part) for part in parts}) > 1:
        ranks = ", ".join(f"{part.name!r} {_rank(part)}" for part in parts)
        raise AdapterError(f"{combination} needs adapters of equal ranks, not {ranks}; cat takes any.")
    known: dict[Place, tuple[str, int]] = {}
    for part in parts:
        for place, pair in part.adapter.pairs.items():
            name, rank = known.setdefault(place, (part.name, pair.rank))
            if rank != pair.rank:
                raise AdapterError(
                    f"{combination} needs equal ranks, but {place[1]} of layer {place[0]} has {rank} in {name!r} and "
                    f"{pair.rank} in {part.name!r}; cat takes any."
                )


def _rank(part: Part) -> int:
    """The largest rank of a module."""
    return max(part.adapter.ranks)


def _names(parts: Sequence[Part]) -> str:
    return ", ".join(repr(part.name) for part in parts)
