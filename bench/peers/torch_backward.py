"""The backward pass of torch's `scaled_dot_product_attention`, pinned to one backend."""

from __future__ import annotations

from typing import Any

from ..shapes import Problem
from . import Prepared, Unsupported
from .torch_arrays import to_torch
from .torch_sdpa import versions

__all__ = ["make", "versions"]


def make(problem: Problem, q: Any, k: Any, v: Any, backend: str) -> Prepared:
    """The backend by its name in `SDPBackend`; q is the gradient by the result, too."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if problem.causal and problem.q_len != problem.kv_len:
        raise Unsupported("its causal mask is aligned at the first key")
    dout, *tensors = (to_torch(array) for array in (q, q, k, v))
    tensors = [tensor.detach().requires_grad_() for tensor in tensors]
    with sdpa_kernel(getattr(SDPBackend, backend)):
        out = torch.nn.functional.scaled_dot_product_attention(
            *tensors,
            is_causal=problem.causal,
            enable_gqa=problem.q_heads != problem.kv_heads,
        )

    def call() -> Any:
        return torch.autograd.grad(out, tensors, dout, retain_graph=True)

    return Prepared(call, work={"flops": 2.5 * problem.flops})
