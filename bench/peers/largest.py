"""The longest sequence that fits the memory of a device, run once and judged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import cuflash

from ..inputs import random_inputs
from ..shapes import Problem

# Keys that a row sees, so that time grows with the length and not with its square.
WINDOW = 1024
_ROWS = 64
_STEPS = 64  # parts of the memory that the answer is exact to


def versions() -> dict[str, str]:
    """Of cuflash."""
    return {"cuflash": cuflash.__version__}


def largest_of(fits: Callable[[int], bool], upper: int) -> int:
    """The largest multiple of a 64th of `upper` that fits, where what is smaller fits too; or 0."""
    step = max(upper // _STEPS, 1)
    low, high = 0, _STEPS + 1  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * step) else (low, middle)
    return low * step


def find(heads: int, dim: int) -> dict[str, Any]:
    """How long q, k, v and the result can be; attention of that length, within a window.

    Raises
    ------
    ValueError
        Where its last rows are wrong.
    """
    import cupy

    pool = cupy.get_default_memory_pool()

    def fits(seq: int) -> bool:
        pool.free_all_blocks()
        try:
            arrays = [cupy.empty((1, heads, seq, dim), np.float16) for _ in range(4)]
        except cupy.cuda.memory.OutOfMemoryError:
            return False
        return bool(arrays)

    free, _ = cupy.cuda.runtime.memGetInfo()
    seq = largest_of(fits, free // (4 * heads * dim * 2))
    while seq:
        pool.free_all_blocks()
        try:
            return _attend(cupy, Problem(1, heads, heads, seq, seq, dim, causal=True))
        except cupy.cuda.memory.OutOfMemoryError:
            seq -= max(seq // _STEPS, 1)  # random inputs take some more while they are made
    raise ValueError("nothing fits")


def _attend(cupy: Any, problem: Problem) -> dict[str, Any]:
    q, k, v = random_inputs(cupy, problem, seed=1)
    out = cupy.full(problem.q_shape, np.nan, np.float16)
    plan = cuflash.explain(q, k, v, causal=True, window=(WINDOW - 1, 0))
    cuflash.attention(q, k, v, causal=True, window=(WINDOW - 1, 0), out=out)
    n = problem.q_len
    rows = min(_ROWS, n)
    first = max(n - rows - WINDOW + 1, 0)
    queries = q[0, -1, n - rows :].astype(np.float64)
    keys, values = (array[0, -1, first:].astype(np.float64) for array in (k, v))
    scores = queries @ keys.T * problem.dim**-0.5
    row = cupy.arange(n - rows, n)[:, None]
    key = cupy.arange(first, n)[None, :]
    scores = cupy.where((key <= row) & (key > row - WINDOW), scores, -np.inf)
    weights = cupy.exp(scores - scores.max(axis=1, keepdims=True))
    exact = weights / weights.sum(axis=1, keepdims=True) @ values
    error = float(
        cupy.linalg.norm(out[0, -1, -rows:].astype(np.float64) - exact) / cupy.linalg.norm(exact)
    )
    if not error < 2e-3:
        raise ValueError(f"seq {n}: relative L2 error {error:.2g} of the last rows")
    return {
        "largest": n, "heads": problem.q_heads, "dim": problem.dim, "window": WINDOW,
        "bytes_each": problem.moved_bytes, "error": error, "kernel": plan.family,
    }  # fmt: skip
