"""Times calls: on a GPU by CUDA events around a window of them, on a CPU by the host's clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

Call = Callable[[], Any]

_SHORT_MS = 5.0  # of a call, below which an estimate takes the mean of several
_MOST_CALLS = 1000  # of a window whose calls are timed one by one


class Stopwatch(Protocol):
    """What a worker times with. Times are of one call, in milliseconds."""

    def estimate(self, call: Call) -> float:
        """Of a call that has run before."""

    def window(
        self, call: Call, estimate: float, settle_ms: float, window_ms: float, flush: bool
    ) -> float:
        """The mean over `window_ms` of calls, after `settle_ms` of the same calls unmeasured."""

    def host_us(self, call: Call, calls: int) -> float:
        """Microseconds that the host takes to queue a call, the device idle before."""


class GpuStopwatch:
    """By CUDA events on the current stream.

    A board at its power limit gives each kernel another clock, and takes its time to settle.
    Where `flush` is asked for, the L2 cache is overwritten before each call, and calls are timed
    one by one; the writing also hides the host's time.
    """

    def __init__(self, cupy: Any, l2_bytes: int) -> None:
        self._cupy = cupy
        self._flushed_bytes = max(4 * l2_bytes, 128 << 20)
        self._scratch: Any = None
        self._pairs: list[tuple[Any, Any]] = []

    def estimate(self, call: Call) -> float:
        """See `Stopwatch`."""
        first = self._mean(call, 1)
        return self._mean(call, 3) if first < _SHORT_MS else first

    def window(
        self, call: Call, estimate: float, settle_ms: float, window_ms: float, flush: bool
    ) -> float:
        """See `Stopwatch`."""
        calls = 1 + int(window_ms / estimate)
        settling = int(settle_ms / estimate)
        if flush:
            # The board settles under what is measured, so that is what is repeated.
            self._flushed(call, min(settling, _MOST_CALLS))
            return self._flushed(call, min(calls, _MOST_CALLS))
        for _ in range(settling):
            call()
        return self._mean(call, calls)

    def host_us(self, call: Call, calls: int) -> float:
        """See `Stopwatch`."""
        self._cupy.cuda.Device().synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls * 1e6

    def _mean(self, call: Call, calls: int) -> float:
        ((start, end),) = self._events(1)
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return float(self._cupy.cuda.get_elapsed_time(start, end)) / calls

    def _flushed(self, call: Call, calls: int) -> float:
        if self._scratch is None:
            self._scratch = self._cupy.empty(self._flushed_bytes, self._cupy.uint8)
        pairs = self._events(calls)
        for start, end in pairs:
            self._scratch.data.memset_async(0, self._flushed_bytes)
            start.record()
            call()
            end.record()
        self._cupy.cuda.Device().synchronize()
        times = [float(self._cupy.cuda.get_elapsed_time(*pair)) for pair in pairs]
        return sum(times) / max(calls, 1)

    def _events(self, count: int) -> list[tuple[Any, Any]]:
        event = self._cupy.cuda.Event
        self._pairs += [(event(), event()) for _ in range(count - len(self._pairs))]
        return self._pairs[:count]


class CpuStopwatch:
    """By the host's clock; what a cache holds between calls, it holds."""

    def estimate(self, call: Call) -> float:
        """See `Stopwatch`."""
        return self._mean(call, 1)

    def window(
        self, call: Call, estimate: float, settle_ms: float, window_ms: float, flush: bool
    ) -> float:
        """See `Stopwatch`."""
        del settle_ms, flush
        return self._mean(call, 1 + int(window_ms / estimate))

    def host_us(self, call: Call, calls: int) -> float:
        """See `Stopwatch`."""
        return self._mean(call, calls) * 1e3

    def _mean(self, call: Call, calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls * 1e3
