"""cuflash in 8 bits: attention to codes, quantising, or both from 16-bit arrays."""

from __future__ import annotations

from typing import Any

import cuflash
from cuflash.fp8 import attention_fp8, attention_quantized, quantize_fp8

from ..shapes import ITEM_BYTES, Problem
from . import Prepared, Unsupported
from .ours import poisoned_like


def versions(recipe: str, part: str) -> dict[str, str]:
    """Of cuflash."""
    return {"cuflash": cuflash.__version__}


def make(problem: Problem, q: Any, k: Any, v: Any, recipe: str, part: str) -> Prepared:
    """A call of a `part`: ``"attend"`` to codes, ``"quantise"``, or the ``"whole"``."""
    out, causal = poisoned_like(q), problem.causal
    try:
        tensors = quantize_fp8(q, k, v, recipe)
    except NotImplementedError as error:
        raise Unsupported(str(error)) from error
    if part == "attend":
        return Prepared(
            lambda: attention_quantized(tensors, causal=causal, out=out), lambda: out, recipe
        )
    if part == "whole":
        return Prepared(
            lambda: attention_fp8(q, k, v, recipe=recipe, causal=causal, out=out),
            lambda: out,
            recipe,
        )
    # As if each array were read twice, for statistics, which are of samples where that will do, and
    # for codes of one byte, which are written.
    moved = problem.input_bytes * (2 + 1 / ITEM_BYTES[problem.dtype])
    return Prepared(lambda: quantize_fp8(q, k, v, recipe), None, recipe, {"bytes": moved})
