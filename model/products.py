"""Which algorithm multiplies how many rows: tried on the device itself, where cuBLAS's own guess is not the fastest.

A GPU under load runs at its power limit, where an algorithm that moves less data is faster than one that is ahead on a
cool device; so candidates take turns, many times over, and the median decides.
"""

from __future__ import annotations

import itertools
import logging
import statistics
from collections.abc import Callable
from typing import Any

import torch

from model.flash_cohere import FlashCohereForCausalLM
from model.kernels.cublas_lt import CublasError, Problem, Product
from model.linear import Linear

logger = logging.getLogger(__name__)

NUM_ROUNDS = 7
CALLS_A_TURN = 4
FEW_ROWS = (16, 32, 64, 128, 256, 512)
"""Numbers of rows that are measured; those in between use what is fastest for the next one."""
MANY_ROWS = 2048
"""From here to the most tokens of a step one algorithm serves all numbers: each fills the device many times over."""
HEATING_ROUNDS = 5
GAIN = 1.015
"""A candidate must be ahead of torch by more than what two measurements of the same differ."""
TOLERANCE = 1e-2
MAX_ADAPTED = 256
NUM_GROUPS = 3
"""Input products, output products, the head."""
SEED = 0


class TunedProducts:
    """The algorithms that are faster than torch's for one weight's shape, by number of rows."""

    def __init__(self, linear: Linear, out_dtype: torch.dtype, is_added: bool) -> None:
        """Of `linear`'s shape and with its weight; results are added to what is in their place if `is_added`."""
        self._linear = linear
        self._out_dtype = out_dtype
        self._is_added = is_added
        self._measured: dict[int, Product | None] = {}  # by rows, in rising order
        self._adapted: dict[int, Product | None] = {}

    def find(self, num_rows: int) -> Product | None:
        """The product to use, or None for torch's."""
        if num_rows not in self._adapted:
            if len(self._adapted) >= MAX_ADAPTED:
                self._adapted.clear()
            self._adapted[num_rows] = self._adapt(num_rows)
        return self._adapted[num_rows]

    def _adapt(self, num_rows: int) -> Product | None:
        size = next((size for size in self._measured if size >= num_rows), None)
        if size is None or num_rows < MANY_ROWS <= size:
            return None
        measured = self._measured[size]
        return measured and self._problem(num_rows).with_algorithm_of(measured)

    def tune(self, num_rows: int) -> None:
        """Measures `num_rows` rows, more than any before; takes as long as some 300 products of them, 100 of many."""
        weight = self._linear.weight
        generator = torch.Generator(weight.device).manual_seed(SEED)
        x = torch.randn(num_rows, weight.shape[1], dtype=weight.dtype, device=weight.device, generator=generator)
        out = torch.zeros((num_rows, weight.shape[0]), dtype=self._out_dtype, device=weight.device)
        self._linear.multiply(x, out, self._is_added)
        expected = out.clone()
        products: list[Product] = []
        for product in self._problem(num_rows).candidates():
            out.zero_()
            try:
                product.run(x, weight, out)
            except CublasError:
                continue
            if float((out - expected).float().norm()) <= TOLERANCE * float(expected.float().norm()):
                products.append(product)
        del expected
        turns: list[Callable[[], None]] = [lambda: self._linear.multiply(x, out, self._is_added)]
        turns += [lambda product=product: product.run(x, weight, out) for product in products]  # type: ignore[misc]
        is_many = num_rows >= MANY_ROWS
        times = _times(turns, 1 if is_many else CALLS_A_TURN, HEATING_ROUNDS if is_many else 1)
        place = choose(times)
        chosen = products[place - 1] if place else None
        self._measured[num_rows] = chosen
        gain = times[0] / times[place]
        logger.debug("product %s of %d rows: %.1f us, %.3f times torch's rate", tuple(weight.shape), num_rows,
                     times[place] * 1e3, gain)  # fmt: skip

    def _problem(self, num_rows: int) -> Problem:
        return Problem(num_rows, self._linear.weight, self._out_dtype, self._is_added)


def row_counts(max_num_seqs: int, max_num_batched_tokens: int) -> list[int]:
    """What to measure for steps that have at most so many rows that decode, and so many tokens."""
    few = [size for size in FEW_ROWS if min(max_num_seqs, max_num_batched_tokens) > 1 and size // 2 < max_num_seqs]
    return few + ([max_num_batched_tokens] if max_num_batched_tokens >= MANY_ROWS else [])


def tune_products(model: FlashCohereForCausalLM, row_counts: list[int], advance: Callable[[], None]) -> None:
    """Measures the products of the layers for each of `row_counts`, and the head's where they are no prompts.

    Needs a CUDA device. A weight that is not bfloat16 keeps torch's products, as all do where cublasLt is not found.
    `advance` is called NUM_GROUPS times for each of them.
    """
    layers = model.model.layers
    is_added = model.parallel.rank == 0  # the residual rides on rank 0 alone
    groups: list[tuple[list[Linear], torch.dtype, bool]] = [
        ([layer.input_projection for layer in layers], torch.bfloat16, False),
        ([layer.output_projection for layer in layers], torch.bfloat16, is_added),
        ([model.lm_head.projection], torch.float32, False),
    ]
    for linears, out_dtype, adds in groups:
        if linears[0].weight.dtype != torch.bfloat16:
            continue
        tuned = TunedProducts(linears[0], out_dtype, adds)
        for num_rows in row_counts:
            if num_rows < MANY_ROWS or len(linears) > 1:
                try:
                    tuned.tune(num_rows)
                except (CublasError, OSError, AttributeError) as error:
                    logger.warning("cuBLAS's first guess is kept for every product: %s", error)
                    return
            advance()
        for linear in linears:
            linear.products = tuned


def choose(times: list[float]) -> int:
    """The place of the fastest, 0 (torch's) unless another is ahead by more than GAIN."""
    best = min(range(len(times)), key=times.__getitem__)
    return best if times[best] * GAIN <= times[0] else 0


def _times(turns: list[Callable[[], None]], num_calls: int, num_heating_rounds: int) -> list[float]:
    """Median milliseconds of each, taking turns."""
    event: Any = torch.cuda.Event  # torch leaves it without types
    rounds: list[list[float]] = []
    for _ in range(num_heating_rounds + NUM_ROUNDS):
        marks = [event(enable_timing=True)]
        marks[0].record()
        for turn in turns:
            for _ in range(num_calls):
                turn()
            marks.append(event(enable_timing=True))
            marks[-1].record()
        marks[-1].synchronize()
        pairs = itertools.pairwise(marks)
        rounds.append([start.elapsed_time(end) / num_calls for start, end in pairs])
    return [statistics.median(column) for column in zip(*rounds[num_heating_rounds:], strict=True)]
