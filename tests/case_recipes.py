"""Builds the input arrays of the attention cases: values from recipes, stored as a case asks.

The conventions are written down in `data/attention_cases.json`. Every array is a view of one flat
host buffer, so that a device can take the whole buffer and see exactly the same strides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

ARRAY_ORDER = ("q", "k", "v", "dout", "k_cache", "v_cache", "k_new", "v_new", "x")
DENSE_AXES = ("batch", "seq", "head", "channel")
PACKED_AXES = ("seq", "head", "channel")
STORAGE_LETTERS = "BSHD"
DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "int8": np.dtype(np.int8),
}


@dataclass(frozen=True)
class HostArray:
    """A view and the C-contiguous buffer it looks into; arrays of one buffer share the object."""

    buffer: np.ndarray
    view: np.ndarray

    @property
    def offset(self) -> int:
        """Bytes from the start of the buffer to the first element of the view."""
        start: int = self.buffer.__array_interface__["data"][0]
        return int(self.view.__array_interface__["data"][0]) - start if self.view.size else 0


def number(value: float | str) -> float:
    """A number of the case file, where 'nan', 'inf' and '-inf' stand for those values."""
    return float(value)


def read_values(name: str, spec: Mapping[str, Any], dtype: str, seed: int) -> np.ndarray:
    """Values of one input, C-contiguous, in the dtype of the input or else of its case."""
    unknown = set(spec) - {"shape", "values", "dtype", "layout"}
    if unknown:
        raise ValueError(f"{name}: unknown input fields {sorted(unknown)}")
    shape = tuple(spec["shape"])
    axes = DENSE_AXES if len(shape) == len(DENSE_AXES) else PACKED_AXES
    rng = np.random.default_rng([seed, ARRAY_ORDER.index(name)])
    values = _form(Draw(rng, shape, axes), spec["values"])
    return round_to(values, DTYPES[spec.get("dtype", dtype)])


def round_to(values: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Float32 values rounded to `dtype`, ties to even."""
    return (np.rint(values) if dtype.kind == "i" else values).astype(dtype)


def lay_out(
    values: Mapping[str, np.ndarray], layouts: Mapping[str, Mapping[str, Any] | None]
) -> dict[str, HostArray]:
    """Store dense (batch, seq, heads, head_dim) arrays the way their layouts ask."""
    packed = [name for name in values if layouts.get(name) == {"kind": "packed_qkv"}]
    placed = _pack_together(values, packed) if packed else {}
    for name, array in values.items():
        if name not in placed:
            placed[name] = _apply_layout(array, layouts.get(name))
    return placed


# --- recipes: (draw, **parameters) -> float32 values ---------------------------------------------


@dataclass(frozen=True)
class Draw:
    """What a recipe forms its values for."""

    rng: np.random.Generator
    shape: tuple[int, ...]
    axes: Sequence[str]

    def where(self, **ranges: Sequence[int]) -> tuple[slice, ...]:
        """Index of the ranges [a, b) given by axis name."""
        unknown = set(ranges) - set(self.axes)
        if unknown:
            raise ValueError(f"unknown axes {sorted(unknown)}; expected some of {self.axes}")
        return tuple(slice(*ranges.get(axis, (None,))) for axis in self.axes)


def _form(draw: Draw, spec: Mapping[str, Any]) -> np.ndarray:
    parameters = dict(spec)
    recipe = RECIPES[parameters.pop("recipe")]
    return np.asarray(recipe(draw, **parameters), dtype=np.float32)


def _normal(draw: Draw, std: float = 1.0, mean: float = 0.0) -> np.ndarray:
    drawn = draw.rng.standard_normal(draw.shape, dtype=np.float32)
    return drawn * np.float32(std) + np.float32(mean)


def _uniform(draw: Draw, low: float, high: float) -> np.ndarray:
    drawn = draw.rng.random(draw.shape, dtype=np.float32)
    return drawn * np.float32(high - low) + np.float32(low)


def _zeros(draw: Draw) -> np.ndarray:
    return np.zeros(draw.shape, np.float32)


def _constant(draw: Draw, value: float | str) -> np.ndarray:
    return np.full(draw.shape, number(value), np.float32)


def _signed_jitter(draw: Draw, value: float, jitter: float) -> np.ndarray:
    return np.float32(value) * (1 + np.float32(jitter) * _uniform(draw, -1.0, 1.0))


def _one_hot(draw: Draw) -> np.ndarray:
    values = np.zeros(draw.shape, np.float32)
    seq, head_dim = (draw.shape[draw.axes.index(axis)] for axis in ("seq", "channel"))
    for position in range(seq):
        channel = position % head_dim
        values[draw.where(seq=(position, position + 1), channel=(channel, channel + 1))] = 1
    return values


def _ramp(draw: Draw, axis: str, start: float, step: float, mod: int | None = None) -> np.ndarray:
    at = draw.axes.index(axis)
    index = np.arange(draw.shape[at])
    ramp = np.float32(start) + np.float32(step) * (index if mod is None else index % mod)
    along_axis = tuple(-1 if i == at else 1 for i in range(len(draw.shape)))
    return np.broadcast_to(ramp.reshape(along_axis), draw.shape)


def _patched(
    draw: Draw, base: Mapping[str, Any], patches: Sequence[Mapping[str, Any]]
) -> np.ndarray:
    values = _form(draw, base)
    for patch in patches:
        values[draw.where(**patch["where"])] = number(patch["value"])
    return values


RECIPES: dict[str, Callable[..., np.ndarray]] = {
    "normal": _normal,
    "uniform": _uniform,
    "zeros": _zeros,
    "constant": _constant,
    "signed_jitter": _signed_jitter,
    "one_hot": _one_hot,
    "ramp": _ramp,
    "patched": _patched,
}


# --- layouts: (values, **parameters) -> HostArray -----------------------------------------------


def _apply_layout(values: np.ndarray, layout: Mapping[str, Any] | None) -> HostArray:
    parameters = dict(layout) if layout else {"kind": "contiguous"}
    return LAYOUTS[parameters.pop("kind")](values, **parameters)


def _gaps(shape: tuple[int, ...], dtype: np.dtype[Any], fill: float = float("nan")) -> np.ndarray:
    """A buffer to write an array into; what the array leaves free would spoil any result."""
    return np.full(shape, 0 if dtype.kind == "i" else fill, dtype)


def _fill(buffer: np.ndarray, view: np.ndarray, values: np.ndarray) -> HostArray:
    view[...] = values
    return HostArray(buffer, view)


def _contiguous(values: np.ndarray) -> HostArray:
    buffer = np.ascontiguousarray(values)
    return HostArray(buffer, buffer)


def _transposed(values: np.ndarray, stored_as: str) -> HostArray:
    order = [STORAGE_LETTERS.index(letter) for letter in stored_as]
    buffer = np.ascontiguousarray(values.transpose(order))
    return HostArray(buffer, buffer.transpose(np.argsort(order)))


def _fused_rows(values: np.ndarray, pitch: int, offset: int) -> HostArray:
    batch, seq, heads, head_dim = values.shape
    buffer = _gaps((batch, seq, pitch), values.dtype)
    columns = buffer[:, :, offset : offset + heads * head_dim]
    return _fill(buffer, columns.reshape(values.shape), values)


def _row_pitch(values: np.ndarray, pitch: int) -> HostArray:
    return _fused_rows(values, pitch, 0)


def _batch_pitch(values: np.ndarray, pitch: int) -> HostArray:
    batch, seq, heads, head_dim = values.shape
    buffer = _gaps((batch, pitch), values.dtype)
    return _fill(buffer, buffer[:, : seq * heads * head_dim].reshape(values.shape), values)


def _strided_last(values: np.ndarray, step: int) -> HostArray:
    buffer = _gaps((*values.shape[:-1], values.shape[-1] * step), values.dtype)
    return _fill(buffer, buffer[..., ::step], values)


def _reversed(values: np.ndarray, axis: str) -> HostArray:
    at = DENSE_AXES.index(axis)
    buffer = np.ascontiguousarray(np.flip(values, at))
    return HostArray(buffer, np.flip(buffer, at))


def _broadcast(values: np.ndarray, axes: Sequence[str]) -> HostArray:
    stored = tuple(slice(0, 1) if axis in axes else slice(None) for axis in DENSE_AXES)
    buffer = np.ascontiguousarray(values[stored])
    return HostArray(buffer, np.broadcast_to(buffer, values.shape))


def _offset_elements(values: np.ndarray, offset: int) -> HostArray:
    buffer = _gaps((offset + values.size,), values.dtype)
    return _fill(buffer, buffer[offset:].reshape(values.shape), values)


def _guarded(values: np.ndarray, before: int, after: int, fill: float | str) -> HostArray:
    batch, seq, heads, head_dim = values.shape
    shape = (batch, before + seq + after, heads, head_dim)
    buffer = _gaps(shape, values.dtype, number(fill))
    return _fill(buffer, buffer[:, before : before + seq], values)


def _pack_together(values: Mapping[str, np.ndarray], names: Sequence[str]) -> dict[str, HostArray]:
    """The arrays as neighbouring slices, along a third axis, of one array."""
    buffer = np.stack([values[name] for name in names], axis=2)
    return {name: HostArray(buffer, buffer[:, :, at]) for at, name in enumerate(names)}


LAYOUTS: dict[str, Callable[..., HostArray]] = {
    "contiguous": _contiguous,
    "transposed": _transposed,
    "fused_rows": _fused_rows,
    "row_pitch": _row_pitch,
    "batch_pitch": _batch_pitch,
    "strided_last": _strided_last,
    "reversed": _reversed,
    "broadcast": _broadcast,
    "offset_elements": _offset_elements,
    "guarded": _guarded,
}
