"""Zero-copy view of a CPU tensor through DLPack, with the bfloat16 that NumPy refuses.

Structures as in the DLPack specification (dlpack.h, versions 0.x and 1.x).
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

CPU_DEVICE = 1
_BFLOAT_CODE = 4
_READ_ONLY_FLAG = 1


class _DLDevice(ctypes.Structure):
    _fields_ = [("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


class _DLDataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    ]


_capsule_is = ctypes.pythonapi.PyCapsule_IsValid
_capsule_is.argtypes, _capsule_is.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_int
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.argtypes, _capsule_pointer.restype = (
    [ctypes.py_object, ctypes.c_char_p],
    ctypes.c_void_p,
)


class _Exported:
    """Array interface over an exporter's memory; owns the capsule, whose destructor frees the
    export.
    """

    def __init__(self, capsule: Any, tensor: _DLTensor, read_only: bool) -> None:
        self._capsule = capsule
        shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
        strides = None
        if tensor.strides:
            strides = tuple(2 * tensor.strides[i] for i in range(tensor.ndim))
        self.__array_interface__ = {
            "shape": shape,
            "strides": strides,
            "typestr": "<u2",
            "data": ((tensor.data or 0) + tensor.byte_offset, read_only),
            "version": 3,
        }


def as_numpy(obj: Any) -> np.ndarray[Any, Any]:
    """View a CPU tensor of any library as a NumPy array over the same memory.

    bfloat16 comes as `ml_dtypes.bfloat16`.
    """
    try:
        return np.from_dlpack(obj)
    except (BufferError, RuntimeError):
        exported = _bfloat16_export(obj)
        if exported is None:
            raise
    import ml_dtypes

    return np.asarray(exported).view(ml_dtypes.bfloat16)


def _bfloat16_export(obj: Any) -> _Exported | None:
    """The memory of a one-lane bfloat16 tensor, or None for any other dtype."""
    try:
        capsule = obj.__dlpack__(max_version=(1, 0))
    except TypeError:  # an exporter from before DLPack 1.0
        capsule = obj.__dlpack__()
    if _capsule_is(capsule, b"dltensor_versioned"):
        pointer = _capsule_pointer(capsule, b"dltensor_versioned")
        managed = ctypes.cast(pointer, ctypes.POINTER(_DLManagedTensorVersioned)).contents
        tensor, read_only = managed.tensor, bool(managed.flags & _READ_ONLY_FLAG)
    else:
        pointer = _capsule_pointer(capsule, b"dltensor")
        # The old form can't say whether it may be written; NumPy takes it not to, and so do we.
        tensor, read_only = ctypes.cast(pointer, ctypes.POINTER(_DLTensor)).contents, True
    kind = tensor.dtype
    if (kind.code, kind.bits, kind.lanes) != (_BFLOAT_CODE, 16, 1):
        return None
    return _Exported(capsule, tensor, read_only)
