"""Kernels run under Triton's interpreter where no GPU is."""

from tests.model.kernels.interpreter import interpret_triton

interpret_triton()
