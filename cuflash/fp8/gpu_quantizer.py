"""q, k and v of 16 bits to codes and scales on a GPU, as the kernel of 8 bits takes them.

The kernels are `cuda_src/fp8/quantize.cu`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from struct import Struct
from typing import Any

import numpy as np

from ..families import fused
from ..runtime import module
from ..runtime.device import Device
from ..runtime.launch import launcher
from ..runtime.specialisation import Specialisation
from ..spec import AttentionSpec
from .recipe import Fp8Recipe
from .rotation import rotation_of

_CHUNK, _TILE, _KEYS = 256, 128, 64  # as in the source
_STATISTICS = 6
_ALIGNMENT = 256
_SHARING: dict[Any, int] = {"token": 0, "columns": 1, 64: 2, 128: 3}
_LARGEST = {"e4m3": "448.f", "int8": "127.f"}
_QK_ELEMENT = {"e4m3": "E4m3", "int8": "Int8"}

_INPUTS = ("q", "k", "v")
_POINTERS = (
    *("q_lens", "kv_lens", "partial", "k_mean", "balance", "v_means", "v_scales", "signs"),
    *("q_codes", "k_codes", "v_codes", "q_scales", "k_scales", "lse_shifts", "residual"),
)
_INTS = (
    *("q_heads", "kv_heads", "q_len", "kv_len", "dim", "chunks", "key_blocks"),
    *("q_sharing", "k_sharing", "center_k", "center_v", "balanced", "signs_per_head", "mixed"),
)
ARGUMENTS = np.dtype(
    [
        *((name, [("data", np.uint64), ("steps", np.int64, 3)]) for name in _INPUTS),
        *((name, np.uint64) for name in _POINTERS),
        *((name, np.int32) for name in _INTS),
        *((name, np.float32) for name in ("root", "scale")),
    ],
    align=True,
)
_CHANGING = Struct(f"{'Q3q' * len(_INPUTS)}{len(_POINTERS)}Q")


@dataclass(frozen=True, slots=True)
class Shapes:
    """Of what is made: all in C order."""

    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    dim: int  # bucket
    key_blocks: int  # of 64 keys, a multiple of what any tile of keys has
    chunks: int

    @classmethod
    def of(cls, spec: AttentionSpec, dim: int) -> Shapes:
        """Of a problem in a bucket of the head dim."""
        key_blocks = -(-spec.kv_len // 384) * 6
        chunks = -(-max(spec.q_len, spec.kv_len) // _CHUNK)
        heads = spec.batch, spec.q_heads, spec.kv_heads
        return cls(*heads, spec.q_len, spec.kv_len, dim, key_blocks, chunks)

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each array."""
        queries, heads = self.batch * self.q_heads * self.q_len, self.batch * self.kv_heads
        of_channels = 4 * heads * self.dim
        return {
            "partial": of_channels * self.chunks * _STATISTICS,
            "k_mean": of_channels,
            "balance": of_channels,
            "v_means": of_channels,
            "v_scales": of_channels,
            "q_codes": queries * self.dim,
            "k_codes": heads * self.kv_len * self.dim,
            "v_codes": heads * self.dim * self.key_blocks * _KEYS,
            "q_scales": 4 * queries,
            "k_scales": 4 * heads * self.key_blocks * 4,
            "lse_shifts": 4 * queries,
            "residual": of_channels * self.key_blocks,
        }


@dataclass(frozen=True, slots=True)
class Codes:
    """Addresses of codes and scales in one block of device memory, which it holds."""

    memory: Any
    q_codes: int
    k_codes: int
    v_codes: int
    q_scales: int
    k_scales: int
    v_scales: int
    v_means: int
    lse_shifts: int


def specialisation(dim: int, dtype: str, qk_dtype: str) -> Specialisation:
    """The module for a bucket of the head dim."""
    name = fused.module_name("quantize", (dim, dim), dtype, {qk_dtype: True})
    config = (
        ("head_dim", dim),
        ("element", fused.ELEMENT[dtype]),
        ("qk_element", _QK_ELEMENT[qk_dtype]),
        ("largest", _LARGEST[qk_dtype]),
    )
    return Specialisation("fp8/quantize.cu", name, config, exact_arch=True)


def prepare(
    spec: AttentionSpec, recipe: Fp8Recipe, device: Device, dim: int
) -> Callable[[Any, Any, Any, int, int], Codes]:
    """Load the kernels; the answer queues them on (batch, heads, seq, dim) views of q, k and v,
    given the addresses of q_lens and kv_lens, or 0.
    """
    import cupy

    shapes = Shapes.of(spec, dim)
    loaded = module.load(specialisation(dim, spec.dtype, recipe.qk_dtype), device)
    rotation = rotation_of(recipe, spec.head_dim, spec.kv_heads)
    signs = None
    if rotation.signs is not None:
        padded = np.zeros((len(rotation.signs), dim), np.float32)
        padded[:, : rotation.dim] = rotation.signs[:, 0]
        signs = cupy.asarray(padded)
    heads, q_rows = spec.batch * spec.kv_heads, spec.batch * spec.q_heads
    grids = {
        "statistics": (shapes.chunks * heads, 256),
        "summary": (heads, dim),
        "queries": (-(-spec.q_len // _TILE) * q_rows, 256),
        "keys": (shapes.key_blocks // 2 * heads, 256),
        "values": (shapes.key_blocks * heads, 256),
    }
    if recipe.residual_mean:
        grids["residual"] = (heads, dim)
    struct = _lasting_arguments(spec, recipe, shapes, rotation.block, signs).tobytes()
    queues = [
        launcher(loaded.function(f"cuflash_fp8_{name}"), blocks, threads, 0, _CHANGING, struct)
        for name, (blocks, threads) in grids.items()
    ]
    places: dict[str, int] = {}
    end = 0
    for name, size in shapes.sizes.items():
        places[name] = end
        end += -(-size // _ALIGNMENT) * _ALIGNMENT

    def run(q: Any, k: Any, v: Any, q_lens: int, kv_lens: int) -> Codes:
        memory = cupy.empty(end, np.uint8)
        base = memory.data.ptr
        at = {name: base + place for name, place in places.items()}
        at["q_lens"], at["kv_lens"] = q_lens, kv_lens
        at["signs"] = 0 if signs is None else signs.data.ptr
        if not recipe.residual_mean:
            at["residual"] = 0
        if not recipe.center_k:
            at["lse_shifts"] = 0
        values = []
        for array in (q, k, v):
            values += [array.data.ptr, *(step // array.itemsize for step in array.strides[:3])]
        values += [at[name] for name in _POINTERS]
        for queue in queues:
            queue(*values)
        return Codes(memory, *(at[name] for name in Codes.__slots__[1:]))

    return run


def _lasting_arguments(
    spec: AttentionSpec, recipe: Fp8Recipe, shapes: Shapes, mixed: int, signs: Any
) -> np.ndarray[Any, Any]:
    """`struct Arguments` without what changes with each call."""
    arguments = np.zeros((), ARGUMENTS)
    for name in ("q_heads", "kv_heads", "q_len", "kv_len"):
        arguments[name] = getattr(spec, name)
    arguments["dim"] = spec.head_dim
    arguments["chunks"], arguments["key_blocks"] = shapes.chunks, shapes.key_blocks
    arguments["q_sharing"] = _SHARING[recipe.q_block]
    arguments["k_sharing"] = _SHARING[recipe.k_block]
    arguments["center_k"], arguments["center_v"] = recipe.center_k, recipe.center_v
    arguments["balanced"] = recipe.balance
    arguments["signs_per_head"] = recipe.rotation_per_head
    arguments["mixed"] = mixed if signs is not None else 1
    arguments["root"] = 1 / math.sqrt(mixed)
    arguments["scale"] = spec.scale
    return arguments
