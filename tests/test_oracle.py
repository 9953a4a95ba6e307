"""The float64 oracle against loops over Python numbers that follow the docstring word for word."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from comparison import Array, values_of

from cuflash import oracle


def attention_by_loops(
    q: Array, k: Array, v: Array, options: dict[str, Any]
) -> tuple[Array, Array]:
    """Attention of (batch, heads, seq, dim) arrays, one number at a time, sums exact."""
    batch, heads, n_q, dim = q.shape
    n_k, group = k.shape[2], heads // k.shape[1]
    out, lse = np.full((batch, heads, n_q, v.shape[3]), 7.0), np.full((batch, heads, n_q), 7.0)
    scores_shape = (batch, heads, n_q, n_k)
    mask = np.broadcast_to(options.get("mask", True), scores_shape)
    bias = np.broadcast_to(options.get("bias", 0.0), scores_shape)
    for b, h, i in np.ndindex(batch, heads, n_q):
        used_q = options.get("q_lens", [n_q] * batch)[b]
        used_k = options.get("kv_lens", [n_k] * batch)[b]
        keys = [j for j in range(used_k) if i < used_q and sees(i, j, used_k - used_q, options)]
        keys = [j for j in keys if mask[b, h, i, j]]
        scores = [score(q[b, h, i], k[b, h // group, j], dim, options) for j in keys]
        scores = [s + float(bias[b, h, i, j]) for s, j in zip(scores, keys, strict=True)]
        top = max(scores, default=0.0)
        weights = [math.exp(s - top) for s in scores]
        total = math.fsum(weights)
        lse[b, h, i] = top + math.log(total) if keys else -math.inf
        for c in range(v.shape[3]):
            column = [float(v[b, h // group, j, c]) for j in keys]
            terms = [w * x for w, x in zip(weights, column, strict=True)]
            out[b, h, i, c] = math.fsum(terms) / total if keys else 0.0
    return out, lse


def score(query: Array, key: Array, dim: int, options: dict[str, Any]) -> float:
    scale = float(options.get("scale", 1 / math.sqrt(dim)))
    product = scale * math.fsum(float(a) * float(b) for a, b in zip(query, key, strict=True))
    cap: float | None = options.get("softcap")
    return product if cap is None else cap * math.tanh(product / cap)


def sees(i: int, j: int, offset: int, options: dict[str, Any]) -> bool:
    centre = i if options.get("causal_align") == "top_left" else i + offset
    left, right = options.get("window") or (None, None)
    return (
        (not options.get("causal") or j <= centre)
        and (left is None or j >= centre - left)
        and (right is None or j <= centre + right)
    )


RNG = np.random.default_rng(0)
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "scale": {"scale": -0.7},
    "zero scale": {"scale": 0.0},
    "causal": {"causal": True},
    "top-left causal": {"causal": True, "causal_align": "top_left"},
    "window": {"window": (2, 1)},
    "window, left": {"window": (1, None)},
    "window, right": {"window": (None, 2)},
    "top-left window": {"window": (1, 0), "causal_align": "top_left"},
    "causal window": {"window": (3, 5), "causal": True},
    "softcap": {"softcap": 0.8},
    "mask": {"mask": RNG.random((2, 4, 5, 7)) < 0.6},
    "mask of keys": {"mask": RNG.random((2, 1, 1, 7)) < 0.6},
    "mask of rows": {"mask": RNG.random((5, 1)) < 0.6},
    "bias": {"bias": RNG.standard_normal((4, 1, 7))},
    "capped, biased, masked": {
        "softcap": 2.0,
        "bias": RNG.standard_normal((5, 7)),
        "mask": RNG.random((4, 5, 7)) < 0.7,
    },
    "lengths": {"q_lens": [5, 3], "kv_lens": [2, 7]},
    "causal lengths": {"q_lens": [2, 5], "kv_lens": [6, 3], "causal": True},
    "top-left lengths": {"kv_lens": [0, 4], "causal": True, "causal_align": "top_left"},
    "window of lengths": {"q_lens": [4, 0], "kv_lens": [5, 7], "window": (1, 1)},
}


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_oracle_agrees_with_loops(options: dict[str, Any], dtype: Any) -> None:
    q = values_of(RNG, (2, 4, 5, 3), dtype)
    k, v = values_of(RNG, (2, 2, 7, 3), dtype), values_of(RNG, (2, 2, 7, 6), dtype)
    out, lse = oracle.attention(q, k, v, **options)
    exact, exact_lse = attention_by_loops(q, k, v, options)
    assert out.dtype == lse.dtype == np.float64
    np.testing.assert_allclose(out, exact, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "none"])
def test_every_option_matters(name: str) -> None:
    """An option that changed nothing here would be no test of it."""
    q, k, v = (values_of(RNG, (2, h, n, 3), np.float64) for h, n in ((4, 5), (2, 7), (2, 7)))
    plain = attention_by_loops(q, k, v, {})[0]
    for option in OPTIONS[name]:
        if option == "causal_align":
            continue
        alone = attention_by_loops(q, k, v, {option: OPTIONS[name][option]})[0]
        assert not np.allclose(alone, plain), option


@pytest.mark.parametrize("rank", [2, 3, 4])
def test_ranks_and_layouts_are_views_of_one_answer(rank: int) -> None:
    q, k, v = (values_of(RNG, (1, 1, n, d), np.float64) for n, d in ((5, 3), (7, 3), (7, 4)))
    if rank > 2:
        q, k, v = q.repeat(4, 1), k.repeat(2, 1), v.repeat(2, 1)
    full, full_lse = attention_by_loops(q, k, v, {"causal": True})
    absent = (0,) * (4 - rank)
    for layout in ("bhsd", "bshd"):
        swap = layout == "bshd" and rank > 2
        given = [a[absent].swapaxes(-3, -2) if swap else a[absent] for a in (q, k, v)]
        out, lse = oracle.attention(*given, causal=True, layout=layout)
        assert out.shape == (*given[0].shape[:-1], 4)
        np.testing.assert_allclose(out.swapaxes(-3, -2) if swap else out, full[absent], rtol=1e-12)
        np.testing.assert_allclose(lse, full_lse[absent], rtol=1e-12)


def test_oracle_agrees_with_scipy() -> None:
    special = pytest.importorskip("scipy.special")
    q, k, v = (values_of(RNG, (2, 3, n, 8), np.float64) for n in (20, 30, 30))
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(8)
    out, lse = oracle.attention(q, k, v)
    np.testing.assert_allclose(out, special.softmax(scores, axis=-1) @ v, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(lse, special.logsumexp(scores, axis=-1), rtol=1e-13)


def test_rows_without_keys() -> None:
    q, k, v = (np.ones((n, 2)) for n in (4, 3, 3))
    hidden = np.array([[True, False, True], [False] * 3, [True] * 3, [False] * 3])
    for mask, bias in ((hidden, None), (None, np.where(hidden, 0.0, -np.inf))):
        out, lse = oracle.attention(q, k, v, mask=mask, bias=bias)
        assert np.array_equal(out, [[1, 1], [0, 0], [1, 1], [0, 0]])
        assert np.array_equal(np.isneginf(lse), [False, True, False, True])


def test_what_is_not_finite_reaches_the_rows_that_see_it() -> None:
    q, k, v = (np.ones((n, 2)) for n in (4, 4, 4))
    v[2, 1] = np.nan
    out, _ = oracle.attention(q, k, v, causal=True)
    assert np.array_equal(np.isnan(out), [[False] * 2, [False] * 2, [False, True], [False, True]])
    v[2, 1], k[1, 0] = 1, np.nan
    out, lse = oracle.attention(q, k, v, causal=True)
    assert np.array_equal(np.isnan(out[:, 0]), [False, True, True, True])
    assert np.array_equal(np.isnan(lse), [False, True, True, True])
    k[1, 0] = np.inf
    out, _ = oracle.attention(q, k, v, causal=True)
    assert np.array_equal(np.isnan(out[:, 0]), [False, True, True, True])
