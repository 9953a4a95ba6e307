"""Counters of launches, without a GPU: streams and memory here only have addresses."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from cuflash.runtime import tickets
from cuflash.runtime.tickets import Counters, counters

cupy: Any = pytest.importorskip("cupy")
SLOT = tickets._SLOT


class Stream:
    """A stream, which may be in a capture."""

    def __init__(self, ptr: int, capturing: bool = False) -> None:
        self.ptr = ptr
        self.capturing = capturing
        self.waits = 0

    def is_capturing(self) -> bool:
        return self.capturing

    def synchronize(self) -> None:
        assert not self.capturing
        self.waits += 1


class Gpu:
    """The current stream, and notes on memory."""

    def __init__(self) -> None:
        self.stream = Stream(0)
        self.set_to_zero: list[tuple[int, int, int]] = []
        self.blocks: list[tuple[int, int]] = []
        self._free = itertools.count(1 << 24, 1 << 24)

    def memory(self, size: int) -> Any:
        block = SimpleNamespace(ptr=next(self._free), size=size)
        self.blocks.append((block.ptr, size))
        return block

    def memset(self, address: int, value: int, size: int, stream: int) -> None:
        assert value == 0
        self.set_to_zero.append((address, size, stream))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    found = Gpu()
    monkeypatch.setattr(tickets, "_counters", {})
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: found.stream)
    monkeypatch.setattr(cupy.cuda, "Memory", found.memory)
    monkeypatch.setattr(cupy.cuda.runtime, "memsetAsync", found.memset)
    return found


def test_launches_take_turns_at_a_ring_that_is_zero(gpu: Gpu) -> None:
    found = Counters()
    ring, spare = gpu.blocks
    assert gpu.set_to_zero == [(*ring, 0), (*spare, 0)]
    assert gpu.stream.waits == 2, "other streams do not wait for this one"
    first = [found.address() for _ in range(tickets._RING)]
    assert sorted(first) == list(range(ring[0], ring[0] + ring[1], SLOT))
    gpu.stream = Stream(77)
    again = [found.address() for _ in range(3)]
    assert again == first[:3]
    assert len(gpu.set_to_zero) == 2, "a kernel leaves its counter at zero"


def test_a_ring_is_longer_than_what_the_driver_queues() -> None:
    assert tickets._RING >= 32 * 1024


def test_all_kernels_of_a_device_share_its_ring(gpu: Gpu) -> None:
    one, other = counters(0), counters(1)
    assert counters(0) is one
    assert one is not other
    assert len({one.address(), one.address(), other.address()}) == 3


def test_each_captured_launch_has_a_counter_of_its_own(gpu: Gpu) -> None:
    """Two graphs can run at once, again and again, and beside calls of any stream."""
    found = Counters()
    ring, spare = gpu.blocks
    zeroed = list(gpu.set_to_zero)
    gpu.stream = Stream(77, capturing=True)
    captured = [found.address() for _ in range(tickets._SPARE)]
    assert gpu.blocks == [ring, spare], "a capture may forbid to allocate"
    assert sorted(captured) == list(range(spare[0], spare[0] + spare[1], SLOT))
    assert gpu.set_to_zero == zeroed + [(address, 4, 77) for address in captured]


def test_spare_counters_are_replaced_before_they_run_out(gpu: Gpu) -> None:
    found = Counters()
    gpu.stream = Stream(77, capturing=True)
    captured = {found.address() for _ in range(tickets._SPARE - tickets._FEW)}
    gpu.stream.capturing = False
    found.address()
    assert len(gpu.blocks) == 2
    gpu.stream.capturing = True
    captured.add(found.address())
    found.provide()
    assert len(gpu.blocks) == 2, "a capture may forbid to allocate"
    gpu.stream.capturing = False
    found.address()
    assert len(gpu.blocks) == 3
    gpu.stream.capturing = True
    more = {found.address() for _ in range(tickets._SPARE)}
    assert len(gpu.blocks) == 3
    assert not captured & more


def test_a_capture_that_finds_none_spare_allocates(gpu: Gpu) -> None:
    gpu.stream = Stream(77, capturing=True)
    found = Counters()
    assert not gpu.blocks
    captured = [found.address() for _ in range(tickets._SPARE + 1)]
    assert len(set(captured)) == tickets._SPARE + 1
    assert len(gpu.blocks) == 2
    assert gpu.set_to_zero == [(address, 4, 77) for address in captured]
    gpu.stream.capturing = False
    assert found.address() not in captured
    assert gpu.set_to_zero[-1] == (*gpu.blocks[2], 77)
