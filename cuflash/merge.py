"""Merging attention over parts of the keys: split-KV, shared prefixes, rings of devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .arrays import adopt, module_of
from .validate import CPU_DTYPES, LAYOUTS, one_of

LSE_DTYPES = ("float32", "float64")


def merge_states(
    outs: Sequence[Any], lses: Sequence[Any], *, layout: str = "bhsd"
) -> tuple[Any, Any]:
    """Attention over the union of disjoint sets of keys, from the results over each set.

    ``lse = log(sum(exp(lse_i)))`` and ``out = sum(exp(lse_i - lse) * out_i)``, in float32 (float64
    for float64), in the order given. A part that saw no key (LSE -inf) has weight exactly 0 and its
    out is not looked at.

    Parameters
    ----------
    outs : sequence of arrays
        Results of `attention` for the same queries: (..., seq, dim), all of one shape and dtype.
    lses : sequence of arrays
        Their log-sum-exps, (..., seq), natural logarithm.
    layout : {"bhsd", "bshd"}
        Order of the axes of `outs`; LSE is (batch, heads, seq) in both.

    Returns
    -------
    out : array, shaped and typed like each of `outs`
    lse : array, shaped and typed like each of `lses`

    Raises
    ------
    ValueError, TypeError
        When the parts don't fit together.

    Notes
    -----
    Dao, "FlashAttention-2" (2023), section 2.3.1: the rescaling that joins blocks of keys.
    """
    one_of("layout", layout, LAYOUTS)
    for name, given in (("outs", outs), ("lses", lses)):
        if not isinstance(given, Sequence):
            raise TypeError(f"{name}: got {type(given).__name__}; expected a list of arrays")
    if len(outs) == 0 or len(outs) != len(lses):
        raise ValueError(
            f"outs, lses: got {len(outs)} and {len(lses)} parts; "
            "expected the same number, at least one"
        )
    parts = [adopt(f"outs[{i}]", out) for i, out in enumerate(outs)]
    norms = [adopt(f"lses[{i}]", lse) for i, lse in enumerate(lses)]
    _check_parts(parts, norms, layout)

    xp = module_of(parts[0])
    dtype = np.float64 if parts[0].dtype == np.float64 else np.float32
    stacked = xp.stack([norm.astype(dtype) for norm in norms])
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        top = stacked.max(axis=0)
        shift = xp.where(xp.isneginf(top), dtype(0), top)  # all parts empty: weights 0, not NaN
        weights = xp.exp(stacked - shift)
        total = weights.sum(axis=0)
        lse = shift + xp.log(total)
        shares = xp.where(total == 0, dtype(0), weights / total)
        out = xp.zeros(parts[0].shape, dtype)
        for part, share in zip(parts, shares, strict=True):
            column = _like_out(share, layout)[..., None]
            out += xp.where(column == 0, dtype(0), part.astype(dtype) * column)
    return out.astype(parts[0].dtype), lse.astype(norms[0].dtype)


def _like_out(norm: Any, layout: str) -> Any:
    return norm.swapaxes(-1, -2) if layout == "bshd" and norm.ndim >= 2 else norm


def _check_parts(parts: list[Any], norms: list[Any], layout: str) -> None:
    first = parts[0]
    for name, arrays, allowed in (("outs", parts, CPU_DTYPES), ("lses", norms, LSE_DTYPES)):
        for i, array in enumerate(arrays):
            if array.dtype.name not in allowed:
                raise TypeError(
                    f"{name}[{i}]: got dtype {array.dtype.name}; expected {', '.join(allowed)}"
                )
    for i, (part, norm) in enumerate(zip(parts, norms, strict=True)):
        if part.shape != first.shape or part.dtype != first.dtype:
            raise ValueError(
                f"outs[{i}]: got {part.dtype} {part.shape}; "
                f"expected that of outs[0], {first.dtype} {first.shape}"
            )
        if _like_out(norm, layout).shape != first.shape[:-1]:
            raise ValueError(
                f"lses[{i}]: got shape {norm.shape}; expected one number for each row of outs, "
                f"of shape {first.shape} in layout {layout!r}"
            )
        if type(part) is not type(first) or type(norm) is not type(first):
            raise ValueError(f"outs[{i}], lses[{i}]: expected arrays on the device of outs[0]")
