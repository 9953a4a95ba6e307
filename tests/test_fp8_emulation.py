"""8-bit attention on the CPU: the steps of the kernel, masks and lengths."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from comparison import Array, store
from fp8_inputs import RECIPES, normal, relative
from fp8_steps import one_row

from cuflash import oracle
from cuflash.fp8 import PRESETS, Fp8Recipe, attention_fp8, attention_quantized, quantize_fp8


@pytest.mark.parametrize("loud", [1, 12])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", [name for name in RECIPES if "accumulat" not in name
                                  and "two levels" not in name])  # fmt: skip
def test_each_step_is_the_kernels(name: str, causal: bool, loud: int) -> None:
    q, k, v = normal(q_heads=4, q_len=5, kv_len=390, dim=32, dtype=np.float32)
    k[:, :, 130:260] *= loud  # then the running maximum is far above other tiles' own
    v += 0.5
    recipe = RECIPES[name]
    out, lse = attention_fp8(q, k, v, recipe=recipe, causal=causal, return_lse=True)
    tensors = quantize_fp8(q, k, v, recipe)
    for h in range(4):
        for i in range(5):
            seen = np.arange(390) <= (i + 385 if causal else 389)
            row, row_lse = one_row(tensors, h, i, seen)
            # A weight next to the middle of two e4m3 values may go to either in float32.
            assert np.linalg.norm(out[0, h, i] - row) < 2e-3 * np.linalg.norm(row), (h, i)
            assert lse[0, h, i] == pytest.approx(row_lse, abs=2e-5 * max(1, abs(row_lse)))


@pytest.mark.parametrize("octaves", [12, 30])
def test_tiles_far_below_a_sink_use_the_range_of_e4m3_up_to_20_octaves(octaves: int) -> None:
    q, k, v = normal(1, 1, q_len=6, kv_len=384, dim=32, dtype=np.float32)
    q[..., 0], k[..., 0] = 4, 0
    k[0, 0, 0] = 0
    k[0, 0, 0, 0] = octaves / math.log2(math.e) * math.sqrt(32) / 4
    v[0, 0, 0] = 0  # all that counts is what lies far below
    recipe = Fp8Recipe(
        rotation=None, balance=False, center_k=False, center_v=False, residual_mean=False
    )
    out = attention_fp8(q, k, v, recipe=recipe)[0, 0]
    tensors = quantize_fp8(q, k, v, recipe)
    rows = np.array([one_row(tensors, 0, i, np.ones(384, bool))[0] for i in range(6)])
    assert relative(out, rows) < 0.2
    exact = oracle.attention(q, k, v)[0][0, 0]
    largest = np.abs(exact).max()
    assert 0.1 < largest * 2**octaves / 384 < 10
    error = relative(out, exact)
    assert error < 10 if octaves == 12 else 10 < error < 90  # where subnormals are left


@pytest.mark.parametrize("name", RECIPES)
def test_the_log_sum_exp_is_that_of_the_dequantised_arrays(name: str) -> None:
    q, k, v = normal(kv_len=520)
    k = (k + 3).astype(np.float16)
    recipe = dataclasses.replace(RECIPES[name], center_k=False)
    tensors = quantize_fp8(q, k, v, recipe)
    _, lse = attention_quantized(tensors, return_lse=True)
    rows, keys = tensors.q.dequantize(), tensors.k.dequantize()
    _, exact = oracle.attention(rows, keys, v, causal=False)
    np.testing.assert_allclose(lse, exact, atol=2e-4)


def test_the_log_sum_exp_gets_the_mean_of_k_back() -> None:
    q, k, v = normal(kv_len=520)
    k = (k + 30 * np.random.default_rng(5).standard_normal((1, 2, 1, 64))).astype(np.float16)
    out, lse = attention_fp8(q, k, v, recipe="i8", scale=0.3, return_lse=True)
    exact, exact_lse = oracle.attention(q, k, v, scale=0.3)
    assert np.abs(exact_lse).max() > 50
    assert np.abs(lse - exact_lse).max() < 0.3
    assert relative(out, exact) < 9  # sharp: the scale is 2.4 times the usual one


@pytest.mark.parametrize("dim", [64, 256])
def test_integer_scores_are_exact(dim: int) -> None:
    """All products at their largest: 127 * 127 * dim."""
    q = np.ones((1, 1, 1, dim), np.float32)
    k = np.ones((1, 1, 130, dim), np.float32)
    v = normal(1, 1, 1, 130, dim, dtype=np.float32)[2]
    recipe = Fp8Recipe(qk_dtype="int8", rotation=None, balance=False, center_k=False)
    _, lse = attention_fp8(q, k, v, recipe=recipe, scale=1.0, return_lse=True)
    assert lse[0, 0, 0] == pytest.approx(dim + math.log(130), rel=1e-6)


# Masks, lengths and shapes: against exact attention


PROBLEMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {}),
    "causal": ({"q_len": 300}, {"causal": True}),
    "causal, few queries": ({}, {"causal": True}),
    "causal, top left": ({"q_len": 280}, {"causal": True, "causal_align": "top_left"}),
    "causal, more queries than keys": ({"q_len": 350}, {"causal": True}),
    "window": ({"q_len": 300}, {"window": (60, 9)}),
    "window without end": ({"q_len": 300}, {"window": (None, 9)}),
    "causal window, top left": (
        {"q_len": 300}, {"window": (130, None), "causal": True, "causal_align": "top_left"},
    ),
    "lengths": (
        {"batch": 3, "q_len": 200},
        {"causal": True, "q_lens": [200, 0, 30], "kv_lens": [300, 140, 0]},
    ),
    "lengths, fewer keys": ({"batch": 2}, {"causal": True, "q_lens": [40, 9], "kv_lens": [20, 5]}),
    "mask": ({"batch": 2, "q_heads": 4}, {"mask": "random"}),
    "grouped heads": ({"q_heads": 6, "q_len": 257}, {"causal": True}),
    "many rows of a group": ({"q_heads": 8, "kv_heads": 1, "q_len": 300}, {"causal": True}),
    "one query": ({"q_heads": 8, "q_len": 1}, {"causal": True}),
    "one key": ({"kv_len": 1, "q_len": 3}, {}),
    "one tile": ({"kv_len": 128}, {}),
    "a key more than a tile": ({"kv_len": 129}, {}),
    "softcap": ({}, {"softcap": 2.0}),
    "scale 0": ({}, {"scale": 0.0}),
    "negative scale": ({}, {"scale": -0.1}),
    "negative scale and softcap": ({}, {"scale": -0.1, "softcap": 3.0}),
    "bfloat16": ({"dtype": ml_dtypes.bfloat16}, {}),
    "float32": ({"dtype": np.float32}, {"causal": True}),
    "dim 80": ({"dim": 80}, {}),
    "dim 256": ({"dim": 256}, {"causal": True}),
    "dim 1": ({"dim": 1}, {}),
    "dims 192 and 128": ({"dim": 192, "dim_v": 128}, {}),
    "dims 24 and 200": ({"dim": 24, "dim_v": 200}, {}),
}  # fmt: skip


@pytest.mark.parametrize("recipe", ["f8", "f8+", "i8", "i8+", "fa3", "per_tensor"])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_attention(problem: str, recipe: str) -> None:
    sizes, options = PROBLEMS[problem]
    q, k, v = normal(**sizes)
    if options.get("mask") == "random":
        mask = np.random.default_rng(1).random((2, 1, 40, 300)) < 0.5
        mask[1, 0, 3] = False
        options = options | {"mask": mask}
    out, lse = attention_fp8(q, k, v, recipe=recipe, return_lse=True, **options)
    exact, exact_lse = oracle.attention(q, k, v, **options)
    assert out.dtype == q.dtype
    assert out.shape == exact.shape
    assert lse.dtype == np.float32
    # With one channel no error makes up for another's.
    limit, lse_limit = (11, 0.25) if q.shape[-1] == 1 else (6.5, 0.15)
    assert relative(out, exact) < limit
    unseen = np.isneginf(exact_lse)
    np.testing.assert_array_equal(np.isneginf(lse), unseen)
    assert not out[unseen].any()
    assert np.abs(lse[~unseen] - exact_lse[~unseen]).max() < lse_limit


@pytest.mark.parametrize("recipe", ["f8", "f8+", "fa3"])
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"window": (60, 9)},
        {"window": (0, 0), "causal_align": "top_left"},
        {"window": (None, 40)},
    ],
    ids=str,
)
def test_a_tile_without_a_visible_key_leaves_no_trace(recipe: str, options: dict[str, Any]) -> None:
    """By a mask each row meets every tile, by a window those that its block sees."""
    q, k, v = normal(4, 2, q_len=1100, kv_len=1000, dim=16, dim_v=8)
    probe = np.zeros((1, 1, 1100, 16)), np.zeros((1, 1, 1000, 16)), np.eye(1000)[None, None]
    mask = oracle.attention(*probe, **options)[0] > 0
    found = attention_fp8(q, k, v, recipe=recipe, return_lse=True, **options)
    expected = attention_fp8(q, k, v, recipe=recipe, return_lse=True, mask=mask)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_layouts_ranks_and_strides(layout: str, rank: int) -> None:
    q, k, v = normal(1, 1) if rank == 2 else normal(4, 2)
    expected, expected_lse = attention_fp8(q, k, v, return_lse=True)

    def as_given(x: Array) -> Array:
        x = x[(0,) * (4 - rank)]
        return x.swapaxes(-3, -2) if layout == "bshd" and rank >= 3 else x

    given = [store(as_given(x), "stepped") for x in (q, k, v)]
    out = store(np.full(given[0].shape, np.nan, np.float16), "reversed")
    found, lse = attention_fp8(*given, layout=layout, return_lse=True, out=out)
    assert found is out
    np.testing.assert_array_equal(out, as_given(expected))
    np.testing.assert_array_equal(lse, expected_lse[(0,) * (4 - rank)])


@pytest.mark.parametrize(
    "sizes",
    [{"q_len": 0}, {"batch": 0}, {"q_heads": 0, "kv_heads": 0}, {"kv_len": 0}],
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_empty_arrays(recipe: str, sizes: dict[str, int]) -> None:
    q, k, v = normal(**sizes)
    out, lse = attention_fp8(q, k, v, recipe=RECIPES[recipe], return_lse=True)
    assert out.shape == q.shape
    assert not out.any()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize("name", RECIPES)
def test_quantising_first_gives_the_same_bits(name: str) -> None:
    q, k, v = normal(4, 2, batch=2)
    options: dict[str, Any] = {"causal": True, "scale": 0.2, "window": (200, None)}
    lens: dict[str, Any] = {"q_lens": [40, 7], "kv_lens": [300, 200]}
    direct = attention_fp8(q, k, v, recipe=RECIPES[name], return_lse=True, **options, **lens)
    again = attention_fp8(q, k, v, recipe=RECIPES[name], return_lse=True, **options, **lens)
    tensors = quantize_fp8(q, k, v, RECIPES[name], **lens)
    out = np.empty_like(q)
    apart = attention_quantized(tensors, return_lse=True, out=out, **options)
    assert apart[0] is out
    for other in (again, apart):
        for a, b in zip(direct, other, strict=True):
            np.testing.assert_array_equal(a, b)
    assert attention_quantized(tensors, dtype="bfloat16").dtype == ml_dtypes.bfloat16


def test_softcap_leaves_k_its_mean() -> None:
    q, k, v = normal()
    k = (k + 2).astype(np.float16)
    exact, _ = oracle.attention(q, k, v, softcap=1.5)
    assert relative(attention_fp8(q, k, v, recipe="i8", softcap=1.5), exact) < 5
    uncentred = dataclasses.replace(PRESETS["i8"], center_k=False)
    np.testing.assert_array_equal(
        attention_quantized(quantize_fp8(q, k, v, uncentred), softcap=1.5),
        attention_fp8(q, k, v, recipe="i8", softcap=1.5),
    )
    with pytest.raises(ValueError, match=r"softcap: got 1.5 with k .*; expected center_k=False"):
        attention_quantized(quantize_fp8(q, k, v, "i8"), softcap=1.5)
