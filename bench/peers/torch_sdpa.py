"""torch's `scaled_dot_product_attention`, pinned to one backend."""

from __future__ import annotations

from typing import Any

from ..shapes import Problem
from . import Prepared, Unsupported
from .torch_arrays import from_torch, to_torch


def versions(backend: str) -> dict[str, str]:
    """Of torch and of its cuDNN."""
    import torch

    return {"torch": torch.__version__, "torch's cuDNN": str(torch.backends.cudnn.version())}


def make(problem: Problem, q: Any, k: Any, v: Any, backend: str) -> Prepared:
    """The backend by its name in `SDPBackend`."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if problem.causal and problem.q_len != problem.kv_len:
        raise Unsupported("its causal mask is aligned at the first key")
    only = getattr(SDPBackend, backend)
    tensors = [to_torch(array) for array in (q, k, v)]
    grouped = problem.q_heads != problem.kv_heads
    last: list[Any] = []

    def call() -> None:
        with sdpa_kernel(only):
            last[:] = [
                torch.nn.functional.scaled_dot_product_attention(
                    *tensors, is_causal=problem.causal, enable_gqa=grouped
                )
            ]

    return Prepared(call, lambda: from_torch(last[0]))
