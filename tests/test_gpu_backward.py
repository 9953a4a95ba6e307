"""Backward passes on a GPU, against the oracle."""

from __future__ import annotations

import contextlib
from itertools import cycle
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from backward_cases import host_backward, run_on_device
from comparison import Array
from gpu_cases import FLOATS, Problem, problems
from gradient_comparison import GRADIENTS

import cuflash
from cuflash import dispatch
from cuflash.families.backward import standard

pytestmark = pytest.mark.gpu
FAMILIES = ["auto", "sm80", "standard"]  # the first: the best that takes a problem
FUSED = {"sm80": 80}  # and the compute capability that each needs
LENS = {"q_lens": [70, 0, 33, 1], "kv_lens": [90, 41, 0, 90]}


def on_host(gradients: Any) -> tuple[Array, Array, Array]:
    dq, dk, dv = (gradient.get() for gradient in gradients)
    return dq, dk, dv


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, cupy: ModuleType) -> str:
    """Each family that this GPU can run."""
    return runnable(str(request.param), cupy)


@pytest.fixture(params=list(FUSED))
def fused_family(request: pytest.FixtureRequest, cupy: ModuleType) -> str:
    """The fused ones of those."""
    return runnable(str(request.param), cupy)


REFUSED = pytest.raises(NotImplementedError, match="no family takes")


def runnable(name: str, cupy: ModuleType) -> str:
    capability = int(cupy.cuda.Device().compute_capability)
    if capability < FUSED.get(name, 0):
        pytest.skip(f"compute capability {capability}")
    return name


DIMS = ((1, 1), (24, 24), (32, 32), (40, 40), (61, 61), (64, 64), (72, 72), (96, 96), (100, 100),
        (128, 128), (152, 152), (192, 192), (192, 128), (64, 96), (61, 19), (200, 200), (96, 192),
        (256, 256), (256, 64), (32, 256))  # fmt: skip
WAYS = ("full", "causal", "window", "softcap", "capped causal", "negative scale", "zero scale")


def own_problems() -> list[Problem]:
    """Each bucket of head dims with each form of the loop, over several tiles with tails; and
    groups of heads that share keys.
    """
    dtypes = cycle(("float16", "bfloat16"))
    found = [
        Problem(next(dtypes), dim=dim, dim_v=dim_v, options=way, q_len=150, kv_len=279)
        for dim, dim_v in DIMS
        for way in WAYS
    ]
    found += [
        Problem(next(dtypes), q_len=q_len, kv_len=kv_len, dim=dim, dim_v=dim, options=way)
        for way in ("full", "causal", "top-left", "window", "left window", "wide window")
        for q_len, kv_len, dim in ((1, 513, 64), (129, 600, 128), (600, 40, 64), (64, 64, 256))
    ]
    found += [
        Problem(next(dtypes), heads=heads, kv_heads=kv_heads, q_len=130, kv_len=200, dim=dim,
                dim_v=dim, options=way)
        for heads, kv_heads in ((4, 2), (6, 2), (5, 1), (8, 8), (24, 2), (40, 1))
        for dim, way in ((64, "causal"), (128, "full"), (256, "window"))
    ]  # fmt: skip
    return found


@pytest.mark.parametrize("problem", problems(), ids=str)
def test_agrees_with_the_oracle_or_is_refused(
    problem: Problem, family: str, cupy: ModuleType
) -> None:
    backward = host_backward(problem)
    takes = problem.dtype != "float32" and problem.mask is None and problem.bias is None
    if family in FUSED and not (takes and set(problem.storage.values()) <= {"offset"}):
        # Some of these are taken: strides are, but for those of the last axis.
        may_refuse = contextlib.suppress(NotImplementedError) if takes else REFUSED
        with may_refuse:
            backward.assert_right(on_host(run_on_device(cupy, backward, family)))
        return
    backward.assert_right(on_host(run_on_device(cupy, backward, family)))


@pytest.mark.parametrize("deterministic", [False, True], ids=["sums", "deterministic"])
@pytest.mark.parametrize("problem", own_problems(), ids=str)
def test_fused_kernels_agree_with_the_oracle(
    problem: Problem, deterministic: bool, fused_family: str, cupy: ModuleType
) -> None:
    backward = host_backward(problem)
    found = run_on_device(cupy, backward, fused_family, deterministic=deterministic)
    backward.assert_right(on_host(found))


@pytest.mark.parametrize("options", ["full", "causal", "top-left", "window", "softcap"])
@pytest.mark.parametrize("kind", ["list", "uint8", "device int32", "device int64"])
def test_lengths(kind: str, options: str, family: str, cupy: ModuleType) -> None:
    """What lies past them is NaN, in `dout`, `out` and LSE too."""
    backward = host_backward(Problem(batch=4, options=options), **LENS)
    make = cupy.asarray if kind.startswith("device") else np.asarray
    given = {
        name: values if kind == "list" else make(values, dtype=kind.split()[-1])
        for name, values in LENS.items()
    }
    backward.assert_right(on_host(run_on_device(cupy, backward, family, **given)), **LENS)


def test_lengths_on_the_device_are_clamped(family: str, cupy: ModuleType) -> None:
    used = {"q_lens": [70, 0, 33, 70], "kv_lens": [90, 41, 0, 90]}
    backward = host_backward(Problem(batch=4, options="causal"), **used)
    found = run_on_device(
        cupy,
        backward,
        family,
        q_lens=cupy.asarray([1000, -1, 33, 2**40]),
        kv_lens=cupy.asarray([2**40, 41, -(2**40), 91]),
    )
    backward.assert_right(on_host(found), **used)


@pytest.mark.parametrize("options", ["full", "causal", "softcap"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_tails_of_every_length(options: str, dim: int, family: str, cupy: ModuleType) -> None:
    if family not in FUSED and (dim > 64 or options == "full"):
        pytest.skip("has no tiles")
    for n in range(1, 131):
        alone = Problem(
            batch=1, heads=2, kv_heads=1, q_len=n, kv_len=n, dim=dim, dim_v=dim, options=options
        )
        backward = host_backward(alone)
        for deterministic in (False, True)[: 1 + (family in FUSED)]:
            found = run_on_device(cupy, backward, family, deterministic=deterministic)
            backward.assert_right(on_host(found))


@pytest.mark.parametrize("axis", range(4))
def test_zero_size_arrays(axis: int, family: str, cupy: ModuleType) -> None:
    batch, heads, q_len, kv_len = (0 if i == axis else n for i, n in enumerate((2, 4, 5, 6)))
    q = cupy.ones((batch, heads, q_len, 8), np.float16)
    k = cupy.ones((batch, 2, kv_len, 8), np.float16)
    v = k[..., :3]
    out, lse = cuflash.attention(q, k, v, return_lse=True)
    memory = {
        name: cupy.full(a.shape, np.nan, a.dtype)
        for name, a in zip(GRADIENTS, (q, k, v), strict=True)
    }
    found = cuflash.attention_backward(
        cupy.ones_like(out), q, k, v, out, lse, kernel=family, **memory
    )
    assert all((gradient.get() == 0).all() for gradient in found)


@pytest.mark.parametrize("dtype", FLOATS)
def test_deterministic_gradients_repeat_bitwise(dtype: str, family: str, cupy: ModuleType) -> None:
    if family in FUSED and dtype == "float32":
        pytest.skip("takes 16 bits")
    backward = host_backward(Problem(dtype, q_len=257, kv_len=257, options="causal"))
    runs = [on_host(run_on_device(cupy, backward, family, deterministic=True)) for _ in range(5)]
    first = [gradient.tobytes() for gradient in runs[0]]
    assert all([gradient.tobytes() for gradient in run] == first for run in runs)


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_deterministic_gradients_of_many_blocks_repeat_bitwise(
    causal: bool, dim: int, fused_family: str, cupy: ModuleType
) -> None:
    """Enough blocks for many waves, whose order is never the same."""
    random = cupy.random.RandomState(0)
    q, dout = (
        random.standard_normal((4, 16, 1024, dim), np.float32).astype(np.float16) for _ in range(2)
    )
    k, v = (
        random.standard_normal((4, 4, 1024, dim), np.float32).astype(np.float16) for _ in range(2)
    )
    out, lse = cuflash.attention(q, k, v, causal=causal, return_lse=True)
    options = {"causal": causal, "kernel": fused_family}
    first = None
    for _ in range(20):
        found = cuflash.attention_backward(
            dout, q, k, v, out, lse, deterministic=True, **options
        )  # fmt: skip
        bits = [gradient.view(np.uint16) for gradient in found]
        first = first or bits
        assert all(bool((a == b).all()) for a, b in zip(bits, first, strict=True))
    other = cuflash.attention_backward(dout, q, k, v, out, lse, **options)
    for sums, same in zip(other, found, strict=True):
        np.testing.assert_allclose(
            sums.get().astype(np.float32), same.get().astype(np.float32), atol=2e-3, rtol=4e-3
        )


def test_more_heads_than_a_grid_has_rows_and_far_elements(
    fused_family: str, cupy: ModuleType
) -> None:
    """65,536 heads, and offsets beyond 2^31: the last head is as it is by itself."""
    shape, room = (2, 32768, 40, 64), 2 * 32768 * 40 * 64 * 2
    free, _ = cupy.cuda.runtime.memGetInfo()
    if free < 12 * room:
        pytest.skip(f"needs {12 * room >> 30} GiB of device memory")
    random = cupy.random.RandomState(0)
    few = [random.standard_normal((1, 2, 40, 64), np.float32).astype(np.float16) for _ in range(4)]
    dout, q, k, v = (cupy.zeros(shape, np.float16) for _ in range(4))
    for many, some in zip((dout, q, k, v), few, strict=True):
        many[-1:, -2:] = some
    results = []
    for arrays in ((dout, q, k, v), few):
        given, *rest = arrays
        out, lse = cuflash.attention(*rest, causal=True, return_lse=True)
        found = cuflash.attention_backward(
            given, *rest, out, lse, causal=True, kernel=fused_family, deterministic=True
        )
        results.append([gradient[-1:, -2:].get() for gradient in found])
    for many, some in zip(*results, strict=True):
        np.testing.assert_array_equal(many, some)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("options", ["causal", "window", "softcap"])
def test_vjp(options: str, dtype: str, cupy: ModuleType) -> None:
    """Whichever family runs the forward pass, its LSE and result serve the backward one."""
    backward = host_backward(Problem(dtype, options=options))
    call = backward.call
    q, k, v, dout = (cupy.asarray(a) for a in (call.q, call.k, call.v, backward.dout))
    out, vjp = cuflash.attention_vjp(q, k, v, **call.options)
    assert type(out) is cupy.ndarray
    backward.assert_right(on_host(vjp(dout)))
    assert cuflash.explain(q, k, v, **call.options, backward=True).family != "reference"


def test_chunks_make_no_difference(cupy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standard, "_WORKSPACE", 400_000)
    dispatch._choose.cache_clear()
    for problem in (
        Problem(q_len=200, kv_len=129, options="causal", layout="bshd"),
        Problem("bfloat16", q_len=150, kv_len=257, mask="bhqk", options="window"),
        Problem("float32", q_len=257, kv_len=65, bias="1hqk", options="top-left"),
    ):
        backward = host_backward(problem)
        backward.assert_right(on_host(run_on_device(cupy, backward, "standard")))
    dispatch._choose.cache_clear()


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_gradient_in_memory_of_another_array_is_refused(name: str, cupy: ModuleType) -> None:
    q, k, v = (cupy.ones((2, 5, 8), np.float16) for _ in range(3))
    out, lse = cuflash.attention(q, k, v, return_lse=True)
    inputs = {"dout": cupy.ones_like(out), "q": q, "k": k, "v": v, "out": out}
    for other, array in inputs.items():
        with pytest.raises(ValueError, match=f"^{name}: shares memory with {other};"):
            cuflash.attention_backward(**inputs, lse=lse, **{name: array})
