"""8-bit attention on a GPU, against the emulation of the same recipe and against float64."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cuflash import oracle
from cuflash.fp8 import (
    PRESETS,
    Fp8Recipe,
    attention_fp8,
    attention_quantized,
    quantize_fp8,
)

pytestmark = pytest.mark.gpu
SHAPES = {  # batch, heads, kv heads, queries, keys
    "small": (1, 2, 2, 128, 128),
    "tails": (2, 4, 2, 150, 333),
    "one query": (2, 6, 2, 1, 700),
    "many keys": (1, 2, 1, 200, 1500),
    "several tiles": (1, 8, 8, 700, 900),
}


@pytest.fixture
def hopper(cupy: ModuleType) -> ModuleType:
    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("8-bit attention needs compute capability 9.0")
    return cupy


def inputs(shape: tuple[int, ...], dim: int, dtype: Any = np.float16) -> list[Any]:
    batch, heads, kv_heads, queries, keys = shape
    rng = np.random.default_rng(sum(shape) + dim)
    q = rng.standard_normal((batch, heads, queries, dim))
    k = rng.standard_normal((batch, kv_heads, keys, dim)) + 2 * rng.standard_normal(dim)
    v = rng.standard_normal((batch, kv_heads, keys, dim)) + 0.5
    return [array.astype(dtype) for array in (q, k, v)]


def relative(found: Any, expected: Any) -> float:
    difference = found.astype(np.float64) - expected.astype(np.float64)
    return float(np.linalg.norm(difference) / np.linalg.norm(expected.astype(np.float64)))


# Of the log-sum-exp: tensor cores sum products of e4m3 in 14 bits, of integers exactly.
LSE_NEAR = {"e4m3": 5e-3, "int8": 2e-4}


@pytest.mark.parametrize("recipe", ["f8", "i8", "f8+", "i8+"])
@pytest.mark.parametrize("dim", [64, 128, 256, 96, 24])
@pytest.mark.parametrize("way", ["full", "causal", "window"])
@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_with_the_emulation(
    shape: str, way: str, dim: int, recipe: str, hopper: ModuleType
) -> None:
    options: dict[str, Any] = {
        "full": {},
        "causal": {"causal": True},
        "window": {"window": (90, 20)},
    }[way]
    arrays = inputs(SHAPES[shape], dim)
    tensors = quantize_fp8(*map(hopper.asarray, arrays), recipe)
    out, lse = attention_quantized(tensors, return_lse=True, **options)
    expected, expected_lse = attention_quantized(tensors.get(), return_lse=True, **options)
    # A weight that rounds the other way moves a single row by more than many.
    assert relative(out.get(), expected) < (2e-2 if SHAPES[shape][3] == 1 else 5e-3)
    near = LSE_NEAR[tensors.recipe.qk_dtype]
    np.testing.assert_allclose(lse.get(), expected_lse, atol=near)
    exact, _ = oracle.attention(*arrays, **options)
    assert relative(out.get(), exact) < 1.05 * relative(expected, exact) + 1e-3


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("qk_dtype", ["e4m3", "int8"])
@pytest.mark.parametrize("reference", ["lagging", "tile"])
@pytest.mark.parametrize("scores", ["peaked", "outshone"])
def test_references_move_as_in_the_emulation(
    scores: str, reference: str, qk_dtype: str, dim: int, hopper: ModuleType
) -> None:
    q, k, v = inputs((1, 4, 2, 200, 4000), dim)
    if scores == "peaked":
        q *= 4
    else:
        q, k = 1 + q / 8, k / 16
        k[:, :, -1] += 9 * dim**-0.5
    recipe = Fp8Recipe(qk_dtype=qk_dtype, reference=reference)
    tensors = quantize_fp8(*map(hopper.asarray, (q, k, v)), recipe)
    out, lse = attention_quantized(tensors, return_lse=True)
    expected, expected_lse = attention_quantized(tensors.get(), return_lse=True)
    # Scores are some four times as large here, and with them what their sums lose.
    assert relative(out.get(), expected) < {"e4m3": 3e-2, "int8": 1e-2}[qk_dtype]
    np.testing.assert_allclose(lse.get(), expected_lse, atol=6 * LSE_NEAR[qk_dtype])


@pytest.mark.parametrize(
    "changes",
    [
        {"q_block": 64, "k_block": 64},
        {"q_block": 128, "k_block": 128},
        {"rotation": None},
        {"balance": False, "center_k": False, "center_v": False, "residual_mean": False},
        {"rotation_per_head": True},
        {"rotation_block": 32},
    ],
)
@pytest.mark.parametrize("recipe", ["f8", "i8"])
def test_parts_of_recipes(recipe: str, changes: dict[str, Any], hopper: ModuleType) -> None:
    chosen: Fp8Recipe = dataclasses.replace(PRESETS[recipe], **changes)
    arrays = inputs(SHAPES["tails"], 128)
    tensors = quantize_fp8(*map(hopper.asarray, arrays), chosen)
    expected = attention_quantized(tensors.get())
    assert relative(attention_quantized(tensors).get(), expected) < 5e-3


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dim", [24, 64, 72, 96, 128, 192, 256])
@pytest.mark.parametrize("recipe", ["f8", "i8"])
def test_codes_are_those_of_numpy(recipe: str, dim: int, layout: str, hopper: ModuleType) -> None:
    arrays = inputs(SHAPES["tails"], dim)
    if layout == "bshd":
        arrays = [np.ascontiguousarray(array.swapaxes(1, 2)) for array in arrays]
    expected = quantize_fp8(*arrays, recipe, layout=layout)
    found = quantize_fp8(*map(hopper.asarray, arrays), recipe, layout=layout)
    for name in "qkv":
        mine, its = getattr(found, name), getattr(expected, name)
        # Statistics are summed in another order.
        assert (mine.data.get() != its.data).mean() < 1e-3
        np.testing.assert_allclose(mine.scale.get(), its.scale, rtol=1e-5)
        assert relative(mine.dequantize().get(), its.dequantize()) < 2e-3


def parts_of(tensors: Any) -> list[Any]:
    """All that quantising makes, as integers and numbers of the host."""
    arrays = [tensors.mean_scores]
    for one in (tensors.q, tensors.k, tensors.v):
        arrays += [one.data, one.scale]
    return [array.get() for array in arrays]


@pytest.mark.parametrize("how", ["bshd", "repeated", "backwards", "every other head", "a slice"])
@pytest.mark.parametrize("dim", [64, 72, 128, 256])
def test_codes_do_not_depend_on_strides(dim: int, how: str, hopper: ModuleType) -> None:
    """Some of these no tensor map describes."""
    q, k, v = (hopper.asarray(a) for a in inputs((2, 4, 4, 300, 333), dim))
    if how == "bshd":
        q, k, v = (hopper.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (q, k, v))
    elif how == "repeated":
        k, v = (hopper.broadcast_to(x[:, :1], x.shape) for x in (k, v))
    elif how == "backwards":
        q, v = q[:, :, ::-1], v[::-1]
    elif how == "every other head":
        q, k, v = (x[:, ::2] for x in (q, k, v))
    else:
        q, k, v = q[1:, :, 5:290], k[:1, 1:, 3:], v[:1, 1:, 3:]
        q = q[:, 1:]
    found = parts_of(quantize_fp8(q, k, v, "f8"))
    expected = parts_of(quantize_fp8(*map(hopper.ascontiguousarray, (q, k, v)), "f8"))
    for mine, its in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, its)


@pytest.mark.parametrize("shape", ["tails", "many keys", "many tiles"])
@pytest.mark.parametrize("dim", [64, 72, 128, 256])
def test_codes_do_not_depend_on_what_lies_beyond_lengths(
    dim: int, shape: str, hopper: ModuleType
) -> None:
    sizes = {**SHAPES, "many tiles": (2, 64, 64, 700, 1300)}[shape]
    q, k, v = (hopper.asarray(a) for a in inputs(sizes, dim))
    lens = {"q_lens": [130, 0][: len(q)], "kv_lens": [129, 250][: len(q)]}
    expected = parts_of(quantize_fp8(q, k, v, "f8", **lens))
    for entry, (queries, keys) in enumerate(zip(*lens.values(), strict=True)):
        q[entry, :, queries:], k[entry, :, keys:], v[entry, :, keys:] = np.nan, np.inf, np.nan
    for _ in range(3):
        found = parts_of(quantize_fp8(q, k, v, "f8", **lens))
        for mine, its in zip(found, expected, strict=True):
            np.testing.assert_array_equal(mine, its)


@pytest.mark.parametrize("rank", [2, 4])
def test_quantised_once_and_attended_to_often(rank: int, hopper: ModuleType) -> None:
    arrays = [hopper.asarray(a) for a in inputs((1, 1, 1, 150, 333), 128)]
    arrays = [array[(0,) * (4 - rank)] for array in arrays]
    tensors = quantize_fp8(*arrays, "f8")
    for options in ({}, {"causal": True, "scale": 0.3}, {"window": (50, 0)}):
        expected, lse = attention_fp8(*arrays, return_lse=True, **options)
        out = hopper.full_like(arrays[0], np.nan)
        found = attention_quantized(tensors, return_lse=True, out=out, **options)
        assert found[0] is out
        assert bool((out == expected).all())
        assert bool((found[1] == lse).all())


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_lengths_hide_what_lies_beyond(dim: int, hopper: ModuleType) -> None:
    q, k, v = inputs(SHAPES["tails"], dim, ml_dtypes.bfloat16)
    lens = {"q_lens": [150, 40], "kv_lens": [70, 333]}
    expected = attention_fp8(q, k, v, **lens, causal=True)
    k[0, :, 70:], v[0, :, 70:], q[1, :, 40:] = np.nan, np.nan, np.nan
    out = attention_fp8(
        *(hopper.asarray(a.view(np.uint16)).view("bfloat16") for a in (q, k, v)),
        **lens,
        causal=True,
    )
    assert relative(out.get(), expected) < 2e-2


def test_twenty_runs_give_the_same_bits(hopper: ModuleType) -> None:
    arrays = [hopper.asarray(a) for a in inputs(SHAPES["several tiles"], 128)]
    first = attention_fp8(*arrays, causal=True)
    for _ in range(20):
        assert bool((attention_fp8(*arrays, causal=True) == first).all())


@pytest.mark.parametrize("recipe", ["f8", "i8+"])
def test_a_captured_call_can_be_replayed_on_new_values(recipe: str, hopper: ModuleType) -> None:
    """Its codes lie where nothing else does, whatever the pool gives away in between."""
    first = [hopper.asarray(array) for array in inputs(SHAPES["several tiles"], 128)]
    second = [array * np.float16(-0.5) for array in first]
    expected = attention_fp8(*second, recipe=recipe, causal=True)
    out = hopper.empty_like(first[0])
    hopper.cuda.Device().synchronize()
    stream = hopper.cuda.Stream(non_blocking=True)
    with stream:
        attention_fp8(*first, recipe=recipe, causal=True, out=out)
        stream.begin_capture()
        try:
            attention_fp8(*first, recipe=recipe, causal=True, out=out)
        finally:
            graph = stream.end_capture()
        for array, value in zip(first, second, strict=True):
            array[...] = value
        for _ in range(2):
            given_away = [hopper.full(1 << 20, 0xFF, np.uint8) for _ in range(64)]
            out.fill(np.nan)
            graph.launch(stream)
            del given_away
        stream.synchronize()
    assert bool((out == expected).all())


@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_nan_is_not_hidden(where: str, hopper: ModuleType) -> None:
    arrays = dict(zip("qkv", inputs(SHAPES["tails"], 64), strict=True))
    arrays[where][0, 0, 7, 3] = np.nan
    expected = attention_fp8(**arrays)
    out = attention_fp8(**{name: hopper.asarray(a) for name, a in arrays.items()}).get()
    assert np.isnan(expected).any()
    assert (np.isnan(out) >= np.isnan(expected)).all()
    assert not np.isnan(out[1]).any()
