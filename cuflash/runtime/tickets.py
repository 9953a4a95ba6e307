"""Counters on the device from which the blocks of a launch draw their work.

A kernel finds its counter at zero and leaves it there. Launches that can overlap must not share
one. Those of a process take turns at a ring of so many that the last one's turn is over long before
it comes again; a captured launch runs whenever and wherever its graph does, and has its own.
"""

from __future__ import annotations

import itertools
from typing import Any

from .locks import KeyedLocks, after_fork

_SLOT = 32  # bytes from counter to counter: no two share a sector of the L2 cache
_RING = 1 << 16  # many times the launches that the driver queues
_SPARE = 4096  # for captured launches, at a time
_FEW = 1024  # more than most captures take

_counters: dict[int, Counters] = {}
after_fork(_counters.clear)
_locks = KeyedLocks()


def counters(device_index: int) -> Counters:
    """The counters of a device, which is the current one."""
    with _locks.of(device_index):
        if device_index not in _counters:
            _counters[device_index] = Counters()
        return _counters[device_index]


class Counters:
    """The counters of one device, which is current here and whenever an address is asked for."""

    def __init__(self) -> None:
        from cupy.cuda import get_current_stream

        self._current_stream = get_current_stream
        self._blocks: list[Any] = []  # never given back: nobody tells when a graph is gone
        self._spare: list[int] = []
        self._first = 0
        self._turn = itertools.count()
        self._is_short = True  # of the ring, or of spare counters
        self.provide()

    def provide(self) -> None:
        """Have counters at hand before a capture begins, which may forbid to allocate."""
        if self._current_stream().is_capturing():
            return
        if not self._first:
            self._first = self._allocate(_RING)
        if len(self._spare) < _FEW:
            self._extend_spare()
        self._is_short = False

    def address(self) -> int:
        """Where the next launch on the current stream finds its counter."""
        stream = self._current_stream()
        if stream.ptr and stream.is_capturing():  # the legacy default stream never is
            return self._captured(stream)
        if self._is_short:
            self.provide()
        return self._first + next(self._turn) % _RING * _SLOT

    def _captured(self, stream: Any) -> int:
        """A counter that no other launch gets; the graph zeroes it before each of its own."""
        from cupy.cuda import runtime

        try:
            found = self._spare.pop()
        except IndexError:
            self._extend_spare()
            found = self._spare.pop()
        if len(self._spare) < _FEW:
            self._is_short = True
        runtime.memsetAsync(found, 0, 4, stream.ptr)
        return found

    def _extend_spare(self) -> None:
        start = self._allocate(_SPARE)
        self._spare.extend(range(start, start + _SLOT * _SPARE, _SLOT))

    def _allocate(self, count: int) -> int:
        """The address of so many counters. They are zero where no capture forbids to see to it."""
        from cupy.cuda import Memory, runtime

        block = Memory(_SLOT * count)  # not from a pool, whose memory belongs to one stream
        self._blocks.append(block)
        stream = self._current_stream()
        if not stream.is_capturing():
            runtime.memsetAsync(block.ptr, 0, _SLOT * count, stream.ptr)
            stream.synchronize()  # launches on other streams do not wait for it
        return int(block.ptr)
