"""Streams, graphs and arrays of other libraries, on a GPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from comparison import DTYPES, Array, assert_attention
from gpu_cases import FLOATS, Problem, assert_agrees, attend, host_call, place

import cuflash
from cuflash.arrays import adopt

pytestmark = pytest.mark.gpu
FAMILY = "standard"


# --- streams and graphs ---------------------------------------------------------------------------


def test_work_is_queued_on_the_current_stream(cupy: ModuleType) -> None:
    call = host_call(Problem(q_len=257, kv_len=257))
    q, k, v = (cupy.full(a.shape, np.nan, a.dtype) for a in (call.q, call.k, call.v))
    values = [cupy.asarray(a) for a in (call.q, call.k, call.v)]
    busy = cupy.ones((4096, 4096), np.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:  # what the work below compiles and allocates is there when it is queued
        attend(cupy, call, kernel=FAMILY)
        busy = busy @ busy * 1e-4
        cupy.cuda.Device().synchronize()
        for _ in range(20):  # on another stream, attention would overtake this and read NaN
            busy = busy @ busy * 1e-4
        for array, value in zip((q, k, v), values, strict=True):
            array[...] = value
        out, lse = cuflash.attention(q, k, v, return_lse=True, kernel=FAMILY)
        out, lse = out.copy(), lse.copy()
    stream.synchronize()
    assert_agrees(call, out, lse)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_call_does_not_wait_for_the_device(dtype: str, cupy: ModuleType) -> None:
    """It comes back while the stream is still busy with what was queued before it."""
    call = host_call(Problem(dtype, batch=2, options="causal", mask="b11k", bias="hqk"))
    lens = [90, 60]
    q, k, v, out = (place(cupy, a) for a in (call.q, call.k, call.v, call.out))
    mask, bias = (place(cupy, call.options[name]) for name in ("mask", "bias"))
    options: dict[str, Any] = {
        "causal": True, "mask": mask, "bias": bias, "kv_lens": cupy.asarray(lens), "out": out,
        "return_lse": True, "kernel": FAMILY,
    }  # fmt: skip
    busy = cupy.RawKernel(
        'extern "C" __global__ void busy(long long cycles) {'
        "    const long long start = clock64(); while (clock64() - start < cycles); }",
        "busy",
    )
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        cuflash.attention(q, k, v, **options)  # compiles
        stream.synchronize()
        out[...] = np.nan
        busy((1,), (1,), (np.int64(1_000_000_000),))  # half a second and more
        _, lse = cuflash.attention(q, k, v, **options)
        assert not stream.done, "the call waited for the stream"
        stream.synchronize()
    assert_agrees(call, out, lse, kv_lens=lens)


def test_capture_is_refused_and_leaves_the_stream_usable(cupy: ModuleType) -> None:
    """CuPy does not let cuBLAS be captured; its error says so."""
    call = host_call(Problem("float16", options="causal"))
    q, k, v = (place(cupy, a) for a in (call.q, call.k, call.v))
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        cuflash.attention(q, k, v, causal=True, kernel=FAMILY)
        stream.synchronize()
        stream.begin_capture()
        try:
            with pytest.raises(NotImplementedError, match="cuBLAS"):
                cuflash.attention(q, k, v, causal=True, kernel=FAMILY)
        finally:
            stream.end_capture()
        out, lse = cuflash.attention(q, k, v, causal=True, kernel=FAMILY, return_lse=True)
        stream.synchronize()
    assert_agrees(call, out, lse)


# --- arrays of others -----------------------------------------------------------------------------


class Interface:
    """An array of a library that has `__cuda_array_interface__` alone."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.__cuda_array_interface__ = array.__cuda_array_interface__


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_cuda_array_interface(dtype: str, cupy: ModuleType) -> None:
    call = host_call(Problem(dtype, storage={"k": "stepped"}))
    q, k, v, out = (Interface(place(cupy, a)) for a in (call.q, call.k, call.v, call.out))
    assert adopt("k", k).data.ptr == k.array.data.ptr
    result, lse = cuflash.attention(q, k, v, out=out, return_lse=True, kernel=FAMILY)
    assert result is out
    assert_agrees(call, out.array, lse)


@pytest.mark.parametrize("dtype", FLOATS)
def test_torch_tensors_are_taken_without_a_copy(dtype: str, cupy: ModuleType) -> None:
    torch: Any = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch without CUDA")
    call = host_call(Problem(dtype, q_len=65, options="causal"))

    def tensor(array: Array) -> Any:
        return torch.from_numpy(array.astype(np.float32)).to("cuda", getattr(torch, dtype))

    q, k, v, out = (tensor(array) for array in (call.q, call.k, call.v, call.out))
    adopted = adopt("q", q)
    assert adopted.data.ptr == q.data_ptr()
    assert adopted.dtype == DTYPES[dtype]
    options: dict[str, Any] = {"causal": True, "return_lse": True, "kernel": FAMILY}
    result, lse = cuflash.attention(q, k, v, out=out, **options)
    assert result is out
    got = out.float().cpu().numpy().astype(DTYPES[dtype])
    assert_attention(got, lse.get(), call.q, call.k, call.v, causal=True)
    views = (array.transpose(1, 2) for array in (q, k, v))
    result, lse = cuflash.attention(*views, layout="bshd", **options)
    assert type(result) is cupy.ndarray
    assert_agrees(call, result.swapaxes(1, 2), lse)


def test_mixed_devices_are_refused_by_name(cupy: ModuleType) -> None:
    host = np.ones((2, 5, 8), np.float16)
    gpu = cupy.asarray(host)
    for arrays, name in (
        ((gpu, host, gpu), "k"),
        ((host, host, gpu), "v"),
        ((host, gpu, gpu), "k"),
    ):
        with pytest.raises(ValueError, match=f"^{name}: got an array on .*; expected q's device"):
            cuflash.attention(*arrays)
    options: dict[str, Any] = {"mask": np.ones((5, 5), bool), "bias": host[0, :, :5], "out": host}
    for name, array in options.items():
        with pytest.raises(ValueError, match=f"^{name}: got an array on cpu; expected q's device"):
            cuflash.attention(gpu, gpu, gpu, **{name: array})


@pytest.mark.parametrize("dtype", [np.float64, np.int8])
def test_dtypes_that_no_family_takes_are_refused(dtype: Any, cupy: ModuleType) -> None:
    q = cupy.ones((5, 8), dtype)
    name = np.dtype(dtype).name
    with pytest.raises(TypeError, match=f"^q: got dtype {name}; expected .* on the GPU"):
        cuflash.attention(q, q, q)


def test_out_must_not_share_memory_with_an_input(cupy: ModuleType) -> None:
    buffer = cupy.ones((10, 8), np.float16)
    with pytest.raises(ValueError, match=r"^out: shares memory with [kv];"):
        cuflash.attention(cupy.ones((5, 8), np.float16), *[buffer[3:8]] * 2, out=buffer[:5])


def test_results_are_new_arrays_on_the_device(cupy: ModuleType) -> None:
    call = host_call(Problem("bfloat16", dim_v=40))
    q, k, v = (place(cupy, a) for a in (call.q, call.k, call.v))
    out, lse = cuflash.attention(q, k, v, return_lse=True, kernel=FAMILY)
    assert type(out) is type(lse) is cupy.ndarray
    assert (out.shape, out.dtype) == ((2, 4, 70, 40), ml_dtypes.bfloat16)
    assert (lse.shape, lse.dtype) == ((2, 4, 70), np.float32)
    assert_agrees(call, out, lse)
    plan = cuflash.explain(q, k, v, kernel=FAMILY)
    assert plan.family == FAMILY
    assert plan.device.compute_capability is not None
