"""Backward passes of the problems of `gpu_cases`, on a device and by the same steps on the host."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from comparison import Array, poisoned, store, values_of
from gpu_cases import HostCall, Problem, host_call, place
from gradient_comparison import GRADIENTS, assert_gradients

import cuflash
from cuflash import families
from cuflash.arrays import describe
from cuflash.operands import adopt_all, adopt_backward


@dataclass
class HostBackward:
    """The arrays of a backward pass in host memory; the gradients are full of NaN."""

    call: HostCall
    dout: Array
    out: Array
    lse: Array
    gradients: dict[str, Array]

    @property
    def arrays(self) -> dict[str, Array]:
        return {"q": self.call.q, "k": self.call.k, "v": self.call.v, "dout": self.dout} | {
            "out": self.out,
            "lse": self.lse,
        }

    def assert_right(self, gradients: Any, **lens: Any) -> None:
        """Assert that gradients on the host are those of the call, by the oracle."""
        call = self.call
        assert_gradients(gradients, self.dout, call.q, call.k, call.v, **call.options, **lens)


def host_backward(problem: Problem, seed: int = 0, **lens: Any) -> HostBackward:
    """Random inputs of a backward pass; what lies past the lengths is NaN where storage allows."""
    call = host_call(problem, seed)
    bshd = call.options["layout"] == "bshd"
    for name, limits in lens.items():
        for array in (call.q,) if name == "q_lens" else (call.k, call.v):
            for entry, length in zip(array, limits, strict=True):
                (entry.swapaxes(0, 1) if bshd else entry)[:, length:] = np.nan
    rng = np.random.default_rng(seed + 1)
    dout = values_of(rng, call.out.shape, call.q.dtype)
    dout = store(dout, problem.storage.get("out", "contiguous"))
    out, lse = cuflash.attention(call.q, call.k, call.v, **call.options, **lens, return_lse=True)
    for b, length in enumerate(lens.get("q_lens", [])):
        for array in (dout, out):
            (array[b].swapaxes(0, 1) if bshd else array[b])[:, length:] = np.nan
        lse[b, :, length:] = np.nan
    gradients = {
        name: poisoned(like.shape, like.dtype, problem.storage.get("out", "contiguous"))
        for name, like in zip(GRADIENTS, (call.q, call.k, call.v), strict=True)
    }
    return HostBackward(call, dout, out, lse, gradients)


def run_on_host(family: str, backward: HostBackward, **lens: Any) -> tuple[Array, Array, Array]:
    """Gradients of a GPU family whose pass asks nothing of its arrays that NumPy's do not have."""
    options = backward.call.options | lens
    scores = {name: options.get(name) for name in ("mask", "bias")}
    limits = {name: options.get(name) for name in ("q_lens", "kv_lens")}
    arrays = backward.arrays
    on_gpu = {
        name: dataclasses.replace(describe(name, array), device="cuda:0")
        for name, array in (arrays | scores | backward.gradients).items()
        if array is not None
    }
    plan = cuflash.explain(**(options | on_gpu), device="8.0", kernel=family, backward=True)
    assert plan.family == family
    forward = adopt_all(
        arrays["q"], arrays["k"], arrays["v"], **scores, out=arrays["out"], **limits,
        layout=options["layout"],
    )  # fmt: skip
    operands = adopt_backward(forward, arrays["dout"], arrays["lse"], **backward.gradients)
    with np.errstate(all="ignore"):  # as on a GPU
        families.load_backward(family).prepare(plan)(operands)
    return operands.dq, operands.dk, operands.dv


def run_on_device(
    cupy: ModuleType, backward: HostBackward, kernel: str = "auto", **more: Any
) -> tuple[Any, Any, Any]:
    """Gradients by the public function, from copies on the device of all the memory."""
    options = {
        name: place(cupy, value) if isinstance(value, np.ndarray) else value
        for name, value in backward.call.options.items()
    }
    arrays = {name: place(cupy, array) for name, array in backward.arrays.items()}
    gradients = {name: place(cupy, array) for name, array in backward.gradients.items()}
    found = cuflash.attention_backward(**arrays, **options, **gradients, kernel=kernel, **more)
    assert all(found[at] is gradients[name] for at, name in enumerate(GRADIENTS))
    return found
