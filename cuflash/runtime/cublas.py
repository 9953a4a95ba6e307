"""The two batched products of attention on cuBLAS: float32 results from 16-bit operands.

`cupy.matmul` does not offer those. Matrices are row-major; cuBLAS sees their transposes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

_CUDA_R = {"float32": 0, "float16": 2, "bfloat16": 14}


@dataclass(frozen=True, slots=True)
class Matrices:
    """Row-major matrices in device memory; steps in elements, columns next to each other."""

    owner: Any  # the array that keeps the memory
    address: int
    count: int
    rows: int
    columns: int
    row_step: int
    matrix_step: int

    @classmethod
    def of(cls, array: Any) -> Matrices:
        """The last two axes of a contiguous array of three."""
        count, rows, columns = array.shape
        return cls(array, array.data.ptr, count, rows, columns, columns, rows * columns)


def scores(q: Matrices, k: Matrices, out: Matrices, scale: float, dtype: str) -> None:
    """``out = scale * q @ k.T`` for each matrix; `out` may have more columns than k has rows."""
    _product(True, k, q, out, scale, dtype)


def weighted_sums(weights: Matrices, v: Matrices, out: Matrices, dtype: str) -> None:
    """``out = weights @ v`` for each matrix, of as many columns of `weights` as v has rows."""
    _product(False, v, weights, out, 1.0, dtype)


def _product(
    transpose: bool, right: Matrices, left: Matrices, out: Matrices, scale: float, dtype: str
) -> None:
    from cupy.cuda import cublas, device

    columns, inner = right.rows, right.columns
    if not transpose:
        columns, inner = inner, columns
    factor, zero = np.array(scale, np.float32), np.zeros((), np.float32)
    cublas.gemmStridedBatchedEx(
        device.get_cublas_handle(),
        cublas.CUBLAS_OP_T if transpose else cublas.CUBLAS_OP_N,
        cublas.CUBLAS_OP_N,
        columns,
        left.rows,
        inner,
        factor.ctypes.data,
        right.address,
        _CUDA_R[dtype],
        right.row_step,
        right.matrix_step,
        left.address,
        _CUDA_R[dtype],
        left.row_step,
        left.matrix_step,
        zero.ctypes.data,
        out.address,
        _CUDA_R["float32"],
        out.row_step,
        out.matrix_step,
        out.count,
        cublas.CUBLAS_COMPUTE_32F,
        cublas.CUBLAS_GEMM_DEFAULT,
    )
