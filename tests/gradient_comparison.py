"""Judges gradients by the float64 oracle, each element by what rounding can make of it."""

from __future__ import annotations

from typing import Any

from comparison import Array, poisoned

import cuflash
from cuflash import check_gradients
from cuflash.check_gradients import GRADIENTS

__all__ = ["GRADIENTS", "assert_gradients", "bits_of", "differentiated", "poisoned_gradients"]


def assert_gradients(
    gradients: tuple[Array, Array, Array],
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    **options: Any,
) -> None:
    """Assert that gradients on the host are those of attention of these host arrays."""
    for got, like in zip(gradients, (q, k, v), strict=True):
        assert got.shape == like.shape
        assert got.dtype == like.dtype
    worst = check_gradients.errors(gradients, dout, q, k, v, **options)
    for name, error in worst.items():
        assert error <= 1, f"{name} is {error:.3g} tolerances off"


def differentiated(
    dout: Array, q: Array, k: Array, v: Array, gradients: Any = None, **options: Any
) -> tuple[Array, Array, Array]:
    """Gradients by the library, whose forward pass gives `out` and LSE."""
    out, lse = cuflash.attention(q, k, v, **options, return_lse=True)
    return cuflash.attention_backward(dout, q, k, v, out, lse, **options, **(gradients or {}))


def poisoned_gradients(*inputs: Array) -> dict[str, Array]:
    """Memory for the gradients of q, k and v, full of NaN."""
    shaped = zip(GRADIENTS, inputs, strict=True)
    return {name: poisoned(array.shape, array.dtype) for name, array in shaped}


def bits_of(gradients: tuple[Array, ...]) -> list[bytes]:
    return [gradient.tobytes() for gradient in gradients]
