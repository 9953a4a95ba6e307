"""What 8-bit attention takes, beyond what every attention call is checked for."""

from __future__ import annotations

import numpy as np

from ..arrays import may_overlap
from ..operands import Operands, spec_of
from ..spec import AttentionSpec, Options

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
        if isinstance(array, np.ndarray) and may_overlap(out, array):
            raise ValueError(f"out: shares memory with {name}; expected memory of its own")
