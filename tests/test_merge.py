"""Attention over parts of the keys, merged, is attention over all of them."""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from comparison import DTYPES, Array, assert_attention, away_from_zero, shape_of, values_of
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash

GPU_DTYPES = ("float16", "bfloat16", "float32")


@pytest.fixture(params=["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def xp(request: pytest.FixtureRequest) -> ModuleType:
    """The array module of the parts."""
    if request.param == "numpy":
        return np
    cupy: ModuleType = pytest.importorskip("cupy")
    return cupy


def to_host(array: Any) -> Array:
    host: Array = array if isinstance(array, np.ndarray) else array.get()
    return host


@st.composite
def splits(draw: st.DrawFn, most: int = 60) -> list[slice]:
    """Consecutive parts of some keys, in any order; any of them may be empty."""
    cuts = sorted(draw(st.lists(st.integers(0, most), min_size=2, max_size=6)))
    parts = [slice(a, b) for a, b in pairwise(cuts)]
    return draw(st.permutations(parts))


@settings(deadline=None, max_examples=600, print_blob=True)
@given(
    parts=splits(),
    dtype=st.sampled_from(list(DTYPES)),
    layout=st.sampled_from(["bhsd", "bshd"]),
    rank=st.integers(2, 4),
    q_len=st.integers(0, 20),
    density=st.sampled_from([0.1, 0.6, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_merged_parts_are_the_whole(
    parts: list[slice],
    dtype: str,
    layout: str,
    rank: int,
    q_len: int,
    density: float,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    first, last = min(part.start for part in parts), max(part.stop for part in parts)
    batch, heads = 2 if rank == 4 else 1, 3 if rank > 2 else 1
    q = values_of(rng, shape_of(rank, layout, batch, heads, q_len, 8), DTYPES[dtype])
    k = values_of(rng, shape_of(rank, layout, batch, heads, last, 8), DTYPES[dtype])
    v = away_from_zero(rng, shape_of(rank, layout, batch, heads, last, 5), DTYPES[dtype])
    mask = rng.random((q_len, last)) < density
    mask[:, :first] = False

    def keys_of(array: Array, part: slice) -> Array:
        return array[..., part, :, :] if layout == "bshd" and rank > 2 else array[..., part, :]

    states = [
        cuflash.attention(
            q, keys_of(k, p), keys_of(v, p), mask=mask[:, p], layout=layout, return_lse=True
        )
        for p in parts
    ]
    outs, lses = zip(*states, strict=True)
    out, lse = cuflash.merge_states(outs, lses, layout=layout)
    assert_attention(out, lse, q, k, v, mask=mask, layout=layout)


@pytest.mark.parametrize("dtype", GPU_DTYPES)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_merged_parts_on_every_device(dtype: str, layout: str, xp: ModuleType) -> None:
    rng = np.random.default_rng(0)
    q = values_of(rng, shape_of(4, layout, 2, 4, 33, 64), DTYPES[dtype])
    k = values_of(rng, shape_of(4, layout, 2, 2, 150, 64), DTYPES[dtype])
    v = away_from_zero(rng, shape_of(4, layout, 2, 2, 150, 48), DTYPES[dtype])
    seq = 1 if layout == "bshd" else 2
    mask = rng.random((33, 150)) < 0.5
    mask[3], mask[4, 70:] = False, False
    states = [
        cuflash.attention(
            xp.asarray(q),
            xp.asarray(k.take(range(*part), axis=seq)),
            xp.asarray(v.take(range(*part), axis=seq)),
            mask=xp.asarray(mask[:, slice(*part)]),
            layout=layout,
            return_lse=True,
        )
        for part in ((0, 70), (70, 71), (71, 71), (71, 150))
    ]
    out, lse = cuflash.merge_states(*zip(*states, strict=True), layout=layout)
    assert type(out) is type(lse) is xp.ndarray
    assert_attention(to_host(out), to_host(lse), q, k, v, mask=mask, layout=layout)


@pytest.mark.parametrize("stray", [np.nan, np.inf, -np.inf])
@pytest.mark.filterwarnings("error")
def test_a_part_without_keys_is_not_looked_at(stray: float, xp: ModuleType) -> None:
    full = xp.asarray([[1.0, 2.0], [3.0, 4.0]], np.float32)
    empty = xp.full((2, 2), stray, np.float32)
    lse = xp.asarray([0.5, -2.0], np.float32)
    none = xp.full(2, -np.inf, np.float32)
    for outs, lses in (([full, empty], [lse, none]), ([empty, full], [none, lse])):
        out, merged = cuflash.merge_states(outs, lses)
        assert np.array_equal(to_host(out), to_host(full))
        assert np.array_equal(to_host(merged), to_host(lse))


@pytest.mark.filterwarnings("error")
def test_only_empty_parts_are_zero(xp: ModuleType) -> None:
    empty = xp.full((3, 2), np.nan, np.float16)
    none = xp.full(3, -np.inf, np.float32)
    out, lse = cuflash.merge_states([empty, empty], [none, none])
    assert out.dtype == np.float16
    assert (to_host(out) == 0).all()
    assert np.isneginf(to_host(lse)).all()


@pytest.mark.filterwarnings("error")
def test_what_is_not_finite_is_not_hidden(xp: ModuleType) -> None:
    """NaN in a part with keys, and an LSE of +inf or NaN, make their rows NaN and no other."""
    outs = [xp.ones((4, 2), np.float32), xp.ones((4, 2), np.float32)]
    outs[0][0, 1] = np.nan
    lses = [xp.zeros(4, np.float32), xp.zeros(4, np.float32)]
    lses[0][1], lses[1][2] = np.inf, np.nan
    out, lse = (to_host(a) for a in cuflash.merge_states(outs, lses))
    assert np.array_equal(np.isnan(out), [[False, True], [True, True], [True, True], [False] * 2])
    assert not np.isfinite(lse[[1, 2]]).any()
    np.testing.assert_allclose(lse[[0, 3]], np.log(2), rtol=1e-6)


def test_far_apart_norms_do_not_overflow(xp: ModuleType) -> None:
    outs = [xp.full((2, 1), x, np.float32) for x in (1.0, 5.0, 9.0)]
    lses = [xp.full(2, x, np.float32) for x in (-1e5, 3e4, 3e4)]
    out, lse = cuflash.merge_states(outs, lses)
    np.testing.assert_allclose(to_host(out), 7.0, rtol=1e-6)
    np.testing.assert_allclose(to_host(lse), 3e4 + np.log(2), rtol=1e-6)


def test_order_decides_bits_only(xp: ModuleType) -> None:
    rng = np.random.default_rng(0)
    outs = [xp.asarray(values_of(rng, (9, 4), np.float32)) for _ in range(5)]
    lses = [xp.asarray(values_of(rng, (9,), np.float32)) for _ in range(5)]
    out, lse = cuflash.merge_states(outs, lses)
    again, lse_again = cuflash.merge_states(outs, lses)
    assert np.array_equal(to_host(out), to_host(again))
    assert np.array_equal(to_host(lse), to_host(lse_again))
    other, lse_other = cuflash.merge_states(outs[::-1], lses[::-1])
    np.testing.assert_allclose(to_host(out), to_host(other), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(to_host(lse), to_host(lse_other), rtol=1e-6)


def test_one_part_is_itself(xp: ModuleType) -> None:
    out, lse = xp.ones((2, 3, 4), np.float16), xp.zeros((2, 3), np.float32)
    merged, norm = cuflash.merge_states([out], [lse])
    assert np.array_equal(to_host(merged), to_host(out))
    assert np.array_equal(to_host(norm), to_host(lse))
    assert (merged.dtype, norm.dtype) == (np.float16, np.float32)


OUT, LSE = np.ones((2, 5, 3), np.float32), np.zeros((2, 5), np.float32)
WRONG: dict[str, tuple[Any, Any, dict[str, Any], type[Exception], str]] = {
    "no parts": ([], [], {}, ValueError, "outs, lses: got 0 and 0 parts"),
    "other numbers": ([OUT, OUT], [LSE], {}, ValueError, "got 2 and 1 parts; expected the same"),
    "shape": ([OUT, OUT[:, :4]], [LSE, LSE], {}, ValueError, "outs[1]: got float32 (2, 4, 3)"),
    "dtype": ([OUT, OUT.astype(np.float16)], [LSE, LSE], {}, ValueError, "outs[1]: got float16"),
    "lse shape": ([OUT], [LSE[:, :4]], {}, ValueError, "lses[0]: got shape (2, 4)"),
    "lse layout": ([OUT], [LSE], {"layout": "bshd"}, ValueError, "in layout 'bshd'"),
    "layout": ([OUT], [LSE], {"layout": "bhds"}, ValueError, "layout: got 'bhds'"),
    "list out": ([OUT, [[1.0]]], [LSE, LSE], {}, TypeError, "outs[1]: got list"),
    "list lse": ([OUT], [[0.0]], {}, TypeError, "lses[0]: got list"),
    "None for outs": (None, [LSE], {}, TypeError, "outs"),
    "None for lses": ([OUT], None, {}, TypeError, "lses"),
    "integers": ([OUT.astype(int)], [LSE], {}, TypeError, "outs[0]: got dtype int64"),
    "integer lse": ([OUT], [LSE.astype(int)], {}, TypeError, "lses[0]: got dtype int64"),
}


@pytest.mark.parametrize(("outs", "lses", "options", "error", "says"), WRONG.values(), ids=WRONG)
def test_parts_that_do_not_fit(
    outs: Any, lses: Any, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error) as caught:
        cuflash.merge_states(outs, lses, **options)
    assert says in str(caught.value)


@pytest.mark.gpu
def test_parts_on_two_devices() -> None:
    cupy = pytest.importorskip("cupy")
    for outs, lses in (
        ([OUT, cupy.asarray(OUT)], [LSE, LSE]),
        ([cupy.asarray(OUT)], [LSE]),
    ):
        with pytest.raises(ValueError, match=r"outs\[\d\], lses\[\d\]: expected arrays on the dev"):
            cuflash.merge_states(outs, lses)
