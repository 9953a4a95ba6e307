"""Work and traffic of a problem, against counting pair by pair and read by read."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash import ArrayInfo
from cuflash.spec import AttentionSpec

BOUNDS = st.none() | st.integers(0, 12) | st.just(10**6)


def spec_of(
    q: tuple[int, ...], kv: tuple[int, ...], dim_v: int, dtype: str = "float16", **options: Any
) -> AttentionSpec:
    k, v = ArrayInfo(kv, dtype, "cpu"), ArrayInfo((*kv[:-1], dim_v), dtype, "cpu")
    return cuflash.explain(ArrayInfo(q, dtype, "cpu"), k, v, **options).spec


def sees(i: int, j: int, offset: int, left: int | None, right: int | None) -> bool:
    return (left is None or j >= i + offset - left) and (right is None or j <= i + offset + right)


# --- which keys -----------------------------------------------------------------------------------


@settings(deadline=None, max_examples=300, print_blob=True)
@given(
    q_len=st.integers(0, 20),
    kv_len=st.integers(0, 20),
    left=BOUNDS,
    right=BOUNDS,
    causal=st.booleans(),
    top_left=st.booleans(),
    batch=st.integers(1, 3),
    group=st.integers(1, 3),
)
def test_pairs_and_flops_are_those_of_a_count(
    q_len: int,
    kv_len: int,
    left: int | None,
    right: int | None,
    causal: bool,
    top_left: bool,
    batch: int,
    group: int,
) -> None:
    spec = spec_of(
        (batch, 2 * group, q_len, 4),
        (batch, 2, kv_len, 4),
        7,
        window=(left, right),
        causal=causal,
        causal_align="top_left" if top_left else "bottom_right",
    )
    offset = 0 if top_left else kv_len - q_len
    right = 0 if causal else right
    pairs = sum(sees(i, j, offset, left, right) for i in range(q_len) for j in range(kv_len))
    assert spec.visible_pairs() == pairs
    assert spec.flops == 2 * batch * 2 * group * pairs * (4 + 7)


@settings(deadline=None, max_examples=400, print_blob=True)
@given(
    rows=st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted),
    offset=st.integers(-25, 25),
    kv_len=st.integers(0, 20),
    left=BOUNDS,
    right=BOUNDS,
)
def test_key_range_is_the_least_that_holds_every_seen_key(
    rows: list[int], offset: int, kv_len: int, left: int | None, right: int | None
) -> None:
    spec = spec_of((30, 4), (20, 4), 4, window=(left, right))
    begin, end = spec.key_range(rows[0], rows[1], offset, kv_len)
    seen = [
        j
        for j in range(kv_len)
        if any(sees(i, j, offset, left, right) for i in range(rows[0], rows[1] + 1))
    ]
    if seen:
        assert (begin, end) == (seen[0], seen[-1] + 1)
    else:
        assert begin == end


@pytest.mark.parametrize(
    ("shape", "kv_heads", "options", "expected"),
    [
        ((8, 4096, 64), 8, {}, 4 * 8 * 4096 * 4096 * 64),
        ((2, 8, 4096, 64), 2, {}, 4 * 2 * 8 * 4096 * 4096 * 64),
        ((8, 4096, 64), 8, {"causal": True}, 4 * 8 * (4096 * 4097 // 2) * 64),
    ],
)
def test_flops_of_known_problems(
    shape: tuple[int, ...], kv_heads: int, options: dict[str, Any], expected: int
) -> None:
    kv = (*shape[:-3], kv_heads, *shape[-2:])
    assert spec_of(shape, kv, shape[-1], **options).flops == expected


# --- bytes ----------------------------------------------------------------------------------------


def test_the_figure_of_the_paper() -> None:
    """8 heads of 4096 tokens: four trips of a 16-bit score matrix, or none."""
    traffic = cuflash.io_bytes((8, 4096, 64))
    assert traffic.standard.scores == 1_073_741_824
    assert traffic.tiled.scores == traffic.tiled_uncached.scores == 0
    assert traffic == cuflash.io_bytes((1, 8, 4096, 64), dtype="bfloat16")
    for name in ("q", "k", "v", "out"):
        assert getattr(traffic.standard, name) == getattr(traffic.tiled, name) == 8 * 4096 * 64 * 2


@pytest.mark.parametrize("score_dtype", ["float16", "float32", "float64"])
def test_scores_may_be_stored_in_another_dtype(score_dtype: str) -> None:
    size = {"float16": 2, "float32": 4, "float64": 8}[score_dtype]
    traffic = cuflash.io_bytes((2, 3, 50, 64), kv_len=70, score_dtype=score_dtype)
    assert traffic.standard.scores == 4 * 2 * 3 * 50 * 70 * size


@settings(deadline=None, max_examples=200, print_blob=True)
@given(
    batch=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    q_len=st.integers(1, 20),
    kv_len=st.integers(0, 20),
    q_rows=st.integers(1, 25),
    causal=st.booleans(),
    left=BOUNDS,
    return_lse=st.booleans(),
    dtype=st.sampled_from(["float16", "bfloat16", "float32", "float64"]),
)
def test_tiled_traffic_is_that_of_a_count(
    batch: int,
    kv_heads: int,
    group: int,
    q_len: int,
    kv_len: int,
    q_rows: int,
    causal: bool,
    left: int | None,
    return_lse: bool,
    dtype: str,
) -> None:
    size = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}[dtype]
    heads, dim, dim_v = kv_heads * group, 8, 5
    traffic = cuflash.io_bytes(
        (batch, heads, q_len, dim),
        dtype=dtype,
        kv_heads=kv_heads,
        kv_len=kv_len,
        head_dim_v=dim_v,
        causal=causal,
        window=(left, None),
        return_lse=return_lse,
        q_rows=q_rows,
    )
    queries = batch * heads * q_len
    for tiled in (traffic.tiled, traffic.tiled_uncached, traffic.standard):
        assert (tiled.q, tiled.out) == (queries * dim * size, queries * dim_v * size)
        assert tiled.lse == (queries * (8 if dtype == "float64" else 4) if return_lse else 0)
    once = batch * kv_heads * kv_len
    assert (traffic.tiled.k, traffic.tiled.v) == (once * dim * size, once * dim_v * size)

    read = 0  # keys that the blocks of one head read: from the first to the last that one row sees
    for first in range(0, q_len, q_rows):
        block = range(first, min(first + q_rows, q_len))
        right = 0 if causal else None
        seen = [
            j for j in range(kv_len) if any(sees(i, j, kv_len - q_len, left, right) for i in block)
        ]
        read += seen[-1] + 1 - seen[0] if seen else 0
    uncached = batch * heads * read
    assert traffic.tiled_uncached.k == uncached * dim * size
    assert traffic.tiled_uncached.v == uncached * dim_v * size
    for part in dataclasses.astuple(traffic):
        assert min(part) >= 0
    assert traffic.standard.total == sum(dataclasses.astuple(traffic.standard))
    assert traffic.standard.scores == 4 * batch * heads * q_len * kv_len * size


def test_a_plan_counts_the_traffic_of_its_problem() -> None:
    q = ArrayInfo((2, 8, 100, 64), "float16", "cpu")
    kv = ArrayInfo((2, 2, 300, 64), "float16", "cpu")
    plan = cuflash.explain(q, kv, kv, return_lse=True)
    traffic = cuflash.io_bytes(q.shape, kv_heads=2, kv_len=300, return_lse=True)
    assert plan.hbm_bytes == traffic.tiled.total


@pytest.mark.parametrize(
    ("shape", "options", "error", "says"),
    [
        ((64,), {}, ValueError, r"^shape: got \(64,\); expected \(batch, heads, seq, dim\)"),
        ((1, 1, 8, 4096, 64), {}, ValueError, "^shape: got"),
        ((-1, 8, 4096, 64), {}, ValueError, "shape: got"),
        ((8, 4096, 257), {}, ValueError, "^q: got head_dim 257"),
        ((8, 4096, 64), {"kv_heads": 3}, ValueError, "^k: got 3 kv heads for 8 query heads"),
        ((8, 4096, 64), {"head_dim_v": 0}, ValueError, "^v: got head_dim 0"),
        ((8, 4096, 64), {"dtype": "int8"}, TypeError, "^q: got dtype int8"),
        ((8, 4096, 64), {"score_dtype": "half"}, ValueError, "^score_dtype: got 'half'; expected"),
        ((8, 4096, 64), {"window": (1,)}, ValueError, "^window: got"),
        ((8, 4096, 64), {"q_rows": 0}, ValueError, "^q_rows: got 0"),
        ((8, 4096, 64), {"q_rows": -5}, ValueError, "^q_rows: got -5"),
    ],
)
def test_wrong_arguments(
    shape: tuple[int, ...], options: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        cuflash.io_bytes(shape, **options)
