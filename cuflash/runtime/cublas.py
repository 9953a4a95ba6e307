"""The two batched products of attention on cuBLAS: float32 results from 16-bit operands.

`cupy.matmul` does not offer those. Matrices are row-major; cuBLAS sees their transposes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_CUDA_R = {"float32": 0, "float16": 2, "bfloat16": 14}


def scores(q: Any, k: Any, out: Any, scale: float, dtype: str) -> None:
    """``out[n, i, :keys] = scale * q[n, i] @ k[n].T``.

    Contiguous q (n, rows, dim), k (n, keys, dim), out (n, rows, pitch).
    """
    keys = k.shape[1]
    _product(True, keys, k, q, out, scale, dtype)


def weighted_sums(weights: Any, v: Any, out: Any, keys: int, dtype: str) -> None:
    """``out[n, i] = weights[n, i, :keys] @ v[n]``.

    Contiguous weights (n, rows, pitch), v (n, keys, dim), out (n, rows, dim).
    """
    _product(False, keys, v, weights, out, 1.0, dtype)


def _product(
    transpose: bool, keys: int, right: Any, left: Any, out: Any, scale: float, dtype: str
) -> None:
    from cupy.cuda import cublas, device

    count, rows, left_pitch = left.shape
    width = right.shape[2]
    columns, inner = (keys, width) if transpose else (width, keys)
    factor, zero = np.array(scale, np.float32), np.zeros((), np.float32)
    cublas.gemmStridedBatchedEx(
        device.get_cublas_handle(),
        cublas.CUBLAS_OP_T if transpose else cublas.CUBLAS_OP_N,
        cublas.CUBLAS_OP_N,
        columns,
        rows,
        inner,
        factor.ctypes.data,
        right.data.ptr,
        _CUDA_R[dtype],
        width,
        keys * width,
        left.data.ptr,
        _CUDA_R[dtype],
        left_pitch,
        rows * left_pitch,
        zero.ctypes.data,
        out.data.ptr,
        _CUDA_R["float32"],
        out.shape[2],
        rows * out.shape[2],
        count,
        cublas.CUBLAS_COMPUTE_32F,
        cublas.CUBLAS_GEMM_DEFAULT,
    )
