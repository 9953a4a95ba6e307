"""The 8-bit formats: every code, every tie, both ends of the range."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from comparison import Array

from cuflash.fp8 import formats

CODES = np.arange(256, dtype=np.uint8)
# The finite values that are not negative, in rising order: code by code.
SIZES = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def random_floats() -> Array:
    """Both signs, sizes from below half a subnormal step to beyond the largest value."""
    rng = np.random.default_rng(0)
    sizes = 2.0 ** rng.uniform(-14, 9.5, 50_000)
    return (sizes * rng.choice([-1, 1], sizes.shape)).astype(np.float32)


def nearest_code(value: float) -> int:
    """By search: the nearest size, of two equally near ones the even code."""
    distance = np.abs(SIZES.astype(np.float64) - abs(value))
    best = np.flatnonzero(distance == distance.min())
    code = int(best[0] if best[0] % 2 == 0 else best[-1])
    return code | (0x80 if np.signbit(value) else 0)


def test_every_code_means_what_it_means_elsewhere() -> None:
    expected = CODES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(formats.decode_e4m3(CODES), expected)
    assert np.array_equal(np.signbit(formats.decode_e4m3(CODES)), np.signbit(expected))


def test_every_value_keeps_its_code() -> None:
    codes = formats.encode_e4m3(formats.decode_e4m3(CODES))
    expected = np.where(CODES == 0xFF, 0x7F, CODES)  # one NaN stands for both
    np.testing.assert_array_equal(codes, expected)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_ties_go_to_even_and_their_neighbours_to_the_nearer(sign: float) -> None:
    low, high = np.arange(126), np.arange(1, 127)
    middle = (SIZES[:-1] + SIZES[1:]) / np.float32(2)
    assert np.array_equal(middle - SIZES[:-1], SIZES[1:] - middle), "not exact in float32"
    bit = 0x80 if sign < 0 else 0
    even = np.where(low % 2 == 0, low, high)
    below, above = np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(1e9))
    for values, expected in ((middle, even), (below, low), (above, high)):
        np.testing.assert_array_equal(formats.encode_e4m3(sign * values), expected | bit)


def test_random_values_go_to_the_nearest() -> None:
    values = random_floats()
    codes = formats.encode_e4m3(values)
    expected = [nearest_code(value) for value in values[:2000]]
    np.testing.assert_array_equal(codes[:2000], expected)
    inside = np.abs(values) <= 448
    np.testing.assert_array_equal(
        codes[inside], values[inside].astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    )


def test_large_values_saturate_and_nan_stays() -> None:
    inf = np.inf
    values = np.array([448, 448.0001, 463.9, 464, 480, 1e30, 3.4e38, inf, -465, -inf], np.float32)
    np.testing.assert_array_equal(formats.encode_e4m3(values), [0x7E] * 8 + [0xFE] * 2)
    np.testing.assert_array_equal(formats.round_e4m3(values), [448] * 8 + [-448] * 2)
    bits = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF], np.uint32)
    nans = bits.view(np.float32)
    assert np.array_equal(formats.encode_e4m3(nans) & 0x7F, [0x7F] * 4)
    assert np.isnan(formats.round_e4m3(nans)).all()


def test_zeros_keep_their_sign_and_small_values_vanish() -> None:
    tiny = np.array([0.0, -0.0, 2.0**-10, -(2.0**-10), 1e-45, -1e-45], np.float32)
    np.testing.assert_array_equal(formats.encode_e4m3(tiny), [0, 0x80, 0, 0x80, 0, 0x80])
    over_half = np.nextafter(np.float32(2.0**-10), np.float32(1))
    assert formats.encode_e4m3(over_half) == 1


def test_rounding_is_encoding_and_decoding() -> None:
    values = np.concatenate([random_floats(), SIZES, -SIZES, np.array([np.nan], np.float32)])
    decoded = formats.decode_e4m3(formats.encode_e4m3(values))
    np.testing.assert_array_equal(formats.round_e4m3(values), decoded)


def test_weights_round_as_other_values() -> None:
    sizes = np.concatenate([np.abs(random_floats()), SIZES, (SIZES[1:] + SIZES[:-1]) / 2])
    weights = np.append(sizes, [np.nan, 450, 470, 1e6, 0]).astype(np.float32)
    np.testing.assert_array_equal(formats.round_weights(weights), formats.round_e4m3(weights))


def test_integers_round_to_even_and_saturate() -> None:
    values = [0, 0.5, 1.5, -0.5, -1.5, 2.5, 126.5, 127.4, 128, 1e30, np.inf, -127.6, -1e9, np.nan]
    expected = [0, 0, 2, 0, -2, 2, 126, 127, 127, 127, 127, -127, -127, 0]
    codes = formats.encode_int8(np.array(values, np.float32))
    assert codes.dtype == np.uint8
    np.testing.assert_array_equal(codes.view(np.int8), expected)
    np.testing.assert_array_equal(formats.decode_int8(codes), expected)


@pytest.mark.parametrize(("dtype", "largest"), [("e4m3", 448.0), ("int8", 127.0)])
def test_formats_by_name(dtype: str, largest: float) -> None:
    assert formats.largest(dtype) == largest
    values = np.array([[largest, -largest], [1, 0]], np.float32)
    codes = formats.encode(values, dtype)
    assert codes.dtype == np.uint8
    np.testing.assert_array_equal(formats.decode(codes, dtype), values)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3)])
def test_any_shape(shape: tuple[int, ...]) -> None:
    values: Any = np.full(shape, 1.75, np.float32)
    for dtype, expected in (("e4m3", 1.75), ("int8", 2.0)):
        codes = formats.encode(values, dtype)
        assert codes.shape == shape
        assert (formats.decode(codes, dtype) == expected).all()
