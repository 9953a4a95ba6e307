"""Small calls of one kind each, whose queueing is timed on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cuflash

from ..shapes import Problem
from . import Prepared
from .torch_arrays import to_torch

_NEEDS_TORCH = ("cuflash, torch tensors", "torch SDPA, FLASH_ATTENTION")


def versions(kind: str) -> dict[str, str]:
    """Of what the call goes through."""
    found = {"cuflash": cuflash.__version__}
    if kind in _NEEDS_TORCH:
        import torch

        found["torch"] = torch.__version__
    return found


def make(problem: Problem, q: Any, k: Any, v: Any, kind: str) -> Prepared:
    """The call by its name in `KINDS`."""
    return Prepared(KINDS[kind](problem, q, k, v))


def _attend(problem: Problem, *arrays: Any, **more: Any) -> Callable[[], Any]:
    return lambda: cuflash.attention(*arrays, causal=problem.causal, **more)


def _into_out(problem: Problem, q: Any, k: Any, v: Any) -> Callable[[], Any]:
    return _attend(problem, q, k, v, out=q.copy())


def _with_lse(problem: Problem, q: Any, k: Any, v: Any) -> Callable[[], Any]:
    return _attend(problem, q, k, v, out=q.copy(), return_lse=True)


def _with_lengths(problem: Problem, q: Any, k: Any, v: Any) -> Callable[[], Any]:
    import cupy

    return _attend(problem, q, k, v, kv_lens=cupy.asarray([problem.kv_len] * problem.batch))


def _of_tensors(problem: Problem, q: Any, k: Any, v: Any) -> Callable[[], Any]:
    return _attend(problem, *map(to_torch, (q, k, v)))


def _by_torch(problem: Problem, q: Any, k: Any, v: Any) -> Callable[[], Any]:
    import torch

    # For the whole process, so that no call pays for the choice.
    torch.backends.cuda.enable_flash_sdp(True)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_math_sdp(False)
    tensors = [to_torch(array) for array in (q, k, v)]
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(*tensors, is_causal=problem.causal)


def _empty_kernel(problem: Problem, q: Any, k: Any, v: Any) -> Callable[[], Any]:
    import cupy

    nothing = cupy.RawKernel('extern "C" __global__ void nothing() {}', "nothing")
    return lambda: nothing((1,), (128,), ())


def _empty_array(problem: Problem, q: Any, k: Any, v: Any) -> Callable[[], Any]:
    import cupy

    return lambda: cupy.empty(q.shape, q.dtype)


KINDS: dict[str, Callable[[Problem, Any, Any, Any], Callable[[], Any]]] = {
    "cuflash": _attend,
    "cuflash, out=": _into_out,
    "cuflash, out= and return_lse": _with_lse,
    "cuflash, kv_lens on the device": _with_lengths,
    "cuflash, torch tensors": _of_tensors,
    "torch SDPA, FLASH_ATTENTION": _by_torch,
    "CuPy, an empty kernel": _empty_kernel,
    "CuPy, an empty array": _empty_array,
}
"""How each kind of call is made, by name."""
