"""The backward pass of the CPU family against the float64 oracle, and the contract by point."""

from __future__ import annotations

import itertools
import tracemalloc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from comparison import DTYPES, STORAGES, WRITABLE_STORAGES, Array, poisoned, store, values_of
from gradient_comparison import GRADIENTS, assert_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from random_calls import Call, calls

import cuflash
from cuflash import dispatch, oracle, reference_backward

# (scores, keys) of a tile: the library's own, and so few that every problem takes several tiles.
TILES = [(reference_backward._TILE_SCORES, reference_backward._TILE_KEYS), (96, 7)]
NAMES = ["own tiles", "tiny tiles"]


@contextmanager
def tiles_of(scores: int, keys: int) -> Iterator[None]:
    """Plan with other tile sizes; plans made before are forgotten, and these afterwards."""
    dispatch._choose.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference_backward, "_TILE_SCORES", scores)
        patch.setattr(reference_backward, "_TILE_KEYS", keys)
        yield
    dispatch._choose.cache_clear()


@pytest.fixture(params=TILES, ids=NAMES)
def tiles(request: pytest.FixtureRequest) -> Iterator[None]:
    with tiles_of(*request.param):
        yield


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def differentiated(
    dout: Array, q: Array, k: Array, v: Array, gradients: Any = None, **options: Any
) -> tuple[Array, Array, Array]:
    """Gradients by the library, whose forward pass gives `out` and LSE."""
    out, lse = cuflash.attention(q, k, v, **options, return_lse=True)
    return cuflash.attention_backward(dout, q, k, v, out, lse, **options, **(gradients or {}))


def poisoned_gradients(*inputs: Array) -> dict[str, Array]:
    """Memory for the gradients of q, k and v, full of NaN."""
    shaped = zip(GRADIENTS, inputs, strict=True)
    return {name: poisoned(array.shape, array.dtype) for name, array in shaped}


def bits_of(gradients: tuple[Array, ...]) -> list[bytes]:
    return [gradient.tobytes() for gradient in gradients]


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
    with tiles_of(*tiles), warnings.catch_warnings():
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
    with tiles_of(*TILES[1]):
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
        with tiles_of(*tile):
            found = differentiated(dout, q, k, v, **options)
        assert_gradients(found, dout, q, k, v, **options)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.usefixtures("no_warnings")
def test_tails_of_every_length(dtype: str, rng: np.random.Generator) -> None:
    """Rows and keys end at every place of a tile, and of two."""
    for length in range(1, 131):
        q, k, v, dout = (values_of(rng, (length, 4), DTYPES[dtype]) for _ in range(4))
        with tiles_of(64 * 32, 32):
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


# --- repeatability, independence, storage ---------------------------------------------------------


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


@pytest.mark.parametrize("tile", [(1, 1), (64, 64), (200, 3), (10**6, 10**6)], ids=str)
def test_tiles_do_not_change_the_answer(tile: tuple[int, int], rng: np.random.Generator) -> None:
    q, k, v, dout = (
        values_of(rng, (h, n, 16), np.float64) for h, n in ((4, 30), (2, 40), (2, 40), (4, 30))
    )
    options: dict[str, Any] = {"window": (9, 3), "mask": rng.random((30, 40)) < 0.7}
    usual = differentiated(dout, q, k, v, **options)
    with tiles_of(*tile):
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
