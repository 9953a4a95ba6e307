"""The CPU family against the float64 oracle, and the numerical contract point by point."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from comparison import DTYPES, assert_attention, poisoned, values_of
from hypothesis import given, settings
from random_calls import Call, calls
from tile_sizes import tile_sizes

import cuflash
from cuflash import reference

# (scores, keys) of a tile: the library's own, and so few that every problem takes several tiles.
TILES = [(reference._TILE_SCORES, reference._TILE_KEYS), (96, 7)]
BY_TILES = pytest.mark.parametrize("tiles", TILES, ids=["own tiles", "tiny tiles"])


@pytest.fixture(params=TILES, ids=["own tiles", "tiny tiles"])
def tiles(request: pytest.FixtureRequest) -> Iterator[None]:
    with tile_sizes(reference, *request.param):
        yield


# --- any problem against the oracle -------------------------------------------------------------


@BY_TILES
@settings(deadline=None, max_examples=1000, print_blob=True)
@given(call=calls())
def test_any_call_agrees_with_the_oracle(tiles: tuple[int, int], call: Call) -> None:
    with tile_sizes(reference, *tiles), warnings.catch_warnings():
        warnings.simplefilter("error")
        result = cuflash.attention(call.q, call.k, call.v, **call.options, **call.own)
    out, lse = result if call.own["return_lse"] else (result, None)
    if "out" in call.own:
        assert out is call.own["out"]
    assert_attention(out, lse, call.q, call.k, call.v, **call.options)


def test_tiny_tiles_cut_rows_keys_and_heads() -> None:
    """Else the second run of the test above would show nothing."""
    q = np.zeros((1, 6, 40, 8), np.float32)
    with tile_sizes(reference, *TILES[1]):
        tiling = cuflash.explain(q, q[:, :3], q[:, :3]).tiling
    assert tiling.q_rows < 40
    assert tiling.keys < 40
    assert tiling.heads < 3


# --- rows without keys --------------------------------------------------------------------------

SEEN_BY_NONE: dict[str, tuple[dict[str, Any], slice]] = {
    "causal, more queries than keys": ({"causal": True}, slice(0, 9)),
    "window before the first key": ({"window": (None, 0)}, slice(0, 9)),
    "window past the last key": (
        {"window": (1, 0), "causal_align": "top_left"},
        slice(12, 20),
    ),
    "kv_lens of 0": ({"kv_lens": [0]}, slice(0, 20)),
    "q_lens": ({"q_lens": [6]}, slice(6, 20)),
    "mask": ({"mask": np.arange(20)[:, None] < 15}, slice(15, 20)),
    "bias of -inf": (
        {"bias": np.where(np.arange(20)[:, None] < 15, 0, -np.inf).astype(np.float32)},
        slice(15, 20),
    ),
}


@pytest.mark.parametrize(("options", "rows"), SEEN_BY_NONE.values(), ids=SEEN_BY_NONE)
@pytest.mark.usefixtures("tiles", "no_warnings")
def test_a_row_without_keys_is_zero(
    options: dict[str, Any], rows: slice, rng: np.random.Generator
) -> None:
    q, k, v = (values_of(rng, (2, n, 5), np.float32) for n in (20, 11, 11))
    out, lse = cuflash.attention(
        q, k, v, **options, return_lse=True, out=poisoned(q.shape, q.dtype)
    )
    empty = np.zeros(20, bool)
    empty[rows] = True
    assert (out[:, empty] == 0).all()
    assert not np.signbit(out[:, empty]).any()
    assert np.isneginf(lse[:, empty]).all()
    assert np.isfinite(lse[:, ~empty]).all()
    assert_attention(out, lse, q, k, v, **options)


@pytest.mark.parametrize("axis", range(4))
@pytest.mark.usefixtures("no_warnings")
def test_zero_size_arrays(axis: int) -> None:
    names = ("batch", "heads", "q_len", "kv_len")
    batch, heads, q_len, kv_len = (0 if i == axis else n for i, n in enumerate((2, 4, 5, 6)))
    q = np.ones((batch, heads, q_len, 8), np.float16)
    k = np.ones((batch, heads // 2, kv_len, 8), np.float16)
    out, lse = cuflash.attention(q, k, k[..., :3], return_lse=True)
    assert out.shape == (batch, heads, q_len, 3), names[axis]
    assert (out == 0).all()
    assert lse.shape == (batch, heads, q_len)
    assert np.isneginf(lse).all()


# --- extreme scores -----------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [-1e5, 1e5, -1e6])
@pytest.mark.usefixtures("tiles", "no_warnings")
def test_far_scores_give_the_weights_of_near_ones(offset: float, rng: np.random.Generator) -> None:
    steps = rng.integers(0, 4, (6, 40))  # exact beside the offset in float32
    bias = (offset + steps).astype(np.float32)
    q = np.ones((6, 3), np.float32)
    v = values_of(rng, (40, 2), np.float32)
    out, lse = cuflash.attention(
        q, np.ones((40, 3), np.float32), v, scale=0, bias=bias, return_lse=True
    )
    weights = np.exp(steps.astype(float))
    np.testing.assert_allclose(
        out, weights @ v / weights.sum(1, keepdims=True), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(lse, offset + np.log(weights.sum(1)), rtol=2**-23)


@pytest.mark.parametrize("logit", [1e30, -1e30, 3e38, -3e38])
@pytest.mark.usefixtures("tiles", "no_warnings")
def test_huge_equal_scores_share_the_weight(logit: float, rng: np.random.Generator) -> None:
    q, v = np.ones((4, 3), np.float32), values_of(rng, (33, 2), np.float32)
    bias = np.full((1, 1), logit, np.float32)
    out, lse = cuflash.attention(
        q, np.ones((33, 3), np.float32), v, scale=0, bias=bias, return_lse=True
    )
    np.testing.assert_allclose(out, np.broadcast_to(v.mean(0), out.shape), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, logit, rtol=1e-6)


@pytest.mark.usefixtures("tiles", "no_warnings")
def test_an_infinite_score_is_not_hidden(rng: np.random.Generator) -> None:
    q, k, v = (values_of(rng, (12, 4), np.float32) for _ in range(3))
    bias = np.zeros((12, 12), np.float32)
    bias[5, 7] = np.inf
    out, lse = cuflash.attention(q, k, v, bias=bias, return_lse=True)
    other = np.arange(12) != 5
    assert np.isnan(out[5]).all()
    assert np.isnan(lse[5])
    assert_attention(out[other], lse[other], q[other], k, v)


# --- what is not finite reaches the rows that see it, and no other --------------------------------

KEY = 4
VISIBILITY: dict[str, tuple[dict[str, Any], Any]] = {
    "full": ({}, lambda i, j: True),
    "causal": ({"causal": True}, lambda i, j: j <= i + 2),
    "top-left causal": ({"causal": True, "causal_align": "top_left"}, lambda i, j: j <= i),
    "window": ({"window": (1, 2)}, lambda i, j: i + 1 <= j <= i + 4),
    "mask": ({"mask": np.indices((20, 22)).sum(0) % 3 > 0}, lambda i, j: (i + j) % 3 > 0),
}


@pytest.mark.parametrize("stray", [np.nan, np.inf])
@pytest.mark.parametrize("place", ["k", "v"])
@pytest.mark.parametrize(("options", "sees"), VISIBILITY.values(), ids=VISIBILITY)
@pytest.mark.usefixtures("tiles", "no_warnings")
def test_not_finite_keys_reach_the_rows_that_see_them(
    options: dict[str, Any], sees: Any, place: str, stray: float, rng: np.random.Generator
) -> None:
    q = np.abs(values_of(rng, (2, 20, 6), np.float32)) + 0.1  # so that a key of +inf scores +inf
    k, v = values_of(rng, (1, 22, 6), np.float32), values_of(rng, (1, 22, 3), np.float32)
    clean, clean_lse = cuflash.attention(q, k, v, **options, return_lse=True)
    (k if place == "k" else v)[0, KEY, 1] = stray
    out, lse = cuflash.attention(q, k, v, **options, return_lse=True)
    reached = np.zeros(out.shape, bool)
    reached[:, [i for i in range(20) if sees(i, KEY)]] = True
    if place == "v":
        reached[..., [0, 2]] = False
    assert reached.any()
    expected = stray if place == "v" else np.nan
    assert np.array_equal(out[reached], np.full(reached.sum(), expected, np.float32), True)
    np.testing.assert_allclose(out[~reached], clean[~reached], rtol=1e-5, atol=1e-6)
    lost = reached[..., 1] if place == "k" else np.zeros(lse.shape, bool)
    assert np.isnan(lse[lost]).all()
    np.testing.assert_allclose(lse[~lost], clean_lse[~lost], rtol=1e-6)


@pytest.mark.parametrize("fill", [np.nan, np.inf, 7.0])
@pytest.mark.usefixtures("tiles", "no_warnings")
def test_what_lies_past_the_lengths_has_no_influence(fill: float, rng: np.random.Generator) -> None:
    q, k, v = (values_of(rng, (3, 2, 30, 8), np.float16) for _ in range(3))
    lengths: dict[str, Any] = {"q_lens": [30, 7, 0], "kv_lens": [11, 30, 5]}
    clean = cuflash.attention(q, k, v, causal=True, **lengths, return_lse=True)
    for b in range(3):
        q[b, :, lengths["q_lens"][b] :] = fill
        k[b, :, lengths["kv_lens"][b] :] = fill
        v[b, :, lengths["kv_lens"][b] :] = fill
    again = cuflash.attention(q, k, v, causal=True, **lengths, return_lse=True)
    assert all(np.array_equal(a, b) for a, b in zip(clean, again, strict=True))


# --- repeatability, independence, storage ---------------------------------------------------------


@pytest.mark.usefixtures("tiles")
def test_results_repeat_bitwise_and_do_not_depend_on_the_batch(rng: np.random.Generator) -> None:
    q, k, v = (values_of(rng, (3, 4, 65, 40), np.float16) for _ in range(3))
    out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    again, lse_again = cuflash.attention(q, k, v, causal=True, return_lse=True)
    assert np.array_equal(out, again)
    assert np.array_equal(lse, lse_again)
    k[0], v[2] = np.nan, np.nan
    beside_nan = cuflash.attention(q, k, v, causal=True)
    assert np.array_equal(out[1], beside_nan[1])
    alone, lse_alone = cuflash.attention(q[1:2], k[1:2], v[1:2], causal=True, return_lse=True)
    assert np.array_equal(out[1:2], alone)
    assert np.array_equal(lse[1:2], lse_alone)


@pytest.mark.parametrize("tile", [(1, 1), (64, 64), (200, 3), (10**6, 10**6)], ids=str)
def test_tiles_do_not_change_the_answer(tile: tuple[int, int], rng: np.random.Generator) -> None:
    q, k, v = (values_of(rng, (h, n, 16), np.float64) for h, n in ((4, 30), (2, 40), (2, 40)))
    options: dict[str, Any] = {
        "window": (9, 3),
        "mask": rng.random((30, 40)) < 0.7,
        "return_lse": True,
    }
    usual, usual_lse = cuflash.attention(q, k, v, **options)
    with tile_sizes(reference, *tile):
        out, lse = cuflash.attention(q, k, v, **options)
    np.testing.assert_allclose(out, usual, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(lse, usual_lse, rtol=1e-13)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtype_of_results(dtype: str) -> None:
    q = np.ones((3, 4), DTYPES[dtype])
    out, lse = cuflash.attention(q, q, q, return_lse=True)
    assert out.dtype == q.dtype
    assert lse.dtype == (np.float64 if dtype == "float64" else np.float32)


def test_out_is_filled_in_place_and_nothing_beside_it(rng: np.random.Generator) -> None:
    q, k, v = (values_of(rng, (2, 30, 8), np.float32) for _ in range(3))
    buffer = np.full((4, 60, 16), np.nan, np.float32)
    out = buffer[::2, ::-2, 1::2]
    assert cuflash.attention(q, k, v, out=out) is out
    assert np.array_equal(out, cuflash.attention(q, k, v))
    assert np.isnan(buffer).sum() == buffer.size - out.size
