"""Runs the CUDA sources that quantise on the host, as `emulated_gpu` does those of the backward
pass.
"""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from comparison import Array
from emulated_gpu import compiled, launcher

from cuflash.arrays import ArrayInfo, describe
from cuflash.families import sm90_fp8
from cuflash.fp8 import Fp8Recipe, gpu_quantizer
from cuflash.fp8.gpu_quantizer import Shapes
from cuflash.fp8.gpu_tensors import GpuFp8Tensors
from cuflash.fp8.inputs import checked_spec
from cuflash.operands import adopt_all
from cuflash.runtime.device import Device
from cuflash.runtime.specialisation import Specialisation
from cuflash.spec import Options

KERNELS = ("cuflash_fp8_statistics", "cuflash_fp8_summary", "cuflash_fp8_codes")
BEYOND = 1024  # bytes after what is asked for, which nobody may write


class _Memory(np.ndarray):
    """Memory of the host, whose address is where CuPy's arrays have it."""

    @property
    def data(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(ptr=self.ctypes.data)


class _Kernels:
    """Stands for a loaded module."""

    def __init__(self, spec: Specialisation) -> None:
        self._code = ctypes.CDLL(str(compiled(spec, KERNELS)))

    def function(self, name: str) -> Any:
        return getattr(self._code, f"{name}_run")


def _allocate(shape: tuple[int], dtype: Any) -> _Memory:
    """Full of NaN, at a multiple of 256 bytes, as CuPy's."""
    assert dtype == np.uint8
    memory = np.full(shape[0] + 256 + BEYOND, 0xFF, np.uint8)
    start = -memory.ctypes.data % 256
    return memory[start : start + shape[0] + BEYOND].view(_Memory)


def quantize_emulated(
    patch: pytest.MonkeyPatch, arrays: tuple[Array, Array, Array], recipe: Fp8Recipe,
    q_lens: Any = None, kv_lens: Any = None, sms: int = 1,
) -> GpuFp8Tensors:  # fmt: skip
    """`quantize_fp8` by the kernels, on so many multiprocessors."""
    lens = [None if one is None else np.asarray(one, np.int64) for one in (q_lens, kv_lens)]
    infos = [describe(name, array) for name, array in zip("qkv", arrays, strict=True)]
    assert all(isinstance(info, ArrayInfo) for info in infos)
    operands = adopt_all(*arrays, None, None, None, *lens, "bhsd")
    spec = checked_spec(operands, Options(return_lse=True))
    device = Device("cuda", "an emulated GPU", compute_capability=(9, 0), sm_count=sms)
    assert not sm90_fp8.reasons_against(spec, recipe, device)
    bucket = sm90_fp8.bucket_of(spec.head_dim)
    cupy = SimpleNamespace(ndarray=_allocate, asarray=lambda array: array.view(_Memory))
    with patch.context() as inner:
        inner.setitem(sys.modules, "cupy", cupy)
        inner.setattr(gpu_quantizer.graphs, "keep", lambda memory: None)
        inner.setattr(gpu_quantizer.module, "load", lambda spec, device: _Kernels(spec))
        inner.setattr(gpu_quantizer, "launcher", launcher)
        run = gpu_quantizer.prepare(spec, recipe, device, bucket)
        addresses = [0 if one is None else one.ctypes.data for one in lens]
        codes = run(*(_there(array) for array in arrays), *addresses)
    shapes = Shapes.of(spec, bucket)
    _assert_nothing_beside(codes.memory, shapes)
    return GpuFp8Tensors(spec, recipe, device, codes, shapes, 4, "bhsd", *lens)


def _there(array: Array) -> Any:
    return SimpleNamespace(data=SimpleNamespace(ptr=array.ctypes.data))


def _assert_nothing_beside(memory: Array, shapes: Shapes) -> None:
    """Between the arrays, and after them, all is as it was."""
    places, written = shapes.places, np.zeros(memory.size, bool)
    for name, size in shapes.sizes.items():
        written[places[name] : places[name] + size] = True
    written[places["value_tiles"] : places["k_means"]] = True  # 0 from end to end
    assert (memory[~written] == 0xFF).all()
