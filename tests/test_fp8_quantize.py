"""The quantiser: scales, the exact transform before rounding, lengths, NaN, and what must match."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from comparison import Array, store

from cuflash.fp8 import Fp8Recipe, Fp8Tensors, quantize_fp8
from cuflash.fp8.formats import decode

PLAIN = Fp8Recipe(rotation=None, balance=False, center_k=False, center_v=False, residual_mean=False)
ALL = Fp8Recipe()


def inputs(
    q_heads: int = 4, kv_heads: int = 2, q_len: int = 70, kv_len: int = 300, dim: int = 64,
    batch: int = 2, dtype: Any = np.float16, seed: int = 0,
) -> tuple[Array, Array, Array]:  # fmt: skip
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((batch, q_heads, q_len, dim))
    k, v = rng.standard_normal((2, batch, kv_heads, kv_len, dim))
    return q.astype(dtype), k.astype(dtype), v.astype(dtype)


def parts(tensors: Fp8Tensors) -> dict[str, Array]:
    """Every array of quantised tensors, by name."""
    named = {
        f"{tensor.role}.{part}": getattr(tensor, part)
        for tensor in (tensors.q, tensors.k, tensors.v)
        for part in ("data", "scale", "balance", "mean", "residual")
    }
    named |= {name: getattr(tensors, name) for name in ("first_values", "mean_scores")}
    return {name: part for name, part in named.items() if part is not None}


def assert_same(a: Fp8Tensors, b: Fp8Tensors) -> None:
    assert parts(a).keys() == parts(b).keys()
    for name, part in parts(a).items():
        np.testing.assert_array_equal(part, parts(b)[name], err_msg=name)


def single(array: Array) -> Array:
    return array.astype(np.float32)


@pytest.mark.parametrize(
    ("block", "shape"),
    [
        ("tensor", (1, 1, 1, 1)), ("head", (2, 2, 1, 1)), (32, (2, 2, 10, 1)), (64, (2, 2, 5, 1)),
        (128, (2, 2, 3, 1)), (256, (2, 2, 2, 1)), ("token", (2, 2, 300, 1)),
        ("columns", (2, 2, 12, 1)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("qk_dtype", ["e4m3", "int8"])
def test_each_group_of_k_uses_the_whole_range(
    block: Any, shape: tuple[int, ...], qk_dtype: str
) -> None:
    q, k, v = inputs()
    recipe = dataclasses.replace(PLAIN, k_block=block, qk_dtype=qk_dtype)
    quantized = quantize_fp8(q, k, v, recipe).k
    assert quantized.scale.shape == shape
    assert quantized.scale.dtype == np.float32
    largest = 448 if qk_dtype == "e4m3" else 127
    codes = np.abs(decode(quantized.data, qk_dtype))
    for group, scale in zip(groups(codes, block), quantized.scale.ravel(), strict=True):
        assert group.max() == largest
        assert scale > 0
    for group, scale in zip(groups(single(k), block), quantized.scale.ravel(), strict=True):
        assert scale == np.abs(group).max() / np.float32(largest)


def groups(array: Array, block: Any) -> list[Array]:
    """The elements that share a scale, one group after the other, by going through the tokens."""
    if block == "tensor":
        return [array]
    found = []
    for head in array.reshape(-1, *array.shape[2:]):
        members: dict[Any, list[Array]] = {}
        for j, row in enumerate(head):
            key: Any = 0 if block == "head" else j if block == "token" else None
            if key is None and block != "columns":
                key = j // block
            elif key is None:  # columns 8n + 2t and 8n + 2t + 1 of each 128
                key = (j // 128, (j % 128) % 8 // 2)
            members.setdefault(key, []).append(row)
        found += [np.array(members[key]) for key in sorted(members)]
    return found


@pytest.mark.parametrize("block", ["tensor", "head", "channel", 64, 128, "token"])
def test_scales_of_v(block: Any) -> None:
    q, k, v = inputs()
    quantized = quantize_fp8(q, k, v, dataclasses.replace(PLAIN, v_block=block)).v
    if block == "channel":
        assert quantized.scale.shape == (2, 2, 1, 64)
        expected = np.abs(single(v)).max(axis=2, keepdims=True) / np.float32(448)
        np.testing.assert_array_equal(quantized.scale, expected)
    else:
        sizes = [np.abs(group).max() for group in groups(single(v), block)]
        np.testing.assert_array_equal(quantized.scale.ravel(), sizes / np.float32(448))


def test_a_large_key_touches_the_scale_of_its_columns_only() -> None:
    q, k, v = inputs(1, 1, batch=1)
    before = quantize_fp8(q, k, v, PLAIN).k.scale.ravel()
    for key, group in ((0, 0), (1, 0), (2, 1), (7, 3), (8, 0), (127, 3), (128, 4), (299, 8 + 1)):
        large = k.copy()
        large[0, 0, key] = 100
        after = quantize_fp8(q, large, v, PLAIN).k.scale.ravel()
        assert np.flatnonzero(after != before).tolist() == [group], key


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("qk_dtype", ["e4m3", "int8"])
def test_errors_stay_within_half_a_step(qk_dtype: str, dtype: Any) -> None:
    arrays = inputs(dtype=dtype)
    quantized = quantize_fp8(*arrays, dataclasses.replace(PLAIN, qk_dtype=qk_dtype))
    for x, tensor in zip(arrays, (quantized.q, quantized.k, quantized.v), strict=True):
        exact = x.astype(np.float64)
        error = np.abs(tensor.dequantize() - exact)
        assert error.any()
        step = tensor.scale.max(axis=2, keepdims=True) * (1 + 1e-5)
        if tensor.dtype == "int8":
            assert (error <= step / 2).all()
        else:
            assert (error <= np.maximum(np.abs(exact) / 16, step * 2.0**-10)).all()


@pytest.mark.parametrize("rotation", [None, "hadamard", "orthogonal", "matrix"])
@pytest.mark.parametrize("dim", [64, 80])
def test_dequantising_undoes_every_step(rotation: Any, dim: int) -> None:
    q, k, v = inputs(dim=dim)
    k = (k + 5 * np.random.default_rng(1).standard_normal((2, 2, 1, dim))).astype(np.float16)
    v = (v + np.arange(dim)).astype(np.float16)
    if rotation == "matrix":
        rotation = np.linalg.qr(np.random.default_rng(2).standard_normal((dim, dim)))[0]
    quantized = quantize_fp8(q, k, v, Fp8Recipe(rotation=rotation))
    for x, tensor in ((q, quantized.q), (k, quantized.k), (v, quantized.v)):
        found = tensor.dequantize()
        assert found.dtype == np.float32
        assert found.shape == x.shape
        spread = single(x) - single(x).mean(axis=2, keepdims=True)
        error = np.linalg.norm(found - single(x)) / np.linalg.norm(spread)
        assert 0.015 < error < 0.035, tensor.role


def test_the_mean_of_the_rounding_errors_of_v_is_added_back() -> None:
    q, k, v = inputs()
    off = quantize_fp8(q, k, v, dataclasses.replace(ALL, residual_mean=False)).v
    on = quantize_fp8(q, k, v, ALL).v
    assert off.residual is None
    assert on.residual is not None
    error = single(v) - off.dequantize()
    np.testing.assert_allclose(on.residual, error.mean(axis=2, keepdims=True), atol=2e-6)
    np.testing.assert_allclose((single(v) - on.dequantize()).mean(axis=2), 0, atol=2e-6)


def test_balancing_makes_channels_of_q_and_k_equally_large() -> None:
    q, k, v = (single(x) for x in inputs())
    k[..., 3] *= 50
    q[..., 3] /= 50
    k[..., 7] = 4  # nothing but a mean, which is subtracted
    q[..., 9] = 0
    k[..., 11] *= 1e9
    q[..., 13] *= 1e9
    quantized = quantize_fp8(q, k, v, ALL)
    balance = quantized.q.balance
    assert balance is not None
    assert quantized.k.balance is balance
    centred = k - k.mean(axis=2, keepdims=True)
    # Two query heads to each kv head.
    q_size = np.square(q.reshape(2, 2, 140, 64)).mean(axis=2)
    expected = (np.square(centred).mean(axis=2) / np.where(q_size == 0, 1, q_size)) ** 0.25
    plain = [c for c in range(64) if c not in (7, 9, 11, 13)]
    np.testing.assert_allclose(balance[:, :, 0, plain], expected[..., plain], rtol=1e-5)
    assert (balance[:, :, 0, 3] > 40).all()
    assert (balance[..., [7, 9]] == 1).all()
    assert (balance[..., 11] == 256).all()
    assert (balance[..., 13] == 1 / 256).all()


def test_channels_of_infinite_size_are_not_balanced() -> None:
    q, k, v = (single(x) for x in inputs())
    q[0, 0, 0, 5] = np.nan
    q[0, 0, 1, 6] = 3e38  # its square overflows
    balance = quantize_fp8(q, k, v, ALL).q.balance
    assert balance is not None
    assert (balance[0, 0, 0, 5:7] == 1).all()
    assert np.isfinite(balance).all()


def test_a_k_that_keeps_its_mean_is_balanced_with_it() -> None:
    q, k, v = inputs()
    k = (k + 3).astype(np.float16)
    balance = quantize_fp8(q, k, v, dataclasses.replace(ALL, center_k=False)).k.balance
    q_size = np.square(single(q).reshape(2, 2, 140, 64)).mean(axis=2)
    expected = (np.square(single(k)).mean(axis=2) / q_size) ** 0.25
    assert balance is not None
    np.testing.assert_allclose(balance[:, :, 0], expected, rtol=1e-5)


def test_scores_lack_one_number_per_row() -> None:
    q, k, v = inputs(q_heads=2)
    k = (k + 20 * np.random.default_rng(1).standard_normal((2, 2, 1, 64))).astype(np.float16)
    quantized = quantize_fp8(q, k, v, Fp8Recipe(qk_dtype="int8", q_block="token", k_block="token"))
    assert quantized.k.mean is not None
    np.testing.assert_allclose(quantized.k.mean, single(k).mean(axis=2, keepdims=True), rtol=1e-4)
    lacking = single(q) @ single(k).mean(axis=2)[..., None]
    assert quantized.mean_scores is not None
    np.testing.assert_allclose(quantized.mean_scores, lacking[..., 0], rtol=1e-3, atol=1e-2)
    assert quantize_fp8(q, k, v, PLAIN).mean_scores is None


@pytest.mark.parametrize("recipe", ["f8+", "i8", "fa3", "per_tensor"])
def test_what_lies_past_the_lengths_has_no_influence(recipe: str) -> None:
    q, k, v = inputs(batch=1)
    short = quantize_fp8(q[:, :, :33], k[:, :, :150], v[:, :, :150], recipe)
    for array, used in ((q, 33), (k, 150), (v, 150)):
        array[:, :, used:] = np.nan
        array[:, :, used] = np.inf
    long = quantize_fp8(q, k, v, recipe, q_lens=[33], kv_lens=np.array([150], np.uint8))
    for name, part in parts(short).items():
        other = parts(long)[name]
        if part.ndim > 2 and part.shape != other.shape:
            other, rest = other[:, :, : part.shape[2]], other[:, :, part.shape[2] :]
            assert not rest.any(), name
        if name == "mean_scores":  # BLAS sums other numbers of rows in another order
            np.testing.assert_allclose(part, other, rtol=1e-5, atol=1e-6)
        else:
            np.testing.assert_array_equal(part, other, err_msg=name)


def test_lengths_that_the_caller_changes_later_stay() -> None:
    lens = np.array([5, 6])
    quantized = quantize_fp8(*inputs(), kv_lens=lens, q_lens=lens)
    lens[:] = 0
    assert quantized.kv_lens is not None
    assert quantized.q_lens is not None
    assert quantized.kv_lens.tolist() == quantized.q_lens.tolist() == [5, 6]


@pytest.mark.parametrize("qk_dtype", ["e4m3", "int8"])
def test_zero_and_tiny_groups_become_zero(qk_dtype: str) -> None:
    q, k, v = (single(x) for x in inputs(1, 1, batch=1))
    q[0, 0, 3] = 0
    q[0, 0, 4] = 9e-31
    q[0, 0, 5] = 2e-30
    v[..., 2] = 0
    quantized = quantize_fp8(q, k, v, dataclasses.replace(PLAIN, qk_dtype=qk_dtype))
    assert (quantized.q.scale[0, 0, [3, 4], 0] == 0).all()
    assert not quantized.q.data[0, 0, [3, 4]].any()
    assert quantized.v.scale[0, 0, 0, 2] == 0
    np.testing.assert_allclose(quantized.q.dequantize()[0, 0, 5], 2e-30, rtol=0.01)
    assert np.isfinite(quantized.q.dequantize()).all()


def test_the_smallest_numbers_of_float16_survive() -> None:
    q, k, v = inputs()
    smallest = np.finfo(np.float16).smallest_subnormal
    q[:] = smallest
    found = quantize_fp8(q, k, v, PLAIN).q.dequantize()
    np.testing.assert_allclose(found, float(smallest), rtol=1e-6)


def test_the_largest_numbers_of_float16_do_not_overflow() -> None:
    q, k, v = (np.where(x > 0, 65504, -65504).astype(np.float16) for x in inputs())
    quantized = quantize_fp8(q, k, v, "f8+")
    for name, part in parts(quantized).items():
        assert np.isfinite(part).all(), name


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_group_with_nan_or_inf_says_so_in_its_scale(bad: float) -> None:
    q, k, v = inputs()
    q[0, 1, 7, 3] = k[1, 0, 130, 5] = v[0, 1, 9, 8] = bad
    for qk_dtype in ("e4m3", "int8"):
        recipe = dataclasses.replace(PLAIN, qk_dtype=qk_dtype, k_block=64)
        quantized = quantize_fp8(q, k, v, recipe)
        assert np.argwhere(np.isnan(quantized.q.scale)).tolist() == [[0, 1, 7, 0]]
        assert np.argwhere(np.isnan(quantized.k.scale)).tolist() == [[1, 0, 2, 0]]
        assert np.argwhere(np.isnan(quantized.v.scale)).tolist() == [[0, 1, 0, 8]]
        assert not quantized.q.data[0, 1, 7].any()
        assert not quantized.k.data[1, 0, 128:192].any()
        assert quantized.k.data[1, 0, 192:].any()
        assert not quantized.v.data[0, 1, :, 8].any()
        assert np.isnan(quantized.q.dequantize()[0, 1, 7]).all()


def test_nan_in_k_spreads_over_its_head_with_the_mean() -> None:
    q, k, v = inputs()
    k[0, 1, 5, 5] = np.nan
    scale = quantize_fp8(q, k, v, "f8").k.scale
    assert np.isnan(scale[0, 1]).all()
    assert np.isfinite(scale[0, 0]).all()
    assert np.isfinite(scale[1]).all()


def test_statistics_of_q_are_over_all_query_heads_of_a_kv_head() -> None:
    q, k, v = inputs(q_heads=4, kv_heads=2)
    q[:, 1] *= 8
    balance = quantize_fp8(q, k, v).q.balance
    swapped = quantize_fp8(q[:, [1, 0, 2, 3]], k, v).q.balance
    crossed = quantize_fp8(q[:, [0, 2, 1, 3]], k, v).q.balance
    assert balance is not None
    assert swapped is not None
    assert crossed is not None
    np.testing.assert_allclose(balance, swapped, rtol=1e-6)
    assert np.abs(balance[:, 0] / crossed[:, 0] - 1).max() > 0.3


def test_the_first_values_lack_what_is_added_and_are_in_units_of_their_scale() -> None:
    q, k, v = inputs()
    v = (v + 100 * np.arange(64) / 64).astype(np.float16)
    v[..., 60] = 3  # constant: no distance from the mean, so that no 8-bit value needs a scale
    v[..., 61] = 0
    v[..., 62] = 60000 + 32 * np.sign(v[..., 62])  # far larger than its distance from the mean
    quantized = quantize_fp8(q, k, v, "f8+")
    first = quantized.first_values
    assert first is not None
    assert first.shape == (2, 2, 128, 64)
    assert first.dtype == np.float16
    assert np.isfinite(first).all()
    whole = single(first) * quantized.v.scale + quantized.v.mean + quantized.v.residual
    # Rounded to float16 is what is left without the means, of size 1.
    np.testing.assert_allclose(whole, single(v[:, :, :128]), rtol=5e-4, atol=1e-3)
    plain = quantize_fp8(q, k, v, "f8")
    assert plain.first_values is None
    np.testing.assert_array_equal(plain.v.scale, quantized.v.scale)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_layouts_and_ranks_hold_the_same_codes(layout: str, rank: int) -> None:
    q, k, v = inputs(1, 1, batch=1) if rank == 2 else inputs(batch=1)
    expected = quantize_fp8(q, k, v, "f8+")
    given = []
    for x in (q, k, v):
        y = x[(0,) * (4 - rank)]
        given.append(y.swapaxes(-3, -2) if layout == "bshd" and rank >= 3 else y)
    found = quantize_fp8(*given, "f8+", layout=layout)
    for name, x in zip("qkv", given, strict=True):
        tensor, plain = getattr(found, name), getattr(expected, name)
        assert tensor.data.shape == x.shape
        assert tensor.data.flags.c_contiguous
        np.testing.assert_array_equal(tensor.codes, plain.codes)
        np.testing.assert_array_equal(tensor.scale, plain.scale)
        assert tensor.dequantize().shape == x.shape
        np.testing.assert_array_equal(
            tensor.dequantize().ravel(), bhsd_like(plain.dequantize(), x, layout).ravel()
        )


def bhsd_like(array: Array, like: Array, layout: str) -> Array:
    array = array[(0,) * (4 - like.ndim)]
    return array.swapaxes(-3, -2) if layout == "bshd" and like.ndim >= 3 else array


@pytest.mark.parametrize("storage", ["transposed", "stepped", "reversed", "offset"])
def test_any_strides_and_untouched_inputs(storage: str) -> None:
    arrays = inputs()
    stored = [store(x, storage) for x in arrays]
    assert_same(quantize_fp8(*stored), quantize_fp8(*arrays))
    for x, y in zip(arrays, stored, strict=True):
        np.testing.assert_array_equal(x, y)


def test_the_same_call_gives_the_same_bits() -> None:
    arrays = inputs()
    assert_same(quantize_fp8(*arrays, "f8+"), quantize_fp8(*arrays, "f8+"))
    other = quantize_fp8(*arrays, dataclasses.replace(ALL, seed=1))
    assert not np.array_equal(other.k.data, quantize_fp8(*arrays).k.data)


@pytest.mark.parametrize(
    "shape",
    [
        {"q_len": 0}, {"kv_len": 0}, {"batch": 0}, {"q_heads": 0, "kv_heads": 0},
        {"q_len": 0, "kv_len": 0}, {"q_len": 1, "kv_len": 1}, {"dim": 1},
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "recipe",
    ["f8+", "i8", "fa3", "per_tensor", Fp8Recipe(rotation="orthogonal", rotation_per_head=True)],
)
def test_empty_and_smallest_arrays(recipe: Any, shape: dict[str, int]) -> None:
    arrays = inputs(**shape)
    quantized = quantize_fp8(*arrays, recipe)
    for x, tensor in zip(arrays, (quantized.q, quantized.k, quantized.v), strict=True):
        assert tensor.dequantize().shape == x.shape
        assert np.isfinite(tensor.dequantize()).all()
