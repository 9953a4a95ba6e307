"""8-bit attention on a GPU: quantise, then attend, without a copy or a wait between.

What depends on neither values nor addresses is checked and prepared once for all calls of a kind,
as in `cuflash.kinds`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import kinds
from ..arrays import ArrayInfo, adopt, describe, fingerprint
from ..families import sm90_fp8
from ..operands import Operands, adopt_all
from ..plan import log_once
from ..runtime.device import Device, activate, of_array
from ..runtime.graphs import lengths_on_device
from ..spec import AttentionSpec, Options
from . import gpu_quantizer
from .gpu_tensors import GpuFp8Tensors
from .inputs import check_out, check_softcap, checked_spec
from .plan import plan_fp8
from .recipe import Fp8Recipe


def attend(operands: Operands, options: Options, recipe: Fp8Recipe) -> None:
    """`out`, allocated unless it is given, and `lse` if it is asked for.

    Raises
    ------
    ValueError, TypeError
        Naming the argument, what was given and what is expected.
    NotImplementedError
        With each reason, where the kernel does not take the problem.
    """
    _kind(_Attention, operands, options, recipe).run(operands)


def quantize(operands: Operands, options: Options, recipe: Fp8Recipe) -> GpuFp8Tensors:
    """`quantize_fp8` of arrays on a GPU.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        As `attend`.
    """
    tensors: GpuFp8Tensors = _kind(_Quantization, operands, options, recipe).tensors(operands)
    return tensors


def attend_to(
    tensors: GpuFp8Tensors, options: Options, dtype: str, mask: Any, out: Any
) -> tuple[Any, Any]:
    """`out`, and LSE or None, of what `quantize` made.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        As `attend`.
    """
    out = None if out is None else adopt("out", out)
    lens = tensors.q_lens, tensors.kv_lens
    key = (
        _ToTensors, None if out is None else fingerprint(out), dtype, mask, tensors.spec,
        tensors.recipe, tensors.rank, *[one is None for one in lens], *_by_type(options),
    )  # fmt: skip
    found = kinds.find(key) if mask is None else None
    if found is None:
        found = _ToTensors(tensors, options, dtype, mask, out)
        kinds.keep(key, found, options)
    return found.run(tensors, out)


class _Attention(kinds.Kind):
    """Calls of `attention_fp8` of one kind."""

    def __init__(self, operands: Operands, options: Options, recipe: Fp8Recipe) -> None:
        plan = plan_fp8(operands, options, recipe, of_array(describe("q", operands.q).device))
        spec = plan.spec
        super().__init__(operands, spec)
        self.check(operands)
        log_once(plan)
        if spec.is_empty:
            return
        with activate(self.device):
            self._quantize = _quantizer(spec, recipe, self.device)
            self._attend = _kernel(spec, recipe, self.device)
        self._run = self._quantize_and_attend

    def _quantize_and_attend(self, operands: Operands) -> None:
        q_lens, kv_lens = _lengths(operands)
        lens = _address_of(q_lens), _address_of(kv_lens)
        codes = self._quantize(operands.q, operands.k, operands.v, *lens)
        self._attend(codes, operands.out.data.ptr, _address_of(operands.lse), *lens)


class _Quantization(kinds.Kind):
    """Calls of `quantize_fp8` of one kind."""

    def __init__(self, operands: Operands, options: Options, recipe: Fp8Recipe) -> None:
        spec = checked_spec(operands, options)
        super().__init__(operands, spec)
        _taken("quantize_fp8", spec, recipe)
        if spec.is_empty:
            raise NotImplementedError("quantize_fp8 on a GPU: needs queries and keys")
        self.check(operands)
        self._recipe, self._rank = recipe, operands.q.ndim
        self._shapes = gpu_quantizer.Shapes.of(spec, sm90_fp8.bucket_of(spec.head_dim))
        with activate(self.device):
            self._quantize = _quantizer(spec, recipe, self.device)

    def tensors(self, operands: Operands) -> GpuFp8Tensors:
        """Of one call."""
        self.check(operands)
        with activate(self.device):
            lens = _lengths(operands)
            arrays = operands.q, operands.k, operands.v
            codes = self._quantize(*arrays, *map(_address_of, lens))
        return GpuFp8Tensors(
            self._spec, self._recipe, self.device, codes, self._shapes, self._rank,
            operands.layout, *lens,
        )  # fmt: skip


class _ToTensors:
    """Calls of `attention_quantized` of one kind."""

    def __init__(
        self, tensors: GpuFp8Tensors, options: Options, dtype: str, mask: Any, out: Any
    ) -> None:
        q, k, v = (ArrayInfo(shape, dtype, tensors.spec.device) for shape in tensors.array_shapes)
        lens = tensors.q_lens, tensors.kv_lens
        operands = adopt_all(q, k, v, mask, None, out, *lens, options.layout, stand_ins=True)
        spec = checked_spec(operands, options)
        check_softcap(spec, tensors.recipe)
        self._device = _taken("attention_quantized", spec, tensors.recipe)
        check_out(operands)
        self._spec, self._operands = (
            spec,
            dataclasses.replace(operands, out=None, q_lens=None, kv_lens=None),
        )
        with activate(self._device):
            self._attend = _kernel(spec, tensors.recipe, self._device)

    def run(self, tensors: GpuFp8Tensors, out: Any) -> tuple[Any, Any]:
        """`out`, and LSE or None, of one call."""
        import cupy

        spec, (*rest, _) = self._spec, self._operands.q.shape
        lens, lse = (tensors.q_lens, tensors.kv_lens), None
        if out is not None:
            check_out(dataclasses.replace(self._operands, out=out, q_lens=lens[0], kv_lens=lens[1]))
        with activate(self._device):
            if out is None:
                out = cupy.empty((*rest, spec.head_dim_v), spec.dtype)
            if spec.return_lse:
                lse = cupy.empty(
                    (spec.batch, spec.q_heads, spec.q_len)[3 - len(rest) :], np.float32
                )
            self._attend(tensors.packed, out.data.ptr, _address_of(lse), *map(_address_of, lens))
        return out, lse


def _kind(make: Any, operands: Operands, options: Options, recipe: Fp8Recipe) -> Any:
    """The kind of a call, made if it is the first."""
    key = *kinds.key_of(make, operands, options), recipe
    found = kinds.find(key)
    if found is None:
        found = make(operands, options, recipe)
        kinds.keep(key, found, options)
    return found


def _by_type(options: Options) -> tuple[Any, ...]:
    """To be compared: with types, which come first, because 1 == 1.0 == True."""
    window = options.window
    types = tuple(map(type, window)) if type(window) is tuple else None
    return tuple(map(type, options)), types, options


def _taken(what: str, spec: AttentionSpec, recipe: Fp8Recipe) -> Device:
    device = of_array(spec.device)
    reasons = sm90_fp8.reasons_against(spec, recipe, device)
    if reasons:
        raise NotImplementedError(f"{what} on {device}: {'; '.join(reasons)}")
    return device


def _lengths(operands: Operands) -> tuple[Any, Any]:
    q_lens, kv_lens = operands.q_lens, operands.kv_lens
    return (
        None if q_lens is None else lengths_on_device("q_lens", q_lens),
        None if kv_lens is None else lengths_on_device("kv_lens", kv_lens),
    )


def _address_of(array: Any) -> int:
    return 0 if array is None else array.data.ptr


@functools.lru_cache(maxsize=1024)
def _quantizer(
    spec: AttentionSpec, recipe: Fp8Recipe, device: Device
) -> Callable[..., gpu_quantizer.Codes]:
    return gpu_quantizer.prepare(spec, recipe, device, sm90_fp8.bucket_of(spec.head_dim))


@functools.lru_cache(maxsize=1024)
def _kernel(spec: AttentionSpec, recipe: Fp8Recipe, device: Device) -> Callable[..., None]:
    return sm90_fp8.prepare(spec, recipe, device)
