"""The float64 gradients of the oracle against differences of its own results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from comparison import Array, values_of
from test_oracle import OPTIONS as FORWARD_OPTIONS

from cuflash import oracle

RNG = np.random.default_rng(0)
Q, K, V = (2, 4, 5, 3), (2, 2, 7, 3), (2, 2, 7, 6)  # the shapes that the masks and biases fit
OPTIONS = FORWARD_OPTIONS | {
    "capped window of lengths": {
        "q_lens": [4, 5], "kv_lens": [5, 7], "window": (2, 1), "softcap": 0.8, "scale": 1.3
    },
    "top-left window, capped, biased": {
        "window": (3, 1),
        "causal_align": "top_left",
        "softcap": 1.5,
        "bias": RNG.standard_normal((4, 5, 7)),
    },
}  # fmt: skip


def differences(arrays: dict[str, Array], name: str, dout: Array, options: Any) -> Array:
    """Central differences of ``sum(out * dout)`` by each element of one array."""
    step, found = 1e-5, np.zeros(arrays[name].shape)

    def value(at: tuple[int, ...], distance: float) -> float:
        moved = arrays[name].copy()
        moved[at] += distance
        out, _ = oracle.attention(**(arrays | {name: moved}), **options)
        return float((out * dout).sum())

    for at in np.ndindex(found.shape):
        found[at] = (value(at, step) - value(at, -step)) / (2 * step)
    return found


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients_are_the_slopes_of_the_result(options: dict[str, Any]) -> None:
    """By every element of one batch entry: entries do not meet, and the other only takes time."""
    arrays = {name: values_of(RNG, s, np.float64) for name, s in zip("qkv", (Q, K, V), strict=True)}
    dout = values_of(RNG, (*Q[:3], V[3]), np.float64)
    found = oracle.gradients(dout, **arrays, **options)
    entry = slice(1, 2)
    one = {name: array[entry] for name, array in arrays.items()}
    limits = {name: options[name][entry] for name in ("q_lens", "kv_lens") if name in options}
    batched = {n: a[entry] for n, a in options.items() if np.ndim(a) == 4 and len(a) == 2}
    for name, gradient in zip("qkv", found, strict=True):
        expected = differences(one, name, dout[entry], options | limits | batched)
        assert gradient.shape == arrays[name].shape
        np.testing.assert_allclose(gradient[entry], expected, rtol=1e-6, atol=1e-8)


def test_heads_of_a_group_add_up() -> None:
    q, k, v = (values_of(RNG, s, np.float64) for s in (Q, K, V))
    dout = values_of(RNG, (*Q[:3], V[3]), np.float64)
    dq, dk, dv = oracle.gradients(dout, q, k, v, causal=True)
    each = oracle.gradients(dout, q, k.repeat(2, 1), v.repeat(2, 1), causal=True)
    np.testing.assert_allclose(dq, each[0], rtol=1e-13)
    for grouped, per_head in ((dk, each[1]), (dv, each[2])):
        summed = per_head[:, ::2] + per_head[:, 1::2]
        np.testing.assert_allclose(grouped, summed, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("rank", [2, 3, 4])
def test_ranks_and_layouts_are_views_of_one_answer(rank: int) -> None:
    q, k, v = (values_of(RNG, (1, 1, n, d), np.float64) for n, d in ((5, 3), (7, 3), (7, 4)))
    if rank > 2:
        q, k, v = q.repeat(4, 1), k.repeat(2, 1), v.repeat(2, 1)
    dout = values_of(RNG, (*q.shape[:3], 4), np.float64)
    full = oracle.gradients(dout, q, k, v, causal=True)
    absent = (0,) * (4 - rank)
    for layout in ("bhsd", "bshd"):
        swap = layout == "bshd" and rank > 2
        given = [a[absent].swapaxes(-3, -2) if swap else a[absent] for a in (dout, q, k, v)]
        for got, want in zip(
            oracle.gradients(*given, causal=True, layout=layout), full, strict=True
        ):
            assert np.array_equal(got.swapaxes(-3, -2) if swap else got, want[absent])


def test_what_is_not_finite_reaches_what_depends_on_it() -> None:
    q, k, v, dout = (values_of(RNG, (6, 2), np.float64) for _ in range(4))
    clean = oracle.gradients(dout, q, k, v, causal=True)
    k[3] = np.nan  # seen by rows 3, 4 and 5
    dq, dk, dv = oracle.gradients(dout, q, k, v, causal=True)
    assert np.array_equal(np.isnan(dq[:, 0]), np.arange(6) >= 3)
    assert np.array_equal(dq[:3], clean[0][:3])
    assert np.isnan(dk).all(), "those rows see every key"
    assert np.isnan(dv).all()
    k[3], q[2] = 1, np.nan  # a row that sees keys 0, 1 and 2
    for gradient in oracle.gradients(dout, q, k, v, causal=True)[1:]:
        assert np.array_equal(np.isnan(gradient[:, 0]), np.arange(6) <= 2)
    q[2], dout[0] = 1, np.nan  # a row that sees key 0 alone
    dq, dk, dv = oracle.gradients(dout, q, k, v, causal=True)
    assert np.array_equal(np.isnan(dq[:, 0]), np.arange(6) == 0)
    for gradient in (dk, dv):
        assert np.array_equal(np.isnan(gradient[:, 0]), np.arange(6) == 0)
