"""A CPU tensor that speaks DLPack alone, in its old or its versioned form, and counts its frees.

NumPy makes each export and frees it; in between, its header is rewritten to say what NumPy itself
can't. The structures follow dlpack.h, apart from the library's own.
"""

from __future__ import annotations

import ctypes
import weakref
from ctypes import c_int32, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from typing import Any

import numpy as np

FLOAT, BFLOAT, COMPLEX = 2, 4, 5
_READ_ONLY = 1


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", c_void_p),
        ("strides", c_void_p),
        ("byte_offset", c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("manager_ctx", c_void_p), ("deleter", c_void_p))


class _ManagedVersioned(ctypes.Structure):
    _fields_ = (
        ("major", c_uint32),
        ("minor", c_uint32),
        ("manager_ctx", c_void_p),
        ("deleter", c_void_p),
        ("flags", c_uint64),
        ("tensor", _Tensor),
    )


_pointer = ctypes.PYFUNCTYPE(c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class Exporter:
    """A tensor over the memory of a NumPy array of floats or, for bfloat16, of uint16.

    Parameters
    ----------
    array : ndarray
        The tensor's shape, strides and memory, which the exports alone keep alive.
    code : int, optional
        DLPack's type code, where it is not the array's own.
    versioned : bool
        Export as DLPack 1.0 does, else as 0.8 and before.
    read_only : bool
        Say so, which only the versioned form can.
    null_strides : bool
        Leave them out, as a contiguous tensor may.
    byte_offset : int
        How far before the first element the data pointer points.
    """

    def __init__(
        self,
        array: np.ndarray[Any, Any],
        code: int | None = None,
        *,
        versioned: bool = True,
        read_only: bool = False,
        null_strides: bool = False,
        byte_offset: int = 0,
    ) -> None:
        self.array, self.code, self.versioned, self.read_only = array, code, versioned, read_only
        self.null_strides, self.byte_offset = null_strides, byte_offset
        self.exported = self.freed = 0

    @property
    def alive(self) -> int:
        """Exports that have not been freed; NumPy's deleter drops the view that each holds."""
        return self.exported - self.freed

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, *, stream: Any = None, **newer: Any) -> Any:
        if newer and not self.versioned:
            raise TypeError(f"__dlpack__() got unexpected keyword arguments {list(newer)}")
        held = self.array[...]
        self.exported += 1
        weakref.finalize(held, self._count_freed)
        if self.versioned:
            capsule: Any = held.__dlpack__(max_version=(1, 0))
            managed: Any = _ManagedVersioned.from_address(_pointer(capsule, b"dltensor_versioned"))
            if self.read_only:
                managed.flags |= _READ_ONLY
        else:
            capsule = held.__dlpack__()
            managed = _Managed.from_address(_pointer(capsule, b"dltensor"))
        tensor = managed.tensor
        if self.code is not None:
            tensor.code = self.code
        if self.null_strides:
            tensor.strides = None
        tensor.data -= self.byte_offset
        tensor.byte_offset = self.byte_offset
        return capsule

    def _count_freed(self) -> None:
        self.freed += 1
