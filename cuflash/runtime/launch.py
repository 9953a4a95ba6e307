"""Queues a kernel whose only argument is a struct.

For less of the host's time than CuPy's own launcher, which looks at each argument anew.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from struct import Struct
from typing import Any

_ALLOWED = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Attribute(ctypes.Structure):
    """`CUlaunchAttribute` of the driver API."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    """`CUlaunchConfig` of the driver API."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_memory", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


def launcher(
    kernel: Any, blocks: int, threads: int, shared_memory: int, changing: Struct, struct: bytes,
    *, early: bool = False,
) -> Callable[..., None]:  # fmt: skip
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
    early : bool
        The kernel may start while the one before it in the stream ends, for which it waits itself
        (PTX ISA, griddepcontrol): what lies between two kernels, some microseconds, is then hidden.
    """
    from cupy.cuda import driver, get_current_stream

    kernel.max_dynamic_shared_size_bytes = shared_memory
    function = kernel.kernel  # a reference keeps its module loaded
    address = function.ptr
    spare: list[tuple[Any, int, Any]] = []

    if early:
        return _early_launch(function, blocks, threads, shared_memory, changing, struct)

    def launch(*values: Any) -> None:
        # A copy that no other thread has: others run while the driver reads it.
        try:
            copy = spare.pop()
        except IndexError:
            copy = _copy(changing, struct)
        pack, arguments, _ = copy
        pack(*values)
        driver.launchKernel(
            address, blocks, 1, 1, threads, 1, 1, shared_memory, get_current_stream().ptr,
            arguments, 0,
        )  # fmt: skip
        spare.append(copy)

    return launch


def _early_launch(
    function: Any, blocks: int, threads: int, shared_memory: int, changing: Struct, struct: bytes
) -> Callable[..., None]:
    from cupy.cuda import driver, get_current_stream

    attribute = _Attribute(id=_ALLOWED)
    attribute.value[0] = 1
    queue = _driver_launch()
    as_argument = ctypes.c_void_p.from_param  # which each call would do else
    address = as_argument(function.ptr)
    spare: list[tuple[Any, ...]] = []

    def another() -> tuple[Any, ...]:
        pack, arguments, kept = _copy(changing, struct)
        config = _Config(
            grid=(blocks, 1, 1), block=(threads, 1, 1), shared_memory=shared_memory,
            attributes=ctypes.pointer(attribute), count=1,
        )  # fmt: skip
        addresses = as_argument(ctypes.addressof(config)), as_argument(arguments)
        return pack, config, *addresses, (kept, function)

    def launch(*values: Any) -> None:
        try:
            copy = spare.pop()
        except IndexError:
            copy = another()
        pack, config, configuration, arguments, _ = copy
        pack(*values)
        config.stream = get_current_stream().ptr
        status = queue(configuration, address, arguments, None)
        if status:
            raise driver.CUDADriverError(status)
        spare.append(copy)

    return launch


@functools.cache
def _driver_launch() -> Any:
    return ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx  # answers an int, by ctypes' own default


def _copy(changing: Struct, struct: bytes) -> tuple[Callable[..., None], int, Any]:
    """Of a copy of the struct: what sets its first fields, the address of a pointer to it, and what
    has to be kept for as long as either.
    """
    held = ctypes.create_string_buffer(struct, len(struct))
    pointer = ctypes.c_void_p(ctypes.addressof(held))
    # Bound, it takes values as they come, without a list of them and of the other two.
    pack = functools.partial(changing.pack_into, held, 0)
    return pack, ctypes.addressof(pointer), pointer
