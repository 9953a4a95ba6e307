"""The sm80 family on a GPU, against the oracle."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gpu_cases import Problem, assert_agrees, attend, host_call, place, problems

import cuflash
from cuflash import dispatch, oracle

pytestmark = pytest.mark.gpu
FAMILY = "sm80"
DTYPES = ("float16", "bfloat16")
DIMS = ((1, 1), (24, 24), (32, 32), (40, 40), (61, 61), (64, 64), (72, 72), (96, 96), (100, 100),
        (128, 128), (152, 152), (192, 192), (192, 128), (64, 96), (61, 19), (200, 200),
        (256, 256), (256, 64))  # fmt: skip
WAYS = ("full", "causal", "window", "softcap", "capped causal", "negative scale", "zero scale")


@pytest.fixture(autouse=True)
def needs_ampere(cupy: ModuleType) -> None:
    if int(cupy.cuda.Device().compute_capability) < 80:
        pytest.skip("needs compute capability 8.0")


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
    return found


@pytest.mark.parametrize("problem", [*problems(), *own_problems()], ids=str)
def test_agrees_with_the_oracle_or_is_refused(problem: Problem, cupy: ModuleType) -> None:
    call = host_call(problem)
    plan_for = {name: place(cupy, getattr(call, name)) for name in "qkv"}
    options = {
        name: place(cupy, value) if isinstance(value, np.ndarray) else value
        for name, value in call.options.items()
    }
    plan = cuflash.explain(**plan_for, **options, out=place(cupy, call.out))
    reasons = dispatch.reasons_against(FAMILY, plan.spec, plan.device)
    takes = problem.dtype in DTYPES and problem.mask is None and problem.bias is None
    if not reasons:
        assert takes
        assert plan.family == FAMILY
        assert_agrees(call, *attend(cupy, call, kernel=FAMILY))
        return
    steps_apart = any(kind in ("stepped", "reversed") for kind in problem.storage.values())
    assert not takes or steps_apart or problem.storage, reasons
    with pytest.raises(NotImplementedError, match=FAMILY):
        attend(cupy, call, kernel=FAMILY)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 128, 256, 61])
@pytest.mark.parametrize("place_of_lens", ["host", "device", "device, every other"])
@pytest.mark.parametrize("way", ["full", "causal", "window"])
def test_lengths_hide_what_lies_beyond(
    dtype: str, dim: int, place_of_lens: str, way: str, cupy: ModuleType
) -> None:
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
    out, lse = attend(cupy, call, **lens, kernel=FAMILY)
    assert_agrees(call, out, lse, q_lens=q_lens, kv_lens=kv_lens)


def test_lengths_on_the_device_are_clamped(cupy: ModuleType) -> None:
    call = host_call(Problem(batch=2, options="causal"))
    lens = cupy.asarray([2**40, -5])
    out, lse = attend(cupy, call, kv_lens=lens, kernel=FAMILY)
    assert_agrees(call, out, lse, kv_lens=[90, 0])


def test_no_keys(cupy: ModuleType) -> None:
    call = host_call(Problem(kv_len=0))
    out, lse = attend(cupy, call, kernel=FAMILY)
    assert not out.get().any()
    assert np.isneginf(lse.get()).all()


@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize("value", [1e-3, 100.0, 30000.0])
def test_equal_logits_of_any_size_weigh_the_same(value: float, dim: int, cupy: ModuleType) -> None:
    """Their product with the scale is off by more than 1 where it is beyond 2^24."""
    q = cupy.full((1, 70, dim), value, np.float32).astype("bfloat16")
    v = cupy.asarray(np.random.default_rng(0).standard_normal((1, 300, dim)), np.float32)
    k = cupy.broadcast_to(q[:, :1], (1, 300, dim))
    out, lse = cuflash.attention(q, k, v.astype("bfloat16"), return_lse=True, kernel=FAMILY)
    mean = v.astype("bfloat16").astype(np.float32).mean(axis=1, keepdims=True)
    assert float(abs(out.astype(np.float32) - mean).max()) < 2e-3
    exact = float(q[0, 0, 0]) ** 2 * dim**0.5 + np.log(300)
    assert float(abs(lse - exact).max()) <= 2e-6 * exact


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_references_beyond_2_24_move_by_what_lies_between_them(
    dtype: str, dim: int, cupy: ModuleType
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
    out = cuflash.attention(*(place(cupy, a) for a in arrays), scale=0.125, kernel=FAMILY)
    np.testing.assert_allclose(out.get().astype(np.float64), expected, atol=2e-3, rtol=8e-3)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_growing_logits_move_the_reference_often(dim: int, cupy: ModuleType) -> None:
    """Key tiles run from the last to the first, so early keys must outgrow what came before."""
    call = host_call(Problem(q_len=64, kv_len=1000, dim=dim, dim_v=dim, options="full"))
    call.k *= np.linspace(12, 0, 1000, dtype=np.float16)[:, None]
    assert_agrees(call, *attend(cupy, call, kernel=FAMILY))


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("way", ["full", "causal"])
def test_twenty_runs_give_the_same_bits(dim: int, way: str, cupy: ModuleType) -> None:
    call = host_call(Problem(q_len=700, kv_len=900, dim=dim, dim_v=dim, options=way))
    first = [a.get() for a in attend(cupy, call, kernel=FAMILY)]
    for _ in range(19):
        again = [a.get() for a in attend(cupy, call, kernel=FAMILY)]
        assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_captured_call_can_be_replayed_on_new_values(dtype: str, cupy: ModuleType) -> None:
    problem = Problem(dtype, batch=2, options="causal")
    first, second = host_call(problem, seed=1), host_call(problem, seed=2)
    lens = [[90, 60], [17, 90]]
    q, k, v, out = (place(cupy, a) for a in (first.q, first.k, first.v, first.out))
    kv_lens = cupy.asarray(lens[0])
    new = [place(cupy, a) for a in (second.q, second.k, second.v)] + [cupy.asarray(lens[1])]
    options: dict[str, Any] = {
        "causal": True, "kv_lens": kv_lens, "out": out, "return_lse": True, "kernel": FAMILY,
    }  # fmt: skip
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        _, lse = cuflash.attention(q, k, v, **options)
        stream.synchronize()
        assert_agrees(first, out, lse, kv_lens=lens[0])
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
        assert_agrees(second, out, lse, kv_lens=lens[1])


def test_a_long_problem_in_spots(cupy: ModuleType) -> None:
    """More rows than blocks of one wave, against float64 on a few of them."""
    rng = np.random.default_rng(5)
    q, k, v = (
        rng.standard_normal((2, heads, 4096, 128), dtype=np.float32).astype(np.float16)
        for heads in (8, 2, 2)
    )
    out, lse = cuflash.attention(
        *(cupy.asarray(a) for a in (q, k, v)), causal=True, return_lse=True, kernel=FAMILY
    )
    rows = np.array([0, 1, 127, 128, 2047, 2048, 4000, 4095])
    mask = np.arange(4096) <= rows[:, None]
    exact, exact_lse = oracle.attention(q[:, :, rows], k, v, mask=mask)
    np.testing.assert_allclose(out.get()[:, :, rows], exact, atol=2e-3, rtol=2e-3)
    np.testing.assert_allclose(lse.get()[:, :, rows], exact_lse, atol=2e-5, rtol=1e-6)
