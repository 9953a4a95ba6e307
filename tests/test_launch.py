"""The launcher of kernels with one struct, without a GPU: the driver here only takes notes."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

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
    launch = launcher(kernel, blocks=10, threads=128, shared_memory=65536)
    assert kernel.max_dynamic_shared_size_bytes == 65536
    for struct in (b"a\0b\0c", b"12345"):  # nul bytes are as good as others
        launch(struct)
    numbers = [1234, 10, 1, 1, 128, 1, 1, 65536, 77]
    assert launches == [(numbers, b"a\0b\0c"), (numbers, b"12345")]
