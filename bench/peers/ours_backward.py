"""The backward pass of cuflash: one family, or the one that it chooses."""

from __future__ import annotations

from typing import Any

import cuflash

from ..gradient_samples import random_dout
from ..shapes import Problem
from . import Prepared
from .ours import poisoned_like


def versions(kernel: str = "auto", deterministic: bool = False) -> dict[str, str]:
    """Of cuflash."""
    return {"cuflash": cuflash.__version__}


def make(
    problem: Problem, q: Any, k: Any, v: Any, kernel: str = "auto", deterministic: bool = False
) -> Prepared:
    """`attention_backward` into memory that is reused, full of NaN at first."""
    import cupy

    causal, dout = problem.causal, random_dout(cupy, problem)
    out, lse = cuflash.attention(q, k, v, causal=causal, return_lse=True)
    options: dict[str, Any] = {"causal": causal, "kernel": kernel, "deterministic": deterministic}
    gradients = {
        f"d{name}": poisoned_like(array) for name, array in zip("qkv", (q, k, v), strict=True)
    }
    plan = cuflash.explain(q, k, v, **options, backward=True)
    name = plan.tiling.launch.module.name if plan.tiling.launch else plan.family

    def call() -> Any:
        return cuflash.attention_backward(dout, q, k, v, out, lse, **options, **gradients)

    held = sum(array.nbytes for array in gradients.values())

    def result() -> Any:
        return tuple(gradients.values())

    return Prepared(call, result, note=name, work={"flops": 2.5 * problem.flops}, held=held)
