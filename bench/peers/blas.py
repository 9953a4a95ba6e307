"""Attention with the whole score matrix in memory, on NumPy's BLAS."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..shapes import Problem
from . import Prepared


def versions() -> dict[str, str]:
    """Of NumPy."""
    return {"numpy": np.__version__}


def make(problem: Problem, q: Any, k: Any, v: Any) -> Prepared:
    """`plain_attention`, keeping its last result."""
    last: list[Any] = []

    def call() -> None:
        last[:] = [plain_attention(q, k, v, problem.causal)]

    return Prepared(call, lambda: last[0])


def plain_attention(q: Any, k: Any, v: Any, causal: bool) -> Any:
    """``softmax(q k^T / sqrt(dim)) v``, kv heads repeated for those that share them."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(array, group, axis=1) if group > 1 else array for array in (k, v))
    scores = q @ k.swapaxes(-1, -2)
    scores *= q.dtype.type(q.shape[-1] ** -0.5)
    if causal:
        rows, keys = scores.shape[-2:]
        np.copyto(scores, -np.inf, where=~np.tri(rows, keys, keys - rows, dtype=bool))
    scores -= scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores, out=scores)
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights @ v
