"""Queues a kernel whose only argument is a struct.

For less of the host's time than CuPy's own launcher, which looks at each argument anew.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any


def launcher(kernel: Any, blocks: int, threads: int, shared_memory: int) -> Callable[[bytes], None]:
    """A function that queues `kernel` on the current stream, given its struct.

    Parameters
    ----------
    kernel : cupy.RawKernel
        Of the device that is current, here and at each launch.
    blocks, threads : int
        Of the grid, and of a block.
    shared_memory : int
        Dynamic shared memory of a block in bytes; the kernel's limit is raised to it.
    """
    from cupy.cuda import driver, get_current_stream

    kernel.max_dynamic_shared_size_bytes = shared_memory
    function = kernel.kernel  # a reference keeps its module loaded
    address = function.ptr

    def launch(struct: bytes) -> None:
        # Of each launch its own copy: other threads run while the driver reads it.
        held = ctypes.create_string_buffer(struct, len(struct))
        arguments = ctypes.c_void_p(ctypes.addressof(held))
        driver.launchKernel(
            address, blocks, 1, 1, threads, 1, 1, shared_memory, get_current_stream().ptr,
            ctypes.addressof(arguments), 0,
        )  # fmt: skip

    return launch
