"""The kernels that quantise, their own text run on the host, against NumPy's codes."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from comparison import Array
from emulated_gpu import needs_cpp
from emulated_quantizer import quantize_emulated

from cuflash.fp8 import PRESETS, Fp8Recipe, quantize, quantize_fp8
from cuflash.fp8.formats import decode
from cuflash.fp8.gpu_tensors import GpuFp8Tensors
from cuflash.fp8.sample import sampled

pytestmark = needs_cpp
Arrays = tuple[Array, Array, Array]
Shape = tuple[int, int, int, int, int]  # batch, heads, kv heads, queries, keys

F16, BF16 = np.float16, ml_dtypes.bfloat16
# Few, because each makes a module of its bucket, which takes seconds to compile.
DTYPES = {
    ("f8", 24): F16, ("f8", 64): F16, ("f8", 72): BF16, ("f8", 128): BF16, ("f8", 192): F16,
    ("f8", 256): F16, ("i8", 24): BF16, ("i8", 64): BF16, ("i8", 72): F16, ("i8", 128): F16,
    ("i8", 192): BF16, ("i8", 256): BF16,
}  # fmt: skip
DIMS = (24, 64, 72, 128, 192, 256)


def inputs(shape: Shape, dim: int, recipe: str) -> Arrays:
    batch, heads, kv_heads, queries, keys = shape
    rng = np.random.default_rng(sum(shape) + dim)
    q = rng.standard_normal((batch, heads, queries, dim))
    k = rng.standard_normal((batch, kv_heads, keys, dim)) + 2 * rng.standard_normal(dim)
    v = rng.standard_normal((batch, kv_heads, keys, dim)) + 0.5
    dtype = DTYPES[recipe[:2], dim]
    return q.astype(dtype), k.astype(dtype), v.astype(dtype)


def changed(recipe: str, **changes: Any) -> Fp8Recipe:
    return dataclasses.replace(PRESETS[recipe], **changes)


def assert_numpy_makes_the_same(
    patch: pytest.MonkeyPatch, arrays: Arrays, recipe: Fp8Recipe, *, sms: int = 1, **lens: Any
) -> None:
    """Statistics that are near, for they are summed in another order; and of the same statistics
    the same codes and scales, bit by bit.
    """
    found = quantize_emulated(patch, arrays, recipe, sms=sms, **lens)
    _assert_near(found, quantize_fp8(*arrays, recipe, **lens))
    k_means, balance, v_means = _statistics(found, arrays[1])
    means = [k_means] * recipe.center_k + [v_means] * recipe.center_v
    means += [np.zeros_like(v_means)] * recipe.residual_mean
    with patch.context() as inner:
        inner.setattr(quantize._Rows, "mean", lambda rows: means.pop(0))
        inner.setattr(quantize, "_balance", lambda queries, keys: balance)
        expected = quantize_fp8(*arrays, recipe, **lens)
    shapes = found.shapes
    heads, dim = (shapes.batch, shapes.kv_heads), shapes.dim
    for name, shape in (
        ("q", (shapes.batch, shapes.q_heads, shapes.q_len, dim)),
        ("k", (*heads, shapes.kv_len, dim)),
        ("v", (*heads, dim, shapes.key_blocks * 64)),
    ):
        mine, its = getattr(found, name), getattr(expected, name)
        np.testing.assert_array_equal(np.asarray(mine.data), its.data, name)
        np.testing.assert_array_equal(mine.scale, its.scale, name)
        codes = found._memory(f"{name}_codes", np.uint8, *shape)  # with 0 for all that is not there
        assert np.count_nonzero(codes) == np.count_nonzero(its.data)
    _assert_values_follow(found, arrays[2], v_means, expected.v.codes)


def _assert_near(found: GpuFp8Tensors, expected: Any) -> None:
    for name in "qkv":
        mine, its = getattr(found, name), getattr(expected, name)
        assert (np.asarray(mine.data) != its.data).mean() < 1e-3
        np.testing.assert_allclose(mine.scale, its.scale, rtol=1e-5)
    for mine, its, near in (
        (found.k.mean, expected.k.mean, 1e-5),
        (found.k.balance, expected.k.balance, 1e-5),
        (found.mean_scores, expected.mean_scores, 1e-3),
        (_added(found.v), _added(expected.v), 2e-3),  # one code more or less
    ):
        assert (mine is None) == (its is None)
        if mine is not None:
            np.testing.assert_allclose(mine, its, rtol=1e-4, atol=near)


def _added(v: Any) -> Any:
    parts = [np.asarray(part) for part in (v.mean, v.residual) if part is not None]
    return sum(parts) if parts else None


def _lengths(found: GpuFp8Tensors) -> tuple[Array, Array]:
    """Of each entry, of queries and of keys."""
    shapes = found.shapes
    q_lens, kv_lens = (
        np.full(shapes.batch, capacity) if lens is None else lens
        for lens, capacity in ((found.q_lens, shapes.q_len), (found.kv_lens, shapes.kv_len))
    )
    return q_lens, kv_lens


def _counts(lens: Array) -> Array:
    return np.maximum(lens, 1).astype(np.float32).reshape(-1, 1, 1, 1)


def _sampled(lens: Array) -> Array:
    return np.array([sampled(int(length)).size for length in lens])


def _statistics(found: GpuFp8Tensors, k: Array) -> Arrays:
    """Means of k, balance and means of v from the kernel's sums of chunks, by the operations of
    `summarise`.
    """
    recipe, shapes, dim = found.recipe, found.shapes, found.spec.head_dim
    group = shapes.q_heads // shapes.kv_heads

    def totals(name: str, chunks: int, records: int) -> Any:
        shape = shapes.batch, shapes.kv_heads, chunks, records, shapes.dim
        numbers = found._numbers(name, *shape)
        # Each of 16 warps adds up its own, then one adds up those.
        shares = [numbers[:, :, warp::16] for warp in range(16)]
        warps = [one.cumsum(2, dtype=np.float32)[:, :, -1:] for one in shares]
        sums = np.concatenate([one for one in warps if one.size], 2).cumsum(2, dtype=np.float32)
        return np.moveaxis(sums[:, :, -1:, :, :dim], 3, 0)

    q_lens, kv_lens = _lengths(found)
    keys = _counts(kv_lens)
    first = np.where(kv_lens.reshape(-1, 1, 1, 1) > 0, k[:, :, :1].astype(np.float32), 0)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        k_sums, k_squares = totals("k_partial", shapes.k_chunks, 2)
        sampled_keys = _counts(_sampled(kv_lens))
        moved = k_sums / sampled_keys
        k_means = first + moved
        k_size = np.fmax(k_squares / sampled_keys - moved * moved, 0)
        if not recipe.center_k:
            k_size = k_size + k_means * k_means
        (q_squares,) = totals("q_partial", group * shapes.q_chunks, 1)
        q_size = q_squares / (_counts(_sampled(q_lens)) * group)
        usable = np.isfinite(k_size) & np.isfinite(q_size) & (k_size > 0) & (q_size > 0)
        root = np.sqrt(np.sqrt(k_size / q_size))
    balance = np.where(usable, np.clip(root, 1 / 256, 256), 1).astype(np.float32)
    return k_means, balance, totals("v_partial", shapes.v_chunks, 3)[0] / keys


def _assert_values_follow(found: GpuFp8Tensors, v: Array, v_means: Array, codes: Array) -> None:
    """What is added to results, and the values of the first keys, from v's codes."""
    recipe, shapes, dim = found.recipe, found.shapes, found.spec.head_dim
    shape = shapes.batch, shapes.kv_heads
    scales, (_, kv_lens) = np.asarray(found.v.scale), _lengths(found)
    added = v_means if recipe.center_v or recipe.residual_mean else np.zeros_like(v_means)
    if recipe.residual_mean:
        sums = decode(codes, "e4m3").sum(2, dtype=np.float64, keepdims=True)
        added = added - scales * (sums.astype(np.float32) / _counts(kv_lens))
    kept = found._numbers("v_means", *shape, 1, shapes.dim)[..., :dim]
    np.testing.assert_array_equal(kept, added)
    if not recipe.first_tile_16bit:
        return
    first = np.zeros((*shape, 128, shapes.dim), np.float16)
    for entry, length in enumerate(np.minimum(kv_lens, 128)):
        rows = v[entry, :, :length].astype(np.float32) - added[entry]
        first[entry, :, :length, :dim] = rows / np.where(scales[entry] == 0, 1, scales[entry])
    found_first = found._memory("first_values", np.float16, *first.shape)
    np.testing.assert_array_equal(found_first, first)


@pytest.mark.parametrize("recipe", ["f8", "i8+"])
@pytest.mark.parametrize(
    ("dim", "shape"),
    [
        (24, (2, 4, 2, 130, 60)),
        (64, (1, 2, 1, 150, 700)),
        (72, (1, 4, 2, 257, 130)),
        (128, (2, 3, 1, 1, 500)),
        (192, (1, 2, 1, 140, 129)),
        (256, (2, 2, 2, 128, 256)),
    ],
)
def test_codes_are_those_of_numpy(
    dim: int, shape: Shape, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = inputs(shape, dim, recipe)
    assert_numpy_makes_the_same(monkeypatch, arrays, PRESETS[recipe], sms=1 + dim % 3)


@pytest.mark.parametrize(
    ("dim", "recipe", "changes"),
    [
        (64, "f8", {"residual_mean": False, "rotation_per_head": True}),
        (64, "f8", {"balance": False, "seed": None}),
        (64, "f8+", {"residual_mean": False, "center_k": False}),
        (64, "f8", {"q_block": 64, "k_block": 128, "rotation_block": 32}),
        (128, "i8+", {"q_block": 128, "k_block": 64, "center_v": False}),
        (256, "f8", {"q_block": 64, "k_block": 64, "center_v": False, "residual_mean": False}),
        (256, "i8", {"q_block": 128, "k_block": 128}),
        (256, "f8", {"rotation": None, "center_k": False}),
        (256, "f8+", {"rotation_block": 32}),
    ],
    ids=str,
)
def test_parts_of_recipes(
    dim: int, recipe: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = inputs((1, 4, 2, 150, 333), dim, recipe)
    assert_numpy_makes_the_same(monkeypatch, arrays, changed(recipe, **changes))


@pytest.mark.parametrize("recipe", ["f8+", "i8"])
@pytest.mark.parametrize("dim", DIMS)
def test_lengths_hide_what_lies_beyond(
    dim: int, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = inputs((4, 2, 1, 140, 300), dim, recipe)
    lens = {"q_lens": [140, 129, 0, 1], "kv_lens": [70, 300, 257, 0]}
    for entry, (queries, keys) in enumerate(zip(*lens.values(), strict=True)):
        q[entry, :, queries:], k[entry, :, keys:], v[entry, :, keys:] = np.nan, np.inf, np.nan
    assert_numpy_makes_the_same(monkeypatch, (q, k, v), PRESETS[recipe], **lens, sms=2)


@pytest.mark.parametrize(("dim", "recipe"), [(64, "f8"), (128, "i8+"), (256, "f8")])
def test_statistics_of_long_heads_are_of_samples(
    dim: int, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With lengths, whose samples may be longer than that of all rows, and without."""
    q, k, v = inputs((3, 2, 1, 4100, 8300), dim, recipe)
    lens = {"q_lens": [4100, 4095, 2500], "kv_lens": [8200, 4095, 4097]}
    assert_numpy_makes_the_same(monkeypatch, (q, k, v), PRESETS[recipe], **lens, sms=2)
    assert_numpy_makes_the_same(monkeypatch, (q[:1], k[:1], v[:1]), PRESETS[recipe], sms=2)


@pytest.mark.parametrize("how", ["nan", "inf"])
def test_a_sample_may_miss_what_is_not_finite(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told by its scale then; where the sample has it, by the mean of all keys."""
    q, k, v = inputs((1, 2, 2, 4200, 4200), 64, "f8")
    taken = sampled(4200)
    missed = np.setdiff1d(np.arange(4200), taken)[700]
    k[0, 0, missed, 5], k[0, 1, taken[700], 5], q[0, 0, missed, 7] = 3 * [float(how)]
    assert_numpy_makes_the_same(monkeypatch, (q, k, v), PRESETS["f8"], sms=2)


@pytest.mark.parametrize("how", ["bshd", "repeated", "backwards", "among others"])
@pytest.mark.parametrize(
    ("dim", "recipe"),
    [(24, "i8"), (64, "f8+"), (72, "i8"), (128, "f8"), (192, "f8"), (256, "i8+")],
)
def test_arrays_that_lie_in_other_ways(
    dim: int, recipe: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = inputs((2, 2, 2, 130, 140), dim, recipe)
    if how == "bshd":
        q, k, v = (np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (q, k, v))
    elif how == "repeated":
        k, v = np.broadcast_to(k[:, :1], k.shape), np.broadcast_to(v[:, :, :1], v.shape)
    elif how == "backwards":
        q, k, v = q[:, :, ::-1], k[:, ::-1], v[::-1]
    else:
        q, k, v = (_among_nan(x) for x in (q, k, v))
    assert_numpy_makes_the_same(monkeypatch, (q, k, v), PRESETS[recipe])


def _among_nan(x: Array) -> Array:
    """As a part of an array that is NaN elsewhere, before and after each row too."""
    batch, heads, rows, dim = x.shape
    memory = np.full((batch + 1, 2 * heads, rows + 2, dim + 24), np.nan, x.dtype)
    part = memory[1:, 1::2, 1:-1, 8:-16]
    part[...] = x
    return part


@pytest.mark.parametrize("centred", [True, False], ids=["centred", "as they are"])
@pytest.mark.parametrize("recipe", ["f8", "i8+"])
@pytest.mark.parametrize("dim", DIMS)
def test_zeros_nan_and_infinities(
    dim: int, recipe: str, centred: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In heads of their own, groups and rows; the third entry is of zeros, of both signs."""
    q, k, v = inputs((3, 4, 2, 130, 140), dim, recipe)
    q[0, 0, 3, 5], q[0, 1, 7, dim - 1], q[0, 2, 129, 0] = np.nan, np.inf, -np.inf
    k[0, 0, 1, 2], k[0, 1, 139, 3] = np.nan, np.inf
    v[0, 0, 1, 2], v[0, 1, 9, 3], v[0, 1, 9, 4] = np.nan, np.inf, -np.inf
    q[1, 0, 128:], k[1, 0, :128], k[1, 1, 2::8], k[1, 1, 3::8] = 0, -0.0, 0, -0.0
    q[1, 1, 5, 1::2] = q[1, 1, 5, ::2]  # differences of 0
    q[1, 2, 6, 1::2], k[1, 1, 5, ::3], v[1, 0, ::2] = -0.0, -0.0, -0.0
    v[1, 0, :, 4], v[1, 0, :, 5], v[1, 1, :, 6] = 0, 1, -0.0
    q[2], k[2], v[2] = 0, -0.0, -0.0
    parts = ("balance", "center_k", "center_v", "residual_mean")
    chosen = changed(recipe, **dict.fromkeys(parts, centred))
    assert_numpy_makes_the_same(monkeypatch, (q, k, v), chosen)


@pytest.mark.parametrize(("dim", "recipe"), [(64, "i8"), (128, "f8+"), (256, "i8")])
def test_keys_that_are_all_the_same_or_tiny(
    dim: int, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of bfloat16, whose groups may be smaller than any scale."""
    q, k, v = inputs((2, 2, 2, 130, 256), dim, recipe)
    k[0], v[0] = k[0, :, :1], 1
    k[1, 0], v[1, 0] = (1e-33 * x[1, 0].astype(np.float32) for x in (k, v))
    q[1, 1] = 1e-36 * q[1, 1].astype(np.float32)
    assert_numpy_makes_the_same(monkeypatch, (q, k, v), PRESETS[recipe])
