"""Which decode steps are captured: a ladder of batch sizes, and for few rows several bounds of the context."""

from __future__ import annotations

import bisect
import dataclasses

LARGEST_SIZE = 512
"""Rows above which launching kernel by kernel costs nothing that is seen."""
SMALL_CONTEXTS = (256, 512, 1024)
"""A tighter bound means fewer splits: one row's attention takes 7 us under 256 and 9 us under 1024 on an H200."""
CONTEXT_FACTOR = 4
PROGRAMS_THAT_FILL = 264
"""Pairs of a row and a KV head from which on attention splits no context, so that the bound does not matter."""


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class GraphShape:
    """A captured step: so many rows, each with a context of at most so many tokens; rows with adapters, or none."""

    num_rows: int
    max_context_len: int
    has_adapters: bool = False


def ladder(max_num_seqs: int) -> list[int]:
    """Batch sizes in rising order, close together where rows are few; the last one is the most rows that occur."""
    largest = min(max_num_seqs, LARGEST_SIZE)
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, LARGEST_SIZE + 1, 64)]
    return [*(size for size in steps if size < largest), largest]


def context_bounds(max_model_len: int) -> list[int]:
    """Bounds in rising order, after the small ones four times the one before; the last is max_model_len."""
    bounds = list(SMALL_CONTEXTS)
    while bounds[-1] < max_model_len:
        bounds.append(bounds[-1] * CONTEXT_FACTOR)
    return [*(bound for bound in bounds if bound < max_model_len), max_model_len]


def shapes(
    sizes: list[int], max_model_len: int, num_kv_heads: int, has_window: bool, has_adapters: bool = False
) -> list[GraphShape]:
    """What to capture, the largest first, so that smaller graphs fit in the memory of larger ones.

    Args:
        sizes: batch sizes.
        max_model_len: longest context.
        num_kv_heads: of this rank.
        has_window: a layer has a window; it then does less where the bound is below it.
        has_adapters: rows may have adapters; each shape is then captured with and without, as steps without any should
            not pay for those that have.
    """
    bounds = context_bounds(max_model_len)
    found = []
    for size in sizes:
        is_full = size * num_kv_heads >= PROGRAMS_THAT_FILL and not has_window
        found += [GraphShape(size, bound) for bound in (bounds[-1:] if is_full else bounds)]
    if has_adapters:
        found += [dataclasses.replace(shape, has_adapters=True) for shape in found]
    return sorted(found, reverse=True)


class ShapeIndex:
    """Finds the smallest shape that holds a step.

    Every batch size has a shape for the longest context, and all shapes or none also have one with adapters.
    """

    def __init__(self, shapes: list[GraphShape]) -> None:
        self._sizes = sorted({shape.num_rows for shape in shapes})
        self._bounds = {size: sorted({s.max_context_len for s in shapes if s.num_rows == size}) for size in self._sizes}

    def choose(self, num_rows: int, max_context_len: int, has_adapters: bool = False) -> GraphShape | None:
        """The shape with the fewest rows, and of these the lowest bound; None where the step has too many rows."""
        place = bisect.bisect_left(self._sizes, num_rows)
        if place == len(self._sizes):
            return None
        size = self._sizes[place]
        bounds = self._bounds[size]
        return GraphShape(size, bounds[bisect.bisect_left(bounds, max_context_len)], has_adapters)
