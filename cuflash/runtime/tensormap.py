"""Tensor maps: descriptions of arrays by which the copy engine (TMA) of a GPU moves boxes of them.

The driver makes them, from addresses and sizes alone: this needs no device and queues nothing. The
rules are those of `cuTensorMapEncodeTiled` in the CUDA driver API's documentation.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

BYTES = 128  # of a map
_ALIGNMENT = 64  # of the memory that the driver writes it to
_RANK = 4
_ITEM_SIZE = 2

# enum CUtensorMapDataType, CUtensorMapSwizzle, CUtensorMapL2promotion of cuda.h
_DTYPES = {"uint8": 0, "float16": 6, "bfloat16": 9}
_SWIZZLES = {64: 2, 128: 3}
_L2_PROMOTION_256B = 3

_UNIT = 16  # bytes that addresses and strides are multiples of
_STRIDES_BELOW = 1 << 40
_MOST = 1 << 32  # elements along an axis

_AXES = ("batch", "heads", "seq", "dim")


def reasons_against(
    shape: tuple[int, int, int, int], strides: tuple[int, int, int, int], aligned: bool
) -> list[str]:
    """Why no map can describe an array of 16-bit elements; empty when one can.

    Parameters
    ----------
    shape, strides : tuple of int
        Of the (batch, heads, seq, dim) view, strides in elements. An axis of one element may have
        any stride.
    aligned : bool
        Whether its first element lies on 16 bytes.
    """
    reasons = []
    if not aligned:
        reasons.append(f"needs to start at a multiple of {_UNIT} bytes")
    if shape[3] > 1 and strides[3] != 1:
        reasons.append("needs neighbouring elements in its last axis")
    for axis, size, step in zip(_AXES[:3], shape, strides, strict=False):
        step *= _ITEM_SIZE
        if size > 1 and not (0 < step < _STRIDES_BELOW and step % _UNIT == 0):
            # The documentation is silent about 0; a broadcast view is refused rather than tried.
            reasons.append(
                f"needs steps along {axis} of a positive multiple of {_UNIT} bytes below 2^40, "
                f"not {step}"
            )
    reasons += [
        f"takes up to 2^32 elements along {axis}, not {size}"
        for axis, size in zip(_AXES, shape, strict=True)
        if size > _MOST
    ]
    return reasons


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """All of a map but the address: equal to itself alone, so that it is quick to look up."""

    dtype: str
    sizes: tuple[int, ...]
    byte_strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle_bytes: int

    @classmethod
    def of(
        cls,
        dtype: str,
        shape: tuple[int, int, int, int],
        strides: tuple[int, int, int, int],
        heads_and_rows: tuple[int, int],
        swizzle_bytes: int,
    ) -> Layout:
        """The layout of a (batch, heads, seq, dim) view, which `reasons_against` has nothing
        against, moved in boxes of some rows of some heads by as many columns as a swizzle spans.

        Dimensions are innermost first: columns, heads, rows, batch.
        """
        item_size = 1 if dtype == "uint8" else _ITEM_SIZE
        # The driver looks at the stride of a single element too: it gets a whole row.
        row = -(-shape[3] * item_size // _UNIT) * _UNIT
        batch, heads, seq = (
            step * item_size if size > 1 else row
            for size, step in zip(shape, strides[:3], strict=False)
        )
        sizes = (shape[3], shape[1], shape[2], shape[0])
        box = (swizzle_bytes // item_size, *heads_and_rows, 1)
        return cls(dtype, sizes, (heads, seq, batch), box, swizzle_bytes)


@functools.lru_cache(maxsize=4096)
def at(layout: Layout, address: int) -> bytes:
    """The map of an array at an address, made once for as long as it is remembered."""
    return encode(
        address, layout.dtype, layout.sizes, layout.byte_strides, layout.box, layout.swizzle_bytes
    )


def encode(
    address: int,
    dtype: str,
    sizes: tuple[int, ...],
    byte_strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle_bytes: int,
) -> bytes:
    """The 128 bytes of a map of rank 4, whose boxes read zeros beyond the array.

    Parameters
    ----------
    address : int
        Of the first element.
    dtype : {"uint8", "float16", "bfloat16"}
    sizes, box : tuple of int
        Elements of the array, and of what is moved at a time, along each dimension, innermost
        first.
    byte_strides : tuple of int
        Of the dimensions but the innermost one.
    swizzle_bytes : {128, 64}
        Span within which shared memory holds units of 16 bytes in swizzled order.

    Raises
    ------
    RuntimeError
        With the driver's error code and the arguments, or where it knows no tensor maps.
    """
    function = _driver_function()
    memory = ctypes.create_string_buffer(BYTES + _ALIGNMENT)
    start = -ctypes.addressof(memory) % _ALIGNMENT
    code = function(
        ctypes.addressof(memory) + start,
        _DTYPES[dtype],
        _RANK,
        address,
        (ctypes.c_uint64 * _RANK)(*sizes),
        (ctypes.c_uint64 * (_RANK - 1))(*byte_strides),
        (ctypes.c_uint32 * _RANK)(*box),
        (ctypes.c_uint32 * _RANK)(1, 1, 1, 1),
        0,  # not interleaved
        _SWIZZLES[swizzle_bytes],
        _L2_PROMOTION_256B,
        0,  # beyond the array are zeros
    )
    if code:
        raise RuntimeError(
            f"cuTensorMapEncodeTiled: error {code} for address {address:#x}, {dtype}, sizes "
            f"{sizes}, byte strides {byte_strides}, box {box}, swizzle {swizzle_bytes}"
        )
    return memory.raw[start : start + BYTES]


@functools.cache
def _driver_function() -> Callable[..., int]:
    """`cuTensorMapEncodeTiled` of the driver."""
    try:
        function: Any = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"tensor maps need a driver of CUDA 12 or newer ({error})") from error
    pointer, enum = ctypes.c_void_p, ctypes.c_uint
    sizes, boxes = ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint32)
    function.argtypes = [
        pointer, enum, ctypes.c_uint32, pointer, sizes, sizes, boxes, boxes, enum, enum, enum, enum,
    ]  # fmt: skip
    function.restype = ctypes.c_int
    return function  # type: ignore[no-any-return]
