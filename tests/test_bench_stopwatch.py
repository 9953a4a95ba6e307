"""The bench's stopwatch on a GPU, with a device that counts what is queued on it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.peak import peak_bytes
from bench.stopwatch import CpuStopwatch, GpuStopwatch


class FakeGpu:
    """CuPy with a clock that calls and overwriting the cache set forward, in milliseconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.flushed = 0
        gpu = self

        class Event:
            def record(self) -> None:
                self.at = gpu.now

            def synchronize(self) -> None:
                pass

        class Scratch:
            def __init__(self, count: int, dtype: Any) -> None:
                self.data, self.bytes = self, count

            def memset_async(self, value: int, count: int) -> None:
                assert count == self.bytes
                gpu.flushed += 1
                gpu.now += 1000.0

        self.empty = Scratch
        self.uint8 = np.uint8
        self.cuda = SimpleNamespace(
            Event=Event,
            Device=lambda: SimpleNamespace(synchronize=lambda: None),
            get_elapsed_time=lambda start, end: end.at - start.at,
        )


@pytest.fixture
def gpu() -> FakeGpu:
    return FakeGpu()


def caller(gpu: FakeGpu, times: list[float]) -> Any:
    """A call that takes these times, the last of them for ever."""
    calls: list[int] = []

    def call() -> None:
        calls.append(1)
        gpu.now += times.pop(0) if len(times) > 1 else times[0]

    call.calls = calls  # type: ignore[attr-defined]
    return call


def test_a_window_is_the_mean_of_calls_after_those_that_settle(gpu: FakeGpu) -> None:
    watch = GpuStopwatch(gpu, 1 << 20)
    call = caller(gpu, [7.0] * 20 + [2.0])
    assert watch.window(call, 2.0, settle_ms=40.0, window_ms=10.0, flush=False) == 2.0
    assert len(call.calls) == 20 + 6
    assert gpu.flushed == 0


def test_a_long_call_is_measured_once_and_settles_by_itself(gpu: FakeGpu) -> None:
    call = caller(gpu, [500.0])
    watch = GpuStopwatch(gpu, 1 << 20)
    assert watch.window(call, 500.0, settle_ms=45.0, window_ms=15.0, flush=False) == 500.0
    assert len(call.calls) == 1


def test_the_cache_is_overwritten_before_each_call_and_not_timed(gpu: FakeGpu) -> None:
    call = caller(gpu, [1.0, 1.0, 2.0, 4.0, 3.0])
    watch = GpuStopwatch(gpu, 1 << 20)
    found = watch.window(call, 1.0, settle_ms=2.0, window_ms=2.0, flush=True)
    assert found == 3.0
    assert gpu.flushed == len(call.calls) == 5


def test_estimates_of_short_calls_are_means(gpu: FakeGpu) -> None:
    watch = GpuStopwatch(gpu, 1 << 20)
    assert watch.estimate(caller(gpu, [4.0, 1.0, 2.0, 3.0])) == 2.0
    long = caller(gpu, [50.0])
    assert watch.estimate(long) == 50.0
    assert len(long.calls) == 1


def test_the_host_is_timed_by_its_own_clock(gpu: FakeGpu) -> None:
    call = caller(gpu, [1e9])
    found = GpuStopwatch(gpu, 1 << 20).host_us(call, 100)
    assert 0 < found < 1e4
    assert len(call.calls) == 100


def test_on_a_cpu_the_window_is_full() -> None:
    calls: list[int] = []
    found = CpuStopwatch().window(lambda: calls.append(1), 0.5, 40.0, 5.0, flush=True)
    assert len(calls) == 11
    assert 0 < found < 5.0


def test_peaks_are_what_is_allocated_at_once() -> None:
    def twice() -> None:
        for _ in range(2):
            np.ones(1 << 20, np.uint8).sum()

    found = peak_bytes(np, twice)
    assert 1 << 20 <= found < 1.1 * (1 << 20)


def test_peaks_of_a_pool_follow_what_is_handed_out() -> None:
    hooks: list[Any] = []

    class MemoryHook:
        def __enter__(self) -> None:
            hooks.append(self)

        def __exit__(self, *_: object) -> None:
            hooks.remove(self)

    def call() -> None:
        for name, size in (
            ("malloc", 512), ("malloc", 1024), ("free", 512), ("malloc", 256), ("free", 1024),
        ):  # fmt: skip
            getattr(hooks[0], f"{name}_postprocess")(device_id=0, mem_size=size, mem_ptr=1)

    device = SimpleNamespace(synchronize=lambda: None)
    cupy = SimpleNamespace(cuda=SimpleNamespace(MemoryHook=MemoryHook, Device=lambda: device))
    assert peak_bytes(cupy, call) == 1536
    assert not hooks
