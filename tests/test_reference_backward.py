"""The backward pass of the CPU family against the float64 oracle, and the contract by point."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from comparison import DTYPES, STORAGES, WRITABLE_STORAGES, Array, poisoned, store, values_of
from gradient_comparison import (
    GRADIENTS,
    assert_gradients,
    bits_of,
    differentiated,
    poisoned_gradients,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from random_calls import Call, calls
from tile_sizes import tile_sizes

import cuflash
from cuflash import oracle, reference_backward

# (scores, keys) of a tile: the library's own, and so few that every problem takes several tiles.
TILES = [(reference_backward._TILE_SCORES, reference_backward._TILE_KEYS), (96, 7)]
NAMES = ["own tiles", "tiny tiles"]


@pytest.fixture(params=TILES, ids=NAMES)
def tiles(request: pytest.FixtureRequest) -> Iterator[None]:
    with tile_sizes(reference_backward, *request.param):
        yield


# --- any problem against the oracle -------------------------------------------------------------


@pytest.mark.parametrize("tiles", TILES, ids=NAMES)
@settings(deadline=None, max_examples=250, print_blob=True)
@given(call=calls(), data=st.data())
def test_any_call_agrees_with_the_oracle(
    tiles: tuple[int, int], call: Call, data: st.DataObject
) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    dout = values_of(rng, (*call.q.shape[:-1], call.v.shape[-1]), call.q.dtype)
    storage = data.draw(st.sampled_from(STORAGES))
    dout = store(dout, storage, data.draw(st.integers(0, dout.ndim - 1)))
    if storage != "broadcast":
        past_lengths(dout, call.options)[...] = np.nan
    given = {
        name: poisoned(array.shape, array.dtype, data.draw(st.sampled_from(WRITABLE_STORAGES)))
        for name, array in zip(GRADIENTS, (call.q, call.k, call.v), strict=True)
        if data.draw(st.booleans())
    }
    with tile_sizes(reference_backward, *tiles), warnings.catch_warnings():
        warnings.simplefilter("error")
        found = differentiated(dout, call.q, call.k, call.v, given, **call.options)
    for name, gradient in zip(GRADIENTS, found, strict=True):
        assert name not in given or gradient is given[name]
    assert_gradients(found, dout, call.q, call.k, call.v, **call.options)


def past_lengths(dout: Array, options: dict[str, Any]) -> Array:
    """A view of rows that no batch entry uses."""
    used = max(options.get("q_lens", [dout.shape[-2]]), default=0)
    if options["layout"] == "bshd" and dout.ndim > 2:
        used = max(options.get("q_lens", [dout.shape[-3]]), default=0)
        return dout[..., used:, :, :]
    return dout[..., used:, :]


def test_tiny_tiles_cut_rows_keys_and_heads() -> None:
    """Else the second run of the test above would show nothing."""
    q = np.zeros((1, 6, 40, 8), np.float32)
    with tile_sizes(reference_backward, *TILES[1]):
        tiling = cuflash.explain(q, q[:, :3], q[:, :3], backward=True).tiling
    assert tiling.q_rows < 40
    assert tiling.keys < 40
    assert tiling.heads < 3


MASKINGS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window": (9, 3)},
    {"window": (None, 4), "causal": False},
    {"window": (6, 5), "causal": True},
]


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("lengths", [None, ([23, 0, 31], [40, 17, 0])], ids=["whole", "lengths"])
@pytest.mark.usefixtures("no_warnings")
def test_every_masking_with_every_option(
    group: int, lengths: Any, rng: np.random.Generator
) -> None:
    """Softcap x window x alignment x lengths x grouped heads, in float64, where little is lost in
    rounding. Some tiles are cut by the window, some are not.
    """
    shapes = ((3, 2 * group, 31, 5), (3, 2, 40, 5), (3, 2, 40, 3))
    q, k, v = (values_of(rng, shape, np.float64) for shape in shapes)
    dout = values_of(rng, (*q.shape[:3], 3), np.float64)
    used = {} if lengths is None else dict(zip(("q_lens", "kv_lens"), lengths, strict=True))
    products = itertools.product(MASKINGS, (None, 0.7), ("bottom_right", "top_left"), TILES)
    for masking, softcap, align, tile in products:
        options = {**masking, **used, "softcap": softcap, "causal_align": align}
        with tile_sizes(reference_backward, *tile):
            found = differentiated(dout, q, k, v, **options)
        assert_gradients(found, dout, q, k, v, **options)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.usefixtures("no_warnings")
def test_tails_of_every_length(dtype: str, rng: np.random.Generator) -> None:
    """Rows and keys end at every place of a tile, and of two."""
    for length in range(1, 131):
        q, k, v, dout = (values_of(rng, (length, 4), DTYPES[dtype]) for _ in range(4))
        with tile_sizes(reference_backward, 64 * 32, 32):
            found = differentiated(dout, q, k, v, causal=True)
        assert_gradients(found, dout, q, k, v, causal=True)


@pytest.mark.parametrize("dims", [(1, 1), (61, 61), (64, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("no_warnings")
def test_head_dims(dims: tuple[int, int], dtype: str, rng: np.random.Generator) -> None:
    q, k, v = (
        values_of(rng, (h, n, d), DTYPES[dtype])
        for h, n, d in ((4, 70, dims[0]), (2, 90, dims[0]), (2, 90, dims[1]))
    )
    dout = values_of(rng, (4, 70, dims[1]), DTYPES[dtype])
    assert_gradients(differentiated(dout, q, k, v, causal=True), dout, q, k, v, causal=True)


# --- rows and keys that see nothing, or one another alone -----------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("tiles", "no_warnings")
def test_a_single_key_passes_dout_on(dtype: str, rng: np.random.Generator) -> None:
    """Its weight is 1 whatever the score, so v gets `dout`, and q and k get rounding errors."""
    q, k, v, dout = (3 * values_of(rng, (5, 1, 32), DTYPES[dtype]) for _ in range(4))
    dq, dk, dv = differentiated(dout, q, k, v)
    assert np.array_equal(dv, dout)
    assert_gradients((dq, dk, dv), dout, q, k, v)
    many = 3 * values_of(rng, (5, 40, 32), DTYPES[dtype])
    rows = values_of(rng, (5, 40, 32), DTYPES[dtype])
    assert_gradients(differentiated(rows, many, k, v), rows, many, k, v)


UNSEEN: dict[str, tuple[dict[str, Any], slice, slice]] = {
    "causal, more queries than keys": ({"causal": True}, slice(0, 9), slice(0)),
    "window past the last key": (
        {"window": (1, 0), "causal_align": "top_left"},
        slice(12, 20),
        slice(0),
    ),
    "top-left window of more keys": (
        {"window": (2, 0), "causal_align": "top_left", "q_lens": [5]},
        slice(5, 20),
        slice(5, 11),
    ),
    "kv_lens of 0": ({"kv_lens": [0]}, slice(0, 20), slice(0, 11)),
    "q_lens of 0": ({"q_lens": [0]}, slice(0, 20), slice(0, 11)),
    "lengths": ({"q_lens": [6], "kv_lens": [4]}, slice(6, 20), slice(4, 11)),
    "mask": (
        {"mask": (np.arange(20)[:, None] < 15) & (np.arange(11) > 2)},
        slice(15, 20),
        slice(0, 3),
    ),
    "bias of -inf": (
        {"bias": np.where(np.arange(20)[:, None] < 15, 0, -np.inf).astype(np.float32)},
        slice(15, 20),
        slice(0),
    ),
}


@pytest.mark.parametrize(("options", "rows", "keys"), UNSEEN.values(), ids=UNSEEN)
@pytest.mark.usefixtures("tiles", "no_warnings")
def test_what_sees_nothing_has_gradients_of_0(
    options: dict[str, Any], rows: slice, keys: slice, rng: np.random.Generator
) -> None:
    q, k, v = (values_of(rng, (2, n, 5), np.float32) for n in (20, 11, 11))
    dout = values_of(rng, q.shape, np.float32)
    memory = poisoned_gradients(q, k, v)
    dq, dk, dv = differentiated(dout, q, k, v, memory, **options)
    for gradient, unseen in ((dq, rows), (dk, keys), (dv, keys)):
        nothing = np.zeros(gradient.shape[1], bool)
        nothing[unseen] = True
        assert (gradient[:, nothing] == 0).all()
        assert not np.signbit(gradient[:, nothing]).any()
        assert gradient[:, ~nothing].any() == (not nothing.all())
    assert_gradients((dq, dk, dv), dout, q, k, v, **options)


@pytest.mark.parametrize("axis", range(4))
@pytest.mark.usefixtures("no_warnings")
def test_zero_size_arrays(axis: int) -> None:
    batch, heads, q_len, kv_len = (0 if i == axis else n for i, n in enumerate((2, 4, 5, 6)))
    q = np.ones((batch, heads, q_len, 8), np.float16)
    k = np.ones((batch, 2, kv_len, 8), np.float16)
    v = k[..., :3]
    memory = poisoned_gradients(q, k, v)
    found = differentiated(np.ones((*q.shape[:3], 3), np.float16), q, k, v, memory)
    assert all(gradient is memory[name] for name, gradient in zip(GRADIENTS, found, strict=True))
    assert all((gradient == 0).all() for gradient in found)


# --- softcap, scale and bias ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.usefixtures("tiles", "no_warnings")
def test_scores_far_beyond_the_cap_have_no_slope(dtype: str, rng: np.random.Generator) -> None:
    """The weights still depend on nothing, so that q and k get 0 where tanh is 1."""
    q, k, v, dout = (values_of(rng, (30, 16), DTYPES[dtype]) for _ in range(4))
    q *= 1e4
    options: dict[str, Any] = {"softcap": 2.0, "causal": True}
    dq, dk, dv = differentiated(dout, q, k, v, **options)
    assert_gradients((dq, dk, dv), dout, q, k, v, **options)
    assert np.abs(dq).max() < 1e-3 < np.abs(dv).max()


@pytest.mark.parametrize("scale", [0.0, -0.4, 3.0])
@pytest.mark.usefixtures("tiles", "no_warnings")
def test_scales(scale: float, rng: np.random.Generator) -> None:
    q, k, v, dout = (values_of(rng, (2, 30, 16), np.float64) for _ in range(4))
    found = differentiated(dout, q, k, v, scale=scale)
    assert_gradients(found, dout, q, k, v, scale=scale)
    assert found[0].any() == found[1].any() == (scale != 0)


@pytest.mark.parametrize("offset", [-1e5, 1e5])
@pytest.mark.usefixtures("tiles", "no_warnings")
def test_far_scores_have_the_gradients_of_near_ones(
    offset: float, rng: np.random.Generator
) -> None:
    """But for what float32 loses of an LSE that large, which is up to 2**-8 of each weight."""
    steps = rng.integers(0, 4, (6, 40))  # exact beside the offset in float32
    q, k, v, dout = (values_of(rng, (n, 3), np.float32) for n in (6, 40, 40, 6))
    far, near = ((steps + shift).astype(np.float32) for shift in (offset, 0))
    found = differentiated(dout, q, k, v, scale=0, bias=far)
    exact, size = (oracle.gradients(d, q, k, v, scale=0, bias=near)[2] for d in (dout, abs(dout)))
    assert (np.abs(found[2] - exact) <= 2**-7.9 * size).all()


# --- what is not finite ---------------------------------------------------------------------------

KEY, ROW = 4, 7
VISIBILITY: dict[str, tuple[dict[str, Any], Any]] = {
    "full": ({}, lambda i, j: i + j >= 0),
    "causal": ({"causal": True}, lambda i, j: j <= i + 2),
    "top-left causal": ({"causal": True, "causal_align": "top_left"}, lambda i, j: j <= i),
    "window": ({"window": (1, 2)}, lambda i, j: (i + 1 <= j) & (j <= i + 4)),
    "mask": ({"mask": np.indices((20, 22)).sum(0) % 3 > 0}, lambda i, j: (i + j) % 3 > 0),
}


@pytest.mark.parametrize("place", ["q", "k", "v", "dout"])
@pytest.mark.parametrize(("options", "sees"), VISIBILITY.values(), ids=VISIBILITY)
@pytest.mark.usefixtures("tiles", "no_warnings")
def test_nan_reaches_what_depends_on_it_and_nothing_else(
    options: dict[str, Any], sees: Any, place: str, rng: np.random.Generator
) -> None:
    arrays = {
        "dout": values_of(rng, (20, 3), np.float32),
        "q": values_of(rng, (20, 6), np.float32),
        "k": values_of(rng, (22, 6), np.float32),
        "v": values_of(rng, (22, 3), np.float32),
    }
    clean = differentiated(**arrays, **options)
    arrays[place][KEY if place in "kv" else ROW, 1] = np.nan
    dq, dk, dv = differentiated(**arrays, **options)
    visible = sees(*np.indices((20, 22)))
    rows = visible[:, KEY] if place in "kv" else np.arange(20) == ROW
    keys = visible[rows].any(axis=0)
    assert rows.any()
    assert keys.any()
    assert np.isnan(dq[rows]).all()
    assert np.isnan(dk[keys]).all()
    np.testing.assert_allclose(dq[~rows], clean[0][~rows], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dk[~keys], clean[1][~keys], rtol=1e-4, atol=1e-5)
    lost = np.zeros(dv.shape, bool)
    if place in "qk":  # the weights are lost
        lost[keys] = True
    elif place == "dout":
        lost[keys, 1] = True
    assert np.array_equal(np.isnan(dv), lost)
    np.testing.assert_allclose(dv[~lost], clean[2][~lost], rtol=1e-4, atol=1e-5)
    exact = oracle.gradients(**arrays, **options)
    for got, want in zip((dq, dk, dv), exact, strict=True):
        assert np.array_equal(np.isnan(got), np.isnan(want))


@pytest.mark.parametrize("fill", [np.nan, np.inf, 7.0])
@pytest.mark.usefixtures("tiles", "no_warnings")
def test_what_lies_past_the_lengths_has_no_influence(fill: float, rng: np.random.Generator) -> None:
    q, k, v, dout = (values_of(rng, (3, 2, 30, 8), np.float16) for _ in range(4))
    options: dict[str, Any] = {"q_lens": [30, 7, 0], "kv_lens": [11, 30, 5], "causal": True}
    out, lse = cuflash.attention(q, k, v, **options, return_lse=True)
    clean = cuflash.attention_backward(dout, q, k, v, out, lse, **options)
    for b in range(3):
        for array in (dout, q, out, lse):
            array[b, :, options["q_lens"][b] :] = fill
        for array in (k, v):
            array[b, :, options["kv_lens"][b] :] = fill
    again = cuflash.attention_backward(dout, q, k, v, out, lse, **options)
    assert bits_of(clean) == bits_of(again)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("tiles")
def test_deterministic_gradients_repeat_bitwise_and_do_not_depend_on_the_batch(
    dtype: str, rng: np.random.Generator
) -> None:
    q, k, v, dout = (values_of(rng, (3, 4, 65, 40), DTYPES[dtype]) for _ in range(4))
    options: dict[str, Any] = {"causal": True, "deterministic": True}
    first = bits_of(differentiated(dout, q, k, v, **options))
    for _ in range(3):
        assert bits_of(differentiated(dout, q, k, v, **options)) == first
    entry = slice(1, 2)
    alone = differentiated(dout[entry], q[entry], k[entry], v[entry], **options)
    k[0], v[2], dout[0] = np.nan, np.nan, np.nan
    beside_nan = differentiated(dout, q, k, v, **options)
    assert bits_of(alone) == bits_of(tuple(gradient[entry] for gradient in beside_nan))
