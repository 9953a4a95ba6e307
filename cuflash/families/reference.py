"""The family of NumPy arrays: tiled online softmax on the CPU (see `cuflash.reference`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from ..operands import Operands
from ..plan import Plan, Tiling
from ..reference import attend, choose_tiling
from ..runtime.device import Device
from ..runtime.specialisation import Specialisation
from ..spec import AttentionSpec


def supports(spec: AttentionSpec, device: Device) -> list[str]:
    return [] if device.kind == "cpu" else ["takes NumPy arrays only"]


def why(spec: AttentionSpec, device: Device) -> str:
    return "NumPy arrays: tiled online softmax with BLAS on the CPU"


def plan(spec: AttentionSpec, device: Device) -> Tiling:
    return choose_tiling(spec)


def prepare(plan: Plan) -> Callable[[Operands], None]:
    return functools.partial(_run, plan)


def _run(plan: Plan, operands: Operands) -> None:
    attend(plan.spec, plan.tiling, operands.views(plan.spec))


def specialisations(
    device: Device, head_dims: Sequence[int], dtypes: Sequence[str]
) -> list[Specialisation]:
    return []
