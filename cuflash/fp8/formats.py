"""The 8-bit number formats: float8 e4m3 and signed integers, stored as uint8.

e4m3 has a sign, 4 exponent bits (bias 7) and 3 fraction bits: values up to 448, a subnormal step of
2**-9, one NaN of each sign and no infinity (Micikevicius et al., "FP8 Formats for Deep Learning",
2022). Conversions round to nearest, ties to even, and saturate, as the converts of GPUs do with
``.satfinite``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

E4M3_MAX = 448.0
INT8_MAX = 127.0

_SMALLEST_NORMAL = 2.0**-6
_SUBNORMAL_STEP = 2.0**-9
# A float32 of this size has the subnormals' step as its unit in the last place, so that adding and
# subtracting it rounds to that step.
_SUBNORMAL_ROUNDER = np.float32(1.5 * 2.0**14)
_DROPPED = 20  # fraction bits of float32 that e4m3 lacks
_EXPONENTS_BELOW = (127 - 7) << 3  # the difference of the biases, in units of a code
_NAN_CODE = 0x7F


def round_e4m3(values: Array) -> Array:
    """The nearest e4m3 values, as float32; NaN stays NaN, what lies beyond ±448 becomes ±448."""
    shape = np.shape(values)
    values = np.clip(np.atleast_1d(np.asarray(values, np.float32)), -E4M3_MAX, E4M3_MAX)
    rounded = _round_fraction(values)
    np.copyto(rounded, _round_subnormal(values), where=np.abs(values) < _SMALLEST_NORMAL)
    np.copyto(rounded, np.nan, where=np.isnan(values))
    return rounded.reshape(shape)


def round_weights(weights: Array) -> Array:
    """`round_e4m3` of contiguous values of 0 and more, and NaN, in fewer passes over memory."""
    rounded = _round_fraction(weights)
    small = weights + _SUBNORMAL_ROUNDER
    small -= _SUBNORMAL_ROUNDER
    np.copyto(rounded, small, where=weights < _SMALLEST_NORMAL)
    np.minimum(rounded, np.float32(E4M3_MAX), out=rounded)
    return rounded


def encode_e4m3(values: Array) -> Array:
    """Codes of the nearest e4m3 values; NaN has the code 0x7f."""
    rounded = np.atleast_1d(round_e4m3(values))
    bits = rounded.view(np.uint32)
    size = np.abs(rounded)
    nan = np.isnan(rounded)
    normal = (bits & np.uint32(0x7FFFFFFF)) >> np.uint32(_DROPPED)
    normal -= np.uint32(_EXPONENTS_BELOW)
    # Multiples of the step: 8 of them are the code of the smallest normal number.
    steps = np.where(nan, 0, size / np.float32(_SUBNORMAL_STEP)).astype(np.uint32)
    codes = np.where(size < _SMALLEST_NORMAL, steps, normal)
    codes |= bits >> np.uint32(31) << np.uint32(7)
    return np.where(nan, _NAN_CODE, codes).astype(np.uint8).reshape(np.shape(values))


def decode_e4m3(codes: Array) -> Array:
    """The float32 values of e4m3 codes."""
    values: Array = _E4M3_VALUES[codes]
    return values


def encode_int8(values: Array) -> Array:
    """Bytes of the nearest integers from -127 to 127; NaN becomes 0, as in GPUs' converts."""
    whole = np.clip(np.rint(np.asarray(values, np.float32)), -INT8_MAX, INT8_MAX)
    return np.where(np.isnan(whole), 0, whole).astype(np.int8).view(np.uint8)


def decode_int8(codes: Array) -> Array:
    """The float32 values of the bytes of signed integers."""
    return codes.view(np.int8).astype(np.float32)


def largest(dtype: str) -> float:
    """The largest value of a format: ``"e4m3"`` or ``"int8"``."""
    return E4M3_MAX if dtype == "e4m3" else INT8_MAX


def encode(values: Array, dtype: str) -> Array:
    """uint8 codes of float32 values in a format."""
    return encode_e4m3(values) if dtype == "e4m3" else encode_int8(values)


def decode(codes: Array, dtype: str) -> Array:
    """float32 values of uint8 codes in a format."""
    return decode_e4m3(codes) if dtype == "e4m3" else decode_int8(codes)


def _round_fraction(values: Array) -> Array:
    """Contiguous values with the fraction bits that e4m3 keeps, ties to even."""
    bits = values.view(np.uint32)
    # Half a unit, less one bit where the last kept bit is 0.
    carried = bits >> np.uint32(_DROPPED)
    carried &= np.uint32(1)
    carried += bits
    carried += np.uint32((1 << (_DROPPED - 1)) - 1)
    carried &= np.uint32(0xFFFFFFFF << _DROPPED & 0xFFFFFFFF)
    rounded: Array = carried.view(np.float32)
    return rounded


def _round_subnormal(values: Array) -> Array:
    """Multiples of the subnormals' step, with the sign of zero kept."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        sums = values + _SUBNORMAL_ROUNDER
    rounded: Array = np.copysign(sums - _SUBNORMAL_ROUNDER, values)
    return rounded


def _e4m3_values() -> Array:
    codes = np.arange(256)
    exponent, fraction = codes >> 3 & 15, (codes & 7) / 8
    size = np.where(exponent == 0, 2.0**-6 * fraction, 2.0 ** (exponent - 7.0) * (1 + fraction))
    size[codes & 127 == _NAN_CODE] = np.nan
    return np.where(codes < 128, size, -size).astype(np.float32)


_E4M3_VALUES = _e4m3_values()
