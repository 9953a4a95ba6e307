"""The arrays of one call: adopted, described, and viewed as (batch, heads, seq, dim)."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from .arrays import (
    NATIVE,
    ArrayInfo,
    adopt,
    describe,
    fingerprint,
    module_of,
)
from .spec import AttentionSpec, Options
from .validate import build_spec
from .validate_backward import BackwardInfos, build_backward_spec

# Options that are arrays, in the order in which they are looked at.
ARRAY_OPTIONS = ("mask", "bias", "out", "q_lens", "kv_lens")
_LENGTHS = ("q_lens", "kv_lens")

_OnHost = np.ndarray  # which NumPy's module takes a while to find


@dataclass(slots=True, eq=False)
class Operands:
    """The native arrays of one call, in the shapes and the layout of the caller.

    `out` and `lse` are None until they are allocated, `lse` also where it is not asked for; the
    other options where they are not given. `q_lens` and `kv_lens` are (batch,) integers, on the
    host (NumPy) or on the device (CuPy).
    """

    q: Any
    k: Any
    v: Any
    mask: Any = None
    bias: Any = None
    out: Any = None
    q_lens: Any = None
    kv_lens: Any = None
    layout: str = "bhsd"
    lse: Any = None
    # On a GPU, where q, k, v and out (0 until it exists) start in memory: known from
    # `fingerprints` on, since CuPy takes a while to tell.
    starts: tuple[int, ...] = ()

    # What is written, and what is read, by name.
    DESTINATIONS: ClassVar[tuple[str, ...]] = ("out",)
    INPUTS: ClassVar[tuple[str, ...]] = ("q", "k", "v", "mask", "bias", "q_lens", "kv_lens")

    def fingerprints(self) -> Hashable:
        """What describes the arrays, to be compared."""
        q, k, v, out = self.q, self.k, self.v, self.out
        mask, bias, q_lens, kv_lens = self.mask, self.bias, self.q_lens, self.kv_lens
        further = None
        if not (mask is None and bias is None and q_lens is None and kv_lens is None):
            further = _fingerprints((mask, bias, q_lens, kv_lens))
        if type(q) is _OnHost or type(k) is _OnHost or type(v) is _OnHost or type(out) is _OnHost:
            return _fingerprints((q, k, v, out)), further
        # As `fingerprint` of each, in one piece and without calls: this is a large part of what a
        # call takes the host.
        q_data, k_data, v_data = q.data, k.data, v.data
        at_q, at_k, at_v = q_data.ptr, k_data.ptr, v_data.ptr
        at_out, of_out = 0, None
        if out is not None:
            out_data = out.data
            at_out, of_out = out_data.ptr, (out.shape, out.dtype, out_data.device_id)
        self.starts = at_q, at_k, at_v, at_out
        try:  # arrays.CONTIGUITY
            are_contiguous = (
                q._c_contiguous
                and k._c_contiguous
                and v._c_contiguous
                and (out is None or out._c_contiguous)
            )
        except AttributeError:
            are_contiguous = False
        unaligned = (at_q | at_k | at_v | at_out) % 16
        return (
            q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype,
            q_data.device_id, k_data.device_id, v_data.device_id, of_out,
            are_contiguous
            or (q.strides, k.strides, v.strides, None if out is None else out.strides),
            unaligned and (at_q % 16, at_k % 16, at_v % 16, at_out % 16),
            further,
        )  # fmt: skip

    def views(self, spec: AttentionSpec) -> Operands:
        """The same memory in one form for every call.

        `q`, `k`, `v` and `out` are (batch, heads, seq, dim); `mask` and `bias` are broadcast to
        (batch, q_heads, q_len, kv_len) without a copy; `lse` is (batch, q_heads, q_len).
        """
        xp, layout = module_of(self.q), self.layout
        scores = (spec.batch, spec.q_heads, spec.q_len, spec.kv_len)
        return Operands(
            q=bhsd_view(self.q, layout),
            k=bhsd_view(self.k, layout),
            v=bhsd_view(self.v, layout),
            mask=None if self.mask is None else xp.broadcast_to(self.mask, scores),
            bias=None if self.bias is None else xp.broadcast_to(self.bias, scores),
            out=bhsd_view(self.out, layout),
            q_lens=self.q_lens,
            kv_lens=self.kv_lens,
            lse=None if self.lse is None else self.lse.reshape(scores[:3]),
        )


@dataclass(slots=True, eq=False)
class BackwardOperands(Operands):
    """The native arrays of one backward pass: those of the forward pass, of which `out` and `lse`
    are read, and the gradients, None until they are allocated.
    """

    dout: Any = None
    dq: Any = None
    dk: Any = None
    dv: Any = None

    DESTINATIONS: ClassVar[tuple[str, ...]] = ("dq", "dk", "dv")
    INPUTS: ClassVar[tuple[str, ...]] = ("dout", *Operands.INPUTS, "out", "lse")

    def fingerprints(self) -> Hashable:
        """What describes the arrays, to be compared."""
        return _fingerprints(getattr(self, name) for name in (*self.INPUTS, *self.DESTINATIONS))

    def views(self, spec: AttentionSpec) -> BackwardOperands:
        """The same memory in one form, as that of a forward pass."""
        forward = Operands.views(self, spec)
        rest = {name: bhsd_view(getattr(self, name), self.layout) for name in _ROWS_OF_GRADIENTS}
        shared = {name: getattr(forward, name) for name in Operands.__slots__}
        return BackwardOperands(**shared, **rest)


_ROWS_OF_GRADIENTS = ("dout", "dq", "dk", "dv")


def _fingerprints(arrays: Iterable[Any]) -> Hashable:
    return tuple([None if array is None else fingerprint(array) for array in arrays])


def adopt_all(
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    bias: Any,
    out: Any,
    q_lens: Any,
    kv_lens: Any,
    layout: str,
    *,
    stand_ins: bool = False,
) -> Operands:
    """Every array of a call as a native one. With `stand_ins`, an `ArrayInfo` stays what it is."""
    take = _adopt_or_keep if stand_ins else adopt
    return Operands(
        q if type(q) in NATIVE else take("q", q),
        k if type(k) in NATIVE else take("k", k),
        v if type(v) in NATIVE else take("v", v),
        None if mask is None else take("mask", mask),
        None if bias is None else take("bias", bias),
        out if out is None or type(out) in NATIVE else take("out", out),
        None if q_lens is None else take("q_lens", _list_as_array("q_lens", q_lens)),
        None if kv_lens is None else take("kv_lens", _list_as_array("kv_lens", kv_lens)),
        layout,
    )


def adopt_backward(
    forward: Operands,
    dout: Any,
    lse: Any,
    dq: Any,
    dk: Any,
    dv: Any,
    *,
    stand_ins: bool = False,
) -> BackwardOperands:
    """Every array of a backward pass as a native one; `forward` has those it shares with the
    forward pass, `out` included.
    """
    take = _adopt_or_keep if stand_ins else adopt
    given = {"dout": dout, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    optional = given if stand_ins else ("dq", "dk", "dv")
    taken: dict[str, Any] = {
        name: None if array is None and name in optional else take(name, array)
        for name, array in given.items()
    }
    shared: dict[str, Any] = {
        name: getattr(forward, name) for name in Operands.__slots__ if name not in given
    }
    return BackwardOperands(**shared, **taken)


def spec_of(operands: Operands, options: Options) -> AttentionSpec:
    """Check a whole call and describe it; its arrays are those of `operands`."""
    infos = {
        # Lengths on the host stay values, to be checked; reading those of a device would wait.
        name: array if name in _LENGTHS and isinstance(array, np.ndarray) else describe(name, array)
        for name in ARRAY_OPTIONS
        if (array := getattr(operands, name)) is not None
    }
    q, k, v = (describe(name, getattr(operands, name)) for name in ("q", "k", "v"))
    options = options._replace(**infos) if infos else options
    if not isinstance(operands, BackwardOperands):
        return build_spec(q, k, v, options)
    arrays = {name: getattr(operands, name) for name in BackwardInfos._fields}
    given = {name: None if a is None else describe(name, a) for name, a in arrays.items()}
    return build_backward_spec(q, k, v, BackwardInfos(**given), options)


def _adopt_or_keep(name: str, obj: Any) -> Any:
    return obj if isinstance(obj, ArrayInfo) else adopt(name, obj)


def _list_as_array(name: str, lens: Any) -> Any:
    """Lengths may also be a list or tuple of integers."""
    if not isinstance(lens, (list, tuple)):
        return lens
    try:
        array = np.asarray(lens)
    except ValueError as error:  # a ragged nest
        raise ValueError(f"{name}: got {lens!r}; expected (batch,) integers") from error
    return array.astype(np.int64) if array.size == 0 else array


def bhsd_view(array: Any, layout: str) -> Any:
    """The same memory as (batch, heads, seq, dim)."""
    if layout == "bshd" and array.ndim >= 3:
        array = array.swapaxes(-3, -2)
    while array.ndim < 4:
        array = array[None]
    return array
