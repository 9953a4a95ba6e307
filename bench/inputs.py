"""Random inputs by seed, the same in every process of a device, and their digest to prove it."""

from __future__ import annotations

import zlib
from typing import Any

import ml_dtypes
import numpy as np

from .shapes import Problem

_CHUNK = 1 << 25  # elements that are made at a time: float32, before they are rounded
_DTYPES: dict[str, Any] = {"bfloat16": ml_dtypes.bfloat16}


def dtype_of(name: str) -> Any:
    """The NumPy dtype of a name; CuPy takes it too."""
    return np.dtype(_DTYPES.get(name, name))


def random_inputs(xp: Any, problem: Problem, seed: int) -> tuple[Any, Any, Any]:
    """q, k and v: normal values of mean 0 and deviation 1, as arrays of NumPy or CuPy."""
    source = xp.random.RandomState(seed)
    shapes = (problem.q_shape, problem.kv_shape, problem.kv_shape)
    q, k, v = (normal(xp, source, shape, problem.dtype) for shape in shapes)
    return q, k, v


def normal(xp: Any, source: Any, shape: tuple[int, ...], dtype_name: str) -> Any:
    """Normal values of mean 0 and deviation 1 from a `RandomState`."""
    dtype = dtype_of(dtype_name)
    array = xp.empty(shape, dtype)
    bits = array.reshape(-1).view(_bits(dtype))
    for start in range(0, bits.size, _CHUNK):
        count = min(_CHUNK, bits.size - start)
        # NumPy's takes no dtype.
        values = (
            source.standard_normal(count)
            if xp is np
            else source.standard_normal(count, dtype=np.float32)
        )
        bits[start : start + count] = values.astype(dtype).view(_bits(dtype))
    return array


def digest(xp: Any, arrays: tuple[Any, ...]) -> str:
    """A text that differs where an element differs, all but surely."""
    sums = []
    for array in arrays:
        flat = xp.ascontiguousarray(array).reshape(-1).view(_bits(array.dtype))
        places = xp.arange(1, min(flat.size, _CHUNK) + 1, dtype=np.uint64)
        for start in range(0, flat.size, _CHUNK):
            part = flat[start : start + _CHUNK].astype(np.uint64)
            sums.append(int((part * places[: part.size]).sum()))
    return f"{zlib.crc32(repr(sums).encode()):08x}"


def _bits(dtype: Any) -> Any:
    return np.dtype(f"uint{8 * dtype.itemsize}")
