"""The fused families on a GPU, against the oracle."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gpu_cases import (
    MORE_OPTIONS,
    OPTIONS,
    Problem,
    assert_agrees,
    attend,
    host_call,
    place,
    problems,
    problems_of_sm90,
    used_lengths,
)

import cuflash
from cuflash import dispatch, oracle

pytestmark = pytest.mark.gpu
NEEDS = {"sm80": 80, "sm90": 90}
DTYPES = ("float16", "bfloat16")
DIMS = ((1, 1), (24, 24), (32, 32), (40, 40), (61, 61), (64, 64), (72, 72), (96, 96), (100, 100),
        (128, 128), (152, 152), (192, 192), (192, 128), (64, 96), (61, 19), (200, 200),
        (256, 256), (256, 64))  # fmt: skip
WAYS = ("full", "causal", "window", "softcap", "capped causal", "negative scale", "zero scale")
# More pieces of work than blocks of one wave, and tiles of sm90 that are cut.
MANY_PIECES = Problem(batch=2, heads=32, kv_heads=8, q_len=1500, kv_len=1500, options="causal")


@pytest.fixture(params=list(NEEDS))
def family(request: pytest.FixtureRequest, cupy: ModuleType) -> str:
    """Each fused family that this GPU can run."""
    name = str(request.param)
    capability = int(cupy.cuda.Device().compute_capability)
    if capability < NEEDS[name] or (name == "sm90" and capability != 90):
        pytest.skip(f"compute capability {capability}")
    return name


def own_problems() -> list[Problem]:
    """Each bucket of head dims with each form of the loop, over several tiles with tails."""
    found = [
        Problem(dtype, dim=dim, dim_v=dim_v, options=way, q_len=150, kv_len=279)
        for dim, dim_v in DIMS
        for at, way in enumerate(WAYS)
        for dtype in (DTYPES[at % 2],)
    ]
    for dtype in DTYPES:
        found += [
            replace(Problem(dtype, options=way), q_len=q_len, kv_len=kv_len, dim=dim, dim_v=dim)
            for way in ("full", "causal", "top-left", "window", "left window", "right window")
            for q_len, kv_len, dim in ((1, 513, 64), (129, 600, 128), (300, 40, 64), (64, 64, 256))
        ]
    # Heads that share keys, which sm90 lays side by side, in tiles that they fill or not.
    groups = ((4, 2), (6, 2), (8, 2), (5, 1), (7, 1), (24, 2), (40, 1), (64, 1), (130, 1))
    dtypes, dims = cycle(DTYPES), cycle((64, 128, 256))
    for heads, kv_heads in groups:
        for q_len in (1, 5, 200):
            for way in ("full", "causal", "window", "left window"):
                dim = next(dims)
                found.append(
                    Problem(next(dtypes), heads=heads, kv_heads=kv_heads, q_len=q_len, kv_len=333,
                            dim=dim, dim_v=dim, options=way)
                )  # fmt: skip
    return found


def assert_alike(found: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    """Assert that `out` and LSE of two families agree; neither may have a NaN."""
    (out, lse), (other, other_lse) = found, expected
    assert out.dtype == other.dtype
    unit = 1 if out.dtype == np.float16 else 8  # bfloat16 has 3 bits less
    np.testing.assert_allclose(
        out.get().astype(np.float32), other.get().astype(np.float32),
        atol=2e-3 * unit, rtol=4e-3 * unit, equal_nan=False,
    )  # fmt: skip
    np.testing.assert_allclose(lse.get(), other_lse.get(), atol=2e-4, rtol=1e-5, equal_nan=False)


def assert_tickets_are_drawn(family: str, *arrays: Any, **options: Any) -> None:
    """Assert that sm90 has several times as many pieces of work as blocks, whose first is given."""
    if family != "sm90":
        return
    plan = cuflash.explain(*arrays, **options, kernel=family)
    assert plan.tiling.launch is not None
    row_tiles = -(-plan.spec.q_len // plan.tiling.q_rows)
    packs = plan.spec.batch * plan.spec.q_heads // plan.tiling.heads
    assert packs * row_tiles > 3 * plan.tiling.launch.blocks


@pytest.mark.parametrize("problem", [*problems(), *own_problems()], ids=str)
def test_agrees_with_the_oracle_or_is_refused(
    problem: Problem, family: str, cupy: ModuleType
) -> None:
    call = host_call(problem)
    plan_for = {name: place(cupy, getattr(call, name)) for name in "qkv"}
    options = {
        name: place(cupy, value) if isinstance(value, np.ndarray) else value
        for name, value in call.options.items()
    }
    plan = cuflash.explain(**plan_for, **options, out=place(cupy, call.out))
    reasons = dispatch.reasons_against(family, plan.spec, plan.device)
    takes = problem.dtype in DTYPES and problem.mask is None and problem.bias is None
    if family == "sm90":
        takes = takes and problem.dim % 8 == problem.dim_v % 8 == 0
    if not reasons:
        assert takes
        assert plan.family in NEEDS
        assert_agrees(call, *attend(cupy, call, kernel=family))
        return
    assert not takes or problem.storage, reasons
    with pytest.raises(NotImplementedError, match=family):
        attend(cupy, call, kernel=family)


@pytest.mark.parametrize("with_lengths", [False, True], ids=["whole", "lengths"])
@pytest.mark.parametrize("problem", problems_of_sm90(), ids=str)
def test_every_kernel_of_sm90(problem: Problem, with_lengths: bool, cupy: ModuleType) -> None:
    """On several tiles, the last of which are cut; what lies beyond used lengths is NaN."""
    capability = cupy.cuda.Device().compute_capability
    if capability != "90":
        pytest.skip(f"compute capability {capability}")
    call = host_call(problem)
    lens: dict[str, Any] = {}
    if with_lengths:
        lens = used_lengths(problem)
        for entry, length in enumerate(lens["kv_lens"]):
            call.k[entry, :, length:] = np.nan
            call.v[entry, :, length:] = np.nan
        lens = {name: cupy.asarray(value) for name, value in lens.items()}
    expected = attend(cupy, call, **lens, kernel="standard")
    assert_alike(attend(cupy, call, **lens, kernel="sm90"), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256, 61])
@pytest.mark.parametrize("place_of_lens", ["host", "device", "device, every other"])
@pytest.mark.parametrize("way", ["full", "causal", "window"])
def test_lengths_hide_what_lies_beyond(
    dtype: str, dim: int, place_of_lens: str, way: str, family: str, cupy: ModuleType
) -> None:
    if family == "sm90" and dim % 8:
        pytest.skip("sm90 takes multiples of 8")
    call = host_call(Problem(dtype, batch=4, dim=dim, dim_v=dim, options=way, kv_len=300))
    q_lens, kv_lens = [70, 0, 17, 64], [300, 40, 0, 129]
    for entry, length in enumerate(kv_lens):
        call.k[entry, :, length:] = np.nan
        call.v[entry, :, length:] = np.nan
    lens: dict[str, Any] = {"q_lens": q_lens, "kv_lens": kv_lens}
    if place_of_lens == "device":
        lens = {name: cupy.asarray(value, np.int32) for name, value in lens.items()}
    elif place_of_lens != "host":
        lens = {name: cupy.asarray(value, np.int64).repeat(2)[::2] for name, value in lens.items()}
    out, lse = attend(cupy, call, **lens, kernel=family)
    assert_agrees(call, out, lse, q_lens=q_lens, kv_lens=kv_lens)


@pytest.mark.parametrize("heads", [(8, 2), (6, 2), (16, 1)])
@pytest.mark.parametrize("way", ["full", "causal", "window"])
def test_lengths_of_heads_that_share_keys(
    way: str, heads: tuple[int, int], family: str, cupy: ModuleType
) -> None:
    shared = Problem(batch=4, heads=heads[0], kv_heads=heads[1], options=way, q_len=90, kv_len=300)
    call = host_call(shared)
    lens: dict[str, Any] = {"q_lens": [90, 0, 17, 3], "kv_lens": [300, 40, 0, 129]}
    for entry, length in enumerate(lens["kv_lens"]):
        call.k[entry, :, length:] = np.nan
        call.v[entry, :, length:] = np.nan
    assert_agrees(call, *attend(cupy, call, **lens, kernel=family), **lens)


def test_lengths_on_the_device_are_clamped(family: str, cupy: ModuleType) -> None:
    call = host_call(Problem(batch=2, options="causal"))
    lens = cupy.asarray([2**40, -5])
    out, lse = attend(cupy, call, kv_lens=lens, kernel=family)
    assert_agrees(call, out, lse, kv_lens=[90, 0])


def test_no_keys(family: str, cupy: ModuleType) -> None:
    call = host_call(Problem(kv_len=0))
    if family == "sm90":
        with pytest.raises(NotImplementedError, match="needs keys"):
            attend(cupy, call, kernel=family)
        return
    out, lse = attend(cupy, call, kernel=family)
    assert not out.get().any()
    assert np.isneginf(lse.get()).all()


@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize("value", [1e-3, 100.0, 30000.0])
@pytest.mark.parametrize("sign", [1, -1])
def test_equal_logits_of_any_size_weigh_the_same(
    value: float, sign: int, dim: int, family: str, cupy: ModuleType
) -> None:
    """Their product with the scale is off by more than 1 where it is beyond 2^24."""
    q = cupy.full((1, 70, dim), value, np.float32).astype("bfloat16")
    v = cupy.asarray(np.random.default_rng(0).standard_normal((1, 300, dim)), np.float32)
    k = cupy.full((1, 300, dim), sign * value, np.float32).astype("bfloat16")
    out, lse = cuflash.attention(q, k, v.astype("bfloat16"), return_lse=True, kernel=family)
    mean = v.astype("bfloat16").astype(np.float32).mean(axis=1, keepdims=True)
    assert float(abs(out.astype(np.float32) - mean).max()) < 2e-3
    exact = sign * float(q[0, 0, 0]) ** 2 * dim**0.5 + np.log(300)
    assert float(abs(lse - exact).max()) <= 2e-6 * abs(exact)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_references_beyond_2_24_move_by_what_lies_between_them(
    dtype: str, dim: int, family: str, cupy: ModuleType
) -> None:
    """Early keys, which come last, score 2^27 + 16 and others 2^27, exactly. At a scale of 1/8 a
    weight is e^2 of theirs; products with the scale are rounded to multiples of 2 in log2 units.
    """
    q, k = np.zeros((1, 70, dim), np.float32), np.zeros((1, 1000, dim), np.float32)
    q[..., 0], q[..., 1] = 2**13, 1
    k[..., 0], k[:, :200, 1] = 2**14, 16
    v = np.random.default_rng(0).standard_normal((1, 1000, dim), np.float32)
    as_dtype = np.dtype(dtype if dtype == "float16" else ml_dtypes.bfloat16)
    arrays = [array.astype(as_dtype) for array in (q, k, v)]
    expected, _ = oracle.attention(*arrays, scale=0.125)
    out = cuflash.attention(*(place(cupy, a) for a in arrays), scale=0.125, kernel=family)
    np.testing.assert_allclose(out.get().astype(np.float64), expected, atol=5e-4, rtol=4e-3)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("first", [1, 0])
def test_rows_below_2_24_do_not_mind_others_that_cross_it(
    first: int, dim: int, family: str, cupy: ModuleType
) -> None:
    """Even rows score 1.2e7 in log2 units for every key, exactly; odd ones 0 for late keys, which
    come first, and beyond 2^24 for early ones, or the other way round with -2^24.
    """
    q, k = np.zeros((1, 64, dim), np.float16), np.zeros((1, 1024, dim), np.float16)
    q[:, 0::2, 0], k[..., 0] = 15016, 4500
    q[:, 1::2, 1], k[:, :512, 1] = 8192, 16384
    if not first:  # huge at first, and no longer when a key scores 0
        q[:, 1::2, 1], k[:, :512, 1], k[:, 512:, 1] = -8192, 0, 16384
    v = np.ones((1, 1024, dim), np.float16)
    v[:, 512:] = -1
    expected, _ = oracle.attention(q, k, v, scale=0.125)
    out = cuflash.attention(*(place(cupy, a) for a in (q, k, v)), scale=0.125, kernel=family)
    np.testing.assert_allclose(out.get().astype(np.float64), expected, atol=1e-3)


@pytest.mark.parametrize("softcap", [20.0, 1e3, 1e6, 1e18])
def test_caps_of_any_size_leave_small_scores_alone(
    softcap: float, family: str, cupy: ModuleType
) -> None:
    call = host_call(Problem(q_len=70, kv_len=300, options="full"))
    call.options["softcap"] = softcap
    assert_agrees(call, *attend(cupy, call, kernel=family))


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_growing_logits_move_the_reference_often(dim: int, family: str, cupy: ModuleType) -> None:
    """Key tiles run from the last to the first, so early keys must outgrow what came before."""
    call = host_call(Problem(q_len=64, kv_len=1000, dim=dim, dim_v=dim, options="full"))
    call.k *= np.linspace(12, 0, 1000, dtype=np.float16)[:, None]
    assert_agrees(call, *attend(cupy, call, kernel=family))


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("farthest", [10, 400])
@pytest.mark.parametrize("way", ["full", "causal"])
def test_references_below_zero(
    way: str, farthest: int, dim: int, family: str, cupy: ModuleType
) -> None:
    """Scores from -10 down: alike, or so that each key tile outgrows the one before it."""
    call = host_call(Problem(q_len=300, kv_len=1000, dim=dim, dim_v=dim, options=way))
    call.q[..., 0] = dim**0.5
    call.k[..., 0] = -np.linspace(10, farthest, 1000)
    assert_agrees(call, *attend(cupy, call, kernel=family))


@pytest.mark.parametrize("with_lengths", [False, True], ids=["whole", "lengths"])
@pytest.mark.parametrize(
    ("dim", "heads", "q_len", "kv_len"),
    [(64, (32, 32), 768, 768), (96, (21, 21), 768, 768), (128, (16, 16), 768, 768),
     (192, (10, 10), 768, 768), (256, (8, 8), 768, 768), (64, (12, 4), 300, 1100),
     (128, (12, 4), 300, 4200), (256, (6, 2), 300, 1100)],
)  # fmt: skip
@pytest.mark.parametrize("way", ["full", "causal", "wide window"])
def test_thousands_of_pieces_of_work_come_to_an_end(
    way: str, dim: int, heads: tuple[int, int], q_len: int, kv_len: int, with_lengths: bool,
    family: str, cupy: ModuleType,
) -> None:  # fmt: skip
    """Warps that miss a phase of a barrier wait for ever, once in a million pieces."""
    normal = cupy.random.standard_normal
    q = normal((16, heads[0], q_len, dim), np.float32).astype("f2")
    k, v = normal((2, 16, heads[1], kv_len, dim), np.float32).astype("f2")
    options: dict[str, Any] = dict((OPTIONS | MORE_OPTIONS)[way])
    if with_lengths:
        options["q_lens"] = cupy.arange(16) * q_len // 15
        options["kv_lens"] = cupy.arange(16)[::-1] * kv_len // 15
    expected = cuflash.attention(q, k, v, **options, kernel=family)
    for _ in range(500):
        out = cuflash.attention(q, k, v, **options, kernel=family)
    assert bool((out == expected).all())


@pytest.mark.parametrize("dim", [64, 192, 256])
def test_lines_that_no_row_comes_to_stay_clear(dim: int, family: str, cupy: ModuleType) -> None:
    """3 heads of 21 rows leave a line of 64, where NaN of one entry would stay for others."""
    call = host_call(
        Problem(batch=64, heads=6, kv_heads=2, q_len=90, kv_len=300, dim=dim, dim_v=dim,
                options="causal")
    )  # fmt: skip
    before = attend(cupy, call, kernel=family)
    call.v[::2] = np.nan
    after = attend(cupy, call, kernel=family)
    for one, other in zip(before, after, strict=True):
        assert bool((one[1::2] == other[1::2]).all())


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("way", ["full", "causal"])
def test_twenty_runs_give_the_same_bits(dim: int, way: str, family: str, cupy: ModuleType) -> None:
    call = host_call(Problem(q_len=700, kv_len=900, dim=dim, dim_v=dim, options=way))
    first = [a.get() for a in attend(cupy, call, kernel=family)]
    for _ in range(19):
        again = [a.get() for a in attend(cupy, call, kernel=family)]
        assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_captured_call_can_be_replayed_on_new_values(
    dtype: str, family: str, cupy: ModuleType
) -> None:
    problem = replace(MANY_PIECES, dtype=dtype)
    calls = [host_call(problem, seed=1), host_call(problem, seed=2)]
    lens = [cupy.asarray([1500, 900]), cupy.asarray([300, 1500])]
    first, second = (
        attend(cupy, call, kv_lens=used, kernel="standard")
        for call, used in zip(calls, lens, strict=True)
    )
    q, k, v, out = (place(cupy, a) for a in (calls[0].q, calls[0].k, calls[0].v, calls[0].out))
    kv_lens = lens[0].copy()
    new = [*(place(cupy, a) for a in (calls[1].q, calls[1].k, calls[1].v)), lens[1]]
    options: dict[str, Any] = {
        "causal": True, "kv_lens": kv_lens, "out": out, "return_lse": True, "kernel": family,
    }  # fmt: skip
    assert_tickets_are_drawn(family, q, k, v, causal=True, kv_lens=kv_lens)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        _, lse = cuflash.attention(q, k, v, **options)
        stream.synchronize()
        assert_alike((out, lse), first)
        del lse  # its memory serves the captured call, which may not allocate
        stream.begin_capture()
        try:
            _, lse = cuflash.attention(q, k, v, **options)
        finally:
            graph = stream.end_capture()
        for array, value in zip((q, k, v, kv_lens), new, strict=True):
            array[...] = value
        out[...] = np.nan
        for _ in range(2):
            graph.launch(stream)
        stream.synchronize()
        assert_alike((out, lse), second)


def test_a_long_problem_in_spots(family: str, cupy: ModuleType) -> None:
    """More rows than blocks of one wave, against float64 on a few of them."""
    rng = np.random.default_rng(5)
    q, k, v = (
        rng.standard_normal((2, heads, 4400, 128), dtype=np.float32).astype(np.float16)
        for heads in (8, 2, 2)
    )
    out, lse = cuflash.attention(
        *(cupy.asarray(a) for a in (q, k, v)), causal=True, return_lse=True, kernel=family
    )
    rows = np.array([0, 1, 127, 128, 2047, 2048, 4000, 4399])
    mask = np.arange(4400) <= rows[:, None]
    exact, exact_lse = oracle.attention(q[:, :, rows], k, v, mask=mask)
    np.testing.assert_allclose(out.get()[:, :, rows], exact, atol=2e-3, rtol=2e-3)
    np.testing.assert_allclose(lse.get()[:, :, rows], exact_lse, atol=2e-5, rtol=1e-6)


@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("way", ["full", "causal", "window"])
@pytest.mark.parametrize("lengths", [(1500, 1500), (1411, 4300), (2900, 1411)])
def test_blocks_that_do_several_pieces_of_work(
    dim: int, way: str, lengths: tuple[int, int], family: str, cupy: ModuleType
) -> None:
    """More tiles than multiprocessors, odd numbers of them, and rows without keys among them."""
    problem = Problem(
        batch=3, heads=10, kv_heads=5, q_len=lengths[0], kv_len=lengths[1],
        dim=dim, dim_v=dim, options=way,
    )  # fmt: skip
    call = host_call(problem)
    assert_alike(attend(cupy, call, kernel=family), attend(cupy, call, kernel="standard"))


def two_calls(family: str, cupy: ModuleType) -> list[tuple[list[Any], Any]]:
    """Arrays of two causal calls of many pieces of work, and what each call gives alone."""
    found = []
    for seed in range(2):
        call = host_call(MANY_PIECES, seed)
        arrays = [place(cupy, a) for a in (call.q, call.k, call.v)]
        assert_tickets_are_drawn(family, *arrays, causal=True)
        out, lse = attend(cupy, call, kernel=family)
        assert_alike((out, lse), attend(cupy, call, kernel="standard"))
        found.append((arrays, out))
    return found


def test_two_streams_at_once(family: str, cupy: ModuleType) -> None:
    """Tickets of one launch are not another's. What a launch leaves out stays NaN."""
    calls = two_calls(family, cupy)
    outs = [cupy.full((20, *alone.shape), np.nan, alone.dtype) for _, alone in calls]
    cupy.cuda.Device().synchronize()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in calls]
    for turn in range(20):
        for stream, (arrays, _), out in zip(streams, calls, outs, strict=True):
            with stream:
                cuflash.attention(*arrays, causal=True, out=out[turn], kernel=family)
    cupy.cuda.Device().synchronize()
    for (_, alone), out in zip(calls, outs, strict=True):
        assert (out == alone).all()


def test_two_graphs_at_once(family: str, cupy: ModuleType) -> None:
    """Nor are tickets of a captured launch those of another, of its graph or of the other one."""
    calls = two_calls(family, cupy)
    outs = [cupy.empty((8, *alone.shape), alone.dtype) for _, alone in calls]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in calls]
    graphs = []
    cupy.cuda.Device().synchronize()
    for stream, (arrays, _), out in zip(streams, calls, outs, strict=True):
        with stream:
            cuflash.attention(*arrays, causal=True, out=out[0], kernel=family)  # compiles, or loads
            stream.synchronize()
            stream.begin_capture()
            try:
                for one in out:
                    cuflash.attention(*arrays, causal=True, out=one, kernel=family)
            finally:
                graphs.append(stream.end_capture())
    for _ in range(5):
        for out in outs:
            out.fill(np.nan)
        cupy.cuda.Device().synchronize()
        for stream, graph in zip(streams, graphs, strict=True):
            graph.launch(stream)
        cupy.cuda.Device().synchronize()
        for (_, alone), out in zip(calls, outs, strict=True):
            assert (out == alone).all()
