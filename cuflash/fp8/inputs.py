"""What 8-bit attention takes, beyond what every attention call is checked for."""

from __future__ import annotations

import numpy as np

from ..arrays import ArrayInfo, may_overlap, module_of
from ..operands import Operands, spec_of
from ..spec import AttentionSpec, Options
from .recipe import Fp8Recipe

DTYPES = ("float16", "bfloat16", "float32")


def checked_spec(operands: Operands, options: Options) -> AttentionSpec:
    """Check a whole call and describe it.

    Raises
    ------
    ValueError, TypeError
        Naming the argument, what was given and what is expected.
    NotImplementedError
        For GPU arrays.
    """
    spec = spec_of(operands, options)
    if spec.dtype not in DTYPES:
        raise TypeError(f"q: got dtype {spec.dtype}; expected {', '.join(DTYPES)}")
    return spec


def check_out(operands: Operands) -> None:
    """Raise ValueError for an `out` that can't be written or shares memory with an input."""
    out = operands.out
    if out is None:
        return
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise ValueError("out: got a read-only array; expected one that can be written")
    for name in ("q", "k", "v", "mask", "q_lens", "kv_lens"):
        array = getattr(operands, name)
        if array is None or isinstance(array, ArrayInfo) or module_of(array) is not module_of(out):
            continue
        if may_overlap(out, array):
            raise ValueError(f"out: shares memory with {name}; expected memory of its own")


def check_softcap(spec: AttentionSpec, recipe: Fp8Recipe) -> None:
    """Raise ValueError for softcap where k lost its mean: it needs the scores themselves."""
    if spec.softcap is not None and recipe.center_k:
        raise ValueError(
            f"softcap: got {spec.softcap!r} with k quantised by a recipe that subtracts its mean; "
            "expected center_k=False, since softcap needs the scores themselves"
        )
