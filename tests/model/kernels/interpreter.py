"""Has Triton run on the CPU."""

import os
import sys

import torch


def interpret_triton() -> None:
    """Where no GPU is, what Triton compiles from now on is interpreted, also if something imported it before."""
    if torch.cuda.is_available():
        return
    os.environ["TRITON_INTERPRET"] = "1"
    if "model.kernels.jit" not in sys.modules:
        for name in [*sys.modules]:
            if name == "triton" or (name.startswith("triton.") and not name.startswith("triton._C")):
                del sys.modules[name]
