"""Triton's compiler as typed code sees it, and the one operation that its interpreter does otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


class Kernel(Protocol):
    """A compiled function: `kernel[grid](...)` launches it, a call inlines it in another kernel."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        """The launcher for a grid of programs."""
        ...

    def __call__(self, *args: object) -> Any:  # noqa: ANN401
        """Only within another kernel."""
        ...


if TYPE_CHECKING:

    def jit(function: Callable[..., object]) -> Kernel:
        """Compiles a kernel at its first launch."""
        ...
else:
    jit = triton.jit


def jit_loosely(integers: list[str], pointers: list[str]) -> Callable[[Callable[..., object]], Kernel]:
    """As jit, but the kernel is the same whatever these integers are and however these pointers are aligned.

    Every combination that is told apart is compiled when it first occurs, which would stop a running service for a
    second; these arguments differ from step to step.
    """
    decorate: Any = triton.jit
    kernel: Callable[[Callable[..., object]], Kernel] = decorate(
        do_not_specialize=integers, do_not_specialize_on_alignment=pointers
    )
    return kernel


IS_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

HAS_DEPENDENT_LAUNCH = tl.constexpr(
    not IS_INTERPRETED.value and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
)
LAUNCH = {"launch_pdl": HAS_DEPENDENT_LAUNCH.value}
"""Launch options of kernels that begin with `wait_for_inputs`."""


@jit
def wait_for_inputs() -> None:
    """Lets this kernel be set up while the one before it still runs (programmatic dependent launch, from Hopper on).

    Every program calls it before its first access to memory, so nothing is read or written too early.
    """
    if HAS_DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()


@jit
def let_next_start() -> None:
    """Lets the next kernel be set up, while this one may not have waited for the one before it yet.

    For a kernel that ends with `wait_for_previous`; the next one then still finds all before this one complete.
    """
    if HAS_DEPENDENT_LAUNCH:
        gdc_launch_dependents()


@jit
def wait_for_previous() -> None:
    """Returns when the kernel before this one is complete and what it wrote can be read."""
    if HAS_DEPENDENT_LAUNCH:
        gdc_wait()


@jit
def dot(left: tl.tensor, right: tl.tensor, acc: tl.tensor) -> tl.tensor:
    """acc + left @ right, float32 exactly (no tf32); the interpreter knows no bfloat16 products."""
    if IS_INTERPRETED:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, acc, input_precision="ieee")


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is no smaller than `number`."""
    return 1 << max(number - 1, 0).bit_length()


def ceil_div(number: int, divisor: int) -> int:
    """number / divisor, rounded up."""
    return -(-number // divisor)
