"""Small calls on NumPy arrays, whose results are compared with those of first calls."""

from __future__ import annotations

from typing import Any

import numpy as np
from comparison import Array

import cuflash
from cuflash import kinds

Q, K, V, OUT = (2, 4, 6, 8), (2, 2, 7, 8), (2, 2, 7, 5), (2, 4, 6, 5)
SCORES = (2, 4, 6, 7)


def values(shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
    """The same numbers each time."""
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


def arrays(dtype: Any = np.float32) -> dict[str, Array]:
    return {"q": values(Q, dtype), "k": values(K, dtype), "v": values(V, dtype)}


def attention(**changes: Any) -> Any:
    return cuflash.attention(**(arrays() | changes))


def fresh(**changes: Any) -> Any:
    """The result where no call was before."""
    kinds.forget()
    return attention(**changes)


def copied(result: Any) -> Any:
    return tuple(map(np.copy, result)) if isinstance(result, tuple) else result.copy()


def same(a: Any, b: Any) -> bool:
    pairs = zip(a, b, strict=True) if isinstance(a, tuple) else [(a, b)]
    return all(x.shape == y.shape and np.array_equal(x, y) for x, y in pairs)
