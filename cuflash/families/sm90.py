"""FlashAttention-3's design on wgmma and TMA, for GPUs of compute capability 9.0.

The kernel is `cuda_src/sm90/forward.cu`; this module says which problems it takes, with which tile,
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
from ..runtime import module, tensormap, tickets
from ..runtime.device import Device
from ..runtime.graphs import lengths_on_device
from ..runtime.launch import launcher
from ..runtime.specialisation import Specialisation
from ..spec import AttentionSpec, Placement
from . import fused
from .sm90_tiles import LINES, Tile, buckets, choices, choose, panel

_MOST_WORK = 1 << 30  # a ticket and the number of blocks, added up, fit 32 bits
_SMS = 132  # multiprocessors of an H100 or H200, for a device that is only named

# struct Arguments of cuda_src/sm90/config.cuh
_MAPS = ("q", "k", "v", "out")
_MAP_OF_8_BITS = "first"  # else 0
_POINTERS = ("lse", "q_lens", "kv_lens", "counter")
_SCALES = ("q_scales", "k_scales", "v_scales", "v_means", "lse_shifts")  # of 8 bits, else null
_INTS = (
    *("q_heads", "group", "q_len", "kv_len", "key_blocks", "pack", "rows", "inverse_pack", "packs"),
    *("all_packs", "row_tiles", "tickets", "section"),
    *("left", "right", "top_left"),
)
_FLOATS = ("factor", "premultiply", "unseen")
_FIELDS: list[tuple[str, Any]] = [
    *((name, (np.uint64, (tensormap.BYTES // 8,))) for name in (*_MAPS, _MAP_OF_8_BITS)),
    *((name, np.uint64) for name in _POINTERS + _SCALES),
    *((name, np.int32) for name in _INTS),
    *((name, np.float32) for name in _FLOATS),
]
ARGUMENTS = fused.struct_of(_FIELDS)
# From call to call.
_CHANGING = Struct(f"{len(_MAPS) * tensormap.BYTES}s{tensormap.BYTES}x{len(_POINTERS)}Q")
# The same with 8 bits.
CHANGING_WITH_SCALES = Struct(
    f"{(len(_MAPS) + 1) * tensormap.BYTES}s{len(_POINTERS) + len(_SCALES)}Q"
)


def supports(spec: AttentionSpec, device: Device) -> list[str]:
    reasons = fused.reasons_against_hopper(spec, device, _arrays(spec))
    if spec.batch * spec.q_heads * -(-spec.q_len // 64) >= _MOST_WORK:
        reasons.append(f"takes less than {_MOST_WORK} tiles of 64 rows")
    return reasons


def why(spec: AttentionSpec, device: Device) -> str:
    return "fused kernel of FlashAttention-3's design on wgmma and TMA"


def plan(spec: AttentionSpec, device: Device) -> Tiling:
    variant = _Variant.of(spec)
    tile = variant.tile
    cut = Cut.of(spec, variant.tile.groups * variant.tile.cluster, variant.bounded)
    places = (device.sm_count or _SMS) * tile.resident // tile.cluster
    launch = Launch(
        _specialisation(variant),
        blocks=min(places, cut.tickets) * tile.cluster,
        threads=128 * (tile.groups + 1),
        shared_memory=tile.shared_memory(variant.head_dim, variant.head_dim_v),
    )
    note = f"{tile.groups} warpgroups"
    if tile.resident > 1:
        note += f", {tile.resident} blocks on a multiprocessor"
    if tile.cluster > 1:
        note += f", clusters of {tile.cluster}"
    if variant.dynamic:
        note += ", work by tickets"
    q_rows = tile.groups * cut.rows
    return Tiling(q_rows, tile.keys, cut.pack, 4 if variant.dynamic else 0, note, launch)


def prepare(plan: Plan) -> Callable[[Operands], None]:
    spec, launch = plan.spec, plan.tiling.launch
    assert launch is not None
    variant = _Variant.of(spec)
    kernel = module.load(launch.module, plan.device).function(launch.module.name)
    # What starts early has blocks that come late, one by one, which those with a static stride of
    # work would wait for.
    queue = launcher(
        kernel, launch.blocks, launch.threads, launch.shared_memory, _CHANGING,
        _lasting_arguments(spec, variant).tobytes(), early=variant.dynamic,
    )  # fmt: skip
    of_name = _layouts(spec, variant)
    layouts = [of_name[name] for name in _MAPS]
    counters = tickets.counters(plan.device.index) if variant.dynamic else None

    @functools.lru_cache(maxsize=256)
    def maps_at(starts: tuple[int, ...]) -> bytes:
        return b"".join(map(tensormap.at, layouts, starts))

    def run(operands: Operands) -> None:
        lse, q_lens, kv_lens = operands.lse, operands.q_lens, operands.kv_lens
        if q_lens is not None:
            q_lens = lengths_on_device("q_lens", q_lens)
        if kv_lens is not None:
            kv_lens = lengths_on_device("kv_lens", kv_lens)
        queue(
            maps_at(operands.starts),
            0 if lse is None else lse.data.ptr,
            0 if q_lens is None else q_lens.data.ptr,
            0 if kv_lens is None else kv_lens.data.ptr,
            0 if counters is None else counters.address(),
        )

    return run


def specialisations(
    device: Device, head_dims: Sequence[int], dtypes: Sequence[str]
) -> list[Specialisation]:
    if device.compute_capability != (9, 0):
        return []
    taken = [dim for dim in head_dims if dim % 8 == 0]
    pairs = dict.fromkeys(buckets(dim, dim_v) for dim in taken for dim_v in taken)
    # Tiles of different rows may be the same but for their reasons.
    found = dict.fromkeys(
        _specialisation(_Variant(*pair, dtype, bounded, left, scores, lengths, tile))
        for pair in pairs
        for dtype in dtypes
        if dtype in fused.ELEMENT
        for bounded, left in ((False, False), (True, False), (True, True))
        for scores in (_PLAIN, _MULTIPLIED, _CAPPED)
        for tile in choices(pair, bounded, scores == _CAPPED)
        for lengths in (False, True)
    )
    return list(found)


# What the kernel does to raw scores before it takes maxima.
_PLAIN, _MULTIPLIED, _CAPPED = range(3)


@dataclass(frozen=True, slots=True)
class _Variant:
    """What the kernel is compiled for: buckets of the head dims, what its loop has to do, and the
    tile.
    """

    head_dim: int
    head_dim_v: int
    dtype: str
    bounded: bool
    left: bool  # a window with a left bound
    scores: int
    lengths: bool
    tile: Tile

    @classmethod
    def of(cls, spec: AttentionSpec) -> _Variant:
        bounded = (spec.left, spec.right) != (None, None)
        pair = buckets(spec.head_dim, spec.head_dim_v)
        premultiply, _ = spec.score_factors
        multiplied = _PLAIN if premultiply is None else _MULTIPLIED
        scores = _CAPPED if spec.softcap is not None else multiplied
        tile = choose(pair, bounded, scores == _CAPPED, spec.kv_len)
        if tile.cluster > 1 and spec.q_len <= tile.q_rows:
            tile = replace(tile, cluster=1)  # else one of each pair would have no rows
        lengths = spec.has_q_lens or spec.has_kv_lens
        left = spec.left is not None
        return cls(*pair, spec.dtype, bounded, left, scores, lengths, tile)

    @property
    def dynamic(self) -> bool:
        """Whether blocks draw their work, since it takes them unequal times or the tile says so."""
        tile = self.tile
        return self.bounded or (tile.cluster == 1 and (self.lengths or tile.tickets))


@functools.lru_cache(maxsize=1024)  # the same for every length
def _specialisation(variant: _Variant) -> Specialisation:
    """The module of a variant."""
    tile = variant.tile
    marks = {
        "bounded": variant.bounded,
        "left": variant.left,
        "scaled": variant.scores == _MULTIPLIED,
        "softcap": variant.scores == _CAPPED,
        "lengths": variant.lengths,
        f"{tile.q_rows}x{tile.keys}": True,
        "turns": tile.ping_pong,
        "pair": tile.cluster > 1,
        "twice": tile.resident > 1,
    }
    dims = variant.head_dim, variant.head_dim_v
    name = fused.module_name("sm90", dims, variant.dtype, marks)
    config: tuple[tuple[str, int | bool | str], ...] = (
        ("bits", 16),
        ("lagging", True),
        ("first", False),
        ("qk_element", fused.ELEMENT[variant.dtype]),
        ("v_element", fused.ELEMENT[variant.dtype]),
        ("out_element", fused.ELEMENT[variant.dtype]),
        ("score", "float"),
        ("head_dim", variant.head_dim),
        ("head_dim_v", variant.head_dim_v),
        ("keys", tile.keys),
        ("groups", tile.groups),
        ("stages", 2),
        ("cluster", tile.cluster),
        ("ping_pong", tile.ping_pong),
        ("out_in_place", tile.out_in_place),
        ("bounded", variant.bounded),
        ("resident", tile.resident),
        ("dynamic", variant.dynamic),
        ("left", variant.left),
        ("scores", variant.scores),
        ("lengths", variant.lengths),
        ("shared_memory", tile.shared_memory(*dims)),
    )
    return Specialisation("sm90/forward.cu", name, config, exact_arch=True)


@dataclass(frozen=True, slots=True)
class Cut:
    """How query rows become pieces of work.

    The 64 lines of a warpgroup are `rows` rows of each of `pack` heads that share keys and values:
    few rows fill a tile that way, and causal tiles have fewer keys that some of their rows don't
    see.
    """

    pack: int
    rows: int
    row_tiles: int  # pieces of work of a pack: a tile of rows for each block of a cluster
    tickets: int

    @classmethod
    def of(cls, spec: AttentionSpec, warpgroups: int, bounded: bool) -> Cut:
        """For `warpgroups` that take neighbouring rows. The one with the fewest pieces of work; of
        several, the most heads where masks are diagonal, and else the fewest.
        """
        cuts = [
            cls.packed(spec, warpgroups, pack)
            for pack in range(1, max(min(spec.group, LINES), 1) + 1)
            if spec.group % pack == 0
        ]
        return min(cuts, key=lambda cut: (cut.tickets, -cut.pack if bounded else cut.pack))

    @classmethod
    def packed(cls, spec: AttentionSpec, warpgroups: int, pack: int) -> Cut:
        rows = LINES // pack
        row_tiles = -(-spec.q_len // (rows * warpgroups))
        return cls(pack, rows, row_tiles, spec.batch * spec.q_heads // pack * row_tiles)


def _arrays(spec: AttentionSpec) -> dict[str, tuple[tuple[int, int, int, int], Placement]]:
    """Shape and placement of each array that is moved by boxes."""
    q, kv = (spec.batch, spec.q_heads, spec.q_len), (spec.batch, spec.kv_heads, spec.kv_len)
    return {
        "q": ((*q, spec.head_dim), spec.q),
        "k": ((*kv, spec.head_dim), spec.k),
        "v": ((*kv, spec.head_dim_v), spec.v),
        "out": ((*q, spec.head_dim_v), spec.out),
    }


def _layouts(spec: AttentionSpec, variant: _Variant) -> dict[str, tensormap.Layout]:
    """Each array in boxes: the lines of a warpgroup, or a block's share of a tile of keys."""
    swizzle_bytes = 2 * panel(variant.head_dim, variant.head_dim_v)
    cut = Cut.of(spec, variant.tile.groups * variant.tile.cluster, variant.bounded)
    lines, keys = (cut.pack, cut.rows), (1, variant.tile.keys // variant.tile.cluster)
    boxes = {"q": lines, "k": keys, "v": keys, "out": lines}
    return {
        name: tensormap.Layout.of(spec.dtype, shape, place.strides, boxes[name], swizzle_bytes)
        for name, (shape, place) in _arrays(spec).items()
    }


_L2_SHARE = 32 << 20  # bytes of the L2 cache for K and V of the heads at work


def _section(spec: AttentionSpec, pack: int, item_size: int) -> int:
    """Packs whose K and V stay in the L2 cache together."""
    of_head = spec.kv_len * (spec.head_dim + spec.head_dim_v) * item_size
    kv_heads = 1 << (max(_L2_SHARE // of_head, 1).bit_length() - 1)
    return min(kv_heads * spec.group, spec.batch * spec.q_heads) // pack


def _lasting_arguments(spec: AttentionSpec, variant: _Variant) -> np.ndarray[Any, Any]:
    """`struct Arguments` without what changes with each call."""
    cut = Cut.of(spec, variant.tile.groups * variant.tile.cluster, variant.bounded)
    arguments = arguments_of(spec, cut, spec.item_size)
    premultiply, factor = spec.score_factors
    arguments["premultiply"] = premultiply or 0.0
    arguments["factor"] = factor
    arguments["unseen"] = fused.unseen(factor)
    return arguments


def arguments_of(spec: AttentionSpec, cut: Cut, item_size: int) -> np.ndarray[Any, Any]:
    """`struct Arguments` with what lasts but for the factors; `item_size` is that of K and V."""
    arguments = np.zeros((), ARGUMENTS)
    for name in ("q_heads", "group", "q_len", "kv_len", "top_left"):
        arguments[name] = getattr(spec, name)
    for name in ("pack", "rows", "row_tiles", "tickets"):
        arguments[name] = getattr(cut, name)
    arguments["inverse_pack"] = -(-(1 << 16) // cut.pack)
    arguments["packs"] = spec.q_heads // cut.pack
    arguments["all_packs"] = spec.batch * spec.q_heads // cut.pack
    arguments["section"] = _section(spec, cut.pack, item_size)
    arguments["left"], arguments["right"] = fused.window_bounds(spec)
    return arguments
