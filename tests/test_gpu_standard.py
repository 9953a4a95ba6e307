"""The standard family on a GPU, against the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from comparison import Array, assert_attention
from gpu_cases import CHUNKED, FLOATS, HostCall, Problem, assert_agrees, attend, host_call, problems

import cuflash
from cuflash import dispatch, oracle
from cuflash.families import standard

pytestmark = pytest.mark.gpu
FAMILY = "standard"


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


# --- any problem against the oracle ---------------------------------------------------------------


@pytest.mark.parametrize("problem", problems(), ids=str)
def test_agrees_with_the_oracle(problem: Problem, cupy: ModuleType) -> None:
    call = host_call(problem)
    assert_agrees(call, *attend(cupy, call, kernel=FAMILY))


@pytest.fixture
def several_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """A workspace so small that problems take several chunks; they are counted in the list."""
    monkeypatch.setattr(standard, "_WORKSPACE", 60_000)
    chunks: list[Any] = []
    chunk = standard._Call.chunk

    def counted(self: Any, *where: slice) -> None:
        chunks.append(where)
        chunk(self, *where)

    monkeypatch.setattr(standard._Call, "chunk", counted)
    dispatch._choose.cache_clear()
    yield chunks
    dispatch._choose.cache_clear()


@pytest.mark.parametrize("problem", CHUNKED, ids=str)
@pytest.mark.parametrize("with_lengths", [False, True], ids=["whole", "lengths"])
def test_chunks_make_no_difference(
    problem: Problem, with_lengths: bool, several_chunks: list[Any], cupy: ModuleType
) -> None:
    call = host_call(problem)
    lens: dict[str, Any] = {}
    if with_lengths:
        lens = {
            "q_lens": [max(problem.q_len - b, 0) for b in range(problem.batch)],
            "kv_lens": [max(problem.kv_len - 3 * b, 0) for b in range(problem.batch)],
        }
    out, lse = attend(cupy, call, **lens, kernel=FAMILY)
    assert len(several_chunks) > 1
    assert_agrees(call, out, lse, **lens)


# --- lengths --------------------------------------------------------------------------------------

LENS = {"q_lens": [70, 0, 33, 1], "kv_lens": [90, 41, 0, 90]}


@pytest.mark.parametrize(
    ("dtype", "options", "kind"),
    [
        *((dtype, "causal", "device int32") for dtype in FLOATS),
        *((dtype, "full", "list") for dtype in FLOATS),
        *(("float16", options, "device int64") for options in ("full", "top-left", "window")),
        *(("bfloat16", "causal", kind) for kind in ("list", "int32", "int64", "uint8")),
        *(("float16", "causal", kind) for kind in ("device stepped int64", "stepped int64")),
    ],
)
def test_lengths(dtype: str, options: str, kind: str, cupy: ModuleType) -> None:
    """What lies past them is NaN, in q too."""
    call = host_call(Problem(dtype, batch=4, options=options))
    for b in range(4):
        call.q[b, :, LENS["q_lens"][b] :] = np.nan
        call.k[b, :, LENS["kv_lens"][b] :] = np.nan
        call.v[b, :, LENS["kv_lens"][b] :] = np.nan
    make = cupy.asarray if kind.startswith("device") else np.asarray
    given = {
        name: values if kind == "list" else make(values, dtype=kind.split()[-1])
        for name, values in LENS.items()
    }
    if "stepped" in kind:
        given = {name: array.repeat(2)[::2] for name, array in given.items()}
    out, lse = attend(cupy, call, **given, kernel=FAMILY)
    assert_agrees(call, out, lse, **LENS)


def test_lengths_on_the_device_are_clamped(cupy: ModuleType) -> None:
    call = host_call(Problem(batch=4, options="causal"))
    out, lse = attend(
        cupy,
        call,
        q_lens=cupy.asarray([1000, -1, 33, 2**40]),
        kv_lens=cupy.asarray([2**40, 41, -(2**40), 91]),
        kernel=FAMILY,
    )
    assert_agrees(call, out, lse, q_lens=[70, 0, 33, 70], kv_lens=[90, 41, 0, 90])


# --- rows without keys, and nothing at all --------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_without_keys_are_zero(dtype: str, cupy: ModuleType) -> None:
    call = host_call(Problem(dtype, mask="bhqk", q_len=100, options="causal"))
    call.options["mask"][0, 1, 50:60] = False
    out, lse = (a.get() for a in attend(cupy, call, kernel=FAMILY))
    empty = np.isneginf(lse)
    assert empty[0, 1, 50:60].all()
    assert empty[:, :, :10].all(), "more queries than keys"
    assert (out[empty] == 0).all()
    assert_attention(out, lse, call.q, call.k, call.v, **call.options)


@pytest.mark.parametrize("axis", range(4))
def test_zero_size_arrays(axis: int, cupy: ModuleType) -> None:
    batch, heads, q_len, kv_len = (0 if i == axis else n for i, n in enumerate((2, 4, 5, 6)))
    q = cupy.ones((batch, heads, q_len, 8), np.float16)
    k = cupy.ones((batch, heads // 2, kv_len, 8), np.float16)
    out = cupy.full((batch, heads, q_len, 3), np.nan, np.float16)
    result, lse = cuflash.attention(q, k, k[..., :3], return_lse=True, out=out, kernel=FAMILY)
    assert result is out
    assert (out.get() == 0).all()
    assert lse.shape == (batch, heads, q_len)
    assert np.isneginf(lse.get()).all()


# --- extreme scores -------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [-1e5, 1e5])
def test_far_scores_give_the_weights_of_near_ones(
    offset: float, rng: np.random.Generator, cupy: ModuleType
) -> None:
    steps = rng.integers(0, 4, (6, 40))
    q, k = cupy.ones((6, 8), np.float32), cupy.ones((40, 8), np.float32)
    v = rng.standard_normal((40, 2), dtype=np.float32)
    bias = cupy.asarray((offset + steps).astype(np.float32))
    out, lse = cuflash.attention(
        q, k, cupy.asarray(v), scale=0, bias=bias, return_lse=True, kernel=FAMILY
    )
    weights = np.exp(steps.astype(float))
    expected = weights @ v / weights.sum(1, keepdims=True)
    np.testing.assert_allclose(out.get(), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse.get(), offset + np.log(weights.sum(1)), rtol=2**-23)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("options", ["causal", "window", "full"])
def test_not_finite_queries_and_keys(options: str, dtype: str, cupy: ModuleType) -> None:
    """NaN reaches the rows that see it, and no other; so does a score of +inf."""
    call, stained = (host_call(Problem(dtype, mask="hqk", options=options)) for _ in range(2))
    for one in (call, stained):
        one.options["mask"][:2, :, 80] = False  # from the heads that share kv head 0
    stained.k[1, 0, 80] = np.nan
    stained.q[0, 2, 5] = np.nan
    clean, clean_lse = (a.get() for a in attend(cupy, call, kernel=FAMILY))
    out, lse = (a.get() for a in attend(cupy, stained, kernel=FAMILY))
    lost = np.zeros(lse.shape, bool)
    lost[0, 2, 5] = not np.isneginf(clean_lse[0, 2, 5])
    assert np.isnan(out[lost]).all()
    assert np.isnan(lse[lost]).all()
    assert np.array_equal(out[~lost], clean[~lost])
    assert np.array_equal(lse[~lost], clean_lse[~lost])
    for stray in (np.nan, np.inf):
        call.options["bias"] = np.zeros((70, 90), np.float32)
        call.options["bias"][:, 80] = stray
        call.options["mask"][:, :, 80] = True
        out, lse = (a.get() for a in attend(cupy, call, kernel=FAMILY))
        seen = np.isfinite(_lse_with_only_key(call, 80))
        assert np.array_equal(np.isnan(out).any(-1), seen)
        assert np.array_equal(np.isnan(lse), seen)


def _lse_with_only_key(call: HostCall, key: int) -> Array:
    """Finite for the rows that see one key."""
    only = np.zeros((70, 90), bool)
    only[:, key] = True
    options = call.options | {"mask": only, "bias": np.zeros((70, 90), np.float32)}
    _, lse = oracle.attention(call.q, call.k, call.v, **options)
    return lse


@pytest.mark.parametrize("largest", [2**31, 2**63 - 1, 2**70], ids=["2^31", "2^63 - 1", "2^70"])
def test_a_window_of_any_size_is_no_bound(largest: int, cupy: ModuleType) -> None:
    for q_len in (5, 50):
        call = host_call(Problem(q_len=q_len, kv_len=20))
        out, lse = attend(cupy, call, window=(largest, largest), kernel=FAMILY)
        assert_agrees(call, out, lse)


# --- repeatability --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_results_repeat_bitwise(dtype: str, cupy: ModuleType) -> None:
    call = host_call(Problem(dtype, q_len=257, kv_len=257, options="causal"))
    (out, lse), (again, lse_again) = (
        attend(cupy, call, kernel=FAMILY),
        attend(cupy, call, kernel=FAMILY),
    )
    assert np.array_equal(out.get().view(np.uint8), again.get().view(np.uint8))
    assert np.array_equal(lse.get(), lse_again.get())
