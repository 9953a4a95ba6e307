"""Most bytes that a call allocates at once."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np


def peak_bytes(xp: Any, call: Callable[[], Any]) -> int:
    """Of NumPy as tracemalloc counts it, of CuPy as its memory pool hands it out."""
    if xp is np:
        tracemalloc.start()
        try:
            call()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    return _of_pool(xp, call)


def _of_pool(cupy: Any, call: Callable[[], Any]) -> int:
    class Count(cupy.cuda.MemoryHook):  # type: ignore[misc]
        """Follows what the pool hands out and takes back."""

        name = "bench peak"

        def __init__(self) -> None:
            self.now = self.most = 0

        def malloc_postprocess(self, **what: Any) -> None:
            self.now += what["mem_size"]
            self.most = max(self.most, self.now)

        def free_postprocess(self, **what: Any) -> None:
            self.now -= what["mem_size"]

    count = Count()
    with count:
        call()
    cupy.cuda.Device().synchronize()
    return count.most
