"""Judges results by the float64 oracle, and stores arrays in every way that strides allow."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from cuflash import check, oracle

Array = np.ndarray[Any, Any]

DTYPES: dict[str, Any] = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}
STORAGES = ("contiguous", "transposed", "stepped", "reversed", "offset", "broadcast")
WRITABLE_STORAGES = STORAGES[:-1]


def store(array: Array, storage: str, axis: int = 0) -> Array:
    """The same values in other memory; NaN, or True, lies between them.

    ``"broadcast"`` alone changes the values: it repeats the first slice along `axis`.
    """
    array = np.asarray(array)
    if array.ndim == 0:
        return array
    if storage == "contiguous":
        return np.ascontiguousarray(array)
    if storage == "transposed":
        return np.ascontiguousarray(array.T).T
    if storage == "stepped":
        buffer = np.full([2 * n for n in array.shape], _filler(array), array.dtype)
        view = buffer[(slice(None, None, 2),) * array.ndim]
    elif storage == "reversed":
        view = np.full_like(array, _filler(array))[(slice(None, None, -1),) * array.ndim]
    elif storage == "offset":
        buffer = np.full(array.size + 8, _filler(array), array.dtype)
        view = buffer[3 : 3 + array.size].reshape(array.shape)
    elif storage == "broadcast":
        if array.shape[axis] == 0:
            return array
        return np.broadcast_to(array.take([0], axis=axis), array.shape)
    else:
        raise ValueError(f"storage: got {storage!r}; expected one of {STORAGES}")
    view[...] = array
    return view


def poisoned(shape: tuple[int, ...], dtype: Any, storage: str = "contiguous") -> Array:
    """Output memory in which an element that is not written shows as NaN."""
    return store(np.full(shape, np.nan, dtype), storage)


def shape_of(rank: int, layout: str, batch: int, heads: int, seq: int, dim: int) -> tuple[int, ...]:
    """Shape of q, k or v of some rank; leading axes that it lacks must be 1."""
    full = (batch, heads, seq, dim) if layout == "bhsd" else (batch, seq, heads, dim)
    if rank == 2:
        return seq, dim
    return full[4 - rank :]


def values_of(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Array:
    """Normal values."""
    return rng.standard_normal(shape).astype(dtype)


def away_from_zero(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Array:
    """Normal values with 2**-6 added to their size.

    For v: the error of a float16 result below 2**-14 is 2**-25 whatever its size, which the bound
    relative to ``sum(weights * |v|)`` does not know.
    """
    values = rng.standard_normal(shape)
    return (values + np.copysign(2.0**-6, values)).astype(dtype)


def tolerances(dtype: str, size: float) -> tuple[float, float]:
    """Of out, relative to ``sum(weights * |v|)``, and of the LSE, absolute.

    A weight's relative error is its score's absolute one, a few units in the last place of `size`;
    the rounding of results to 16 bits does not grow with it.
    """
    growth = max(1.0, size / check.SCORE_SIZE)
    accumulated = check.TOLERANCE["float64" if dtype == "float64" else "float32"]
    out = check.TOLERANCE[dtype] + (growth - 1.0) * accumulated
    return out, growth * check.LSE_TOLERANCE[dtype]


def assert_attention(
    out: Array, lse: Array | None, q: Array, k: Array, v: Array, **options: Any
) -> None:
    """Assert that results on the host are attention of these host arrays, by the oracle."""
    exact, exact_lse = oracle.attention(q, k, v, **options)
    size, _ = oracle.attention(q, k, np.abs(v), **options)
    out_tolerance, lse_tolerance = tolerances(q.dtype.name, check.score_size(q, k, options))
    assert out.dtype == q.dtype
    assert out.shape == exact.shape
    error = check.scaled_error(out, exact, size)
    assert error <= out_tolerance, f"out is {error / out_tolerance:.3g} tolerances off"
    if lse is None:
        return
    assert lse.dtype == (np.float64 if q.dtype == np.float64 else np.float32)
    assert lse.shape == exact_lse.shape
    empty = np.isneginf(exact_lse)
    assert np.array_equal(np.isneginf(lse), empty), "LSE is -inf in other rows than the oracle's"
    distance = np.abs(lse[~empty].astype(np.float64) - exact_lse[~empty])
    assert not np.isnan(distance).any(), "LSE is NaN"
    error = float(distance.max(initial=0.0))
    assert error <= lse_tolerance, f"LSE is {error / lse_tolerance:.3g} tolerances off"


def _filler(array: Array) -> Any:
    return True if array.dtype == bool else np.nan
