"""The backward pass of FlashAttention-2 on mma.sync, from compute capability 8.0 on.

The kernels are `cuda_src/sm80/backward.cu`; this module says which problems they take, with which
tile, and launches them: one that describes rows, the main one, and one that rounds dQ.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any

import numpy as np

from ...operands import BackwardOperands
from ...plan import Launch, Plan, Tiling
from ...runtime import graphs, module
from ...runtime.device import Device
from ...runtime.graphs import lengths_on_device
from ...runtime.launch import launcher
from ...runtime.specialisation import Specialisation
from ...spec import AttentionSpec, Placement
from .. import fused
from .sm80_tiles import ROW_BYTES, Tile, bucket, choose
from .turns import counters_size

# struct Arguments of cuda_src/sm80/backward_config.cuh
_POINTERS = (
    *("q", "k", "v", "out", "dout", "lse", "dq", "dk", "dv"),
    *("rows", "sums", "counters", "q_lens", "kv_lens"),
)
_TENSORS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
_INTS = (
    *("q_heads", "group", "q_len", "kv_len", "head_dim", "head_dim_v"),
    *("row_blocks", "key_blocks", "all_kv_heads", "section", "left", "right", "top_left"),
)
_ARGUMENTS = np.dtype(
    [(name, np.uint64) for name in _POINTERS]
    + [(f"{n}_{axis}", np.int64) for n in (*_TENSORS, "lse") for axis in ("entry", "head", "row")]
    + [(name, np.int32) for name in _INTS]
    + [("factor", np.float32), ("premultiply", np.float32), ("scale", np.float32)]
    + [("prepare", np.int32), ("out_aligned", np.int32)]
    + [(f"{name}_aligned", np.int32) for name in ("dq", "dk", "dv")],
    align=True,
)
_CHANGING = Struct(f"{len(_POINTERS)}Q")  # from call to call
_ROW_THREADS = 256
_SMS = 132  # multiprocessors of an H100 or H200, for a device that is only named


def supports(spec: AttentionSpec, device: Device) -> list[str]:
    reasons = fused.reasons_against_ampere(spec, device)
    if not spec.is_empty:
        for name, place in _placements(spec).items():
            is_keys = name in ("k", "v", "dk", "dv")
            dim = spec.head_dim if name in ("q", "k", "dq", "dk") else spec.head_dim_v
            if dim > 1 and place.strides[3] != 1 and (spec.kv_len or not is_keys):
                reasons.append(f"{name}: needs neighbouring elements in its last axis")
    if spec.batch * spec.q_heads * -(-max(spec.q_len, spec.kv_len) // 32) >= 1 << 31:
        reasons.append("more blocks than a grid holds")
    return reasons


def why(spec: AttentionSpec, device: Device) -> str:
    return "fused kernels of FlashAttention-2 on mma.sync; no newer family takes this problem"


def plan(spec: AttentionSpec, device: Device) -> Tiling:
    variant = _Variant.of(spec)
    tile, compiled = _compiled(variant, device)
    launch = Launch(
        compiled,
        blocks=spec.batch * spec.kv_heads * -(-spec.kv_len // tile.keys),
        threads=32 * tile.warps,
        shared_memory=tile.shared_memory(variant.head_dim, variant.head_dim_v),
    )
    note = f"{tile.warps} warps, dQ added up in float32"
    note += " in turn" if spec.deterministic else ""
    workspace = sum(_workspace(spec, tile).values())
    return Tiling(tile.q_rows, tile.keys, 1, workspace, note, launch)


def _workspace(spec: AttentionSpec, tile: Tile) -> dict[str, int]:
    """Bytes of each part of the workspace, all but the last of them multiples of 128."""
    tiles = spec.batch * spec.q_heads * _row_blocks(spec, tile.q_rows)
    rows = tiles * tile.q_rows
    sizes = {"rows": rows * ROW_BYTES, "sums": 4 * rows * tile.padded(bucket(spec.head_dim))}
    if spec.deterministic:
        sizes["counters"] = counters_size(tiles * tile.warps)
    return sizes


@functools.lru_cache(maxsize=1024)  # the same for every length
def _compiled(variant: _Variant, device: Device) -> tuple[Tile, Specialisation]:
    tile = variant.tile(device)
    return tile, variant.specialisation(tile)


def prepare(plan: Plan) -> Callable[[BackwardOperands], None]:
    launches = _launches(plan)
    size = plan.tiling.workspace
    tile, _ = _compiled(_Variant.of(plan.spec), plan.device)
    parts = _workspace(plan.spec, tile)
    sums = parts["rows"]
    counters = sums + parts["sums"]

    def run(operands: BackwardOperands) -> None:
        q_lens, kv_lens = operands.q_lens, operands.kv_lens
        if q_lens is not None:
            q_lens = lengths_on_device("q_lens", q_lens)
        if kv_lens is not None:
            kv_lens = lengths_on_device("kv_lens", kv_lens)
        # Given back when the last launch is queued: what takes it next on this stream runs later.
        workspace = _allocate(size)
        pointers = (
            operands.q.data.ptr,
            operands.k.data.ptr,
            operands.v.data.ptr,
            operands.out.data.ptr,
            operands.dout.data.ptr,
            operands.lse.data.ptr,
            operands.dq.data.ptr,
            operands.dk.data.ptr,
            operands.dv.data.ptr,
            workspace.ptr,
            workspace.ptr + sums,
            workspace.ptr + counters,
            0 if q_lens is None else q_lens.data.ptr,
            0 if kv_lens is None else kv_lens.data.ptr,
        )
        for launch in launches:
            launch(*pointers)

    return run


def _allocate(size: int) -> Any:
    """Memory of the pool of the current device and stream."""
    from cupy.cuda import alloc

    memory = alloc(size)
    graphs.keep(memory)
    return memory


def _launches(plan: Plan) -> list[Callable[..., None]]:
    """What queues each kernel, in the order in which they run."""
    spec, main = plan.spec, plan.tiling.launch
    assert main is not None
    tile, _ = _compiled(_Variant.of(spec), plan.device)
    loaded = module.load(main.module, plan.device)
    struct = _lasting_arguments(spec, tile, plan.device).tobytes()
    row_blocks = spec.batch * spec.q_heads * _row_blocks(spec, tile.q_rows)
    name = main.module.name
    kernels = [
        (f"{name}_prepare", row_blocks, _ROW_THREADS, 0),
        (name, main.blocks, main.threads, main.shared_memory),
        (f"{name}_finish", row_blocks, main.threads, 0),
    ]
    return [
        launcher(loaded.function(kernel), blocks, threads, shared_memory, _CHANGING, struct)
        for kernel, blocks, threads, shared_memory in kernels
        if blocks  # none of the main one where there is no key
    ]


def specialisations(
    device: Device, head_dims: Sequence[int], dtypes: Sequence[str]
) -> list[Specialisation]:
    if (device.compute_capability or (0, 0)) < (8, 0):
        return []
    variants = [
        _Variant(bucket, bucket, dtype, bounded, softcap, aligned, deterministic)
        for bucket in dict.fromkeys(bucket(dim) for dim in head_dims)
        for dtype in dtypes
        if dtype in fused.ELEMENT
        for bounded, softcap, aligned in _KINDS
        for deterministic in (False, True)
    ]
    return [variant.specialisation(variant.tile(device)) for variant in variants]


# Of bounded, softcap and aligned. Those that are slower anyway do with the code for masks.
_KINDS = (
    *((False, False, True), (True, False, True), (True, True, True)),
    *((True, False, False), (True, True, False)),
)


@dataclass(frozen=True, slots=True)
class _Variant:
    """What the kernels are compiled for: buckets of the head dims, and what they have to do."""

    head_dim: int
    head_dim_v: int
    dtype: str
    bounded: bool
    softcap: bool
    aligned: bool
    deterministic: bool

    @classmethod
    def of(cls, spec: AttentionSpec) -> _Variant:
        softcap, aligned = spec.softcap is not None, _is_aligned(spec)
        return cls(
            bucket(spec.head_dim),
            bucket(spec.head_dim_v),
            spec.dtype,
            (spec.left, spec.right) != (None, None) or softcap or not aligned,
            softcap,
            aligned,
            spec.deterministic,
        )

    def tile(self, device: Device) -> Tile:
        return choose(self.head_dim, self.head_dim_v, device, self.deterministic)

    def specialisation(self, tile: Tile) -> Specialisation:
        """The module of this variant with a tile."""
        marks = {
            "bounded": self.bounded,
            "softcap": self.softcap,
            "unaligned": not self.aligned,
            "deterministic": self.deterministic,
        }
        dims = (self.head_dim, self.head_dim_v)
        name = fused.module_name("sm80", dims, self.dtype, marks, kind="bwd")
        config: tuple[tuple[str, int | bool | str], ...] = (
            ("element", fused.ELEMENT[self.dtype]),
            ("head_dim", tile.padded(self.head_dim)),
            ("head_dim_v", tile.padded(self.head_dim_v)),
            ("q_rows", tile.q_rows),
            ("keys", tile.keys),
            ("warps", tile.warps),
            ("blocks", tile.blocks),
            ("key_groups", tile.key_groups),
            ("query_groups", tile.query_groups),
            ("stages", tile.stages),
            ("unroll", tile.unroll),
            ("bounded", self.bounded),
            ("softcap", self.softcap),
            ("aligned", self.aligned),
            ("deterministic", self.deterministic),
            ("prepare", f"{name}_prepare"),
            ("finish", f"{name}_finish"),
        )
        return Specialisation("sm80/backward.cu", name, config)


def _section(spec: AttentionSpec, tile: Tile, device: Device) -> int:
    """Heads of a section, where tiles of keys add to dQ in turn: together they have about two
    blocks for each that is at work at a time. With fewer heads, more blocks of one start at a time
    and wait for one another; with more, less of dQ is in the L2 cache.
    """
    heads, key_blocks = spec.batch * spec.kv_heads, -(-spec.kv_len // tile.keys)
    at_work = (device.sm_count or _SMS) * tile.blocks
    return -(-heads // max(round(heads * key_blocks / (2 * at_work)), 1))


def _lasting_arguments(spec: AttentionSpec, tile: Tile, device: Device) -> np.ndarray[Any, Any]:
    """`struct Arguments` without its pointers."""
    assert spec.gradients is not None
    arguments: dict[str, float] = dict.fromkeys(_ARGUMENTS.names or (), 0)
    places = _placements(spec)
    strides = {name: place.strides[:3] for name, place in places.items()}
    for name, steps in (strides | {"lse": spec.gradients.lse}).items():
        for axis, step in zip(("entry", "head", "row"), steps, strict=True):
            arguments[f"{name}_{axis}"] = step
    for name in ("q_heads", "group", "q_len", "kv_len", "head_dim", "head_dim_v", "top_left"):
        arguments[name] = getattr(spec, name)
    arguments["row_blocks"] = _row_blocks(spec, tile.q_rows)
    arguments["key_blocks"] = -(-spec.kv_len // tile.keys)
    arguments["all_kv_heads"] = spec.batch * spec.kv_heads
    arguments["section"] = _section(spec, tile, device)
    arguments["left"], arguments["right"] = fused.window_bounds(spec)
    premultiply, arguments["factor"] = spec.score_factors
    if premultiply is not None:
        arguments["prepare"], arguments["premultiply"] = 1, premultiply
    arguments["scale"] = spec.scale
    arguments["out_aligned"] = (
        spec.head_dim_v % 8 == 0
        and fused.rows_aligned(places["out"])
        and fused.rows_aligned(places["dout"])
    )
    for name in ("dq", "dk", "dv"):
        arguments[f"{name}_aligned"] = fused.rows_aligned(places[name])
    return np.array(tuple(arguments.values()), _ARGUMENTS)


def _placements(spec: AttentionSpec) -> dict[str, Placement]:
    """Where each array of `_TENSORS` lies."""
    return {
        name: getattr(spec if name in ("q", "k", "v", "out") else spec.gradients, name)
        for name in _TENSORS
    }


def _row_blocks(spec: AttentionSpec, q_rows: int) -> int:
    return -(-spec.q_len // q_rows)


def _is_aligned(spec: AttentionSpec) -> bool:
    """Whether every row of what tiles are loaded from starts on 16 bytes and holds whole units."""
    places = _placements(spec)
    return (
        spec.head_dim % 8 == 0
        and spec.head_dim_v % 8 == 0
        and all(fused.rows_aligned(places[name]) for name in ("q", "k", "v", "dout"))
    )
