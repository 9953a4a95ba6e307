"""How tensor cores sum 8-bit products, as a model in float32.

Hopper's FP8 instructions align the products of 32 keys and the accumulator to the largest exponent
among them and keep 13 fraction bits (DeepSeek-V3 technical report, 2024, section 3.3.2, found 14
bits; SageAttention2, 2024, 13).
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_STEP_KEYS = 32
_FRACTION_BITS = 13
_BLOCK_PRODUCTS = 1 << 20  # products at a time, to bound the memory


def add_products(sums: Array, weights: Array, values: Array) -> Array:
    """``sums + weights @ values`` by the accumulator's rule.

    (rows, dim), (rows, keys) and (keys, dim) in float32. NaN and Inf among the inputs are NaN or
    Inf in the result.
    """
    rows, dim = sums.shape
    step_rows = max(1, _BLOCK_PRODUCTS // ((_STEP_KEYS + 1) * max(dim, 1)))
    result = np.empty_like(sums)
    for first in range(0, rows, step_rows):
        block = slice(first, first + step_rows)
        total = sums[block]
        for j in range(0, weights.shape[1], _STEP_KEYS):
            keys = slice(j, j + _STEP_KEYS)
            total = _aligned_sum(total, weights[block, keys], values[keys])
        result[block] = total
    return result


def _aligned_sum(sums: Array, weights: Array, values: Array) -> Array:
    products = np.einsum("rk,kd->krd", weights, values)
    addends = np.concatenate([sums[None], products])
    largest = np.abs(addends).max(axis=0)
    finite = np.isfinite(largest)
    exponent = np.frexp(np.where(finite, largest, 0))[1] - 1  # of a fraction from 1 to 2
    quantum = np.ldexp(np.float32(1), exponent - _FRACTION_BITS)
    with np.errstate(invalid="ignore"):
        # Whole numbers below 2**14: their sum is exact.
        whole = np.trunc(addends / quantum).sum(axis=0, dtype=np.float32) * quantum
        total: Array = np.where(finite, whole, addends.sum(axis=0))
    return total.astype(np.float32)
