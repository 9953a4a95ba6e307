"""Judges gradients by the float64 oracle, each element by what rounding can make of it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from comparison import Array, poisoned, score_size

import cuflash
from cuflash import check, oracle

GRADIENTS = ("dq", "dk", "dv")
# Of one rounding to the dtype, of the result itself and of the `out` that enters it.
_ROUNDINGS = {"float16": 2 * 2.0**-11, "bfloat16": 2 * 2.0**-8, "float32": 0.0, "float64": 0.0}
_UNIT_ROUNDOFF = {"float32": 2.0**-24, "float64": 2.0**-53}
# Below these a number has few digits or none.
_SMALLEST = {"float16": 2.0**-24, "bfloat16": 1e-35, "float32": 1e-35, "float64": 1e-290}
_SCORE_SIZE = 32.0  # for which `check.TOLERANCE` holds


def assert_gradients(
    gradients: tuple[Array, Array, Array],
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    **options: Any,
) -> None:
    """Assert that gradients on the host are those of attention of these host arrays."""
    worst = gradient_errors(gradients, dout, q, k, v, **options)
    for name, error in worst.items():
        assert error <= 1, f"{name} is {error:.3g} tolerances off"


def gradient_errors(
    gradients: tuple[Array, Array, Array],
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    **options: Any,
) -> dict[str, float]:
    """The largest error of each gradient, in tolerances of its element. Shapes, dtypes, and what
    has to be exactly 0 are asserted.
    """
    dtype = q.dtype.name
    exact = oracle.gradients(dout, q, k, v, **options)
    growth = max(1.0, score_size(q, k, options) / _SCORE_SIZE)
    sums_in = "float64" if dtype == "float64" else "float32"
    found = {}
    sizes = _sizes(dout, q, k, v, options)
    (_, heads, q_len, _), (_, kv_heads, kv_len, _) = (
        _bhsd(a, options.get("layout", "bhsd")).shape for a in (q, k)
    )
    for name, like, got, want, (rounded, summed, met) in zip(
        GRADIENTS, (q, k, v), gradients, exact, sizes, strict=True
    ):
        # Equal terms, as of a broadcast dout, round alike: n of them may lose n unit roundoffs.
        terms = kv_len if name == "dq" else q_len * (heads // max(kv_heads, 1))
        accumulated = growth * check.TOLERANCE[sums_in] + terms * _UNIT_ROUNDOFF[sums_in]
        assert got.shape == like.shape
        assert got.dtype == like.dtype
        assert not np.any(got[summed == 0]), f"{name} is not 0 where nothing contributes"
        # Weights and their gradients are rounded too, and below the smallest number to nothing.
        smallest = _SMALLEST[dtype] * (1 + met / 2)
        tolerance = _ROUNDINGS[dtype] * rounded + accumulated * summed + smallest
        error = np.abs(got.astype(np.float64) - want)
        assert not np.isnan(error).any(), f"{name} is NaN"
        found[name] = float((error / tolerance).max(initial=0.0))
    return found


def _sizes(
    dout: Array, q: Array, k: Array, v: Array, options: dict[str, Any]
) -> list[tuple[Array, Array, Array]]:
    """Sums of the sizes of all terms of each gradient, which rounding errors scale with; the same
    without the derivative of softcap, ``1 - tanh**2``, whose error does not shrink with it; and the
    sums where every pair that has a weight has a gradient of 1.
    """
    layout = options.get("layout", "bhsd")
    rows, queries, keys, values = (_finite(_bhsd(a, layout)) for a in (dout, q, k, v))
    weights = _weights(queries.shape, keys.shape, q, k, options)
    group = queries.shape[1] // max(keys.shape[1], 1)
    repeated_keys, repeated_values = (a.repeat(max(group, 1), axis=1) for a in (keys, values))
    scale = options.get("scale")
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else abs(float(scale))

    by_weight = rows @ repeated_values.swapaxes(-1, -2)
    delta = (rows * (weights @ repeated_values)).sum(-1, keepdims=True)
    plain = weights * (by_weight + delta) * factor
    sloped = plain * _slopes(q, k, max(group, 1), factor, options)
    some = (weights > 0).astype(np.float64)

    def of_keys(per_head: Array) -> Array:
        batch, heads, length, dim = per_head.shape
        groups = (batch, heads // max(group, 1), max(group, 1), length, dim)
        summed: Array = per_head.reshape(groups).sum(axis=2)
        return summed

    found = []
    for like, sums in (
        (q, [s @ repeated_keys for s in (sloped, plain, some * factor)]),
        (k, [of_keys(s.swapaxes(-1, -2) @ queries) for s in (sloped, plain, some * factor)]),
        (v, [of_keys(s.swapaxes(-1, -2) @ rows) for s in (weights, weights, some)]),
    ):
        swapped = layout == "bshd" and like.ndim >= 3
        given = [s.swapaxes(1, 2) if swapped else s for s in sums]
        rounded, summed, met = (s.reshape(like.shape) for s in given)
        found.append((rounded, summed, met))
    return found


def _weights(
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], q: Array, k: Array, options: dict[str, Any]
) -> Array:
    """Weights of every (batch, query head, query, key): attention to the identity."""
    kv_len = k_shape[2]
    one_hot = np.broadcast_to(np.eye(kv_len), (*k_shape[:2], kv_len, kv_len))
    layout = options.get("layout", "bhsd")
    if layout == "bshd":
        one_hot = one_hot.swapaxes(1, 2)
    one_hot = one_hot[(0,) * (4 - k.ndim)] if k.ndim > 2 else one_hot.reshape(kv_len, kv_len)
    rows, _ = oracle.attention(q, k, one_hot, **options)
    if layout == "bshd" and q.ndim > 2:
        rows = rows.swapaxes(-3, -2)
    return rows.reshape(*q_shape[:3], kv_len)


def _slopes(q: Array, k: Array, group: int, factor: float, options: dict[str, Any]) -> Any:
    if options.get("softcap") is None:
        return 1.0
    layout = options.get("layout", "bhsd")
    queries, keys = (np.nan_to_num(_bhsd(a, layout).astype(np.float64)) for a in (q, k))
    scores = queries @ keys.repeat(group, axis=1).swapaxes(-1, -2) * factor
    with np.errstate(over="ignore"):
        return np.cosh(scores / options["softcap"]) ** -2


def _finite(array: Array) -> Array:
    """Absolute values in float64; 0 for NaN and Inf, which no tolerance covers."""
    values = np.abs(array.astype(np.float64))
    return np.where(np.isfinite(values), values, 0.0)


def _bhsd(array: Array, layout: str) -> Array:
    if layout == "bshd" and array.ndim >= 3:
        array = array.swapaxes(-3, -2)
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


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
