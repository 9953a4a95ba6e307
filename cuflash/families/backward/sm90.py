"""FlashAttention-3's backward pass on wgmma and TMA, for GPUs of compute capability 9.0.

The kernels are `cuda_src/sm90_backward/backward.cu`; this module says which problems they take,
with which tile, and launches them: one that prepares rows, one that multiplies, and one that rounds
dQ, each of which may start as the one before it ends.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any

import numpy as np

from ...operands import BackwardOperands
from ...plan import Launch, Plan, Tiling
from ...runtime import graphs, module, tensormap
from ...runtime.device import Device
from ...runtime.graphs import lengths_on_device
from ...runtime.launch import launcher
from ...runtime.specialisation import Specialisation
from ...spec import AttentionSpec, Placement
from .. import fused
from .sm90_tiles import GROUPS, PAIRS, Q_STAGES, Tile, buckets, choose
from .turns import counters_size

_MOST_WORK = 1 << 30  # tickets, and tiles of queries: what blocks draw and their number fit 32 bits
_SMS = 132  # multiprocessors of an H100 or H200, for a device that is only named
_THREADS = 128 * (GROUPS + 1)
_ROWS_THREADS = 256  # of a block that prepares or finishes a tile of queries
_ALIGNMENT = 256  # bytes that parts of the workspace are multiples of

# struct Arguments of cuda_src/sm90_backward/config.cuh
_MAPS = ("q", "k", "v", "dout", "dk", "dv")
_ARRAYS = ("out", "dout_rows", "lse", "dq")
_LENGTHS = ("q_lens", "kv_lens")
_PARTS = ("row_stats", "sums", "counters", "partials")  # of the workspace
_STEPS = ("out_steps", "dout_steps", "lse_steps", "dq_steps")
_INTS = (
    *("q_heads", "kv_heads", "group", "q_len", "kv_len", "head_dim", "head_dim_v", "q_tiles"),
    *("key_tiles", "all_kv_heads", "tickets", "whole", "parts", "section", "sections", "sweep"),
    *("left", "right", "top_left"),
)
_FLOATS = ("premultiply", "factor", "scale")
_FIELDS: list[tuple[str, Any]] = [
    *((name, (np.uint64, (tensormap.BYTES // 8,))) for name in _MAPS),
    *((name, np.uint64) for name in (*_ARRAYS, *_LENGTHS, *_PARTS)),
    *((name, (np.int64, (3,))) for name in _STEPS),
    ("all_rows", np.int64),
    *((name, np.int32) for name in _INTS),
    *((name, np.float32) for name in _FLOATS),
]
ARGUMENTS = fused.struct_of(_FIELDS)
# From call to call.
_CHANGING = Struct(f"{len(_MAPS) * tensormap.BYTES}s{len(_ARRAYS) + len(_LENGTHS) + len(_PARTS)}Q")


def supports(spec: AttentionSpec, device: Device) -> list[str]:
    reasons = fused.reasons_against_hopper(spec, device, _arrays(spec))
    heads = spec.batch * max(spec.q_heads, spec.kv_heads)
    if heads * -(-max(spec.q_len, spec.kv_len) // 64) >= _MOST_WORK:
        reasons.append(f"takes less than {_MOST_WORK} tiles of 64 rows or keys")
    return reasons


def why(spec: AttentionSpec, device: Device) -> str:
    return "fused kernel of FlashAttention-3's design on wgmma and TMA"


def plan(spec: AttentionSpec, device: Device) -> Tiling:
    variant = _Variant.of(spec)
    tile, cut = variant.tile, Cut.of(spec, variant, device)
    launch = Launch(
        _specialisation(variant),
        blocks=cut.blocks,
        threads=_THREADS,
        shared_memory=tile.shared_memory(*variant.pair),
    )
    note = f"{GROUPS} warpgroups on {'the same keys' if tile.parted else '64 keys each'}"
    note += ", dQ added up in float32" + (" in turn" if variant.ordered else "")
    if cut.split:
        note += f"; {cut.split} of {cut.pieces} tiles of keys in {cut.parts} parts"
    return Tiling(tile.q_rows, tile.keys, 1, cut.workspace, note, launch)


def prepare(plan: Plan) -> Callable[[BackwardOperands], None]:
    import cupy

    spec, launch = plan.spec, plan.tiling.launch
    assert launch is not None
    variant = _Variant.of(spec)
    cut = Cut.of(spec, variant, plan.device)
    loaded = module.load(launch.module, plan.device)
    struct = _lasting_arguments(spec, variant, cut).tobytes()
    rows = cut.query_tiles, _ROWS_THREADS, 0
    queues = [
        launcher(loaded.function(name), *shape, _CHANGING, struct, early=early)
        for name, shape, early in (
            ("cuflash_bwd_prepare", rows, variant.tile.early),
            (launch.module.name, (launch.blocks, launch.threads, launch.shared_memory), True),
            ("cuflash_bwd_finish", rows, True),
        )
    ]
    of_name = _layouts(spec, variant)
    layouts = [of_name[name] for name in _MAPS]
    places = cut.places
    size, offsets = (cut.workspace,), [places[name] for name in _PARTS]

    @functools.lru_cache(maxsize=256)
    def maps_at(*addresses: int) -> bytes:
        return b"".join(map(tensormap.at, layouts, addresses))

    def run(operands: BackwardOperands) -> None:
        lens = [
            None if given is None else lengths_on_device(name, given)
            for name in _LENGTHS
            for given in [getattr(operands, name)]
        ]
        workspace = cupy.ndarray(size, np.uint8)
        graphs.keep(workspace)
        base, dout = workspace.data.ptr, operands.dout.data.ptr
        values = (
            maps_at(
                operands.q.data.ptr, operands.k.data.ptr, operands.v.data.ptr, dout,
                operands.dk.data.ptr, operands.dv.data.ptr,
            ),
            operands.out.data.ptr, dout, operands.lse.data.ptr, operands.dq.data.ptr,
            *(0 if given is None else given.data.ptr for given in lens),
            *(base + offset for offset in offsets),
        )  # fmt: skip
        for queue in queues:
            queue(*values)

    return run


def specialisations(
    device: Device, head_dims: Sequence[int], dtypes: Sequence[str]
) -> list[Specialisation]:
    if device.compute_capability != (9, 0):
        return []
    taken = [dim for dim in head_dims if dim % 8 == 0]
    pairs = {buckets(dim, dim_v) for dim in taken for dim_v in taken}
    return [
        _specialisation(_Variant(pair, dtype, bounded, left, capped, lengths, ordered))
        for pair in PAIRS
        if pair in pairs
        for dtype in dtypes
        if dtype in fused.ELEMENT
        for bounded, left in ((False, False), (True, False), (True, True))
        for capped in (False, True)
        for lengths in (False, True)
        for ordered in (False, True)
    ]


@dataclass(frozen=True, slots=True)
class _Variant:
    """What the kernels are compiled for: buckets of the head dims, and what the loop has to do."""

    pair: tuple[int, int]
    dtype: str
    bounded: bool
    left: bool  # a window with a left bound
    capped: bool
    lengths: bool
    ordered: bool  # tiles of keys add to dQ in turn

    @classmethod
    def of(cls, spec: AttentionSpec) -> _Variant:
        return cls(
            buckets(spec.head_dim, spec.head_dim_v),
            spec.dtype,
            (spec.left, spec.right) != (None, None),
            spec.left is not None,
            spec.softcap is not None,
            spec.has_q_lens or spec.has_kv_lens,
            spec.deterministic,
        )

    @property
    def tile(self) -> Tile:
        return choose(self.pair, self.capped)


@functools.lru_cache(maxsize=1024)  # the same for every length
def _specialisation(variant: _Variant) -> Specialisation:
    """The module of a variant."""
    tile = variant.tile
    marks = {
        "bounded": variant.bounded,
        "left": variant.left,
        "softcap": variant.capped,
        "lengths": variant.lengths,
        "ordered": variant.ordered,
        f"{tile.q_rows}x{tile.keys}": True,
    }
    name = fused.module_name("sm90", variant.pair, variant.dtype, marks, kind="bwd")
    config: tuple[tuple[str, int | bool | str], ...] = (
        ("element", fused.ELEMENT[variant.dtype]),
        ("head_dim", variant.pair[0]),
        ("head_dim_v", variant.pair[1]),
        ("q_rows", tile.q_rows),
        ("keys", tile.keys),
        ("groups", GROUPS),
        ("parted", tile.parted),
        ("panel", tile.panel),
        ("q_stages", Q_STAGES),
        ("o_stages", tile.o_stages),
        ("dq_chunks", tile.dq_chunks),
        ("share", "LINES" if tile.lines else "COLUMNS"),
        ("bounded", variant.bounded),
        ("left", variant.left),
        ("capped", variant.capped),
        ("lengths", variant.lengths),
        ("ordered", variant.ordered),
        ("shared_memory", tile.shared_memory(*variant.pair)),
    )
    return Specialisation("sm90_backward/backward.cu", name, config, exact_arch=True)


@dataclass(frozen=True, slots=True)
class Cut:
    """How a problem becomes tiles, and what they need in main memory."""

    q_tiles: int  # of a query head
    key_tiles: int  # of a kv head
    query_tiles: int  # of all heads
    pieces: int  # of work: tiles of keys of all heads
    section: int  # kv heads whose queries stay in the L2 cache together
    sections: int  # whose dQ begins as 0 one after the other; 1 where all does before
    blocks: int
    split: int  # the last of the pieces, which blocks share
    parts: int  # of each of those
    sizes: dict[str, int]  # bytes of each part of the workspace

    @classmethod
    def of(cls, spec: AttentionSpec, variant: _Variant, device: Device) -> Cut:
        tile, heads, section = variant.tile, spec.batch * spec.kv_heads, _section(spec, variant)
        q_tiles, key_tiles = -(-spec.q_len // tile.q_rows), -(-spec.kv_len // tile.keys)
        query_tiles, pieces = spec.batch * spec.q_heads * q_tiles, heads * key_tiles
        blocks = _blocks(device)
        sections = -(-heads // section)
        if key_tiles < _FEW_TILES or pieces < blocks:
            sections = 1
        split = pieces % blocks
        # Pieces of other sections have to set the next one's dQ to 0; and where pieces take less
        # from one to the next, the last are short as they are.
        is_last = split <= (heads - (sections - 1) * section) * key_tiles or sections == 1
        if not is_last or (variant.bounded and pieces > blocks):
            split = 0
        floats = tile.floats(*variant.pair)
        parts = _parts(split, blocks, _most_seeing(spec, tile, q_tiles), spec.group, 4 * floats)
        split = split if parts > 1 else 0
        rows = query_tiles * tile.q_rows
        sizes = {
            "row_stats": 2 * 4 * rows,
            "sums": 4 * rows * variant.pair[0],
            "counters": counters_size(sections + split * GROUPS + query_tiles * variant.ordered),
            "partials": 4 * split * parts * floats,
        }
        blocks = min(blocks, pieces - split + split * parts)
        return cls(
            q_tiles, key_tiles, query_tiles, pieces, section, sections, blocks, split, parts, sizes
        )

    @property
    def places(self) -> dict[str, int]:
        """Where each part of the workspace begins, in bytes, and where all end."""
        found, end = {}, 0
        for name, size in self.sizes.items():
            found[name] = end
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        return {**found, "end": end}

    @property
    def workspace(self) -> int:
        """Bytes of all parts."""
        return self.places["end"]


def _arrays(spec: AttentionSpec) -> dict[str, tuple[tuple[int, int, int, int], Placement]]:
    """Shape and placement of each array that is moved by boxes, or by units of 16 bytes."""
    q, kv = (spec.batch, spec.q_heads, spec.q_len), (spec.batch, spec.kv_heads, spec.kv_len)
    further = spec.gradients
    assert further is not None
    return {
        "q": ((*q, spec.head_dim), spec.q),
        "k": ((*kv, spec.head_dim), spec.k),
        "v": ((*kv, spec.head_dim_v), spec.v),
        "out": ((*q, spec.head_dim_v), spec.out),
        "dout": ((*q, spec.head_dim_v), further.dout),
        "dq": ((*q, spec.head_dim), further.dq),
        "dk": ((*kv, spec.head_dim), further.dk),
        "dv": ((*kv, spec.head_dim_v), further.dv),
    }


def _layouts(spec: AttentionSpec, variant: _Variant) -> dict[str, tensormap.Layout]:
    """Each array in boxes: a tile, or the keys of a warpgroup."""
    tile, arrays = variant.tile, _arrays(spec)
    rows = {"q": tile.q_rows, "dout": tile.q_rows, "k": tile.keys, "v": tile.keys}
    return {
        name: tensormap.Layout.of(
            spec.dtype, shape, place.strides, (1, rows.get(name, 64)), 2 * tile.panel
        )
        for name, (shape, place) in arrays.items()
        if name in _MAPS
    }


_L2_SHARE = 24 << 20  # bytes of the L2 cache for queries, dO and dQ of the heads at work


def _section(spec: AttentionSpec, variant: _Variant) -> int:
    """Kv heads whose queries stay in the L2 cache together. Where tiles of keys of unequal work add
    to dQ in turn, as many as were fastest: with more, less of dQ is in the cache; with fewer, more
    tiles of a head wait for one another.
    """
    row = (spec.head_dim + spec.head_dim_v) * spec.item_size + 4 * spec.head_dim
    of_head = spec.q_len * spec.group * row
    heads = 1 << (max(_L2_SHARE // of_head, 1).bit_length() - 1)
    if variant.ordered and variant.bounded:
        key_tiles = -(-spec.kv_len // variant.tile.keys)
        heads = 1 << max(math.ceil(math.log2(64 / math.sqrt(max(key_tiles, 1)))), 0)
    return min(heads, spec.batch * spec.kv_heads)


_FEW_TILES = 4  # of keys: fewer pieces of work take long to set the next section to 0


def _blocks(device: Device) -> int:
    """How many run at once."""
    return device.sm_count or _SMS


def _most_seeing(spec: AttentionSpec, tile: Tile, q_tiles: int) -> int:
    """Tiles of queries of a head that see some of a tile of keys, or a few more."""
    if spec.left is None or spec.right is None:
        return q_tiles
    rows = spec.left + spec.right + tile.keys
    return min(q_tiles, -(-rows // tile.q_rows) + 1)


_MOST_PARTS = 16
_MOVED = 1 << 17  # bytes that a block writes or reads while it would multiply one tile of queries


def _parts(pieces: int, blocks: int, q_tiles: int, group: int, part_bytes: int) -> int:
    """In how many parts fewer pieces of work than blocks take least: as long as the parts that a
    block has, and as it takes one of them to write its sums and to read those of all.
    """

    def time(parts: int) -> float:
        if parts == 1:
            return q_tiles * group
        moved = part_bytes / _MOVED
        rounds = -(-pieces * parts // blocks)
        return rounds * (-(-q_tiles // parts) * group + moved) + parts * moved

    return min(range(1, min(_MOST_PARTS, q_tiles) + 1), key=time) if pieces else 1


def _lasting_arguments(spec: AttentionSpec, variant: _Variant, cut: Cut) -> np.ndarray[Any, Any]:
    """`struct Arguments` without what changes with each call."""
    further = spec.gradients
    assert further is not None
    arguments = np.zeros((), ARGUMENTS)
    for name in (
        *("q_heads", "kv_heads", "group", "q_len", "kv_len", "head_dim", "head_dim_v", "top_left"),
        "scale",
    ):
        arguments[name] = getattr(spec, name)
    for name in ("q_tiles", "key_tiles", "parts", "section", "sections"):
        arguments[name] = getattr(cut, name)
    whole = cut.pieces - cut.split
    arguments["whole"], arguments["tickets"] = whole, whole + cut.split * cut.parts
    arguments["all_kv_heads"] = spec.batch * spec.kv_heads
    arguments["all_rows"] = cut.query_tiles * variant.tile.q_rows
    arguments["sweep"] = max(round(min(cut.blocks, cut.pieces) / cut.section), 1)
    arguments["left"], arguments["right"] = fused.window_bounds(spec)
    arguments["out_steps"] = spec.out.strides[:3]
    arguments["dout_steps"] = further.dout.strides[:3]
    arguments["lse_steps"] = further.lse
    arguments["dq_steps"] = further.dq.strides[:3]
    if spec.softcap is None:
        # No maximum is taken, so that the factor may have any sign.
        arguments["factor"] = spec.scale * math.log2(math.e)
    else:
        arguments["premultiply"], arguments["factor"] = spec.score_factors
    return arguments
