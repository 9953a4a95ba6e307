"""What a device can do, as plain data; the rules of dispatch can ask about one not here."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import cast


@dataclass(frozen=True, slots=True)
class Device:
    """A CPU or one GPU. Sizes in bytes; 0 where unknown (a device that is only named)."""

    kind: str  # "cpu" or "cuda"
    name: str
    index: int = 0
    compute_capability: tuple[int, int] | None = None
    sm_count: int = 0
    shared_memory_per_block: int = 0
    l2_size: int = 0
    memory: int = 0

    def __str__(self) -> str:
        if self.compute_capability is None:
            return self.name
        major, minor = self.compute_capability
        return f"{self.name} (compute capability {major}.{minor})"


# Most that a block may have, in bytes: CUDA programming guide, table of compute capabilities.
_SHARED_MEMORY = {
    **dict.fromkeys(((8, 0), (8, 7)), 163 << 10),
    **dict.fromkeys(((9, 0), (10, 0), (10, 3), (11, 0)), 227 << 10),
    **dict.fromkeys(((7, 0),), 96 << 10),
    **dict.fromkeys(((7, 5),), 64 << 10),
}

CPU = Device(kind="cpu", name="CPU")


def of_array(place: str) -> Device:
    """The device of an `ArrayInfo.device` string."""
    return CPU if place == "cpu" else cuda_device(int(place.removeprefix("cuda:")))


@functools.cache
def cuda_device(index: int) -> Device:
    """Properties of a GPU of this machine.

    Raises
    ------
    RuntimeError
        Where there is no such GPU; `unavailable_reason` says why.
    """
    reason = unavailable_reason()
    if reason:
        raise RuntimeError(f"no GPU here: {reason}")
    from cupy.cuda import runtime

    if not 0 <= index < runtime.getDeviceCount():
        raise RuntimeError(f"no GPU {index} here: {runtime.getDeviceCount()} found")
    properties = runtime.getDeviceProperties(index)
    return Device(
        kind="cuda",
        name=properties["name"].decode(),
        index=index,
        compute_capability=(properties["major"], properties["minor"]),
        sm_count=properties["multiProcessorCount"],
        shared_memory_per_block=properties["sharedMemPerBlockOptin"],
        l2_size=properties["l2CacheSize"],
        memory=properties["totalGlobalMem"],
    )


def cuda_devices() -> list[Device]:
    """Every GPU of this machine; empty where CuPy or a driver is missing."""
    if unavailable_reason():
        return []
    from cupy.cuda import runtime

    return [cuda_device(i) for i in range(runtime.getDeviceCount())]


def unavailable_reason() -> str:
    """Why no GPU can be used here, or an empty string when one can."""
    try:
        import cupy
    except ImportError as error:
        return f"CuPy can't be imported ({error})"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"the CUDA driver does not answer ({error})"
    return "" if count else "CUDA finds no device"


def activate(device: Device) -> AbstractContextManager[object]:
    """Make a GPU current while its arrays are worked on; nothing to do for the CPU."""
    if device.kind == "cpu":
        return nullcontext()
    from cupy.cuda import Device as CudaDevice

    return cast("AbstractContextManager[object]", CudaDevice(device.index))


def current_index(device: Device) -> Callable[[], int]:
    """A function that tells which device of a device's kind is current."""
    if device.kind == "cpu":
        return lambda: device.index
    from cupy.cuda import runtime

    return cast("Callable[[], int]", runtime.getDevice)


def named(text: str) -> Device:
    """A device that need not be here: ``"cpu"``, or ``"9.0"`` or ``"sm_90"`` for a capability.

    Raises
    ------
    ValueError
        For any other text.
    """
    if text == "cpu":
        return CPU
    match = re.fullmatch(r"(?:sm_?)?(\d+?)\.?(\d)a?", text)
    if not match:
        raise ValueError(
            f"device: got {text!r}; expected 'cpu' or a compute capability such as '9.0' or 'sm_90'"
        )
    major, minor = int(match[1]), int(match[2])
    return Device(
        kind="cuda",
        name=f"sm_{major}{minor}",
        compute_capability=(major, minor),
        shared_memory_per_block=_SHARED_MEMORY.get((major, minor), 99 << 10),
    )
