"""`Plan`: which family runs a problem, how, and why. Plain data, launching nothing."""

from __future__ import annotations

import dataclasses
import logging
import os
from dataclasses import dataclass
from typing import Any

from .runtime import module
from .runtime.device import Device
from .runtime.ptxas import Resources
from .runtime.specialisation import Specialisation
from .spec import AttentionSpec
from .traffic import backward_bytes, tiled_bytes

_log = logging.getLogger("cuflash")
_logged: set[Plan] = set()


@dataclass(frozen=True, slots=True)
class Launch:
    """The kernel that does the work: its module, blocks, threads of a block, and dynamic shared
    memory of a block in bytes.
    """

    module: Specialisation
    blocks: int
    threads: int
    shared_memory: int


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a family cuts a problem: query rows and keys at a time, the heads it takes together, and
    what it allocates.
    """

    q_rows: int
    keys: int
    heads: int
    workspace: int  # bytes beside the outputs
    note: str = ""
    launch: Launch | None = None  # of a family with one kernel


@dataclass(frozen=True, slots=True)
class Refusal:
    """A family that does not take a problem, and each reason."""

    family: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The choice for one problem on one device. `print(plan)` shows all of it; `to_dict()` is
    JSON-ready.
    """

    spec: AttentionSpec
    device: Device
    family: str
    why: str
    tiling: Tiling
    refused: tuple[Refusal, ...]

    @property
    def flops(self) -> int:
        """Floating-point operations of the products, two forward or five backward, over the (query,
        key) pairs that causal and window leave.
        """
        return self.spec.flops

    @property
    def hbm_bytes(self) -> int:
        """Main-memory bytes that a tiled kernel must move: inputs once, outputs once."""
        if self.spec.gradients is not None:
            return backward_bytes(self.spec)
        return tiled_bytes(self.spec).total

    @property
    def resources(self) -> Resources | None:
        """Registers and spills of the kernel; None before it was compiled, or without one."""
        launch = self.tiling.launch
        if launch is None:
            return None
        kernels = module.resources(launch.module, self.device)
        return None if kernels is None else kernels.get(launch.module.name)

    def to_dict(self) -> dict[str, Any]:
        """Every field, and the derived figures, as plain JSON types."""
        return {
            **dataclasses.asdict(self),
            "flops": self.flops,
            "hbm_bytes": self.hbm_bytes,
            "resources": None if self.resources is None else dataclasses.asdict(self.resources),
        }

    def __str__(self) -> str:
        spec, tiling = self.spec, self.tiling
        tile = f"{tiling.q_rows} query rows x {tiling.keys} keys, {tiling.heads} heads at a time"
        kind = "plan" if spec.gradients is None else "backward plan"
        lines = [
            f"cuflash {kind}: {self.family} on {self.device}",
            f"  why        {self.why}",
            f"  problem    {describe_problem(spec)}",
            f"  tile       {tile}" + (f"; {tiling.note}" if tiling.note else ""),
            *self._launch_lines(),
            f"  workspace  {format_bytes(tiling.workspace)}",
            f"  work       {self.flops / 1e9:.3g} GFLOP, "
            f"at least {format_bytes(self.hbm_bytes)} of main memory",
        ]
        for refusal in self.refused:
            lines.append(f"  not {refusal.family:<9}{'; '.join(refusal.reasons)}")
        return "\n".join(lines)

    def _launch_lines(self) -> list[str]:
        launch, resources = self.tiling.launch, self.resources
        if launch is None:
            return []
        compiled = "not compiled yet"
        if resources is not None:
            spilled = resources.spill_stores + resources.spill_loads
            compiled = f"{resources.registers} registers, {spilled} bytes spilled"
        shape = f"{launch.blocks} blocks of {launch.threads} threads"
        memory = f"{launch.shared_memory / 1024:.3g} KiB of shared memory each"
        return [
            f"  kernel     {launch.module.name}; {compiled}",
            f"  grid       {shape}, {memory}",
        ]


def describe_problem(spec: AttentionSpec) -> str:
    """One line: shapes, dtype and the options that are on."""
    heads = f"{spec.q_heads} heads" if spec.group == 1 else f"{spec.q_heads}/{spec.kv_heads} heads"
    dims = f"dim {spec.head_dim}" + (
        f"/{spec.head_dim_v}" if spec.head_dim_v != spec.head_dim else ""
    )
    parts = [
        spec.dtype,
        f"batch {spec.batch}",
        heads,
        f"{spec.q_len} queries x {spec.kv_len} keys",
        dims,
    ]
    if spec.left is None and spec.right == 0:
        parts.append("causal")
    elif (spec.left, spec.right) != (None, None):
        parts.append(f"window ({spec.left}, {spec.right})")
    if spec.top_left and (spec.left, spec.right) != (None, None):
        parts.append("top-left")
    if spec.softcap is not None:
        parts.append(f"softcap {spec.softcap:g}")
    for name in ("mask", "bias"):
        if getattr(spec, name) is not None:
            parts.append(name)
    parts += [name for name in ("q_lens", "kv_lens") if getattr(spec, f"has_{name}")]
    parts.append(f"scale {spec.scale:.4g}")
    return ", ".join(parts)


def format_bytes(count: int) -> str:
    """Decimal units, as memory bandwidths are quoted."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


def is_logging() -> bool:
    """Whether plans are to be logged: with CUFLASH_LOG=1 in the environment."""
    return os.environ.get("CUFLASH_LOG", "0") not in ("", "0")


def log_once(plan: Plan) -> None:
    """Log a plan the first time it is used, where plans are to be logged."""
    if not is_logging() or plan in _logged:
        return
    _logged.add(plan)
    if not _log.handlers and not logging.getLogger().handlers:
        _log.addHandler(logging.StreamHandler())
    _log.setLevel(logging.INFO)
    _log.info("%s", plan)
