"""cuDNN's graph of the bench, by a frontend that attends in NumPy to the addresses it is given."""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.inputs import random_inputs
from bench.peers import blas, cudnn_graph
from bench.shapes import Problem


class DeviceArray(np.ndarray):
    """A NumPy array whose memory is asked for as CuPy's is."""

    @property
    def data(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(ptr=self.ctypes.data)


class Tensor:
    """A tensor of the graph, which has no number before the graph is built."""

    def __init__(self) -> None:
        self.dim: list[int] = []
        self.stride: list[int] = []
        self.uid: int | None = None
        self.output = False

    def set_output(self, is_one: bool) -> Tensor:
        self.output = is_one
        return self

    def set_dim(self, dim: list[int]) -> Tensor:
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> Tensor:
        self.stride = stride
        return self

    def get_uid(self) -> int:
        assert self.uid is not None, "the graph is not built"
        return self.uid

    def at(self, address: int) -> Any:
        size = 1 + sum((n - 1) * step for n, step in zip(self.dim, self.stride, strict=True))
        memory = (ctypes.c_char * (2 * size)).from_address(address)
        flat = np.frombuffer(memory, np.float16)
        steps = [2 * step for step in self.stride]
        return np.lib.stride_tricks.as_strided(flat, self.dim, steps)


class Graph:
    """`cudnn.pygraph` as far as it is used, with the names of its arguments."""

    def __init__(self, io_data_type: str, intermediate_data_type: str, compute_data_type: str):
        assert (io_data_type, compute_data_type) == ("HALF", "FLOAT")
        self.built = False

    def tensor(self, dim: list[int], stride: list[int], data_type: str) -> Tensor:
        assert data_type == "HALF"
        return Tensor().set_dim(dim).set_stride(stride)

    def sdpa(
        self, q: Tensor, k: Tensor, v: Tensor, attn_scale: float, is_inference: bool, name: str,
        use_causal_mask: bool = False, use_causal_mask_bottom_right: bool = False,
    ) -> list[Any]:  # fmt: skip
        assert is_inference
        assert attn_scale == q.dim[-1] ** -0.5
        self.inputs, self.out = (q, k, v), Tensor()
        # The first aligns at the first key, which is right for equal lengths alone.
        assert not use_causal_mask or q.dim[2] == k.dim[2]
        self.causal = use_causal_mask or use_causal_mask_bottom_right
        return [self.out, None]

    def build(self, modes: list[str]) -> None:
        for number, tensor in enumerate((*self.inputs, self.out), start=7):
            tensor.uid = number
        self.built = True

    def get_workspace_size(self) -> int:
        assert self.built
        return 0

    def execute(self, given: dict[int, int], workspace: int) -> None:
        assert workspace
        assert self.out.output
        q, k, v = (x.at(given[x.get_uid()]).astype(np.float32) for x in self.inputs)
        self.out.at(given[self.out.get_uid()])[...] = blas.plain_attention(q, k, v, self.causal)


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = SimpleNamespace(HALF="HALF", BFLOAT16="BFLOAT16", FLOAT="FLOAT", FP8_E4M3="E4M3")
    cudnn: Any = ModuleType("cudnn")
    cudnn.data_type, cudnn.pygraph = kinds, Graph
    cudnn.heur_mode = SimpleNamespace(A="A", FALLBACK="FALLBACK")
    cupy: Any = ModuleType("cupy")
    cupy.empty = lambda count, dtype: np.empty(count, dtype).view(DeviceArray)
    cupy.uint8 = np.uint8
    cuda: Any = ModuleType("cupy.cuda")
    cuda.device = SimpleNamespace(get_cublas_handle=lambda: 1)
    for name, module in (("cudnn", cudnn), ("cupy", cupy), ("cupy.cuda", cuda)):
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("lengths", [(20, 20), (12, 20)], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.usefixtures("libraries")
def test_the_graph_attends_to_the_arrays(causal: bool, lengths: tuple[int, int]) -> None:
    problem = Problem(2, 4, 2, *lengths, 16, causal=causal)
    q, k, v = (array.view(DeviceArray) for array in random_inputs(np, problem, 1))
    prepared = cudnn_graph.make(problem, q, k, v)
    assert prepared.result is not None
    assert np.isnan(prepared.result()).all()
    prepared.call()
    expected = blas.plain_attention(*(x.astype(np.float32) for x in (q, k, v)), causal)
    np.testing.assert_allclose(prepared.result(), expected.astype(np.float16), atol=1e-3)
