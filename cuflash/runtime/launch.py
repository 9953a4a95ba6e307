"""Queues a kernel whose only argument is a struct.

For less of the host's time than CuPy's own launcher, which looks at each argument anew.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from struct import Struct
from typing import Any


def launcher(
    kernel: Any, blocks: int, threads: int, shared_memory: int, changing: Struct, struct: bytes
) -> Callable[..., None]:
    """A function that queues `kernel` on the current stream, given what changes in its struct.

    Parameters
    ----------
    kernel : cupy.RawKernel
        Of the device that is current, here and at each launch.
    blocks, threads : int
        Of the grid, and of a block.
    shared_memory : int
        Dynamic shared memory of a block in bytes; the kernel's limit is raised to it.
    changing : struct.Struct
        The first fields of the struct, which are the arguments of each launch.
    struct : bytes
        The whole struct, of which the rest lasts.
    """
    from cupy.cuda import driver, get_current_stream

    kernel.max_dynamic_shared_size_bytes = shared_memory
    function = kernel.kernel  # a reference keeps its module loaded
    address = function.ptr
    spare: list[tuple[Any, Any, int]] = []

    def launch(*values: Any) -> None:
        # A copy that no other thread has: others run while the driver reads it.
        try:
            copy = spare.pop()
        except IndexError:
            copy = _copy(struct)
        changing.pack_into(copy[0], 0, *values)
        driver.launchKernel(
            address, blocks, 1, 1, threads, 1, 1, shared_memory, get_current_stream().ptr,
            copy[2], 0,
        )  # fmt: skip
        spare.append(copy)

    return launch


def _copy(struct: bytes) -> tuple[Any, Any, int]:
    """A copy that can be changed, a pointer to it, and the address of that pointer."""
    held = ctypes.create_string_buffer(struct, len(struct))
    pointer = ctypes.c_void_p(ctypes.addressof(held))
    return held, pointer, ctypes.addressof(pointer)
