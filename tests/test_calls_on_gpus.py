"""Calls on GPUs that are not here: CuPy arrays over addresses, and a launcher that takes notes."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import arrays, calls, kinds
from cuflash.families import sm80
from cuflash.runtime import device as devices

Patch = pytest.MonkeyPatch


class Gpus:
    """Two GPUs whose arrays are mere addresses, and whose kernels take notes."""

    def __init__(self, cupy: Any) -> None:
        self.cupy = cupy
        self.current = 0
        self.launches: list[tuple[int, int, Any]] = []  # the kernel's device, the current one
        self.loads: list[int] = []
        self.allocations = itertools.count(1 << 32, 1 << 20)

    def array(
        self, address: int, shape: tuple[int, ...], dtype: Any = np.float16, device: int = 0
    ) -> Any:
        return self.cupy.ndarray(shape, dtype, memptr=self.memory(address, device))

    def memory(self, address: int, device: int) -> Any:
        memory = self.cupy.cuda.UnownedMemory(address, 1 << 20, self, device_id=device)
        return self.cupy.cuda.MemoryPointer(memory, 0)

    def allocate(self, size: int) -> Any:
        return self.memory(next(self.allocations), self.current)

    def upload(self, name: str, lens: Any) -> Any:
        return self.cupy.empty(lens.shape, np.int64) if isinstance(lens, np.ndarray) else lens

    @contextlib.contextmanager
    def activate(self, device: Any) -> Iterator[None]:
        before, self.current = self.current, device.index
        yield
        self.current = before

    def load(self, module: Any, device: Any) -> Any:
        self.loads.append(device.index)
        return SimpleNamespace(function=lambda name: device.index)

    def launcher(self, kernel: int, *given: Any) -> Callable[..., None]:
        *_, changing, struct = given

        def launch(*values: int) -> None:
            bytes_given = changing.pack(*values) + struct[changing.size :]
            note = np.frombuffer(bytes_given, sm80._ARGUMENTS)[0]
            self.launches.append((kernel, self.current, note))

        return launch


@pytest.fixture
def gpus(monkeypatch: Patch) -> Iterator[Gpus]:
    cupy: Any = pytest.importorskip("cupy")
    found = Gpus(cupy)
    ampere = devices.named("8.0")
    for place, name, stand_in in (
        (devices, "cuda_device", lambda index: dataclasses.replace(ampere, index=index)),
        (kinds, "current_index", lambda device: lambda: found.current),
        (kinds, "activate", found.activate),
        (calls, "activate", found.activate),
        (sm80.module, "load", found.load),
        (sm80, "launcher", found.launcher),
        (sm80, "lengths_on_device", found.upload),
    ):
        monkeypatch.setattr(place, name, stand_in)
    with cupy.cuda.using_allocator(found.allocate):
        yield found


def on(gpus: Gpus, device: int, *, at: int = 1 << 24, dtype: Any = np.float16) -> list[Any]:
    """Arrays q, k and v."""
    return [gpus.array(at + i * (1 << 20), (2, 4, 33, 64), dtype, device) for i in range(3)]


def test_calls_of_a_gpu_come_again(gpus: Gpus, checked: list[Any]) -> None:
    for turn in range(3):
        q, k, v = on(gpus, 0, at=(turn + 1) << 24)
        out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
        assert (out.shape, lse.shape) == (q.shape, q.shape[:-1])
        assert (out.dtype, lse.dtype) == (np.float16, np.float32)
        _, _, given = gpus.launches[-1]
        assert [int(given[name]) for name in ("q", "k", "v", "out", "lse")] == [
            array.data.ptr for array in (q, k, v, out, lse)
        ]
    assert len(checked) == len(gpus.loads) == 1
    assert len(gpus.launches) == 3


def test_two_gpus_do_not_mix(gpus: Gpus) -> None:
    for device in (0, 1, 1, 0):
        for current in (0, 1):
            gpus.current = current
            out = cuflash.attention(*on(gpus, device))
            assert out.data.device_id == device
            assert gpus.launches[-1][:2] == (device, device)
            assert gpus.current == current
    assert sorted(gpus.loads) == [0, 1]
    q, k, v = on(gpus, 0)
    _, k_elsewhere, v_elsewhere = on(gpus, 1)
    for arguments in ((q, k_elsewhere, v), (q, k, v_elsewhere)):
        with pytest.raises(ValueError, match="on cuda:1; expected q's device, cuda:0"):
            cuflash.attention(*arguments)
    assert len(gpus.launches) == 8


def test_arrays_of_the_host_and_of_a_gpu_do_not_mix(gpus: Gpus) -> None:
    host = [np.ones((2, 4, 33, 64), np.float16) for _ in range(3)]
    for _ in range(2):
        assert type(cuflash.attention(*on(gpus, 0))) is gpus.cupy.ndarray
        assert type(cuflash.attention(*host)) is np.ndarray
    assert len(gpus.launches) == 2
    for mixed in ((on(gpus, 0)[0], *host[1:]), (host[0], *on(gpus, 0)[1:])):
        with pytest.raises(ValueError, match="expected q's device"):
            cuflash.attention(*mixed)


def test_the_alignment_of_a_gpu_array_chooses_the_kernel(gpus: Gpus, checked: list[Any]) -> None:
    for at in (1 << 24, (1 << 24) + 2, (1 << 24) + 16):
        cuflash.attention(*on(gpus, 0, at=at))
    assert len(checked) == len(gpus.loads) == 2, "the third lies on 16 bytes as the first does"


@pytest.mark.parametrize("which", range(4), ids=["q", "k", "v", "out"])
def test_the_alignment_of_each_gpu_array_is_looked_at(
    which: int, gpus: Gpus, checked: list[Any]
) -> None:
    """In a call after one of arrays that all lie on 16 bytes, and of others that do not."""
    starts = [(i + 1) << 24 for i in range(4)]
    others = [at + 2 * (i != which) for i, at in enumerate(starts)]
    for places in (starts, others, [at + 2 * (i == which) for i, at in enumerate(starts)]):
        q, k, v, out = (gpus.array(at, (2, 4, 33, 64)) for at in places)
        assert cuflash.attention(q, k, v, out=out) is out
        given = gpus.launches[-1][2]
        assert [int(given[name]) for name in ("q", "k", "v", "out")] == places
    assert len(checked) == 3


@pytest.mark.parametrize("attribute", ["CuPy's", "gone"])
@pytest.mark.parametrize("which", range(4), ids=["q", "k", "v", "out"])
def test_the_strides_of_each_gpu_array_are_looked_at(
    which: int, attribute: str, gpus: Gpus, checked: list[Any]
) -> None:
    """In a call after one of arrays in C order; with a CuPy that does not tell of it, too."""

    class Silent(gpus.cupy.ndarray):  # type: ignore[misc]
        @property
        def _c_contiguous(self) -> bool:
            raise AttributeError

    shape = (2, 4, 33, 64)

    def given(step: int) -> list[Any]:
        """At the second step one of them lies in another order."""
        found = [gpus.array((i + step) << 24, shape) for i in range(4)]
        if step > 1:
            found[which] = gpus.array(9 << 24, (2, 33, 4, 64)).swapaxes(1, 2)
        return [array.view(Silent) for array in found] if attribute == "gone" else found

    for step in (1, 2, 1, 2):
        q, k, v, out = given(step)
        assert cuflash.attention(q, k, v, out=out) is out
        name = ("q", "k", "v", "out")[which]
        launched = gpus.launches[-1][2]
        steps = [int(launched[f"{name}_{axis}"]) for axis in ("entry", "head", "row")]
        assert steps == [n // 2 for n in given(step)[which].strides[:3]]
    assert len(checked) == 2


def test_cupy_tells_of_contiguity() -> None:
    """Else each call looks at strides, which takes four times as long."""
    cupy = pytest.importorskip("cupy")
    assert hasattr(cupy.ndarray, arrays.CONTIGUITY)


@pytest.mark.parametrize("way", ["directly", "by the class"])
def test_arrays_are_made_as_their_class_makes_them(
    way: str, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Directly, and with a CuPy that has no such way, too."""
    assert hasattr(gpus.cupy.ndarray.__base__, arrays._SET_UP)
    if way == "by the class":
        monkeypatch.setattr(arrays, "_SET_UP", "_no_such_attribute")
    make = arrays.maker_of(on(gpus, 0)[0])
    for shape, dtype in (((2, 3, 8), np.dtype(np.float16)), ((), np.float32), ((0, 4), np.float64)):
        made, wanted = make(shape, dtype), gpus.cupy.ndarray(shape, dtype)
        assert type(made) is type(wanted)
        for name in ("shape", "strides", "dtype", "size", "base", "_index_32_bits"):
            assert getattr(made, name) == getattr(wanted, name), name
        assert made.flags.c_contiguous
        assert made.data.ptr == wanted.data.ptr - (1 << 20), "memory of its own, before the other's"
        made.shape = (1, *shape)
        assert made.shape == (1, *shape)


@pytest.mark.parametrize("with_lengths", [False, True])
def test_out_on_a_gpu_is_looked_at_in_each_call(
    with_lengths: bool, gpus: Gpus, checked: list[Any]
) -> None:
    q, k, v = on(gpus, 0)
    end = q.data.ptr + q.nbytes
    good = gpus.array(1 << 30, q.shape)
    lens = gpus.array(1 << 29, (2,), np.int64)
    options: dict[str, Any] = {"kv_lens": lens} if with_lengths else {}
    assert cuflash.attention(q, k, v, out=good, **options) is good
    for name, at in (("q", end - 16), ("k", k.data.ptr), ("v", v.data.ptr - 16)):
        with pytest.raises(ValueError, match=f"^out: shares memory with {name};"):
            cuflash.attention(q, k, v, out=gpus.array(at, q.shape), **options)
    if with_lengths:
        with pytest.raises(ValueError, match=r"^out: shares memory with kv_lens;"):
            cuflash.attention(q, k, v, out=gpus.array((1 << 29) - 16, q.shape), **options)
    assert len(gpus.launches) == 1
    beside = gpus.array(end, q.shape)
    assert cuflash.attention(q, k, v, out=beside, **options) is beside
    assert int(gpus.launches[-1][2]["out"]) == end
    assert int(gpus.launches[-1][2]["kv_lens"]) == with_lengths << 29
    assert len(checked) == 1


def test_lengths_of_the_host_are_checked_before_a_launch(gpus: Gpus) -> None:
    q, k, v = on(gpus, 0)
    cuflash.attention(q, k, v, kv_lens=[33, 2], q_lens=[1, 2], kernel="sm80")
    before = next(gpus.allocations)
    for lens in ({"kv_lens": [34, 2], "q_lens": [1, 2]}, {"kv_lens": [33, 2], "q_lens": [1, -2]}):
        with pytest.raises(ValueError, match="expected 0 to 33"):
            cuflash.attention(q, k, v, **lens, kernel="sm80")
    assert next(gpus.allocations) == before + (1 << 20), "memory was taken first"
    assert len(gpus.launches) == 1


def test_lengths_of_the_host_do_not_lie_in_an_output_of_a_gpu(gpus: Gpus) -> None:
    """The same address means another place there."""
    q, k, v = on(gpus, 0)
    lens = np.array([33, 2])
    out = gpus.array(lens.ctypes.data // 16 * 16, q.shape)
    for _ in range(2):
        assert cuflash.attention(q, k, v, kv_lens=lens, out=out) is out


def test_a_gpu_call_without_output_loads_nothing(gpus: Gpus) -> None:
    q = gpus.array(1 << 24, (2, 4, 0, 64))
    k = gpus.array(1 << 25, (2, 4, 33, 64))
    for _ in range(2):
        assert cuflash.attention(q, k, k).shape == q.shape
    assert not gpus.loads
    assert not gpus.launches
