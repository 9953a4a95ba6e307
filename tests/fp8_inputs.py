"""Inputs of the tests of 8-bit attention."""

from __future__ import annotations

from typing import Any

import numpy as np
from comparison import Array


def normal(
    q_heads: int = 2, kv_heads: int = 2, q_len: int = 40, kv_len: int = 300, dim: int = 64,
    dim_v: int | None = None, batch: int = 1, dtype: Any = np.float16, seed: int = 0,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """q, k and v of a normal distribution, (batch, heads, length, dim)."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((batch, q_heads, q_len, dim))
    k = rng.standard_normal((batch, kv_heads, kv_len, dim))
    v = rng.standard_normal((batch, kv_heads, kv_len, dim if dim_v is None else dim_v))
    return q.astype(dtype), k.astype(dtype), v.astype(dtype)
