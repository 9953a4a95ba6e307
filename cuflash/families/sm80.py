"""FlashAttention-2 on mma.sync, for every GPU of compute capability 8.0 and newer.

The kernel is `cuda_src/sm80/forward.cu`; this module says which problems it takes, with which tile,
and launches it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from struct import Struct
from typing import Any

import numpy as np

from ..operands import Operands
from ..plan import Launch, Plan, Tiling
from ..runtime import module
from ..runtime.device import Device
from ..runtime.graphs import lengths_on_device
from ..runtime.launch import launcher
from ..runtime.specialisation import Specialisation
from ..spec import AttentionSpec
from . import fused

# struct Arguments of cuda_src/sm80/forward.cu
_POINTERS = ("q", "k", "v", "out", "lse", "q_lens", "kv_lens")
_TENSORS = ("q", "k", "v", "out")
_INTS = (
    *("q_heads", "group", "q_len", "kv_len", "head_dim", "head_dim_v"),
    *("row_blocks", "left", "right", "top_left"),
)
_ARGUMENTS = np.dtype(
    [(name, np.uint64) for name in _POINTERS]
    + [(f"{name}_{axis}", np.int64) for name in _TENSORS for axis in ("entry", "head", "row")]
    + [(name, np.int32) for name in _INTS]
    + [("factor", np.float32), ("premultiply", np.float32), ("unseen", np.float32)]
    + [("prepare", np.int32), ("out_aligned", np.int32)],
    align=True,
)
_CHANGING = Struct(f"{len(_POINTERS)}Q")  # from call to call


@dataclass(frozen=True, slots=True)
class Tile:
    """A row of the tile table: what a block works on, and why. `unroll` counts steps of Q Kᵀ."""

    q_rows: int
    keys: int
    warps: int
    blocks: int  # of one multiprocessor, which share its 65,536 registers
    sides: int  # warps that share rows, each with a part of the keys and of V's columns
    unroll: int
    why: str

    @property
    def row_tiles(self) -> int:
        """Tiles of 16 rows of each warp."""
        return self.q_rows * self.sides // (16 * self.warps)

    def registers(self, head_dim_v: int) -> int:
        """Registers a thread for scores and output, without the 45 or so beside them."""
        return self.row_tiles * (self.keys + head_dim_v) // (2 * self.sides)

    def shared_memory(self, head_dim: int, head_dim_v: int) -> int:
        """Bytes a block: tiles in panels of 64 columns, and weights that change sides."""
        dim, dim_v = (-(-d // 64) * 64 for d in (head_dim, head_dim_v))
        elements = self.q_rows * max(dim, dim_v) + self.keys * (dim + dim_v)
        return 2 * (elements + (self.q_rows * self.keys if self.sides > 1 else 0))


# By the larger of both head dims, rounded up to a bucket. Ratios are to FlashAttention-2 of torch
# 2.11 in the same run on an H200, full and causal: float16, batch * seq = 16,384, hidden 2,048, the
# mean of seq 2,048 and 8,192. Other architectures have not been timed: what is chosen there keeps
# every value in registers.
_TILES = {
    32: Tile(128, 128, 4, 2, 1, 2, "1.14, 1.12; 96 keys 1.04, 1.04; 160 keys 1.16, 1.08"),
    64: Tile(128, 128, 4, 2, 1, 4, "1.11, 1.08; 96 and 112 keys 5 to 6 % less"),
    96: Tile(128, 96, 4, 2, 1, 6, "1.08, 1.07; 80 keys 1.01, 0.99; unrolled by 3 1.03, 1.04"),
    128: Tile(128, 80, 4, 2, 1, 8, "1.11, 1.10; unrolled by 4 1.07, 1.05; 64 keys 1.09, 1.08"),
    192: Tile(64, 96, 4, 2, 1, 12, "1.05, 1.10; 80 keys 1.04, 1.09; 128 rows spill"),
    256: Tile(64, 80, 4, 2, 1, 16, "1.07, 1.07; two sides are a little faster"),
}
_AMPERE = {  # and Ada
    96: Tile(128, 96, 4, 2, 1, 3, "spills where unrolled by 6 on 8.0"),
    128: Tile(128, 80, 4, 2, 1, 4, "spills where unrolled by 8 on 8.0"),
}
_BLACKWELL = {
    64: Tile(128, 128, 4, 2, 1, 1, "spills where unrolled by 2 on 12.0"),
    96: Tile(128, 80, 4, 2, 1, 3, "96 keys spill on 10.0"),
    128: Tile(128, 64, 4, 2, 1, 2, "spills where unrolled by 4 on 10.0"),
}
# The first that fits as it is, where head_dim_v has two sides of whole panels.
_TWO_SIDED = {
    256: (
        Tile(128, 96, 8, 1, 2, 16, "1.16, 1.14; twice as many rows share what is loaded"),
        Tile(64, 64, 4, 2, 2, 16, "1.08, 1.10"),
    )
}
_BLACKWELL_TWO_SIDED = {
    256: (
        Tile(128, 96, 8, 1, 2, 8, "spills where unrolled by 16 on 10.0"),
        Tile(64, 64, 4, 2, 2, 16, "as on 9.0"),
    )
}
# Softcap and rows that are not 16-byte aligned need registers of their own.
_CAREFUL = {
    32: Tile(128, 128, 4, 2, 1, 2, "as without"),
    64: Tile(128, 96, 4, 2, 1, 2, "112 keys spill on 10.0"),
    96: Tile(128, 64, 4, 2, 1, 2, "80 keys spill on 10.0"),
    128: Tile(128, 48, 4, 2, 1, 2, "64 keys spill on 10.0"),
    192: Tile(64, 80, 4, 2, 1, 4, "as without, but for 16 keys"),
    256: Tile(64, 80, 4, 2, 1, 4, "as without"),
}
_BUCKETS = tuple(_TILES)
_LEAST_KEYS = 32
_RESERVED = 2048  # shared memory that each block takes beside its tiles: the system's, the kernel's


def supports(spec: AttentionSpec, device: Device) -> list[str]:
    reasons = fused.reasons_against_ampere(spec, device)
    if not spec.is_empty:
        read = {"k": spec.head_dim, "v": spec.head_dim_v} if spec.kv_len else {}
        for name, dim in {"q": spec.head_dim, **read, "out": spec.head_dim_v}.items():
            if dim > 1 and getattr(spec, name).strides[3] != 1:
                reasons.append(f"{name}: needs neighbouring elements in its last axis")
    if spec.batch * spec.q_heads * -(-spec.q_len // 64) >= 1 << 31:
        reasons.append("more blocks than a grid holds")
    return reasons


def why(spec: AttentionSpec, device: Device) -> str:
    return "fused kernel of FlashAttention-2 on mma.sync; no newer family takes this problem"


def plan(spec: AttentionSpec, device: Device) -> Tiling:
    variant = _Variant.of(spec)
    tile, compiled = _compiled(variant, device)
    launch = Launch(
        compiled,
        blocks=spec.batch * spec.q_heads * -(-spec.q_len // tile.q_rows),
        threads=32 * tile.warps,
        shared_memory=tile.shared_memory(variant.head_dim, variant.head_dim_v),
    )
    note = f"{tile.warps} warps"
    return Tiling(tile.q_rows, tile.keys, 1, 0, note, launch)


@functools.lru_cache(maxsize=1024)  # the same for every length
def _compiled(variant: _Variant, device: Device) -> tuple[Tile, Specialisation]:
    return variant.tile(device), variant.specialisation(device)


def prepare(plan: Plan) -> Callable[[Operands], None]:
    launch = plan.tiling.launch
    assert launch is not None
    kernel = module.load(launch.module, plan.device).function(launch.module.name)
    row_blocks = -(-plan.spec.q_len // plan.tiling.q_rows)
    queue = launcher(
        kernel, launch.blocks, launch.threads, launch.shared_memory, _CHANGING,
        _lasting_arguments(plan.spec, row_blocks).tobytes(),
    )  # fmt: skip

    def run(operands: Operands) -> None:
        lse, q_lens, kv_lens = operands.lse, operands.q_lens, operands.kv_lens
        if q_lens is not None:
            q_lens = lengths_on_device("q_lens", q_lens)
        if kv_lens is not None:
            kv_lens = lengths_on_device("kv_lens", kv_lens)
        queue(
            *operands.starts,
            0 if lse is None else lse.data.ptr,
            0 if q_lens is None else q_lens.data.ptr,
            0 if kv_lens is None else kv_lens.data.ptr,
        )

    return run


def specialisations(
    device: Device, head_dims: Sequence[int], dtypes: Sequence[str]
) -> list[Specialisation]:
    return [
        _Variant(bucket, bucket, dtype, bounded, softcap, aligned).specialisation(device)
        for bucket in dict.fromkeys(_bucket(dim) for dim in head_dims)
        for dtype in dtypes
        if dtype in fused.ELEMENT and (device.compute_capability or (0, 0)) >= (8, 0)
        for bounded in (False, True)
        for softcap in (False, True)
        for aligned in (True, False)
    ]


@dataclass(frozen=True, slots=True)
class _Variant:
    """What the kernel is compiled for: buckets of the head dims, and what its loop has to do."""

    head_dim: int
    head_dim_v: int
    dtype: str
    bounded: bool
    softcap: bool
    aligned: bool

    @classmethod
    def of(cls, spec: AttentionSpec) -> _Variant:
        return cls(
            _bucket(spec.head_dim),
            _bucket(spec.head_dim_v),
            spec.dtype,
            (spec.left, spec.right) != (None, None),
            spec.softcap is not None,
            _is_aligned(spec),
        )

    def tile(self, device: Device) -> Tile:
        """The row of the tile table, with fewer keys where shared memory is small: as many as let
        two blocks share a multiprocessor, or else as many as one block can hold.
        """
        dim = max(self.head_dim, self.head_dim_v)
        if self.softcap or not self.aligned:
            tile = _CAREFUL[dim]
        else:
            generation, _ = device.compute_capability or (0, 0)
            two_sided = _BLACKWELL_TWO_SIDED if generation > 9 else _TWO_SIDED
            for tile in two_sided.get(dim, ()):
                if self.head_dim_v % 128 == 0 and self._fits(tile, device):
                    return tile
            others = _AMPERE if generation < 9 else _BLACKWELL if generation > 9 else {}
            tile = others.get(dim, _TILES[dim])
        fewer = [replace(tile, keys=n) for n in range(tile.keys, _LEAST_KEYS - 1, -16)]
        alone = [replace(tile, blocks=1) for tile in fewer]
        return next((tile for tile in fewer + alone if self._fits(tile, device)), alone[-1])

    def _fits(self, tile: Tile, device: Device) -> bool:
        bytes_each = tile.shared_memory(self.head_dim, self.head_dim_v) + _RESERVED
        # What the system takes of one block is not counted in the device's most for a block.
        return tile.blocks * bytes_each <= device.shared_memory_per_block + 1024

    def specialisation(self, device: Device) -> Specialisation:
        """The module of this variant with its tile."""
        tile = self.tile(device)
        marks = {"bounded": self.bounded, "softcap": self.softcap, "unaligned": not self.aligned}
        name = fused.module_name("sm80", (self.head_dim, self.head_dim_v), self.dtype, marks)
        config: tuple[tuple[str, int | bool | str], ...] = (
            ("element", fused.ELEMENT[self.dtype]),
            ("head_dim", self.head_dim),
            ("head_dim_v", self.head_dim_v),
            ("q_rows", tile.q_rows),
            ("keys", tile.keys),
            ("warps", tile.warps),
            ("blocks", tile.blocks),
            ("sides", tile.sides),
            ("unroll", tile.unroll),
            ("bounded", self.bounded),
            ("softcap", self.softcap),
            ("aligned", self.aligned),
        )
        return Specialisation("sm80/forward.cu", name, config)


def _lasting_arguments(spec: AttentionSpec, row_blocks: int) -> np.ndarray[Any, Any]:
    """`struct Arguments` without its pointers."""
    arguments: dict[str, float] = dict.fromkeys(_ARGUMENTS.names or (), 0)
    for name in _TENSORS:
        strides = getattr(spec, name).strides
        for axis, step in zip(("entry", "head", "row"), strides, strict=False):
            arguments[f"{name}_{axis}"] = step
    for name in ("q_heads", "group", "q_len", "kv_len", "head_dim", "head_dim_v", "top_left"):
        arguments[name] = getattr(spec, name)
    arguments["row_blocks"] = row_blocks
    arguments["left"], arguments["right"] = fused.window_bounds(spec)
    premultiply, arguments["factor"] = spec.score_factors
    if premultiply is not None:
        arguments["prepare"], arguments["premultiply"] = 1, premultiply
    arguments["unseen"] = fused.unseen(arguments["factor"])
    arguments["out_aligned"] = fused.rows_aligned(spec.out)
    return np.array(tuple(arguments.values()), _ARGUMENTS)


def _bucket(dim: int) -> int:
    return next(bucket for bucket in _BUCKETS if dim <= bucket)


def _is_aligned(spec: AttentionSpec) -> bool:
    """Whether every row of q, k and v starts on 16 bytes and holds whole units of them."""
    return (
        spec.head_dim % 8 == 0
        and spec.head_dim_v % 8 == 0
        and all(fused.rows_aligned(place) for place in (spec.q, spec.k, spec.v))
    )
