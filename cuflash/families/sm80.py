"""FlashAttention-2 on mma.sync, for every GPU of compute capability 8.0 and newer.

The kernel is `cuda_src/sm80/forward.cu`; this module says which problems it takes, with which tile,
and launches it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..operands import Operands
from ..plan import Launch, Plan, Tiling
from ..runtime import module
from ..runtime.device import Device
from ..runtime.specialisation import Specialisation
from ..spec import AttentionSpec

_ELEMENT = {"float16": "Float16", "bfloat16": "Bfloat16"}
_SHORT_NAME = {"float16": "f16", "bfloat16": "bf16"}
_UNBOUNDED = 1 << 29  # far beyond any length, and sums of a few still fit 32 bits
_LOG2_E = math.log2(math.e)

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
    + [("factor", np.float32), ("premultiply", np.float32)]
    + [("prepare", np.int32), ("out_aligned", np.int32)],
    align=True,
)


@dataclass(frozen=True, slots=True)
class Tile:
    """A row of the tile table: what a block works on, and why. `unroll` counts steps of Q Kᵀ."""

    q_rows: int
    keys: int
    warps: int
    blocks: int  # of one multiprocessor, which share its 65,536 registers
    stages: int
    unroll: int
    overlap: bool  # the next tile's scores among this one's exponentials
    why: str

    @property
    def row_tiles(self) -> int:
        """Tiles of 16 rows of each warp."""
        return self.q_rows // (16 * self.warps)

    def registers(self, head_dim_v: int) -> int:
        """Registers a thread for scores and output, without the 45 or so beside them."""
        scores = self.keys * (2 if self.overlap else 1)
        return self.row_tiles * (scores + head_dim_v) // 2

    def shared_memory(self, head_dim: int, head_dim_v: int) -> int:
        """Bytes a block; tiles are stored in panels of 64 columns."""
        dim, dim_v = (-(-d // 64) * 64 for d in (head_dim, head_dim_v))
        return 2 * (self.q_rows * max(dim, dim_v) + self.stages * self.keys * (dim + dim_v))


# By the larger of both head dims, rounded up to a bucket. TFLOP/s are of float16 at batch * seq =
# 16,384, hidden 2,048, seq 8,192, full and causal, on an H200; in brackets what FlashAttention-2 of
# torch 2.11 reached in the same run. Other architectures have not been timed: what is chosen there
# keeps every value in registers.
_TILES = {
    32: Tile(128, 64, 4, 2, 1, 2, False, "128 keys spill on 10.0 and 12.0"),
    64: Tile(128, 80, 4, 2, 1, 2, False, "more keys, or overlap, spill on 10.0 and 12.0"),
    96: Tile(128, 64, 4, 2, 1, 2, False, "as for 128, with room to unroll"),
    128: Tile(128, 48, 4, 2, 2, 1, False, "64 keys spill but on 9.0"),
    192: Tile(64, 64, 4, 2, 1, 2, False, "128 rows do not fit the registers"),
    256: Tile(64, 64, 4, 2, 1, 4, False, "330 and 287 (310, 283); 8 warps 285 and 253"),
}
_OVERLAPPED = {64: Tile(128, 64, 4, 2, 2, 1, True, "313 and 301 (294, 272); serial 306 and 288")}
_HOPPER = {
    **_OVERLAPPED,
    128: Tile(128, 64, 4, 2, 2, 1, False, "352 and 320 (341, 285); one stage 361 and 306"),
}
_SMALL_SHARED = {
    128: Tile(128, 32, 4, 2, 1, 2, False, "two blocks share 100 kB of memory"),
}
# Softcap and rows that are not 16-byte aligned need registers of their own.
_CAREFUL = {
    32: Tile(128, 64, 4, 2, 1, 1, False, "spills with 128 keys"),
    64: Tile(128, 64, 4, 2, 1, 1, False, "spills with 128 keys"),
    96: Tile(128, 32, 4, 2, 1, 1, False, "spills with 64 keys"),
    128: Tile(128, 32, 4, 2, 1, 1, False, "spills with 64 keys"),
    192: Tile(64, 32, 4, 2, 1, 1, False, "spills with 64 keys"),
    256: Tile(64, 32, 4, 2, 1, 1, False, "spills with 64 keys"),
}
_BUCKETS = tuple(_TILES)
_ROOMY = 128 << 10


def supports(spec: AttentionSpec, device: Device) -> list[str]:
    reasons = []
    if device.compute_capability is None:
        reasons.append("needs a GPU")
    elif device.compute_capability < (8, 0):
        major, minor = device.compute_capability
        reasons.append(f"needs compute capability 8.0 or newer, not {major}.{minor}")
    if spec.dtype not in _ELEMENT:
        reasons.append(f"takes {' and '.join(_ELEMENT)}, not {spec.dtype}")
    reasons += [f"does not take {name}" for name in ("mask", "bias") if getattr(spec, name)]
    if not spec.is_empty:
        read = {"k": spec.head_dim, "v": spec.head_dim_v} if spec.kv_len else {}
        for name, dim in {"q": spec.head_dim, **read, "out": spec.head_dim_v}.items():
            if dim > 1 and getattr(spec, name).strides[3] != 1:
                reasons.append(f"{name}: needs neighbouring elements in its last axis")
    if max(spec.q_len, spec.kv_len) >= _UNBOUNDED:
        reasons.append(f"takes lengths below {_UNBOUNDED}")
    if spec.batch * spec.q_heads * -(-spec.q_len // 64) >= 1 << 31:
        reasons.append("more blocks than a grid holds")
    return reasons


def why(spec: AttentionSpec, device: Device) -> str:
    return "fused kernel of FlashAttention-2 on mma.sync; no newer family takes this problem"


def plan(spec: AttentionSpec, device: Device) -> Tiling:
    variant = _Variant.of(spec)
    tile = variant.tile(device)
    launch = Launch(
        variant.specialisation(device),
        blocks=spec.batch * spec.q_heads * -(-spec.q_len // tile.q_rows),
        threads=32 * tile.warps,
        shared_memory=tile.shared_memory(variant.head_dim, variant.head_dim_v),
    )
    loop = "overlapped" if tile.overlap else "serial"
    note = f"{tile.warps} warps, {tile.stages}-stage {loop} loop"
    return Tiling(tile.q_rows, tile.keys, 1, 0, note, launch)


def run(plan: Plan, operands: Operands) -> None:
    ready = _prepare(plan.spec, plan.device)
    lens = [_on_device(lens) for lens in (operands.q_lens, operands.kv_lens)]
    arguments = ready.arguments.copy()
    for name in _TENSORS:
        arguments[name] = getattr(operands, name).data.ptr
    if operands.lse is not None:
        arguments["lse"] = operands.lse.data.ptr
    for name, array in zip(("q_lens", "kv_lens"), lens, strict=True):
        if array is not None:
            arguments[name] = array.data.ptr
    # As plain bytes: CuPy would describe a structured array anew at each launch.
    packed = (arguments.view(f"V{_ARGUMENTS.itemsize}"),)
    ready.kernel(ready.grid, ready.block, packed, shared_mem=ready.shared_memory)


def specialisations(
    device: Device, head_dims: Sequence[int], dtypes: Sequence[str]
) -> list[Specialisation]:
    return [
        _Variant(bucket, bucket, dtype, bounded, softcap, aligned).specialisation(device)
        for bucket in dict.fromkeys(_bucket(dim) for dim in head_dims)
        for dtype in dtypes
        if dtype in _ELEMENT and (device.compute_capability or (0, 0)) >= (8, 0)
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
        """The row of the tile table."""
        dim = max(self.head_dim, self.head_dim_v)
        if self.softcap or not self.aligned:
            return _CAREFUL[dim]
        special: dict[int, Tile] = {}
        if device.compute_capability == (9, 0):
            special = _HOPPER
        elif (device.compute_capability or (0, 0)) < (9, 0):
            special = _OVERLAPPED
        if device.shared_memory_per_block < _ROOMY:
            special = {**special, **_SMALL_SHARED}
        return special.get(dim, _TILES[dim])

    def specialisation(self, device: Device) -> Specialisation:
        """The module of this variant with its tile."""
        tile = self.tile(device)
        dims = f"d{self.head_dim}"
        if self.head_dim_v != self.head_dim:
            dims += f"x{self.head_dim_v}"
        marks = {"bounded": self.bounded, "softcap": self.softcap, "unaligned": not self.aligned}
        name = "_".join(
            ["cuflash_fwd_sm80", dims, _SHORT_NAME[self.dtype]]
            + [mark for mark, on in marks.items() if on]
        )
        config: tuple[tuple[str, int | bool | str], ...] = (
            ("element", _ELEMENT[self.dtype]),
            ("head_dim", self.head_dim),
            ("head_dim_v", self.head_dim_v),
            ("q_rows", tile.q_rows),
            ("keys", tile.keys),
            ("warps", tile.warps),
            ("blocks", tile.blocks),
            ("stages", tile.stages),
            ("unroll", tile.unroll),
            ("overlap", tile.overlap),
            ("bounded", self.bounded),
            ("softcap", self.softcap),
            ("aligned", self.aligned),
        )
        return Specialisation("sm80/forward.cu", name, config)


@dataclass(frozen=True, slots=True)
class _Ready:
    """A loaded kernel and what all calls of one problem share."""

    kernel: Any
    grid: tuple[int]
    block: tuple[int]
    shared_memory: int
    arguments: np.ndarray[Any, Any]


@functools.lru_cache(maxsize=1024)
def _prepare(spec: AttentionSpec, device: Device) -> _Ready:
    tiling = plan(spec, device)
    launch = tiling.launch
    assert launch is not None
    kernel = module.load(launch.module, device).function(launch.module.name)
    kernel.max_dynamic_shared_size_bytes = launch.shared_memory
    row_blocks = -(-spec.q_len // tiling.q_rows)
    return _Ready(
        kernel,
        (launch.blocks,),
        (launch.threads,),
        launch.shared_memory,
        _lasting_arguments(spec, row_blocks),
    )


def _lasting_arguments(spec: AttentionSpec, row_blocks: int) -> np.ndarray[Any, Any]:
    """`struct Arguments` without its pointers."""
    arguments = np.zeros((), _ARGUMENTS)
    for name in _TENSORS:
        strides = getattr(spec, name).strides
        for axis, step in zip(("entry", "head", "row"), strides, strict=False):
            arguments[f"{name}_{axis}"] = step
    for name in ("q_heads", "group", "q_len", "kv_len", "head_dim", "head_dim_v", "top_left"):
        arguments[name] = getattr(spec, name)
    arguments["row_blocks"] = row_blocks
    arguments["left"] = _UNBOUNDED if spec.left is None else spec.left
    arguments["right"] = _UNBOUNDED if spec.right is None else spec.right
    if spec.softcap is not None:
        arguments["prepare"], arguments["premultiply"] = 1, spec.scale / spec.softcap
        arguments["factor"] = spec.softcap * _LOG2_E
    elif spec.scale > 0:
        arguments["factor"] = spec.scale * _LOG2_E
    else:  # the largest raw score is not the largest scaled one
        arguments["prepare"], arguments["premultiply"] = 1, spec.scale * _LOG2_E
        arguments["factor"] = 1.0
    arguments["out_aligned"] = _rows_aligned(spec.out.strides, spec.out.aligned)
    return arguments


def _bucket(dim: int) -> int:
    return next(bucket for bucket in _BUCKETS if dim <= bucket)


def _is_aligned(spec: AttentionSpec) -> bool:
    """Whether every row of q, k and v starts on 16 bytes and holds whole units of them."""
    return (
        spec.head_dim % 8 == 0
        and spec.head_dim_v % 8 == 0
        and all(_rows_aligned(place.strides, place.aligned) for place in (spec.q, spec.k, spec.v))
    )


def _rows_aligned(strides: tuple[int, ...], aligned: bool) -> bool:
    return aligned and all(step % 8 == 0 for step in strides[:3])


def _on_device(lens: Any) -> Any:
    """Lengths as int64 on the device; those of the host are copied, without waiting."""
    if lens is None:
        return None
    import cupy

    return cupy.asarray(lens, dtype=np.int64)
