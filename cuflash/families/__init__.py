"""Kernel families. Each is a module with the same verbs:

- ``supports(spec, device)``: reasons why it can't take a problem; none when it can
- ``why(spec, device)``: one line for people
- ``plan(spec, device)``: how it would run it, a `Tiling`
- ``prepare(plan)``: load what the plan needs; the answer runs any call that follows it, given its
  `Operands`. Asked for only where there is an output element
- ``specialisations(device, head_dims, dtypes)``: every module it may compile for problems of these,
  each once; what it does not take adds none

All but `prepare` never import CuPy. Adding an architecture is adding a module and its name here.

The backward pass of a family is a module in `backward`, with the same verbs. Their specs have
`gradients`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

from ..plan import Plan, Tiling
from ..runtime.device import Device
from ..runtime.specialisation import Specialisation
from ..spec import AttentionSpec


class Family(Protocol):
    """The verbs of a family module, of either pass."""

    def supports(self, spec: AttentionSpec, device: Device) -> list[str]: ...

    def why(self, spec: AttentionSpec, device: Device) -> str: ...

    def plan(self, spec: AttentionSpec, device: Device) -> Tiling: ...

    def prepare(self, plan: Plan) -> Callable[[Any], None]: ...

    def specialisations(
        self, device: Device, head_dims: Sequence[int], dtypes: Sequence[str]
    ) -> list[Specialisation]: ...


BUILT = ("sm90", "sm80", "standard", "reference")
IN_8_BITS = ("sm90_fp8",)  # which `attention_fp8` has, and not `attention`
BACKWARD_BUILT = ("sm90", "sm80", "standard", "reference")


@functools.cache
def load(name: str) -> Family:
    """The module of a built family, imported on first use."""
    module: Any = importlib.import_module(f".{name}", __name__)
    return cast(Family, module)


@functools.cache
def load_backward(name: str) -> Family:
    """The module of the backward pass of a family, imported on first use."""
    module: Any = importlib.import_module(f".backward.{name}", __name__)
    return cast(Family, module)
