"""The backward pass of NumPy arrays, tiled on the CPU (see `cuflash.reference_backward`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from ...operands import BackwardOperands
from ...plan import Plan, Tiling
from ...reference_backward import choose_tiling, differentiate
from ...runtime.device import Device
from ...runtime.specialisation import Specialisation
from ...spec import AttentionSpec


def supports(spec: AttentionSpec, device: Device) -> list[str]:
    return [] if device.kind == "cpu" else ["takes NumPy arrays only"]


def why(spec: AttentionSpec, device: Device) -> str:
    return "NumPy arrays: weights computed again from LSE, tile by tile, with BLAS on the CPU"


def plan(spec: AttentionSpec, device: Device) -> Tiling:
    return choose_tiling(spec)


def prepare(plan: Plan) -> Callable[[BackwardOperands], None]:
    return functools.partial(_run, plan)


def specialisations(
    device: Device, head_dims: Sequence[int], dtypes: Sequence[str]
) -> list[Specialisation]:
    return []


def _run(plan: Plan, operands: BackwardOperands) -> None:
    differentiate(plan.spec, plan.tiling, operands.views(plan.spec))
