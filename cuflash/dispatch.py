"""Chooses the family of a problem. The only file that knows them all; it imports no CuPy, so every
rule is testable.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from . import families
from .plan import Plan, Refusal
from .runtime.device import Device
from .spec import AttentionSpec
from .validate import one_of

# The first family that takes a problem runs it.
PREFERENCE = ("sm90_fp8", "sm90", "sm80", "standard", "reference")
AUTO = "auto"
KERNELS = (AUTO, *PREFERENCE)
BACKWARD_PREFERENCE = ("sm90", "sm80", "standard", "reference")
BACKWARD_KERNELS = (AUTO, *BACKWARD_PREFERENCE)


def choose(spec: AttentionSpec, device: Device, kernel: str = AUTO) -> Plan:
    """The plan of a problem, or of its backward pass where the spec has gradients, on a device.

    Raises
    ------
    ValueError
        For a `kernel` that is not a family's name.
    NotImplementedError
        With each reason, when the family asked for, or every family, refuses the problem.
    """
    known = KERNELS if spec.gradients is None else BACKWARD_KERNELS
    return _choose(spec, device, one_of("kernel", kernel, known))


@functools.lru_cache(maxsize=4096)
def _choose(spec: AttentionSpec, device: Device, kernel: str) -> Plan:
    backward = spec.gradients is not None
    preference = BACKWARD_PREFERENCE if backward else PREFERENCE
    refused: list[Refusal] = []
    for name in preference if kernel == AUTO else (kernel,):
        reasons = reasons_against(name, spec, device)
        if not reasons:
            family = families.load_backward(name) if backward else families.load(name)
            why = family.why(spec, device) if kernel == AUTO else f"asked for by kernel={kernel!r}"
            return Plan(spec, device, name, why, family.plan(spec, device), tuple(refused))
        refused.append(Refusal(name, tuple(reasons)))
    asked = "" if kernel == AUTO else f"kernel={kernel!r}: "
    lines = "; ".join(f"{refusal.family}: {', '.join(refusal.reasons)}" for refusal in refused)
    problem = "the backward pass of this problem" if backward else "this problem"
    raise NotImplementedError(f"{asked}no family takes {problem} on {device}. {lines}")


def reasons_against(name: str, spec: AttentionSpec, device: Device) -> list[str]:
    """Why a family does not take a problem; empty when it does."""
    if spec.gradients is not None:
        return families.load_backward(name).supports(spec, device)
    if name in families.BUILT:
        return families.load(name).supports(spec, device)
    return [*_IN_8_BITS(spec, device), "in 8 bits, which attention_fp8 asks for"]


def _needs(
    capability: str, matches: Callable[[tuple[int, int]], bool], dtypes: tuple[str, ...]
) -> Rule:
    def rule(spec: AttentionSpec, device: Device) -> list[str]:
        reasons = []
        if device.compute_capability is None:
            reasons.append("needs a GPU")
        elif not matches(device.compute_capability):
            major, minor = device.compute_capability
            reasons.append(f"needs compute capability {capability}, not {major}.{minor}")
        if spec.dtype not in dtypes:
            reasons.append(f"takes {' and '.join(dtypes)}, not {spec.dtype}")
        return reasons

    return rule


Rule = Callable[[AttentionSpec, Device], list[str]]

_IN_8_BITS = _needs("9.0", lambda cc: cc == (9, 0), ("float16", "bfloat16"))
