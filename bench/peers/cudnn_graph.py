"""cuDNN's attention by its frontend, on the memory of CuPy arrays, of 16 bits or e4m3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..shapes import Problem
from . import Prepared


def versions(bits: int = 16) -> dict[str, str]:
    """Of the frontend and of cuDNN."""
    import cudnn

    return {"cudnn-frontend": cudnn.__version__, "cuDNN": cudnn.backend_version_string()}


def make(problem: Problem, q: Any, k: Any, v: Any, bits: int = 16) -> Prepared:
    """A graph that is built once, and executed on addresses."""
    from cupy.cuda import device

    device.get_cublas_handle()  # loads libraries that cuDNN looks for by their names
    return _of_e4m3(problem, q, k, v) if bits == 8 else _of_16_bits(problem, q, k, v)


def _of_16_bits(problem: Problem, q: Any, k: Any, v: Any) -> Prepared:
    import cudnn

    from .ours import poisoned_like

    kinds = cudnn.data_type
    kind = {"float16": kinds.HALF, "bfloat16": kinds.BFLOAT16}[problem.dtype]
    graph = cudnn.pygraph(
        io_data_type=kind, intermediate_data_type=kinds.FLOAT, compute_data_type=kinds.FLOAT
    )
    tensors = [_tensor(graph, array, kind) for array in (q, k, v)]
    made, *_ = graph.sdpa(
        *tensors, attn_scale=problem.dim**-0.5, is_inference=True, name="attention",
        **_mask(problem),
    )  # fmt: skip
    out = poisoned_like(q)
    _give_out(made, out)
    given = {t: a.data.ptr for t, a in zip((*tensors, made), (q, k, v, out), strict=True)}
    return Prepared(_built(cudnn, graph, given, (q, k, v, out)), lambda: out)


def _of_e4m3(problem: Problem, q: Any, k: Any, v: Any) -> Prepared:
    """All scales are 1, and the output is e4m3 too."""
    import cudnn
    import cupy
    import torch

    from .torch_arrays import from_torch, to_torch

    kinds = cudnn.data_type
    graph = cudnn.pygraph(
        io_data_type=kinds.FP8_E4M3,
        intermediate_data_type=kinds.FLOAT,
        compute_data_type=kinds.FLOAT,
    )
    codes = [
        cupy.from_dlpack(to_torch(array).to(torch.float8_e4m3fn).view(torch.uint8))
        for array in (q, k, v)
    ]
    tensors = [_tensor(graph, array, kinds.FP8_E4M3) for array in codes]
    names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    scalar = {"dim": [1, 1, 1, 1], "stride": [1, 1, 1, 1], "data_type": kinds.FLOAT}
    scales = [graph.tensor(**scalar, name=name) for name in names]
    made, _, *largest = graph.sdpa_fp8(
        *tensors, *scales, attn_scale=problem.dim**-0.5, is_inference=True, name="attention",
        **_mask(problem),
    )  # fmt: skip
    out = cupy.full(problem.q_shape, 0xFF, cupy.uint8)  # NaN
    _give_out(made, out)
    one, most = cupy.ones(1, cupy.float32), cupy.zeros(len(largest), cupy.float32)
    given = {t: a.data.ptr for t, a in zip((*tensors, made), (*codes, out), strict=True)}
    given |= dict.fromkeys(scales, one.data.ptr)
    for place, tensor in enumerate(largest):
        tensor.set_output(True).set_dim([1, 1, 1, 1]).set_stride([1, 1, 1, 1])
        tensor.set_data_type(kinds.FLOAT)
        given[tensor] = most[place:].data.ptr

    def result() -> Any:
        # Integers of 8 bits travel by DLPack; torch widens them.
        return from_torch(torch.from_dlpack(out).view(torch.float8_e4m3fn).to(torch.float16))

    return Prepared(_built(cudnn, graph, given, (codes, out, one, most)), result)


def _mask(problem: Problem) -> dict[str, bool]:
    if not problem.causal:
        return {}
    at_the_end = problem.q_len != problem.kv_len
    return {"use_causal_mask_bottom_right" if at_the_end else "use_causal_mask": True}


def _tensor(graph: Any, array: Any, kind: Any) -> Any:
    strides = [step // array.dtype.itemsize for step in array.strides]
    return graph.tensor(dim=list(array.shape), stride=strides, data_type=kind)


def _give_out(made: Any, out: Any) -> None:
    strides = [step // out.dtype.itemsize for step in out.strides]
    made.set_output(True).set_dim(list(out.shape)).set_stride(strides)


def _built(cudnn: Any, graph: Any, given: dict[Any, int], owners: Any) -> Callable[[], Any]:
    """The call of a graph on addresses of the memory of `owners`."""
    import cupy

    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    workspace = cupy.empty(max(graph.get_workspace_size(), 1), cupy.uint8)
    addresses = {tensor.get_uid(): address for tensor, address in given.items()}

    def call() -> Any:
        graph.execute(addresses, workspace.data.ptr)
        return owners  # whose memory is used for as long as there is this call

    return call
