"""FlashAttention-3 (`flash_attn_interface`) and 4 (`flash_attn.cute`), of 16 bits or e4m3."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

from ..shapes import Problem
from . import Prepared, Unsupported
from .torch_arrays import from_torch, rows_first


def versions(module: str, bits: int = 16) -> dict[str, str]:
    """Of torch, and of the first distribution that carries the module."""
    import torch

    importlib.import_module(module)
    carriers = importlib.metadata.packages_distributions().get(module.split(".")[0], ())
    found = {name: importlib.metadata.version(name) for name in carriers}
    return {"torch": torch.__version__, **(found or {module: "of unknown version"})}


def make(problem: Problem, q: Any, k: Any, v: Any, module: str, bits: int = 16) -> Prepared:
    """`flash_attn_func`; with 8 bits of q, k and v as e4m3 with scales of 1."""
    import torch

    attend = importlib.import_module(module).flash_attn_func
    tensors = [rows_first(array) for array in (q, k, v)]
    more: dict[str, Any] = {}
    if bits == 8:
        if module != "flash_attn_interface":
            raise Unsupported("takes no e4m3")
        tensors = [tensor.to(torch.float8_e4m3fn) for tensor in tensors]
        ones = torch.ones(problem.batch, problem.kv_heads, device="cuda")
        more = {f"{name}_descale": ones for name in "qkv"}
    last: list[Any] = []

    def call() -> None:
        last[:] = [attend(*tensors, causal=problem.causal, **more)]

    def result() -> Any:
        out = last[0][0] if isinstance(last[0], tuple) else last[0]
        return from_torch(out.transpose(1, 2))

    return Prepared(call, result)
