"""Products of 8 bits on the kernel of `sm90`, for GPUs of compute capability 9.0.

The kernel is `cuda_src/sm90/forward.cu`; it takes codes and scales as `fp8.gpu_quantizer` makes
them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..fp8 import gpu_quantizer
from ..fp8.emulate import REFERENCE_KEYS
from ..fp8.gpu_quantizer import Codes, Shapes
from ..fp8.recipe import PRESETS, Fp8Recipe
from ..fp8.rotation import rotation_of
from ..plan import Launch, Tiling
from ..runtime import module, tensormap, tickets
from ..runtime.device import Device
from ..runtime.launch import launcher
from ..runtime.specialisation import Specialisation
from ..spec import AttentionSpec
from . import fused
from .sm90 import CHANGING_WITH_SCALES, Cut, arguments_of

_SMS = 132
_QK_ELEMENT = {"e4m3": ("E4m3", "float"), "int8": ("Int8", "int")}


@dataclass(frozen=True, slots=True)
class Tile:
    """A block's share of the work: 64 query rows for each warpgroup, and tiles of 64 keys, of
    which `stages` are in flight.
    """

    groups: int
    stages: int

    @property
    def q_rows(self) -> int:
        return 64 * self.groups


# By bucket of the head dim, whatever the mask and the reference. More warpgroups with fewer keys
# at a time are faster than fewer with more: while some wait for products, exponentials of others
# go on. Registers allow no more.
_TILES = {64: Tile(4, 4), 128: Tile(3, 4), 256: Tile(2, 4)}
# With the values of the first two tiles in 16 bits, which take registers and shared memory.
_TILES_WITH_FIRST = {64: Tile(3, 4), 128: Tile(3, 4), 256: Tile(2, 2)}
_REFERENCES = ("lagging", "tile")


def reasons_against(spec: AttentionSpec, recipe: Fp8Recipe, device: Device) -> list[str]:
    """Why the kernel does not take a problem with a recipe; empty when it does."""
    reasons = []
    if device.compute_capability != (9, 0):
        shown = (
            "a CPU"
            if device.compute_capability is None
            else "{}.{}".format(*device.compute_capability)
        )
        reasons.append(f"needs compute capability 9.0, not {shown}")
    reasons += fused.reasons_against(spec)
    if spec.softcap is not None:
        reasons.append("does not take softcap")
    if not spec.scale > 0:
        reasons.append(f"takes a scale above 0, not {spec.scale:g}")
    if spec.head_dim != spec.head_dim_v or spec.head_dim % 8:
        reasons.append(
            "takes one multiple of 8 as head_dim and head_dim_v, not "
            f"{spec.head_dim} and {spec.head_dim_v}"
        )
    if spec.kv_len == 0:
        reasons.append("needs keys")
    reasons += _reasons_against_recipe(recipe)
    for name in ("q", "k", "v", "out"):
        place = getattr(spec, name)
        if not place.aligned or place.strides[3] != 1 or any(n % 8 for n in place.strides[:3]):
            reasons.append(f"{name}: needs rows that start at multiples of 16 bytes")
    return reasons


def _reasons_against_recipe(recipe: Fp8Recipe) -> list[str]:
    taken: dict[str, tuple[Any, ...]] = {
        "q_block": ("token", 64, 128),
        "k_block": ("columns", 64, 128),
        "v_block": ("channel",),
        "p_scale": (448.0,),
        "reference": _REFERENCES,
    }
    reasons = [
        f"takes {name} {' or '.join(map(str, values))}, not {getattr(recipe, name)}"
        for name, values in taken.items()
        if getattr(recipe, name) not in values
    ]
    if not (recipe.rotation is None or isinstance(recipe.rotation, str)) or (
        recipe.rotation == "orthogonal"
    ):
        reasons.append("takes no rotation or a Hadamard one, no matrix")
    return reasons


def bucket_of(head_dim: int) -> int:
    """The head dim that a kernel is compiled for, at or above the true one."""
    return next(dim for dim in _TILES if head_dim <= dim)


@dataclass(frozen=True, slots=True)
class Variant:
    """What the kernel is compiled for."""

    head_dim: int  # bucket
    qk_dtype: str
    reference: str
    dtype: str  # of out
    bounded: bool
    left: bool
    lengths: bool
    first: bool  # the values of the first two tiles are of 16 bits

    @classmethod
    def of(cls, spec: AttentionSpec, recipe: Fp8Recipe) -> Variant:
        return cls(
            head_dim=bucket_of(spec.head_dim),
            qk_dtype=recipe.qk_dtype,
            reference=recipe.reference,
            dtype=spec.dtype,
            bounded=(spec.left, spec.right) != (None, None),
            left=spec.left is not None,
            lengths=spec.has_q_lens or spec.has_kv_lens,
            first=recipe.first_tile_16bit,
        )

    @property
    def dynamic(self) -> bool:
        """Whether blocks draw their work, because it takes them unequal times."""
        return self.bounded or self.lengths

    @property
    def tile(self) -> Tile:
        return (_TILES_WITH_FIRST if self.first else _TILES)[self.head_dim]

    @property
    def shared_memory(self) -> int:
        """Bytes of a block: Q, the rings of K and V, the output, first values, 1,024 beside."""
        tile, dim = self.tile, self.head_dim
        ring = tile.stages * REFERENCE_KEYS * dim
        first = 2 * REFERENCE_KEYS * dim * 2 if self.first else 0
        return tile.q_rows * dim + 2 * ring + 2 * tile.q_rows * dim + first + 1024


def specialisation(variant: Variant) -> Specialisation:
    """The module of a variant."""
    tile = variant.tile
    element, score = _QK_ELEMENT[variant.qk_dtype]
    marks = {
        variant.qk_dtype: True,
        "bounded": variant.bounded,
        "left": variant.left,
        "lengths": variant.lengths,
        variant.reference: True,
        "first": variant.first,
    }
    dims = variant.head_dim, variant.head_dim
    name = fused.module_name("sm90_fp8", dims, variant.dtype, marks)
    config: tuple[tuple[str, int | bool | str], ...] = (
        ("bits", 8),
        ("lagging", variant.reference == "lagging"),
        ("first", variant.first),
        ("qk_element", element),
        ("v_element", "E4m3"),
        ("out_element", fused.ELEMENT[variant.dtype]),
        ("score", score),
        ("head_dim", variant.head_dim),
        ("head_dim_v", variant.head_dim),
        ("keys", REFERENCE_KEYS),
        ("groups", tile.groups),
        ("stages", tile.stages),
        ("cluster", 1),
        ("resident", 1),
        ("ping_pong", False),
        ("out_in_place", False),
        ("bounded", variant.bounded),
        ("dynamic", variant.dynamic),
        ("left", variant.left),
        ("scores", 0),
        ("lengths", variant.lengths),
        ("shared_memory", variant.shared_memory),
    )
    return Specialisation("sm90/forward.cu", name, config, exact_arch=True)


def specialisations(
    device: Device, head_dims: Sequence[int], dtypes: Sequence[str]
) -> list[Specialisation]:
    """What calls with a preset's recipe may load: to quantise, and to attend."""
    if device.compute_capability != (9, 0):
        return []
    found: dict[Specialisation, None] = {}
    for recipe in PRESETS.values():
        if _reasons_against_recipe(recipe):
            continue
        for dim, dtype in itertools.product(head_dims, dtypes):
            if dim % 8 or dtype not in fused.ELEMENT:
                continue
            bucket, mixed = bucket_of(dim), rotation_of(recipe, dim, 1).block
            found[gpu_quantizer.specialisation(bucket, dtype, recipe.qk_dtype, mixed)] = None
            of_recipe = bucket, recipe.qk_dtype, recipe.reference, dtype
            for bounded, left in ((False, False), (True, False), (True, True)):
                for lengths in (False, True):
                    variant = Variant(*of_recipe, bounded, left, lengths, recipe.first_tile_16bit)
                    found[specialisation(variant)] = None
    return list(found)


def plan(spec: AttentionSpec, recipe: Fp8Recipe, device: Device) -> Tiling:
    """How the kernel cuts a problem that it takes. The workspace is codes and scales."""
    variant = Variant.of(spec, recipe)
    tile = variant.tile
    cut = Cut.of(spec, tile.groups, variant.bounded)
    launch = Launch(
        specialisation(variant),
        blocks=min(device.sm_count or _SMS, cut.tickets),
        threads=128 * (tile.groups + 1),
        shared_memory=variant.shared_memory,
    )
    note = f"{tile.groups} warpgroups" + (", work by tickets" if variant.dynamic else "")
    workspace = Shapes.of(spec, variant.head_dim).places["end"]
    return Tiling(tile.groups * cut.rows, REFERENCE_KEYS, cut.pack, workspace, note, launch)


def prepare(
    spec: AttentionSpec, recipe: Fp8Recipe, device: Device
) -> Callable[[Codes, int, int, int, int], None]:
    """Load the kernel; the answer queues it on codes, given the addresses of out, lse, q_lens and
    kv_lens, or 0.
    """
    variant = Variant.of(spec, recipe)
    launch = plan(spec, recipe, device).launch
    assert launch is not None
    cut = Cut.of(spec, variant.tile.groups, variant.bounded)
    shapes = Shapes.of(spec, variant.head_dim)
    arguments = arguments_of(spec, cut, 1)
    arguments["key_blocks"] = shapes.key_blocks
    arguments["factor"] = max(spec.scale * math.log2(math.e), 1e-10)
    kernel = module.load(launch.module, device).function(launch.module.name)
    queue = launcher(
        kernel, launch.blocks, launch.threads, launch.shared_memory, CHANGING_WITH_SCALES,
        arguments.tobytes(), early=True,
    )  # fmt: skip
    layouts = _layouts(spec, variant, cut, shapes)
    counters = tickets.counters(device.index) if variant.dynamic else None

    def run(codes: Codes, out: int, lse: int, q_lens: int, kv_lens: int) -> None:
        addresses = (codes.q_codes, codes.k_codes, codes.v_codes, out, codes.first_values)
        queue(
            b"".join(map(tensormap.at, layouts, addresses)),
            lse, q_lens, kv_lens, 0 if counters is None else counters.address(),
            codes.q_scales, codes.k_scales, codes.v_scales, codes.v_means,
            codes.lse_shifts if lse else 0,
        )  # fmt: skip

    return run


def _layouts(
    spec: AttentionSpec, variant: Variant, cut: Cut, shapes: Shapes
) -> list[tensormap.Layout]:
    """Of codes in boxes, of the output, and of the first values."""
    dim, row = variant.head_dim, min(variant.head_dim, 128)
    lines, keys = (cut.pack, cut.rows), (1, REFERENCE_KEYS)
    q = spec.batch, spec.q_heads, spec.q_len, dim
    k = spec.batch, spec.kv_heads, spec.kv_len, dim
    v = spec.batch, spec.kv_heads, dim, shapes.key_blocks * 64
    out = spec.batch, spec.q_heads, spec.q_len, spec.head_dim_v
    first = spec.batch, spec.kv_heads, 2 * REFERENCE_KEYS, dim
    return [
        tensormap.Layout.of("uint8", q, _contiguous(q), lines, row),
        tensormap.Layout.of("uint8", k, _contiguous(k), keys, row),
        tensormap.Layout.of("uint8", v, _contiguous(v), (1, dim), REFERENCE_KEYS),
        tensormap.Layout.of(spec.dtype, out, spec.out.strides, lines, 128),
        tensormap.Layout.of("float16", first, _contiguous(first), (1, first[2]), 128),
    ]


def _contiguous(shape: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    _, heads, rows, columns = shape
    return heads * rows * columns, rows * columns, columns, 1
