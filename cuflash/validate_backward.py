"""Checks the arrays that a backward pass has beside q, k and v, naming the argument."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from .arrays import ArrayInfo, contiguous_strides
from .spec import OPTION_NAMES, AttentionSpec, Gradients, Options
from .validate import build_spec, check_device, check_like, check_output


class BackwardInfos(NamedTuple):
    """The further arrays of a backward pass. What is None will be contiguous."""

    dout: ArrayInfo | None = None
    out: ArrayInfo | None = None
    lse: ArrayInfo | None = None
    dq: ArrayInfo | None = None
    dk: ArrayInfo | None = None
    dv: ArrayInfo | None = None


# Options of `attention` that mean nothing here: LSE goes in, and so does `out`.
_FORWARD_ONLY = ("return_lse", "out")
BACKWARD_OPTION_NAMES = (*(n for n in OPTION_NAMES if n not in _FORWARD_ONLY), "dq", "dk", "dv")


def build_backward_spec(
    q: ArrayInfo, k: ArrayInfo, v: ArrayInfo, given: BackwardInfos, options: Options
) -> AttentionSpec:
    """Check a whole backward pass and describe it.

    `options.mask` and the lengths are as in `build_spec`; `options.out` is not looked at.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        As `build_spec`.
    """
    spec = build_spec(q, k, v, options._replace(out=None))
    out_shape, layout = (*q.shape[:-1], spec.head_dim_v), options.layout
    gradients = Gradients(
        dout=check_like("dout", given.dout, out_shape, q, layout),
        lse=_check_lse(given.lse, spec, q),
        dq=check_output("dq", given.dq, q.shape, q, layout),
        dk=check_output("dk", given.dk, k.shape, q, layout),
        dv=check_output("dv", given.dv, v.shape, q, layout),
    )
    out = check_like("out", given.out, out_shape, q, layout)
    return dataclasses.replace(spec, out=out, gradients=gradients)


def _check_lse(lse: ArrayInfo | None, spec: AttentionSpec, q: ArrayInfo) -> tuple[int, int, int]:
    axes = ("batch", "heads", "seq")[4 - len(q.shape) :]
    shape = (spec.batch, spec.q_heads, spec.q_len)[4 - len(q.shape) :]
    strides = contiguous_strides(shape)
    if lse is not None:
        if lse.shape != shape:
            raise ValueError(
                f"lse: got shape {lse.shape}; expected ({', '.join(axes)}) = {shape}, "
                "as attention(..., return_lse=True) returns it"
            )
        dtype = "float64" if spec.dtype == "float64" else "float32"
        if lse.dtype != dtype:
            raise TypeError(f"lse: got dtype {lse.dtype}; expected {dtype} beside {spec.dtype}")
        check_device("lse", lse.device, q)
        strides = lse.strides
    batch, heads, seq = (0,) * (3 - len(shape)) + strides
    return batch, heads, seq
