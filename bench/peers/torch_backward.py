"""The backward pass of torch's `scaled_dot_product_attention`, pinned to one backend."""

from __future__ import annotations

from typing import Any

from ..gradient_samples import random_dout
from ..shapes import Problem
from . import Prepared, Unsupported
from .torch_arrays import from_torch, to_torch
from .torch_sdpa import versions

__all__ = ["make", "versions"]


def make(problem: Problem, q: Any, k: Any, v: Any, backend: str) -> Prepared:
    """The backend by its name in `SDPBackend`."""
    import cupy
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if problem.causal and problem.q_len != problem.kv_len:
        raise Unsupported("its causal mask is aligned at the first key")
    dout, *tensors = (to_torch(array) for array in (random_dout(cupy, problem), q, k, v))
    tensors = [tensor.detach().requires_grad_() for tensor in tensors]
    with sdpa_kernel(getattr(SDPBackend, backend)):
        out = torch.nn.functional.scaled_dot_product_attention(
            *tensors,
            is_causal=problem.causal,
            enable_gqa=problem.q_heads != problem.kv_heads,
        )

    last: list[Any] = []

    def call() -> None:
        last[:] = torch.autograd.grad(out, tensors, dout, retain_graph=True)

    def result() -> Any:
        return tuple(from_torch(gradient) for gradient in last)

    return Prepared(call, result, work={"flops": 2.5 * problem.flops})
