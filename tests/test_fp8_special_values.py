"""8-bit attention of NaN, zeros and ends of ranges, and with its first values in 16 bit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from fp8_inputs import RECIPES, normal, relative
from fp8_steps import one_row

from cuflash import oracle
from cuflash.fp8 import Fp8Recipe, attention_fp8, quantize_fp8
from cuflash.fp8.sample import sampled

# NaN and Inf


@pytest.mark.parametrize("recipe", ["f8", "i8", "f8+", "fa3", "i8+"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_row_of_q_is_a_bad_row_of_the_result(bad: float, recipe: str) -> None:
    q, k, v = normal(q_len=300)
    q[0, 1, 140, 5] = bad
    out, lse = attention_fp8(q, k, v, recipe=recipe, causal=True, return_lse=True)
    row = slice(128, 256) if recipe == "fa3" else slice(140, 141)  # what shares its scale
    expected = np.zeros(lse.shape, bool)
    expected[0, 1, row] = True
    np.testing.assert_array_equal(np.isnan(lse), expected)
    np.testing.assert_array_equal(np.isnan(out), np.broadcast_to(expected[..., None], out.shape))


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_nan_in_k_makes_its_head_nan_but_not_rows_without_keys(bad: float) -> None:
    q, k, v = normal(4, 2, q_len=310, batch=2)
    k[1, 1, 299, 0] = bad
    out, lse = attention_fp8(q, k, v, causal=True, return_lse=True)
    assert np.isfinite(out[0]).all()
    assert np.isfinite(out[1, :2]).all()
    assert np.isnan(out[1, 2:, 10:]).all()
    assert np.isnan(lse[1, 2:, 10:]).all()
    assert not out[:, :, :10].any()
    assert np.isneginf(lse[:, :, :10]).all()


def test_nan_in_k_that_keeps_its_mean_reaches_those_who_see_its_block() -> None:
    q, k, v = normal(1, 1, q_len=300)
    k[0, 0, 140, 0] = np.nan
    recipe = Fp8Recipe(center_k=False, balance=False, k_block=64)
    out = attention_fp8(q, k, v, recipe=recipe, causal=True)
    np.testing.assert_array_equal(np.isnan(out[0, 0]).all(axis=-1), np.arange(300) >= 128)
    assert np.isfinite(out[0, 0, :128]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_in_k_that_no_sample_has_reaches_those_who_see_its_block(bad: float) -> None:
    """Of a long head: k's mean, which is of a sample, does not tell."""
    q, k, v = normal(1, 1, q_len=300, kv_len=4200)
    missed = np.setdiff1d(np.arange(4000, 4200), sampled(4200))[0]
    k[0, 0, missed, 0] = bad
    out = attention_fp8(q, k, v, recipe=Fp8Recipe(k_block=64), causal=True)
    sees = 3900 + np.arange(300) >= missed // 64 * 64
    assert 0 < sees.sum() < 300
    np.testing.assert_array_equal(np.isnan(out[0, 0]).all(axis=-1), sees)
    assert np.isfinite(out[0, 0, ~sees]).all()


@pytest.mark.parametrize("recipe", ["f8", "f8+", "i8"])
def test_nan_in_v_makes_its_channel_nan(recipe: str) -> None:
    q, k, v = normal(4, 2, q_len=310)
    v[0, 0, 200, 7] = np.nan
    out, lse = attention_fp8(q, k, v, recipe=recipe, causal=True, return_lse=True)
    expected = np.zeros(out.shape, bool)
    expected[0, :2, 10:, 7] = True
    np.testing.assert_array_equal(np.isnan(out), expected)
    assert not np.isnan(lse).any()


@pytest.mark.parametrize("accumulate", ["fp32", "two_level", "single"])
@pytest.mark.parametrize("block", [64, 256, "token"])
def test_nan_in_v_with_scales_along_tokens_reaches_those_who_see_its_tile(
    block: Any, accumulate: str
) -> None:
    q, k, v = normal(1, 1, q_len=300)
    v[0, 0, 280, 7] = np.nan
    recipe = Fp8Recipe(center_v=False, residual_mean=False, v_block=block, accumulate=accumulate)
    out = attention_fp8(q, k, v, recipe=recipe, causal=True)
    assert np.isfinite(out[0, 0, :256]).all()
    assert np.isnan(out[0, 0, 280:]).any(axis=-1).all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_nothing_past_the_lengths_reaches_the_result(recipe: str) -> None:
    q, k, v = normal(4, 2, batch=2)
    lens: dict[str, Any] = {"q_lens": [40, 23], "kv_lens": [170, 300]}
    expected = attention_fp8(q, k, v, recipe=RECIPES[recipe], return_lse=True, **lens)
    k[0, :, 170:], v[0, :, 170:], q[1, :, 23:] = np.nan, np.inf, np.nan
    found = attention_fp8(q, k, v, recipe=RECIPES[recipe], return_lse=True, **lens)
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_array_equal(a, b)


def test_inputs_at_the_ends_of_float16() -> None:
    q, k, v = normal()
    large = np.where(np.random.default_rng(0).random(v.shape) < 0.5, -65504, 65504)
    out = attention_fp8(q, k, large.astype(np.float16), recipe="f8+")
    assert relative(out, oracle.attention(q, k, large)[0]) < 7
    out, lse = attention_fp8(np.full_like(q, 6e4), k, v, recipe="f8", scale=1e-6, return_lse=True)
    exact, exact_lse = oracle.attention(np.full_like(q, 6e4), k, v, scale=1e-6)
    assert relative(out, exact) < 7
    assert np.abs(lse - exact_lse).max() < 0.3
    tiny = (v.astype(np.float32) * 2.0**-20).astype(np.float16)
    wide = (x.astype(np.float32) for x in (q, k, tiny))
    assert relative(attention_fp8(*wide, recipe="i8"), oracle.attention(q, k, tiny)[0]) < 5


def test_zero_inputs() -> None:
    q, k, v = normal()
    zero = np.zeros_like(k)
    for name, recipe in RECIPES.items():
        assert not attention_fp8(q, k, zero, recipe=recipe).any(), name
        out, lse = attention_fp8(q, zero, v, recipe=recipe, return_lse=True)
        mean = v.astype(np.float64).mean(axis=2, keepdims=True)
        exact = np.broadcast_to(mean, out.shape)
        assert relative(out, exact) < 12, name  # means of noise lose most of their size
        np.testing.assert_allclose(lse, math.log(300), rtol=1e-5)
        np.testing.assert_array_equal(out, attention_fp8(np.zeros_like(q), k, v, recipe=recipe))


# The first tile in 16 bit


def test_a_constant_channel_stays_exact_with_a_first_tile_in_16_bit() -> None:
    for kv_len in (100, 300):
        q, k, v = normal(kv_len=kv_len)
        v[..., 5] = 3
        v[..., 6] = 0
        out = attention_fp8(q, k, v, recipe="f8+")
        np.testing.assert_allclose(out[..., 5], 3, rtol=2e-3)
        assert not out[..., 6].any()


def test_one_tile_in_16_bit_has_v_of_16_bit() -> None:
    q, k, v = normal(kv_len=128)
    exact, _ = oracle.attention(q, k, v)
    plain, first = (attention_fp8(q, k, v, recipe=name) for name in ("i8", "i8+"))
    assert relative(plain, exact) > 2.5
    assert relative(first, exact) < 1.5


def test_weights_of_the_first_tile_are_rounded_to_16_bit() -> None:
    # Inputs with no weight so near to the middle of two halves that float32 takes the other one.
    q, k, v = normal(1, 1, q_len=8, kv_len=128, dim=32, dtype=np.float32, seed=1)
    out = attention_fp8(q, k, v, recipe="i8+")[0, 0]
    tensors = quantize_fp8(q, k, v, "i8+")
    rows = np.array([one_row(tensors, 0, i, np.ones(128, bool))[0] for i in range(8)])
    assert relative(out, rows) < 2e-3  # without the rounding 1e-2


def test_a_window_that_skips_the_first_tile() -> None:
    q, k, v = normal(q_len=300)
    options: dict[str, Any] = {"window": (100, 0)}
    plain, first = (attention_fp8(q, k, v, recipe=name, **options) for name in ("f8", "f8+"))
    np.testing.assert_array_equal(plain[:, :, 228:], first[:, :, 228:])
    assert not np.array_equal(plain[:, :, :228], first[:, :, :228])
