"""8-bit calls on a GPU that is not here: arrays over addresses, launchers that take notes."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from struct import Struct
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cuflash import explain, kinds, plan
from cuflash.families import sm90, sm90_fp8
from cuflash.fp8 import attention_fp8, attention_quantized, gpu, gpu_quantizer, quantize_fp8
from cuflash.runtime import device as devices
from cuflash.runtime import graphs

SHAPES = (2, 8, 150, 128), (2, 2, 333, 128), (2, 2, 333, 128)


class Gpu:
    """Arrays that are mere addresses, and kernels that take notes."""

    def __init__(self, cupy: Any) -> None:
        self.cupy = cupy
        self.launches: list[tuple[str, Any]] = []  # names of kernels, and their structs
        self.allocations = itertools.count(1 << 32, 1 << 24)
        self.addresses = itertools.count(1 << 24, 1 << 20)

    def arrays(self) -> list[Any]:
        return [self.array(shape) for shape in SHAPES]

    def array(
        self, shape: tuple[int, ...], address: int | None = None, dtype: Any = np.float16
    ) -> Any:
        at = next(self.addresses) if address is None else address
        return self.cupy.ndarray(shape, dtype, memptr=self.memory(at))

    def asarray(self, array: Any, dtype: Any = None) -> Any:
        return self.array(array.shape, dtype=array.dtype if dtype is None else dtype)

    def memory(self, address: int) -> Any:
        memory = self.cupy.cuda.UnownedMemory(address, 1 << 20, self, device_id=0)
        return self.cupy.cuda.MemoryPointer(memory, 0)

    def launcher(
        self, kernel: str, blocks: int, threads: int, shared_memory: int, changing: Struct,
        struct: bytes, *, early: bool,
    ) -> Callable[..., None]:  # fmt: skip
        kind = gpu_quantizer.ARGUMENTS if kernel.startswith("cuflash_fp8") else sm90.ARGUMENTS

        def launch(*values: Any) -> None:
            given = changing.pack(*values) + struct[changing.size :]
            self.launches.append((kernel, np.frombuffer(given, kind)[0]))

        return launch


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    cupy: Any = pytest.importorskip("cupy")
    found = Gpu(cupy)
    device = dataclasses.replace(devices.named("9.0"), index=0)
    functions = SimpleNamespace(function=lambda name: name)
    for place, name, stand_in in (
        (devices, "cuda_device", lambda index: device),
        (kinds, "current_index", lambda device: lambda: 0),
        (gpu, "activate", lambda device: contextlib.nullcontext()),
        (graphs, "is_capturing", lambda: False),
        (gpu_quantizer, "launcher", found.launcher),
        (gpu_quantizer.module, "load", lambda module, device: functions),
        (sm90_fp8, "launcher", found.launcher),
        (sm90_fp8.module, "load", lambda module, device: functions),
        (sm90_fp8.tensormap, "at", lambda layout, address: address.to_bytes(8, "little") * 16),
        (
            sm90_fp8.tickets,
            "counters",
            lambda index: SimpleNamespace(provide=lambda: None, address=lambda: 0),
        ),
        (cupy, "asarray", found.asarray),
    ):
        monkeypatch.setattr(place, name, stand_in)
    gpu._quantizer.cache_clear()
    gpu._kernel.cache_clear()
    with cupy.cuda.using_allocator(lambda size: found.memory(next(found.allocations))):
        yield found
    gpu._quantizer.cache_clear()
    gpu._kernel.cache_clear()


def test_a_call_quantises_and_attends(hopper: Gpu) -> None:
    q, k, v = hopper.arrays()
    out, lse = attention_fp8(q, k, v, causal=True, return_lse=True)
    names = [name.removeprefix("cuflash_fp8_") for name, _ in hopper.launches]
    assert names[:3] == ["statistics", "summary", "codes"]
    assert len(names) == 4
    first, *_, last = (struct for _, struct in hopper.launches)
    for name, array in (("q", q), ("k", k), ("v", v)):
        assert first[name]["data"] == array.data.ptr
        assert first[name]["steps"].tolist() == [step // 2 for step in array.strides[:3]]
    assert (last["out"] == out.data.ptr).all()
    assert last["lse"] == lse.data.ptr
    assert (last["q"] == first["q_codes"]).all()
    for name in ("q_scales", "k_scales", "v_scales", "v_means", "lse_shifts"):
        assert last[name] == first[name] > 0
    arrays = gpu_quantizer._ARRAYS
    places = gpu_quantizer.Shapes(2, 8, 2, 150, 333, 128, 6, 2, 1, 2).places
    start = first["q_partial"]
    assert {name: first[name] - start for name in arrays} == {
        name: places[name] - places["q_partial"] for name in arrays
    }


def test_products_with_the_mean_are_left_out_without_lse(hopper: Gpu) -> None:
    attention_fp8(*hopper.arrays())
    assert hopper.launches[0][1]["lse_shifts"] == 0
    assert hopper.launches[-1][1]["lse_shifts"] == 0


@pytest.mark.parametrize("call", [attention_fp8, quantize_fp8])
def test_a_capture_keeps_its_codes(
    call: Callable[..., Any], hopper: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(graphs, "_kept", kept)
    call(*hopper.arrays())
    assert kept == []
    monkeypatch.setattr(graphs, "is_capturing", lambda: True)
    call(*hopper.arrays())
    (memory,) = kept
    codes = hopper.launches[-1 if call is quantize_fp8 else -2][1]["q_codes"]
    assert memory.data.ptr < codes < memory.data.ptr + memory.nbytes


def test_a_second_call_of_a_kind_is_not_described_again(
    hopper: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    for call in (attention_fp8, quantize_fp8):
        call(*hopper.arrays())
    for name in ("checked_spec", "plan_fp8"):
        monkeypatch.setattr(gpu, name, lambda *_: pytest.fail("it was checked again"))
    before = len(hopper.launches)
    for call in (attention_fp8, quantize_fp8, attention_fp8):
        call(*hopper.arrays())
    assert len(hopper.launches) == before + 4 + 3 + 4
    with pytest.raises(pytest.fail.Exception, match="checked again"):
        attention_fp8(*hopper.arrays(), causal=True)
    with pytest.raises(pytest.fail.Exception, match="checked again"):
        attention_fp8(*hopper.arrays(), recipe="i8")
    with pytest.raises(pytest.fail.Exception, match="checked again"):
        attention_fp8(*hopper.arrays(), scale=1)


def test_out_is_looked_at_in_each_call(hopper: Gpu) -> None:
    q, k, v = hopper.arrays()
    out = hopper.array(SHAPES[0])
    assert attention_fp8(q, k, v, out=out) is out
    before = len(hopper.launches)
    near = hopper.array(SHAPES[0], q.data.ptr + 1024)
    with pytest.raises(ValueError, match=r"^out: shares memory with q"):
        attention_fp8(q, k, v, out=near)
    assert len(hopper.launches) == before


def test_lengths_are_checked_before_a_launch(hopper: Gpu) -> None:
    arrays = hopper.arrays()
    attention_fp8(*arrays, kv_lens=np.array([3, 333]))
    before = len(hopper.launches)
    for call in (attention_fp8, quantize_fp8):
        with pytest.raises(ValueError, match=r"^kv_lens: "):
            call(*arrays, kv_lens=np.array([3, 334]))
    assert len(hopper.launches) == before


def test_what_the_kernel_does_not_take_is_refused_each_time(hopper: Gpu) -> None:
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="does not take softcap"):
            attention_fp8(*hopper.arrays(), softcap=30.0)
    assert not hopper.launches


def test_tensors_are_of_their_call(hopper: Gpu) -> None:
    first, second = (quantize_fp8(*hopper.arrays(), "i8") for _ in range(2))
    assert first.packed.q_codes != second.packed.q_codes
    assert first.recipe.qk_dtype == "int8"
    assert first.packed.memory.data.ptr + first.shapes.places["q_codes"] == first.packed.q_codes


def test_tensors_are_attended_to_without_another_look_at_them(
    hopper: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (quantize_fp8(*hopper.arrays()) for _ in range(2))
    attention_quantized(first, causal=True)
    hopper.launches.clear()
    monkeypatch.setattr(gpu, "checked_spec", lambda *_: pytest.fail("it was checked again"))
    out = attention_quantized(second, causal=True)
    ((_, found),) = hopper.launches
    assert (found["q"] == second.packed.q_codes).all()
    assert (found["out"] == out.data.ptr).all()
    assert out.shape == SHAPES[0]
    with pytest.raises(pytest.fail.Exception, match="checked again"):
        attention_quantized(second, causal=True, return_lse=True)
    with pytest.raises(pytest.fail.Exception, match="checked again"):
        attention_quantized(second, causal=1)


def test_an_output_in_used_lengths_is_refused(hopper: Gpu) -> None:
    lens = hopper.cupy.ndarray((2,), np.int64, memptr=hopper.memory(1 << 40))
    tensors = quantize_fp8(*hopper.arrays(), kv_lens=lens)
    out = hopper.array(SHAPES[0], tensors.kv_lens.data.ptr)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^out: shares memory with kv_lens"):
            attention_quantized(tensors, out=out)


def test_the_plan_of_a_kind_is_logged(
    hopper: Gpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plan, "_logged", set())
    monkeypatch.setenv("CUFLASH_LOG", "1")
    arrays = hopper.arrays()
    for _ in range(2):
        attention_fp8(*arrays, causal=True)
    (record,) = caplog.records
    assert record.getMessage() == str(explain(*arrays, causal=True, recipe="f8"))
    small = np.zeros((3, 8, 16), np.float16)
    for _ in range(2):
        attention_fp8(small, small, small)
    assert caplog.records[1].getMessage() == str(explain(small, small, small, recipe="f8"))
    assert len(caplog.records) == 2
