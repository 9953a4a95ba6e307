"""The backward pass of sm90 on a GPU of compute capability 9.0."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from backward_cases import host_backward, run_on_device
from comparison import Array
from gpu_cases import Problem, problems_of_sm90_backward, used_lengths

import cuflash
from cuflash import kinds
from cuflash.families.backward import sm90

pytestmark = pytest.mark.gpu
PAIRS = [(64, 64), (128, 128), (192, 128), (192, 192), (256, 256)]
WAYS = ("full", "causal", "window", "softcap")


@pytest.fixture(autouse=True)
def hopper(cupy: ModuleType) -> None:
    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("not of compute capability 9.0")


def on_host(gradients: Any) -> tuple[Array, Array, Array]:
    dq, dk, dv = (gradient.get() for gradient in gradients)
    return dq, dk, dv


def random_call(
    cupy: ModuleType, shape: tuple[int, ...], kv: tuple[int, ...], **options: Any
) -> Any:
    """dout, q, k, v, out and LSE of a call on the device."""
    rng = cupy.random.default_rng(0)
    q, k, v, dout = (
        rng.standard_normal(size, dtype=np.float32).astype(np.float16)
        for size in (shape, kv, kv, shape)
    )
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    return dout, q, k, v, out, lse


def close(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.get(), other.get(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("problem", problems_of_sm90_backward(), ids=str)
def test_every_kernel_agrees_with_the_oracle(
    problem: Problem, deterministic: bool, cupy: ModuleType
) -> None:
    for lens in ({}, used_lengths(problem)):
        backward = host_backward(problem, **lens)
        found = run_on_device(cupy, backward, "sm90", deterministic=deterministic, **lens)
        backward.assert_right(on_host(found), **lens)


@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("dims", PAIRS, ids=str)
def test_tails_of_every_length(dims: tuple[int, int], options: str, cupy: ModuleType) -> None:
    for n in range(1, 131):
        backward = host_backward(
            Problem(batch=1, heads=2, kv_heads=1, q_len=n, kv_len=131 - n, dim=dims[0],
                    dim_v=dims[1], options=options)
        )  # fmt: skip
        backward.assert_right(on_host(run_on_device(cupy, backward, "sm90")))


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (8, 2), (12, 2), (7, 7)], ids=str)
def test_heads_that_share_keys(
    heads: tuple[int, int], options: str, deterministic: bool, cupy: ModuleType
) -> None:
    for dim in (64, 80, 128, 256):
        backward = host_backward(
            Problem(heads=heads[0], kv_heads=heads[1], q_len=211, kv_len=333, dim=dim, dim_v=dim,
                    layout="bshd", options=options)
        )  # fmt: skip
        found = run_on_device(cupy, backward, "sm90", deterministic=deterministic)
        backward.assert_right(on_host(found))


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("section", [1, 2, 5])
def test_sections_begin_as_0_one_after_the_other(
    section: int, options: str, deterministic: bool, cupy: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """As where heads do not fit the L2 cache together. The last pieces of work are split."""
    monkeypatch.setattr(sm90, "_section", lambda spec, variant: section)
    monkeypatch.setattr(sm90, "_blocks", lambda device: 10)
    monkeypatch.setattr(sm90, "_parts", lambda *problem: 3)
    kinds.forget()
    shapes = (64, 3, 4, 4), (128, 12, 2, 2), (192, 2, 2, 2), (256, 2, 4, 2)
    for dim, batch, heads, kv_heads in shapes:
        problem = Problem(batch=batch, heads=heads, kv_heads=kv_heads, q_len=300, kv_len=700,
                          dim=dim, dim_v=dim, options=options)  # fmt: skip
        entries = range(batch)
        lengths = {
            "q_lens": [300 - 23 * entry % 300 for entry in entries],
            "kv_lens": [150 * entry % 701 for entry in entries],
        }
        for lens in ({}, lengths):
            backward = host_backward(problem, **lens)
            cupy.full(1 << 24, np.nan, np.float32)  # in which the workspace will be
            found = run_on_device(cupy, backward, "sm90", deterministic=deterministic, **lens)
            backward.assert_right(on_host(found), **lens)
    kinds.forget()


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("dims", PAIRS, ids=str)
def test_parts_of_pieces_of_work_add_up(
    dims: tuple[int, int], options: str, deterministic: bool, cupy: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """In more parts than there are tiles, too; dK and dV have the same bits each time."""
    problem = Problem(batch=2, heads=4, kv_heads=2, q_len=777, kv_len=300, dim=dims[0],
                      dim_v=dims[1], options=options)  # fmt: skip
    lengths = {"q_lens": [777, 100], "kv_lens": [0, 290]}
    for parts in (2, 5, 16):
        monkeypatch.setattr(sm90, "_parts", lambda *problem, parts=parts: parts)
        kinds.forget()
        for lens in ({}, lengths):
            backward = host_backward(problem, **lens)
            runs = []
            for _ in range(3):
                cupy.full(1 << 23, np.nan, np.float32)  # in which the workspace will be
                found = run_on_device(cupy, backward, "sm90", deterministic=deterministic, **lens)
                runs.append(on_host(found))
            backward.assert_right(runs[0], **lens)
            for run in runs[1:]:
                same = [a.tobytes() == b.tobytes() for a, b in zip(runs[0], run, strict=True)]
                assert all(same if deterministic else same[1:])
    kinds.forget()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_gradients_repeat_bitwise(dim: int, causal: bool, cupy: ModuleType) -> None:
    """Those of keys always, those of queries where it is asked for; beside other work too."""
    call = random_call(cupy, (2, 8, 2100, dim), (2, 4, 1900, dim), causal=causal)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    cupy.cuda.Device().synchronize()
    for deterministic in (False, True):
        runs = []
        for turn in range(20):
            with streams[turn % 2]:
                runs.append(
                    cuflash.attention_backward(
                        *call, causal=causal, kernel="sm90", deterministic=deterministic
                    )
                )
        cupy.cuda.Device().synchronize()
        first, *others = runs
        for other in others:
            same = [bool((a == b).all()) for a, b in zip(first, other, strict=True)]
            assert all(same[0 if deterministic else 1 :])


def test_a_graph_runs_again_and_again(cupy: ModuleType) -> None:
    call = random_call(cupy, (1, 4, 900, 128), (1, 4, 900, 128), causal=True)
    options = {"causal": True, "kernel": "sm90", "deterministic": True}
    expected = cuflash.attention_backward(*call, **options)
    stream = cupy.cuda.Stream(non_blocking=True)
    found = [cupy.empty_like(gradient) for gradient in expected]
    names = dict(zip(("dq", "dk", "dv"), found, strict=True))
    with stream:
        cuflash.attention_backward(*call, **options, **names)
        stream.begin_capture()
        cuflash.attention_backward(*call, **options, **names)
        graph = stream.end_capture()
        for _ in range(3):
            for gradient in found:
                gradient.fill(np.nan)
            graph.launch(stream)
            filled = cupy.full(1 << 24, 0xFF, np.uint8)  # what the pool has meanwhile
            del filled
            stream.synchronize()
            for one, other in zip(found, expected, strict=True):
                assert bool((one == other).all())


def test_more_heads_than_a_grid_has_rows(cupy: ModuleType) -> None:
    call = random_call(cupy, (35000, 2, 17, 64), (35000, 2, 33, 64))
    found = cuflash.attention_backward(*call, kernel="sm90")
    close(found, cuflash.attention_backward(*call, kernel="standard"))


def test_arrays_of_more_than_2_to_the_31_elements(cupy: ModuleType) -> None:
    free, _ = cupy.cuda.runtime.memGetInfo()
    shape = (32784, 8, 64, 128)
    if free < 60 << 30:
        pytest.skip(f"needs 60 GiB of device memory; {free >> 30} are free")
    q, k, v, dout = (cupy.empty(shape, np.float16) for _ in range(4))
    rng = cupy.random.default_rng(0)
    for array in (q, k, v, dout):
        array[...] = rng.standard_normal((1, *shape[1:]), dtype=np.float32).astype(np.float16)
        array[-3:] *= np.float16(0.5)
    out, lse = cuflash.attention(q, k, v, return_lse=True)
    found = cuflash.attention_backward(dout, q, k, v, out, lse, kernel="sm90")
    for part in (slice(0, 2), slice(-3, None)):
        arrays = [array[part] for array in (dout, q, k, v, out, lse)]
        expected = cuflash.attention_backward(*arrays, kernel="standard")
        close([gradient[part] for gradient in found], expected)


def test_what_lies_past_lengths_is_never_read_into_a_gradient(cupy: ModuleType) -> None:
    """In shared memory either, where the tile before was of another entry."""
    lens = {"q_lens": [300, 1, 0, 130, 64], "kv_lens": [1, 129, 64, 0, 300]}
    for dim, options in ((64, "causal"), (128, "full"), (128, "softcap"), (256, "window")):
        problem = Problem(batch=5, q_len=300, kv_len=300, dim=dim, dim_v=dim, options=options)
        backward = host_backward(problem, **lens)
        found = run_on_device(cupy, backward, "sm90", **lens)
        backward.assert_right(on_host(found), **lens)
