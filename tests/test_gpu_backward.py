"""Backward passes on a GPU, against the oracle."""

from __future__ import annotations

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
FAMILIES = ["auto", "standard"]  # the first is a fused one wherever one takes a problem
LENS = {"q_lens": [70, 0, 33, 1], "kv_lens": [90, 41, 0, 90]}


def on_host(gradients: Any) -> tuple[Array, Array, Array]:
    dq, dk, dv = (gradient.get() for gradient in gradients)
    return dq, dk, dv


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("problem", problems(), ids=str)
def test_agrees_with_the_oracle(problem: Problem, family: str, cupy: ModuleType) -> None:
    backward = host_backward(problem)
    backward.assert_right(on_host(run_on_device(cupy, backward, family)))


@pytest.mark.parametrize("family", FAMILIES)
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


@pytest.mark.parametrize("family", FAMILIES)
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


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", ["causal", "softcap"])
def test_tails_of_every_length(options: str, family: str, cupy: ModuleType) -> None:
    for n in range(1, 131):
        alone = Problem(
            batch=1, heads=2, kv_heads=1, q_len=n, kv_len=n, dim=64, dim_v=64, options=options
        )
        backward = host_backward(alone)
        backward.assert_right(on_host(run_on_device(cupy, backward, family)))


@pytest.mark.parametrize("family", FAMILIES)
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


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_deterministic_gradients_repeat_bitwise(dtype: str, family: str, cupy: ModuleType) -> None:
    backward = host_backward(Problem(dtype, q_len=257, kv_len=257, options="causal"))
    runs = [on_host(run_on_device(cupy, backward, family, deterministic=True)) for _ in range(5)]
    first = [gradient.tobytes() for gradient in runs[0]]
    assert all([gradient.tobytes() for gradient in run] == first for run in runs)


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
