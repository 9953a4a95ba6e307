"""CuPy arrays as torch tensors and back, without a copy: DLPack of CuPy has no bfloat16."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..inputs import dtype_of


def to_torch(array: Any) -> Any:
    """A tensor of the same memory."""
    import torch

    bits = torch.from_dlpack(array.view(np.int16))
    return bits.view(getattr(torch, array.dtype.name))


def from_torch(tensor: Any) -> Any:
    """A CuPy array of the same memory, of any strides; its dtype has 16 bits."""
    import cupy
    import torch

    name = str(tensor.dtype).removeprefix("torch.")
    return cupy.from_dlpack(tensor.detach().view(torch.int16)).view(dtype_of(name))


def rows_first(array: Any) -> Any:
    """A (batch, heads, seq, dim) array as a (batch, seq, heads, dim) tensor in C order."""
    import cupy

    return to_torch(cupy.ascontiguousarray(array.view(np.int16).swapaxes(1, 2)).view(array.dtype))
