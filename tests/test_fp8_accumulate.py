"""The model of how tensor cores sum 8-bit products."""

from __future__ import annotations

import numpy as np

from cuflash.fp8.accumulate import add_products


def test_the_model_of_the_accumulator_drops_what_lies_14_bits_lower() -> None:
    zero, one = np.zeros((1, 1), np.float32), np.ones((1, 1), np.float32)
    for exponent in range(1, 20):
        small = np.full((1, 1), 2.0**-exponent, np.float32)
        kept = 1 + (2.0**-exponent if exponent <= 13 else 0)
        assert add_products(one, one, small)[0, 0] == kept
        assert add_products(small, one, one)[0, 0] == kept
        weights = np.concatenate([one, small], axis=1)
        assert add_products(zero, weights, np.ones((2, 1), np.float32))[0, 0] == kept


def test_the_model_truncates_towards_zero_in_steps_of_32_keys() -> None:
    values = np.zeros((33, 1), np.float32)
    weights = np.ones((1, 33), np.float32)
    values[:2, 0] = 1, 1.99 * 2.0**-13
    assert add_products(np.zeros((1, 1), np.float32), weights, values)[0, 0] == 1 + 2.0**-13
    values = -values
    assert add_products(np.zeros((1, 1), np.float32), weights, values)[0, 0] == -1 - 2.0**-13
    # The small ones meet before the large one does.
    values[:, 0] = 2.0**-14
    values[32] = 1
    assert add_products(np.zeros((1, 1), np.float32), weights, values)[0, 0] == 1 + 2.0**-9
    values[:, 0] = 2.0**-14
    values[0] = 1
    assert add_products(np.zeros((1, 1), np.float32), weights, values)[0, 0] == 1


def test_the_model_sums_integers_exactly_in_blocks_of_rows() -> None:
    rng = np.random.default_rng(0)
    weights = rng.integers(0, 4, (1500, 70)).astype(np.float32)
    values = rng.integers(-3, 4, (70, 40)).astype(np.float32)
    sums = rng.integers(-9, 9, (1500, 40)).astype(np.float32)
    np.testing.assert_array_equal(add_products(sums, weights, values), sums + weights @ values)


def test_the_model_passes_nan_and_inf() -> None:
    sums = np.array([[0, np.nan, 0, np.inf]], np.float32)
    values = np.array([[1, 1, np.inf, 1]], np.float32)
    found = add_products(sums, np.ones((1, 1), np.float32), values)
    np.testing.assert_array_equal(found, [[1, np.nan, np.inf, np.inf]])
