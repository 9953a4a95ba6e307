"""The arrays of one call: adopted, checked, and viewed as (batch, heads, seq, dim)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from .arrays import ArrayInfo, adopt, describe, may_overlap, module_of
from .spec import AttentionSpec, Options
from .validate import build_spec

_ARRAY_OPTIONS = ("mask", "bias", "out")
_LENGTHS = ("q_lens", "kv_lens")


@dataclass(slots=True, eq=False)
class Operands:
    """Arrays of one call as 4-D views, and the two results in the shape that the caller gets.

    `q`, `k`, `v` and `out` are (batch, heads, seq, dim) views over the callers' memory; `mask` and
    `bias` are broadcast to (batch, q_heads, q_len, kv_len) without a copy; `lse` is (batch,
    q_heads, q_len) or None. `q_lens` and `kv_lens` are (batch,) integer arrays, on the host (NumPy)
    or on the device (CuPy), or None.
    """

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any
    mask: Any
    bias: Any
    q_lens: Any
    kv_lens: Any


def prepare_spec(
    q: Any, k: Any, v: Any, options: Options, *, stand_ins: bool = False
) -> tuple[AttentionSpec, tuple[Any, Any, Any], Options]:
    """Adopt every array of a call and build its spec.

    With `stand_ins`, an `ArrayInfo` may take an array's place. Returns the spec, q, k and v as
    native arrays, and the options with native arrays in them.
    """

    def take(name: str, obj: Any) -> Any:
        return obj if stand_ins and isinstance(obj, ArrayInfo) else adopt(name, obj)

    arrays = (take("q", q), take("k", k), take("v", v))
    native = {
        name: take(name, _list_as_array(name, obj) if name in _LENGTHS else obj)
        for name in (*_ARRAY_OPTIONS, *_LENGTHS)
        if (obj := getattr(options, name)) is not None
    }
    infos = {
        # Lengths on the host stay values, to be checked; reading those of a device would wait.
        name: array if name in _LENGTHS and isinstance(array, np.ndarray) else describe(name, array)
        for name, array in native.items()
    }
    spec = build_spec(
        describe("q", arrays[0]),
        describe("k", arrays[1]),
        describe("v", arrays[2]),
        dataclasses.replace(options, **infos) if infos else options,
    )
    return spec, arrays, dataclasses.replace(options, **native) if native else options


def bind(
    spec: AttentionSpec, arrays: tuple[Any, Any, Any], options: Options
) -> tuple[Operands, Any, Any]:
    """Views for the families, and out and LSE (or None) in the caller's shape.

    Allocates the outputs, uninitialised.
    """
    q, k, v = arrays
    xp = module_of(q)
    layout = options.layout
    out = options.out
    if out is None:
        out = xp.empty((*q.shape[:-1], spec.head_dim_v), dtype=q.dtype)
    else:
        _check_writable(out, arrays, options)
    lse = None
    if spec.return_lse:
        lse_dtype = np.float64 if spec.dtype == "float64" else np.float32
        lse = xp.empty((spec.batch, spec.q_heads, spec.q_len), dtype=lse_dtype)
    scores = (spec.batch, spec.q_heads, spec.q_len, spec.kv_len)
    operands = Operands(
        q=_bhsd(q, layout),
        k=_bhsd(k, layout),
        v=_bhsd(v, layout),
        out=_bhsd(out, layout),
        lse=lse,
        mask=None if options.mask is None else xp.broadcast_to(options.mask, scores),
        bias=None if options.bias is None else xp.broadcast_to(options.bias, scores),
        q_lens=options.q_lens,
        kv_lens=options.kv_lens,
    )
    caller_lse = None if lse is None else lse.reshape(lse.shape[4 - q.ndim :])
    return operands, out, caller_lse


def _list_as_array(name: str, lens: Any) -> Any:
    """Lengths may also be a list or tuple of integers."""
    if not isinstance(lens, (list, tuple)):
        return lens
    try:
        array = np.asarray(lens)
    except ValueError as error:  # a ragged nest
        raise ValueError(f"{name}: got {lens!r}; expected (batch,) integers") from error
    return array.astype(np.int64) if array.size == 0 else array


def _bhsd(array: Any, layout: str) -> Any:
    if layout == "bshd" and array.ndim >= 3:
        array = array.swapaxes(-3, -2)
    while array.ndim < 4:
        array = array[None]
    return array


def _check_writable(out: Any, arrays: tuple[Any, Any, Any], options: Options) -> None:
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise ValueError("out: got a read-only array; expected one that can be written")
    others = {
        **dict(zip("qkv", arrays, strict=True)),
        **{name: getattr(options, name) for name in ("mask", "bias", *_LENGTHS)},
    }
    for name, other in others.items():
        # Lengths of the host lie elsewhere than an output on the device.
        if type(other) is type(out) and may_overlap(out, other):
            raise ValueError(f"out: shares memory with {name}; expected memory of its own")
