"""What a device can do at best: large matrix products, and copies. Of random values: zeros draw
less power, and are faster.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..inputs import dtype_of
from ..shapes import Problem
from . import Prepared

_SIDE = 8192
_COPIED = 1 << 30
_CUDA_R = {"float16": 2, "bfloat16": 14}


def versions(what: str) -> dict[str, str]:
    """Of torch where it multiplies."""
    if what != "matmul e4m3":
        return {}
    import torch

    return {"torch": torch.__version__}


def make(problem: Problem, q: Any, k: Any, v: Any, what: str) -> Prepared:
    """``"copy"``, or ``"matmul DTYPE"``; the problem does not matter."""
    if what == "copy":
        return _copy()
    dtype = what.removeprefix("matmul ")
    call = _product_of_8_bits() if dtype == "e4m3" else _product(dtype)
    return Prepared(call, work={"flops": 2.0 * _SIDE**3})


def _copy() -> Prepared:
    import cupy

    source = cupy.random.RandomState(1).standard_normal(_COPIED // 4, dtype=np.float32)
    target = cupy.empty_like(source)
    return Prepared(lambda: cupy.copyto(target, source), work={"bytes": 2.0 * _COPIED})


def _product(dtype: str) -> Any:
    """By cuBLAS, which `cupy.matmul` does not give every 16-bit dtype."""
    import cupy
    from cupy.cuda import cublas, device

    random = cupy.random.RandomState(1)
    left, right = (
        random.standard_normal(_SIDE * _SIDE, dtype=np.float32).astype(dtype_of(dtype))
        for _ in range(2)
    )
    out = cupy.empty_like(left)
    one, zero = np.ones((), np.float32), np.zeros((), np.float32)
    handle, kind = device.get_cublas_handle(), _CUDA_R[dtype]
    step = _SIDE * _SIDE

    def call() -> None:
        cublas.gemmStridedBatchedEx(
            handle, cublas.CUBLAS_OP_T, cublas.CUBLAS_OP_N, _SIDE, _SIDE, _SIDE,
            one.ctypes.data, right.data.ptr, kind, _SIDE, step,
            left.data.ptr, kind, _SIDE, step,
            zero.ctypes.data, out.data.ptr, kind, _SIDE, step, 1,
            cublas.CUBLAS_COMPUTE_32F, cublas.CUBLAS_GEMM_DEFAULT,
        )  # fmt: skip

    return call


def _product_of_8_bits() -> Any:
    """By cuBLASLt, which torch calls; the second operand is column-major, as it has to be."""
    import torch

    left, right = (
        torch.randn(_SIDE, _SIDE, device="cuda", dtype=torch.float16).to(torch.float8_e4m3fn)
        for _ in range(2)
    )
    one = torch.ones((), device="cuda")

    def call() -> Any:
        return torch._scaled_mm(
            left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return call
