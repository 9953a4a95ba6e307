"""Takes arrays from NumPy, CuPy, `__cuda_array_interface__` and DLPack without copying them.

The rest of the library meets two kinds of array only, `numpy.ndarray` and `cupy.ndarray`, and
decides everything from their `ArrayInfo`, so that the rules can be tested where there is no GPU.
"""

from __future__ import annotations

import functools
import math
import operator
import re
import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import dlpack

CPU = "cpu"

# Types that are taken as they are; CuPy's joins them once an array of it was met.
NATIVE: set[type] = {np.ndarray}


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """Shape, strides, dtype and place of an array, without its data.

    Stands in for an array in `cuflash.explain`, so that a plan can be read without allocating
    anything.

    Parameters
    ----------
    shape : tuple of int
    dtype : str
        NumPy's name of the dtype, such as ``"float16"`` or ``"bfloat16"``.
    device : str
        ``"cpu"`` or ``"cuda:N"``.
    strides : tuple of int, optional
        In elements, not bytes; C-contiguous when left out.
    aligned : bool
        Whether the first element lies on a 16-byte boundary.

    Raises
    ------
    ValueError
        For a negative length, strides that don't fit the shape, or an unknown device.
    """

    shape: tuple[int, ...]
    dtype: str = "float16"
    device: str = "cuda:0"
    strides: tuple[int, ...] = field(default=())
    aligned: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(map(int, self.shape)))
        if not self.strides:
            object.__setattr__(self, "strides", contiguous_strides(self.shape))
        if min(self.shape, default=0) < 0:
            raise ValueError(f"shape: got {self.shape}; expected lengths of 0 or more")
        if len(self.strides) != len(self.shape):
            raise ValueError(
                f"strides: got {self.strides}; expected one for each axis of {self.shape}"
            )
        if not _is_place(self.device):
            raise ValueError(f"device: got {self.device!r}; expected 'cpu' or 'cuda:N'")

    @property
    def on_gpu(self) -> bool:
        """Whether the array lies in GPU memory."""
        return self.device != CPU


@functools.lru_cache(maxsize=64)
def _is_place(device: str) -> bool:
    return device == CPU or re.fullmatch(r"cuda:\d+", device) is not None


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a C-contiguous array of `shape`."""
    strides = []
    step = 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def adopt(name: str, obj: Any) -> Any:
    """Return `obj` as a `numpy.ndarray` or `cupy.ndarray` over the same memory.

    Raises
    ------
    TypeError
        Naming `name`, when `obj` is not an array or can't be taken without a copy.
    """
    if type(obj) in NATIVE:
        return obj
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(obj, cupy.ndarray):
        NATIVE.add(cupy.ndarray)
        return obj
    if isinstance(obj, np.ma.MaskedArray):
        raise TypeError(
            f"{name}: got a masked array, whose mask would be lost; pass its .filled(...) data"
        )
    if isinstance(obj, np.ndarray):
        return np.asarray(obj)
    try:
        if hasattr(obj, "__dlpack_device__"):
            return _from_dlpack(name, obj)
        if hasattr(obj, "__cuda_array_interface__"):
            return _import_cupy(name).asarray(obj)
    except (BufferError, RuntimeError, NotImplementedError, AttributeError, ValueError) as error:
        raise TypeError(
            f"{name}: this {_type_name(obj)} could not be taken without a copy: {error}"
        ) from error
    raise TypeError(_not_an_array(name, obj))


def describe(name: str, obj: Any) -> ArrayInfo:
    """`ArrayInfo` of a native array, or `obj` itself when it is one already."""
    if isinstance(obj, ArrayInfo):
        return obj
    dtype, shape = obj.dtype, obj.shape
    if not dtype.isnative:
        raise TypeError(
            f"{name}: got byte-swapped {dtype.newbyteorder('=').name}; expected native byte order"
        )
    on_host = isinstance(obj, np.ndarray)
    device = CPU if on_host else f"cuda:{obj.data.device_id}"
    aligned = address(obj) % 16 == 0
    if obj.flags.c_contiguous if on_host else getattr(obj, CONTIGUITY, False):
        # Whatever its axes of one element say.
        return ArrayInfo(shape, _name(dtype), device, contiguous_strides(shape), aligned)
    size, byte_strides = max(dtype.itemsize, 1), obj.strides
    if math.gcd(*byte_strides) % size:
        raise ValueError(
            f"{name}: got byte strides {byte_strides}; expected multiples of the item size, {size}"
        )
    strides = tuple([step // size for step in byte_strides])
    return ArrayInfo(shape, _name(dtype), device, strides, aligned)


def fingerprint(array: Any) -> Hashable:
    """All that `describe` reads of a native array, as it is: alike only where its answers are."""
    if type(array) is np.ndarray:
        return array.shape, array.strides, array.dtype, address(array) % 16
    strides = None if getattr(array, CONTIGUITY, False) else array.strides
    return _facts_on_device(array), strides, array.data.ptr % 16


# Of a CuPy array, all that its fingerprint has but how it lies in memory.
_facts_on_device = operator.attrgetter("shape", "dtype", "data.device_id")
# What tells that a CuPy array is C-contiguous: `strides` take four times as long, `flags` ten
# times. It is not CuPy's promise: where it is missing, strides are looked at.
CONTIGUITY = "_c_contiguous"
# What sets up a CuPy array of a shape and a dtype, once it exists. No promise either.
_SET_UP = "_init"


@functools.cache
def _name(dtype: np.dtype[Any]) -> str:
    return str(dtype.name)  # which NumPy builds anew each time


def address(array: Any) -> int:
    """Where the first element of a native array lies."""
    found: int = (
        array.__array_interface__["data"][0] if isinstance(array, np.ndarray) else array.data.ptr
    )
    return found


def reach(array: Any) -> tuple[int, int]:
    """First byte and the byte past the last one that a native array touches, counted from its
    address.
    """
    if array.size == 0:
        return 0, 0
    low = sum(min((n - 1) * step, 0) for n, step in zip(array.shape, array.strides, strict=True))
    high = sum(max((n - 1) * step, 0) for n, step in zip(array.shape, array.strides, strict=True))
    return low, high + array.dtype.itemsize


def memory_range(array: Any) -> tuple[int, int]:
    """First byte and the byte past the last one that a native array touches."""
    start, (low, high) = address(array), reach(array)
    return start + low, start + high


def may_repeat(info: ArrayInfo) -> bool:
    """Whether two indices of an array can be one place in memory, as in a broadcast view.

    Strides that nest, each beyond what the smaller ones reach, can't; any others may.
    """
    if 0 in info.shape:
        return False
    reach = 0
    axes = ((abs(step), n) for step, n in zip(info.strides, info.shape, strict=True) if n > 1)
    for step, n in sorted(axes):
        if step <= reach:
            return True
        reach += step * (n - 1)
    return False


def may_overlap(a: Any, b: Any) -> bool:
    """Whether two native arrays can touch the same bytes.

    Interleaved views are told apart for NumPy only; on the GPU, address ranges decide.
    """
    a_low, a_high = memory_range(a)
    b_low, b_high = memory_range(b)
    if a_low >= b_high or b_low >= a_high:
        return False
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return np.shares_memory(a, b)
    return True


def bits(array: Any) -> Any:
    """16-bit elements as integers: moving them needs no arithmetic on bfloat16."""
    return array.view(np.uint16) if array.dtype.itemsize == 2 else array


def fill_zero(array: Any) -> None:
    """Set every element of a native array to 0."""
    bits(array)[...] = 0


def to_host(array: Any) -> np.ndarray[Any, Any]:
    """A NumPy array as it is, or a copy of a CuPy one."""
    copy: np.ndarray[Any, Any] = array if isinstance(array, np.ndarray) else array.get()
    return copy


def module_of(array: Any) -> Any:
    """The array module, `numpy` or `cupy`, that made a native array."""
    return np if isinstance(array, np.ndarray) else sys.modules["cupy"]


def maker_of(array: Any) -> Callable[[tuple[int, ...], Any], Any]:
    """What makes arrays like a native one, of a shape and a dtype, without setting elements."""
    if isinstance(array, np.ndarray):
        return np.empty
    # To call the class takes the host some 0.3 us longer, for an `__init__` that does nothing, and
    # `cupy.empty` does more beside.
    ndarray = sys.modules["cupy"].ndarray
    make = functools.partial(ndarray.__new__, ndarray)
    base = ndarray.__base__
    if not hasattr(base, _SET_UP):
        return make
    # What that does, without taking its arguments apart twice more.
    create, set_up = functools.partial(base.__new__, ndarray), getattr(base, _SET_UP)

    def make_directly(shape: tuple[int, ...], dtype: Any) -> Any:
        array = create()
        set_up(array, shape, dtype)
        return array

    return make_directly


def _from_dlpack(name: str, obj: Any) -> Any:
    device_type = int(obj.__dlpack_device__()[0])
    if device_type == dlpack.CPU_DEVICE:
        return dlpack.as_numpy(obj)
    # CuPy hands its current stream to the producer, which orders its pending work before ours.
    return _import_cupy(name).from_dlpack(obj)


def _import_cupy(name: str) -> Any:
    try:
        import cupy
    except ImportError as error:
        raise TypeError(
            f"{name}: got an array in GPU memory, which needs CuPy: "
            "pip install 'cuflash[cuda13]' (or cuda12)"
        ) from error
    return cupy


def _type_name(obj: Any) -> str:
    kind = type(obj)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _not_an_array(name: str, obj: Any) -> str:
    hint = (
        "; wrap it with numpy.asarray(...)"
        if isinstance(obj, (list, tuple, int, float, np.generic))
        else ""
    )
    return (
        f"{name}: got {_type_name(obj)}; expected a NumPy or CuPy array, or an object with "
        f"__dlpack__ or __cuda_array_interface__ (torch, JAX, Numba){hint}"
    )
