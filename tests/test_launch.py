"""The launcher of kernels with one struct, without a GPU: the driver here only takes notes."""

from __future__ import annotations

import ctypes
from struct import Struct
from types import SimpleNamespace
from typing import Any

import pytest

from cuflash.runtime import launch as launching
from cuflash.runtime.launch import launcher

cupy: Any = pytest.importorskip("cupy")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Integers of each launch, and the struct that its argument pointed to."""
    found: list[Any] = []

    def launch(*given: int) -> None:
        *numbers, arguments, extra = given
        assert extra == 0
        struct = ctypes.c_void_p.from_address(arguments).value
        assert struct is not None
        found.append((numbers, ctypes.string_at(struct, 5)))

    monkeypatch.setattr(cupy.cuda.driver, "launchKernel", launch)
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: SimpleNamespace(ptr=77))
    return found


def test_the_struct_reaches_the_driver(launches: list[Any]) -> None:
    kernel = SimpleNamespace(kernel=SimpleNamespace(ptr=1234), max_dynamic_shared_size_bytes=0)
    launch = launcher(kernel, 10, 128, 65536, Struct("2B"), b"\0\0\0.!")
    assert kernel.max_dynamic_shared_size_bytes == 65536
    launch(7, 0)
    launch(0, 8)
    numbers = [1234, 10, 1, 1, 128, 1, 1, 65536, 77]
    assert launches == [(numbers, b"\x07\0\0.!"), (numbers, b"\0\x08\0.!")]


def test_a_launch_amid_another_has_a_struct_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the driver lets other threads run."""
    found: list[bytes] = []

    def driver(*given: int) -> None:
        if not found:
            found.append(b"")
            launch(2)
        struct = ctypes.c_void_p.from_address(given[-2]).value
        assert struct is not None
        found.append(ctypes.string_at(struct, 2))

    monkeypatch.setattr(cupy.cuda.driver, "launchKernel", driver)
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: SimpleNamespace(ptr=77))
    kernel = SimpleNamespace(kernel=SimpleNamespace(ptr=1234), max_dynamic_shared_size_bytes=0)
    launch = launcher(kernel, 1, 1, 0, Struct("B"), b"\0.")
    launch(1)
    launch(3)
    assert found == [b"", b"\x02.", b"\x01.", b"\x03."]


def test_an_early_launch_may_overlap_the_kernel_before(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []

    @ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
    def driver(configuration: int, function: int, arguments: int, extra: None) -> int:
        assert extra is None
        given = launching._Config.from_address(configuration)
        attribute = given.attributes[0]
        struct = ctypes.c_void_p.from_address(arguments).value
        assert struct is not None
        found.append((
            function, [*given.grid], [*given.block], given.shared_memory, given.stream,
            given.count, attribute.id, attribute.value[0], ctypes.string_at(struct, 2),
        ))  # fmt: skip
        return len(found) - 1

    monkeypatch.setattr(launching, "_driver_launch", lambda: driver)
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: SimpleNamespace(ptr=77))
    kernel = SimpleNamespace(kernel=SimpleNamespace(ptr=1234), max_dynamic_shared_size_bytes=0)
    launch = launcher(kernel, 10, 128, 65536, Struct("B"), b"\0.", early=True)
    launch(5)
    assert found == [(1234, [10, 1, 1], [128, 1, 1], 65536, 77, 1, 6, 1, b"\x05.")]
    monkeypatch.setattr(cupy.cuda.driver, "CUDADriverError", ArithmeticError)
    with pytest.raises(ArithmeticError, match="1"):
        launch(6)


def test_configurations_lie_in_memory_as_the_driver_has_them() -> None:
    assert launching._Config.stream.offset == 32
    assert launching._Config.attributes.offset == 40
    assert ctypes.sizeof(launching._Config) == 56
    assert launching._Attribute.value.offset == 8
    assert ctypes.sizeof(launching._Attribute) == 72
