"""cuflash on CuPy or NumPy arrays: one family, or the one that it chooses."""

from __future__ import annotations

from typing import Any

import numpy as np

import cuflash

from ..shapes import Problem
from . import Prepared


def versions(kernel: str = "auto") -> dict[str, str]:
    """Of cuflash."""
    return {"cuflash": cuflash.__version__}


def make(problem: Problem, q: Any, k: Any, v: Any, kernel: str = "auto") -> Prepared:
    """`attention` with its result in memory that is reused, full of NaN at first."""
    out = poisoned_like(q)
    plan = cuflash.explain(q, k, v, causal=problem.causal, kernel=kernel)
    tile = f"{plan.tiling.q_rows}x{plan.tiling.keys}"
    name = plan.tiling.launch.module.name if plan.tiling.launch else f"{plan.family} {tile}"

    def call() -> Any:
        return cuflash.attention(q, k, v, causal=problem.causal, kernel=kernel, out=out)

    return Prepared(call, lambda: out, note=name, held=out.nbytes)


def poisoned_like(array: Any) -> Any:
    """Memory for a result in which an element that is not written shows as NaN."""
    bits = np.dtype(f"uint{8 * array.dtype.itemsize}")
    copy = array.copy()
    copy.view(bits).fill(np.iinfo(bits).max)  # a NaN in every format
    return copy
