"""8-bit attention on a GPU: quantise, then attend, without a copy or a wait between."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from ..arrays import lengths_on_device
from ..families import sm90_fp8
from ..operands import Operands, bhsd_view
from ..runtime.device import Device, activate, of_array
from ..spec import AttentionSpec
from . import gpu_quantizer
from .gpu_quantizer import Codes
from .gpu_tensors import GpuFp8Tensors
from .recipe import Fp8Recipe


def attend(spec: AttentionSpec, recipe: Fp8Recipe, operands: Operands) -> tuple[Any, Any]:
    """`out`, allocated unless it is given, and LSE or None.

    Raises
    ------
    NotImplementedError
        With each reason, where the kernel does not take the problem.
    """
    device = _taken("attention_fp8", spec, recipe)
    with activate(device):
        lens = _lengths(operands)
        codes = None
        if not spec.is_empty:
            codes = _quantized(spec, recipe, device, operands, lens)
        return _attend(spec, recipe, device, codes, operands, lens)


def quantize(spec: AttentionSpec, recipe: Fp8Recipe, operands: Operands) -> GpuFp8Tensors:
    """`quantize_fp8` of arrays on a GPU.

    Raises
    ------
    NotImplementedError
        With each reason, where the kernel does not take the problem.
    """
    device = _taken("quantize_fp8", spec, recipe)
    if spec.is_empty:
        raise NotImplementedError("quantize_fp8 on a GPU: needs queries and keys")
    with activate(device):
        lens = _lengths(operands)
        codes = _quantized(spec, recipe, device, operands, lens)
    shapes = gpu_quantizer.Shapes.of(spec, sm90_fp8.bucket_of(spec.head_dim))
    rank, layout = operands.q.ndim, operands.layout
    return GpuFp8Tensors(spec, recipe, device, codes, shapes, rank, layout, *lens)


def attend_to(tensors: GpuFp8Tensors, spec: AttentionSpec, operands: Operands) -> tuple[Any, Any]:
    """`attend` to what `quantize` made. The q, k and v of `operands` only describe arrays."""
    device = _taken("attention_quantized", spec, tensors.recipe)
    with activate(device):
        lens = tensors.q_lens, tensors.kv_lens
        return _attend(spec, tensors.recipe, device, tensors.packed, operands, lens)


def _taken(what: str, spec: AttentionSpec, recipe: Fp8Recipe) -> Device:
    device = of_array(spec.device)
    reasons = sm90_fp8.reasons_against(spec, recipe, device)
    if reasons:
        raise NotImplementedError(f"{what} on {device}: {'; '.join(reasons)}")
    return device


def _lengths(operands: Operands) -> list[Any]:
    return [
        None if one is None else lengths_on_device(one)
        for one in (operands.q_lens, operands.kv_lens)
    ]


def _addresses(lens: Any) -> list[int]:
    return [0 if one is None else one.data.ptr for one in lens]


def _quantized(
    spec: AttentionSpec, recipe: Fp8Recipe, device: Device, operands: Operands, lens: Any
) -> Codes:
    views = (bhsd_view(array, operands.layout) for array in (operands.q, operands.k, operands.v))
    return _quantizer(spec, recipe, device)(*views, *_addresses(lens))


def _attend(
    spec: AttentionSpec, recipe: Fp8Recipe, device: Device, codes: Codes | None,
    operands: Operands, lens: Any,
) -> tuple[Any, Any]:  # fmt: skip
    import cupy

    out, lse = operands.out, None
    shape = operands.q.shape
    if out is None:
        out = cupy.empty((*shape[:-1], spec.head_dim_v), spec.dtype)
    if spec.return_lse:
        lse = cupy.empty((spec.batch, spec.q_heads, spec.q_len), np.float32)
    if codes is not None:
        to = bhsd_view(out, operands.layout)
        run = _kernel(spec, recipe, device)
        run(codes, to.data.ptr, 0 if lse is None else lse.data.ptr, *_addresses(lens))
    return out, None if lse is None else lse[(0,) * (4 - len(shape))]


@functools.lru_cache(maxsize=1024)
def _quantizer(spec: AttentionSpec, recipe: Fp8Recipe, device: Device) -> Callable[..., Codes]:
    return gpu_quantizer.prepare(spec, recipe, device, sm90_fp8.bucket_of(spec.head_dim))


@functools.lru_cache(maxsize=1024)
def _kernel(spec: AttentionSpec, recipe: Fp8Recipe, device: Device) -> Callable[..., None]:
    return sm90_fp8.prepare(spec, recipe, device)
