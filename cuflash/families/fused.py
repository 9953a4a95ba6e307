"""What the families of fused kernels share: what none of them takes, names and arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..runtime import tensormap
from ..runtime.device import Device
from ..spec import AttentionSpec, Placement

ELEMENT = {"float16": "Float16", "bfloat16": "Bfloat16"}  # as the sources call them
UNBOUNDED = 1 << 29  # far beyond any length, and sums of a few still fit 32 bits
_SHORT_NAME = {"float16": "f16", "bfloat16": "bf16"}
_LARGEST_SCALE = 1e20  # times any score of 16 bits it leaves float32 room


def reasons_against(spec: AttentionSpec) -> list[str]:
    """Why no fused kernel takes a problem; empty when one may."""
    reasons = []
    if spec.dtype not in ELEMENT:
        reasons.append(f"takes {' and '.join(ELEMENT)}, not {spec.dtype}")
    reasons += [f"does not take {name}" for name in ("mask", "bias") if getattr(spec, name)]
    if max(spec.q_len, spec.kv_len) >= UNBOUNDED:
        reasons.append(f"takes lengths below {UNBOUNDED}")
    reasons += [
        f"takes {name} up to {_LARGEST_SCALE:.0e}, not {value:g}"
        for name, value in (("scale", spec.scale), ("softcap", spec.softcap or 0.0))
        if abs(value) > _LARGEST_SCALE
    ]
    return reasons


def reasons_against_ampere(spec: AttentionSpec, device: Device) -> list[str]:
    """The same of kernels on mma.sync and asynchronous copies, from compute capability 8.0 on."""
    reasons = []
    if device.compute_capability is None:
        reasons.append("needs a GPU")
    elif device.compute_capability < (8, 0):
        major, minor = device.compute_capability
        reasons.append(f"needs compute capability 8.0 or newer, not {major}.{minor}")
    return reasons + reasons_against(spec)


def reasons_against_hopper(
    spec: AttentionSpec,
    device: Device,
    arrays: Mapping[str, tuple[tuple[int, int, int, int], Placement]],
) -> list[str]:
    """The same of kernels that move arrays by tensor copies, on compute capability 9.0 alone."""
    reasons = []
    if device.compute_capability is None:
        reasons.append("needs a GPU")
    elif device.compute_capability != (9, 0):
        major, minor = device.compute_capability
        reasons.append(f"needs compute capability 9.0, not {major}.{minor}")
    reasons += reasons_against(spec)
    reasons += [
        f"takes multiples of 8 as {name}, not {getattr(spec, name)}"
        for name in ("head_dim", "head_dim_v")
        if getattr(spec, name) % 8
    ]
    if spec.is_empty:
        return reasons
    if spec.kv_len == 0:
        reasons.append("needs keys")
    reasons += [
        f"{name}: {reason}"
        for name, (shape, place) in arrays.items()
        if 0 not in shape
        for reason in tensormap.reasons_against(shape, place.strides, place.aligned)
    ]
    return reasons


def buckets(
    head_dim: int, head_dim_v: int, known: Sequence[int], unequal: Sequence[tuple[int, int]]
) -> tuple[int, int]:
    """What a kernel is compiled for: the first of `known` at or above each head dim. Pairs that are
    not among `unequal` are as wide as the larger; columns beyond the head dims are zeros.
    """
    pair = tuple(next(size for size in known if dim <= size) for dim in (head_dim, head_dim_v))
    first, second = pair
    return (first, second) if pair in unequal else (max(pair), max(pair))


def struct_of(fields: list[tuple[str, Any]]) -> np.dtype[Any]:
    """A kernel's arguments as C++ lays them out, in whole units of the 64 bytes that tensor maps
    are aligned to.
    """
    return np.dtype(
        {
            "names": [name for name, _ in fields],
            "formats": [kind for _, kind in fields],
            "itemsize": -(-np.dtype(fields, align=True).itemsize // 64) * 64,
        },
        align=True,
    )


def module_name(
    family: str,
    dims: tuple[int, int],
    dtype: str,
    marks: Mapping[str, bool],
    kind: str = "fwd",
) -> str:
    """The name of a kernel for buckets of the head dims, with the marks that are on; `kind` is the
    pass, ``"fwd"`` or ``"bwd"``.
    """
    shown = f"d{dims[0]}" if dims[0] == dims[1] else f"d{dims[0]}x{dims[1]}"
    on = [mark for mark, is_on in marks.items() if is_on]
    return "_".join([f"cuflash_{kind}", family, shown, _SHORT_NAME[dtype], *on])


def window_bounds(spec: AttentionSpec) -> tuple[int, int]:
    """Keys that a row sees to the left and to the right of its own, as kernels count them."""
    return (
        UNBOUNDED if spec.left is None else spec.left,
        UNBOUNDED if spec.right is None else spec.right,
    )


def unseen(factor: float) -> float:
    """The reference of a row that has seen no key, before `factor` multiplies it.

    Above -inf in units of log2 too, so that the difference of two is 0 and not NaN, and below every
    score that float32 holds there.
    """
    return -3.4e38 / max(1.0, factor)


def rows_aligned(place: Placement) -> bool:
    """Whether every row starts on 16 bytes."""
    return place.aligned and all(step % 8 == 0 for step in place.strides[:3])
