"""Gradients of the CPU family: alike in whatever memory, tiles and batch; their errors."""

from __future__ import annotations

import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from comparison import DTYPES, STORAGES, Array, store, values_of
from gradient_comparison import (
    GRADIENTS,
    assert_gradients,
    differentiated,
)
from tile_sizes import tile_sizes

import cuflash
from cuflash import oracle, reference_backward

# --- repeatability, independence, storage ---------------------------------------------------------


@pytest.mark.parametrize("tile", [(1, 1), (64, 64), (200, 3), (10**6, 10**6)], ids=str)
def test_tiles_do_not_change_the_answer(tile: tuple[int, int], rng: np.random.Generator) -> None:
    q, k, v, dout = (
        values_of(rng, (h, n, 16), np.float64) for h, n in ((4, 30), (2, 40), (2, 40), (4, 30))
    )
    options: dict[str, Any] = {"window": (9, 3), "mask": rng.random((30, 40)) < 0.7}
    usual = differentiated(dout, q, k, v, **options)
    with tile_sizes(reference_backward, *tile):
        found = differentiated(dout, q, k, v, **options)
    for a, b in zip(found, usual, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", ["dout", "q", "k", "v", "out"])
def test_storage_makes_no_difference(name: str, storage: str, rng: np.random.Generator) -> None:
    arrays = {n: values_of(rng, (2, 3, 20, 8), np.float32) for n in ("dout", "q", "k", "v")}
    if name != "out":
        arrays[name] = store(arrays[name], storage, axis=2)
    q, k, v = (arrays[n] for n in "qkv")
    out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    plain = {n: np.ascontiguousarray(a) for n, a in arrays.items()}
    expected = cuflash.attention_backward(**plain, out=out, lse=lse, causal=True)
    if name == "out":
        kept = storage if storage != "broadcast" else "stepped"
        out, lse = store(out, kept), store(lse, kept)
    found = cuflash.attention_backward(**arrays, out=out, lse=lse, causal=True)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_dout_of_one_number_broadcast() -> None:
    """The gradient of a plain sum, stride 0 in every axis."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 20, 8))
    dout = np.broadcast_to(np.float64(1), q.shape)
    assert_gradients(differentiated(dout, q, k, v), dout, q, k, v)


# --- parts of the keys, memory, errors ------------------------------------------------------------


def test_parts_of_the_keys_add_up(rng: np.random.Generator) -> None:
    """With the result and the LSE over all keys, gradients over parts are parts of the gradients:
    what rings of devices rely on.
    """
    q, k, v, dout = (values_of(rng, (2, 40, 8), np.float64) for _ in range(4))
    whole = differentiated(dout, q, k, v)
    parts = [(k[:, :13], v[:, :13]), (k[:, 13:], v[:, 13:])]
    out, lse = cuflash.merge_states(
        *zip(*(cuflash.attention(q, *part, return_lse=True) for part in parts), strict=True)
    )
    found = [cuflash.attention_backward(dout, q, *part, out, lse) for part in parts]
    np.testing.assert_allclose(found[0][0] + found[1][0], whole[0], rtol=1e-11, atol=1e-13)
    for at in (1, 2):
        joined = np.concatenate([found[0][at], found[1][at]], axis=1)
        np.testing.assert_allclose(joined, whole[at], rtol=1e-11, atol=1e-13)


def test_a_long_problem_takes_the_memory_that_its_plan_says() -> None:
    """The scores would be 4 heads of 16 MiB, and their gradients as much again."""
    q, k, v, dout = np.random.default_rng(0).standard_normal((4, 4, 2048, 64), dtype=np.float32)
    out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    workspace = cuflash.explain(q, k, v, causal=True, backward=True).tiling.workspace
    gradients = tuple(np.empty_like(q) for _ in range(3))
    tracemalloc.start()
    cuflash.attention_backward(
        dout, q, k, v, out, lse, causal=True, **dict(zip(GRADIENTS, gradients, strict=True))
    )
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert workspace < 8e6
    assert peak < 1.5 * workspace, f"{peak / 1e6:.3g} MB, planned {workspace / 1e6:.3g} MB"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("length", "dim"), [(300, 64), (700, 128), (300, 16)])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_errors_are_not_above_those_of_dense_float32_attention(
    causal: bool, length: int, dim: int, dtype: str, rng: np.random.Generator
) -> None:
    """Of a dense computation from the same `out` and LSE, rounded as these are; and at most 1.35 of
    one that keeps its own weights in float32, which has no LSE and no `out` to be rounded.
    """
    q, k, v, dout = (values_of(rng, (4, length, dim), DTYPES[dtype]) for _ in range(4))
    out, lse = cuflash.attention(q, k, v, causal=causal, return_lse=True)
    found = cuflash.attention_backward(dout, q, k, v, out, lse, causal=causal)
    exact = oracle.gradients(dout, q, k, v, causal=causal)
    same, own = (
        dense_float32(dout, q, k, v, causal, *saved) for saved in ((out, lse), (None, None))
    )
    for name, gradient, a, b, truth in zip(GRADIENTS, found, same, own, exact, strict=True):
        error, error_a, error_b = (
            np.sqrt(np.square(g.astype(q.dtype).astype(np.float64) - truth).mean())
            for g in (gradient, a, b)
        )
        assert error <= 1.02 * error_a, f"{name}: {error / error_a:.3f}"
        assert error <= 1.35 * error_b, f"{name}: {error / error_b:.3f}"


def dense_float32(
    dout: Array, q: Array, k: Array, v: Array, causal: bool, out: Array | None, lse: Array | None
) -> tuple[Array, Array, Array]:
    """Gradients with the whole matrix of weights, of a row's own softmax where there is no LSE."""
    rows, queries, keys, values = (a.astype(np.float32) for a in (dout, q, k, v))
    scale = np.float32(q.shape[-1] ** -0.5)
    scores = queries @ keys.swapaxes(1, 2) * scale
    if causal:
        scores[:, ~np.tri(*scores.shape[1:], dtype=bool)] = -np.inf
    by_weight = rows @ values.swapaxes(1, 2)
    if lse is None or out is None:
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        delta = (weights * by_weight).sum(-1, keepdims=True)
    else:
        weights = np.exp(scores - lse[..., None])
        delta = (rows * out.astype(np.float32)).sum(-1, keepdims=True)
    by_score = weights * (by_weight - delta) * scale
    return (
        by_score @ keys,
        by_score.swapaxes(1, 2) @ queries,
        weights.swapaxes(1, 2) @ rows,
    )


def test_the_comparison_notices_a_wrong_gradient(rng: np.random.Generator) -> None:
    """Else the tests above would pass on anything."""
    q, k, v, dout = (values_of(rng, (40, 8), ml_dtypes.bfloat16) for _ in range(4))
    right = differentiated(dout, q, k, v, causal=True)
    assert_gradients(right, dout, q, k, v, causal=True)
    for at, name in enumerate(GRADIENTS):
        for factor in (1.06, -1.0, np.nan):
            wrong = list(right)
            wrong[at] = (right[at].astype(np.float32) * factor).astype(q.dtype)
            with pytest.raises(AssertionError, match=name):
                assert_gradients(tuple(wrong), dout, q, k, v, causal=True)  # type: ignore[arg-type]
