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
from .recipe import Fp8Recipe


def attend(spec: AttentionSpec, recipe: Fp8Recipe, operands: Operands) -> tuple[Any, Any]:
    """`out`, allocated unless it is given, and LSE or None.

    Raises
    ------
    NotImplementedError
        With each reason, where the kernel does not take the problem.
    """
    device = of_array(spec.device)
    reasons = sm90_fp8.reasons_against(spec, recipe, device)
    if reasons:
        raise NotImplementedError(f"attention_fp8 on {device}: {'; '.join(reasons)}")
    import cupy

    with activate(device):
        out, lse = operands.out, None
        if out is None:
            out = cupy.empty((*operands.q.shape[:-1], spec.head_dim_v), operands.q.dtype)
        if spec.return_lse:
            lse = cupy.empty((spec.batch, spec.q_heads, spec.q_len), np.float32)
        if not spec.is_empty:
            q, k, v, to = (
                bhsd_view(array, operands.layout)
                for array in (operands.q, operands.k, operands.v, out)
            )
            lens = [
                None if one is None else lengths_on_device(one)
                for one in (operands.q_lens, operands.kv_lens)
            ]
            q_lens, kv_lens = (0 if one is None else one.data.ptr for one in lens)
            quantize, run = _prepared(spec, recipe, device)
            codes = quantize(q, k, v, q_lens, kv_lens)
            run(codes, to.data.ptr, 0 if lse is None else lse.data.ptr, q_lens, kv_lens)
    if lse is not None:
        lse = lse[(0,) * (4 - operands.q.ndim)]
    return out, lse


@functools.lru_cache(maxsize=1024)
def _prepared(
    spec: AttentionSpec, recipe: Fp8Recipe, device: Device
) -> tuple[Callable[..., gpu_quantizer.Codes], Callable[..., None]]:
    bucket = sm90_fp8.bucket_of(spec.head_dim)
    quantize = gpu_quantizer.prepare(spec, recipe, device, bucket)
    return quantize, sm90_fp8.prepare(spec, recipe, device)
