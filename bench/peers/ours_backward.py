"""The backward pass of cuflash: one family, or the one that it chooses."""

from __future__ import annotations

from typing import Any

import cuflash

from ..shapes import Problem
from . import Prepared
from .ours import poisoned_like, versions

__all__ = ["make", "versions"]


def make(
    problem: Problem, q: Any, k: Any, v: Any, kernel: str = "auto", deterministic: bool = False
) -> Prepared:
    """`attention_backward` of q as the gradient, into memory that is reused."""
    causal = problem.causal
    out, lse = cuflash.attention(q, k, v, causal=causal, return_lse=True)
    options: dict[str, Any] = {"causal": causal, "kernel": kernel, "deterministic": deterministic}
    gradients = {
        f"d{name}": poisoned_like(array) for name, array in zip("qkv", (q, k, v), strict=True)
    }
    plan = cuflash.explain(q, k, v, **options, backward=True)
    name = plan.tiling.launch.module.name if plan.tiling.launch else plan.family

    def call() -> Any:
        return cuflash.attention_backward(q, q, k, v, out, lse, **options, **gradients)

    held = sum(array.nbytes for array in gradients.values())
    return Prepared(call, note=name, work={"flops": 2.5 * problem.flops}, held=held)
