"""cuBLAS's products with an algorithm of our choice, which torch leaves to cuBLAS's own guess.

Bound to the cublasLt library that torch has loaded (names and numbers of its C interface: cublasLt.h). A row-major
`y [M, N] = x [M, K] W [N, K]^T` is, in cuBLAS's column-major order, `y^T = W x^T` with W transposed.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p

import torch

COMPUTE_FLOAT32, REAL_FLOAT32, REAL_BFLOAT16 = 68, 0, 14
DESC_TRANSA, TRANSPOSED = 3, 1
PREFERENCE_WORKSPACE = 1
MAX_CANDIDATES = 32
WORKSPACE_BYTES = 64 << 20
DTYPES = {torch.float32: REAL_FLOAT32, torch.bfloat16: REAL_BFLOAT16}


class CublasError(Exception):
    """A call was refused; the text has cuBLAS's status."""


class _Algorithm(ctypes.Structure):
    _fields_ = (("data", c_uint64 * 8),)


class _Heuristic(ctypes.Structure):
    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class _Library:
    """The library, a handle and a workspace of one device; products of one stream share it."""

    def __init__(self, device: torch.device) -> None:
        major = (torch.version.cuda or "").partition(".")[0]
        self.functions = ctypes.CDLL(f"libcublasLt.so.{major}")
        self.handle = c_void_p()
        self.call("cublasLtCreate", byref(self.handle))
        self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def call(self, name: str, *arguments: object) -> None:
        status = self.functions[name](*arguments)
        if status:
            raise CublasError(f"{name} returned status {status}")


@functools.cache
def _library(device: torch.device) -> _Library:
    return _Library(device)


class Problem:
    """Products of one shape: `M` rows of activations, a weight `[N, K]`, a result that is new or added to."""

    def __init__(self, num_rows: int, weight: torch.Tensor, out_dtype: torch.dtype, is_added: bool) -> None:
        """Raises CublasError, or OSError where the library is not there."""
        assert weight.dtype == torch.bfloat16 and weight.is_contiguous()
        self.num_rows = num_rows
        self.num_columns, self.depth = weight.shape
        self.library = _library(weight.device)
        self.operation = c_void_p()
        self.library.call("cublasLtMatmulDescCreate", byref(self.operation), COMPUTE_FLOAT32, REAL_FLOAT32)
        is_transposed = c_int32(TRANSPOSED)
        self.library.call(
            "cublasLtMatmulDescSetAttribute", self.operation, DESC_TRANSA, byref(is_transposed), c_size_t(4)
        )
        self.weight = self._layout(weight.dtype, self.depth, self.num_columns)
        self.x = self._layout(weight.dtype, self.depth, num_rows)
        self.out = self._layout(out_dtype, self.num_columns, num_rows)
        self.scales = (c_float(1.0), c_float(1.0 if is_added else 0.0))

    def _layout(self, dtype: torch.dtype, num_rows: int, num_columns: int) -> c_void_p:
        layout = c_void_p()
        self.library.call(
            "cublasLtMatrixLayoutCreate",
            byref(layout),
            DTYPES[dtype],
            c_uint64(num_rows),
            c_uint64(num_columns),
            c_int64(num_rows),
        )
        return layout

    def __del__(self) -> None:
        functions = self.library.functions
        functions.cublasLtMatmulDescDestroy(self.operation)
        for layout in (self.weight, self.x, self.out):
            functions.cublasLtMatrixLayoutDestroy(layout)

    def candidates(self) -> list[Product]:
        """What cuBLAS thinks fast, its first guess first."""
        preference, limit = c_void_p(), c_size_t(WORKSPACE_BYTES)
        self.library.call("cublasLtMatmulPreferenceCreate", byref(preference))
        self.library.call(
            "cublasLtMatmulPreferenceSetAttribute", preference, PREFERENCE_WORKSPACE, byref(limit), c_size_t(8)
        )
        found, num_found = (_Heuristic * MAX_CANDIDATES)(), c_int()
        layouts = (self.weight, self.x, self.out, self.out)
        try:
            self.library.call(
                "cublasLtMatmulAlgoGetHeuristic",
                self.library.handle,
                self.operation,
                *layouts,
                preference,
                MAX_CANDIDATES,
                found,
                byref(num_found),
            )
        finally:
            self.library.functions.cublasLtMatmulPreferenceDestroy(preference)
        return [Product(self, entry) for entry in found[: num_found.value] if not entry.state]

    def with_algorithm_of(self, product: Product) -> Product | None:
        """The product of this shape by the algorithm of another one's; None where it does not apply."""
        checked = _Heuristic()
        layouts = (self.weight, self.x, self.out, self.out)
        algorithm = product.heuristic.algorithm
        try:
            self.library.call(
                "cublasLtMatmulAlgoCheck",
                self.library.handle,
                self.operation,
                *layouts,
                byref(algorithm),
                byref(checked),
            )
        except CublasError:
            return None
        checked.algorithm = algorithm
        return Product(self, checked) if checked.workspace_bytes <= WORKSPACE_BYTES else None


class Product:
    """One problem and one algorithm."""

    def __init__(self, problem: Problem, heuristic: _Heuristic) -> None:
        self.problem = problem
        self.heuristic = heuristic

    def run(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """out = x weight^T, or out += where the problem says so, on the current stream; raises CublasError.

        Args:
            x: bfloat16 `[M, K]`, contiguous.
            weight: bfloat16 `[N, K]`, contiguous.
            out: `[M, N]`, contiguous, of the problem's type.
        """
        problem = self.problem
        assert x.shape == (problem.num_rows, problem.depth) and x.is_contiguous() and out.is_contiguous()
        library, (alpha, beta) = problem.library, problem.scales
        place = c_void_p(out.data_ptr())
        library.call(
            "cublasLtMatmul",
            library.handle,
            problem.operation,
            byref(alpha),
            c_void_p(weight.data_ptr()),
            problem.weight,
            c_void_p(x.data_ptr()),
            problem.x,
            byref(beta),
            place,
            problem.out,
            place,
            problem.out,
            byref(self.heuristic.algorithm),
            c_void_p(library.workspace.data_ptr()),
            c_size_t(self.heuristic.workspace_bytes),
            c_void_p(torch.cuda.current_stream(x.device).cuda_stream),
        )
