"""q, k and v of 16 bits to codes and scales on a GPU, as the kernel of 8 bits takes them.

The kernels are `cuda_src/fp8/quantize.cu`. They do the operations of `quantize` one by one: from
the same statistics come the same codes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from struct import Struct
from typing import Any, NamedTuple

import numpy as np

from ..families import fused
from ..runtime import graphs, module
from ..runtime.device import Device
from ..runtime.launch import launcher
from ..runtime.specialisation import Specialisation
from ..spec import AttentionSpec
from .recipe import Fp8Recipe
from .rotation import rotation_of
from .sample import FEWEST, RUN, runs

_SMS = 132
_CHUNK, _FIRST, _KEYS = 256, 128, 64  # as in the source
_RECORDS = {"q_partial": 1, "k_partial": 2, "v_partial": 3}
_ALIGNMENT = 256
_SHARING: dict[Any, int] = {"token": 0, "columns": 1, 64: 2, 128: 3}
_LARGEST = {"e4m3": "448.f", "int8": "127.f"}
_QK_ELEMENT = {"e4m3": "E4m3", "int8": "Int8"}

_INPUTS = ("q", "k", "v")
_POINTERS = (
    *("q_lens", "kv_lens", "q_partial", "k_partial", "v_partial", "value_tiles", "code_sums"),
    *("k_means", "q_factors", "k_factors", "v_means", "v_scales"),
    *("q_codes", "k_codes", "v_codes", "q_scales", "k_scales", "lse_shifts", "first_values"),
    "signs",
)
_ARRAYS = _POINTERS[2:-1]  # in one block of memory
_INTS = (
    *("entries", "q_heads", "kv_heads", "group", "q_len", "kv_len", "dim"),
    *("q_chunks", "k_chunks", "v_chunks", "key_blocks"),
    *("q_sharing", "k_sharing", "center_k", "center_v", "balanced", "signs_per_head"),
    *("residual_mean", "keep_first", "zeros"),
)
ARGUMENTS = np.dtype(
    [
        *((name, [("data", np.uint64), ("steps", np.int64, 3)]) for name in _INPUTS),
        *((name, np.uint64) for name in _POINTERS),
        *((name, np.int32) for name in _INTS),
        ("root", np.float32),
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
    # Of what statistics are of: v, all of it, and samples of q and k.
    v_chunks: int
    q_chunks: int
    k_chunks: int

    @classmethod
    def of(cls, spec: AttentionSpec, dim: int) -> Shapes:
        """Of a problem in a bucket of the head dim."""
        key_blocks = -(-spec.kv_len // 384) * 6
        chunks = (
            -(-spec.kv_len // _CHUNK),
            _sample_chunks(spec.q_len, spec.has_q_lens),
            _sample_chunks(spec.kv_len, spec.has_kv_lens),
        )
        heads = spec.batch, spec.q_heads, spec.kv_heads
        return cls(*heads, spec.q_len, spec.kv_len, dim, key_blocks, *chunks)

    def tiles(self, rows: int) -> int:
        """Of so many rows of q, k and v."""
        q_tiles = self.q_heads * -(-self.q_len // rows)
        return self.batch * (q_tiles + 2 * self.kv_heads * self.key_blocks * _KEYS // rows)

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each array."""
        queries, heads = self.batch * self.q_heads * self.q_len, self.batch * self.kv_heads
        of_channels = 4 * heads * self.dim
        chunks = {
            "q_partial": self.batch * self.q_heads * self.q_chunks,
            "k_partial": heads * self.k_chunks,
            "v_partial": heads * self.v_chunks,
        }
        return {
            **{name: 4 * self.dim * _RECORDS[name] * count for name, count in chunks.items()},
            "value_tiles": 4 * heads,
            "code_sums": 2 * of_channels,
            "k_means": of_channels,
            "q_factors": of_channels,
            "k_factors": of_channels,
            "v_means": of_channels,
            "v_scales": of_channels,
            "q_codes": queries * self.dim,
            "k_codes": heads * self.kv_len * self.dim,
            "v_codes": heads * self.dim * self.key_blocks * _KEYS,
            "q_scales": 4 * queries,
            "k_scales": 4 * heads * self.key_blocks * 4,
            "lse_shifts": 4 * queries,
            "first_values": 2 * heads * _FIRST * self.dim,
        }

    @property
    def places(self) -> dict[str, int]:
        """Where each begins, in bytes, and where all end."""
        found: dict[str, int] = {}
        end = 0
        for name, size in self.sizes.items():
            found[name] = end
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        return {**found, "end": end}


def _sample_chunks(length: int, is_most: bool) -> int:
    """Of a sample of so many rows, or of as many as any number of rows up to that has."""
    most = min(length, 2 * FEWEST - 1) if is_most else length
    return -(-runs(most) * RUN // _CHUNK)


class Blocks(NamedTuple):
    """Of codes: rows of a tile, threads of a block, and blocks of a multiprocessor.

    As many as have room for a row in registers, in one thread or in four, and for two tiles in
    shared memory.
    """

    tile: int
    threads: int
    resident: int

    @classmethod
    def of(cls, dim: int, shared_by_128: bool) -> Blocks:
        """For a bucket of the head dim, and whether 128 rows have one scale: a tile has them all.

        Two blocks of half the threads rather than one, so that one computes while the other waits.
        """
        if dim == 256:
            return cls(128, 512, 1) if shared_by_128 else cls(64, 256, 2)
        return cls(128, 128, 5 if dim == 64 else 3)

    def shared_memory(self, dim: int) -> int:
        """Bytes of a block: two tiles, 16 bytes after each row, and two numbers a channel."""
        return 2 * (self.tile * (2 * dim + 16) + 2 * 4 * dim)


def _shares_by_128(recipe: Fp8Recipe) -> bool:
    return 128 in (recipe.q_block, recipe.k_block)


class Codes(NamedTuple):
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
    first_values: int


def specialisation(
    dim: int, dtype: str, qk_dtype: str, mixed: int, *, shared_by_128: bool = False
) -> Specialisation:
    """The module for a bucket of the head dim, of which `mixed` channels are rotated together, and
    of recipes in which 128 rows have one scale or none.
    """
    blocks = Blocks.of(dim, shared_by_128)
    marks = {qk_dtype: True, f"mixed{mixed}": mixed > 1, f"rows{blocks.tile}": blocks.tile != 128}
    name = fused.module_name("quantize", (dim, dim), dtype, marks)
    config = (
        ("head_dim", dim),
        ("mixed", mixed),
        ("element", fused.ELEMENT[dtype]),
        ("qk_element", _QK_ELEMENT[qk_dtype]),
        ("largest", _LARGEST[qk_dtype]),
        ("tile", blocks.tile),
        ("threads", blocks.threads),
        ("resident", blocks.resident),
        ("shared_memory", blocks.shared_memory(dim)),
    )
    return Specialisation("fp8/quantize.cu", name, config, exact_arch=True)


def prepare(
    spec: AttentionSpec, recipe: Fp8Recipe, device: Device, dim: int
) -> Callable[[Any, Any, Any, int, int], Codes]:
    """Load the kernels; the answer queues them on q, k and v as `spec` describes them, given the
    addresses of q_lens and kv_lens, or 0.
    """
    import cupy

    shapes = Shapes.of(spec, dim)
    rotation = rotation_of(recipe, spec.head_dim, spec.kv_heads)
    compiled = specialisation(
        dim, spec.dtype, recipe.qk_dtype, rotation.block, shared_by_128=_shares_by_128(recipe)
    )
    loaded = module.load(compiled, device)
    signs = None
    if rotation.signs is not None:
        padded = np.zeros((len(rotation.signs), dim), np.float32)
        padded[:, : rotation.dim] = rotation.signs[:, 0]
        signs = cupy.asarray(padded)
    struct = _lasting_arguments(spec, recipe, shapes, rotation.block).tobytes()
    queues = []
    for name, cut in _cuts(recipe, shapes, device.sm_count or _SMS).items():
        kernel = loaded.function(f"cuflash_fp8_{name}")
        queues.append(launcher(kernel, *cut, _CHANGING, struct, early=True))
    places = shapes.places
    size = (places["end"],)
    offsets = [places[name] for name in _ARRAYS]
    of_codes = [_ARRAYS.index(name) for name in Codes._fields[1:]]
    lse_shifts = _ARRAYS.index("lse_shifts")
    shifted = recipe.center_k and spec.return_lse
    steps = [tuple(place.strides[:3]) for place in (spec.q, spec.k, spec.v)]

    def run(q: Any, k: Any, v: Any, q_lens: int, kv_lens: int) -> Codes:
        memory = cupy.ndarray(size, np.uint8)
        graphs.keep(memory)
        base = memory.data.ptr
        at = [base + offset for offset in offsets]
        if not shifted:
            at[lse_shifts] = 0
        values = (
            q.data.ptr, *steps[0], k.data.ptr, *steps[1], v.data.ptr, *steps[2],
            q_lens, kv_lens, *at, 0 if signs is None else signs.data.ptr,
        )  # fmt: skip
        for queue in queues:
            queue(*values)
        return Codes(memory, *[at[index] for index in of_codes])

    return run


def _cuts(recipe: Fp8Recipe, shapes: Shapes, sms: int) -> dict[str, tuple[int, int, int]]:
    """Blocks, threads of each, and its bytes of shared memory, of each kernel in its turn."""
    heads = shapes.batch * shapes.kv_heads
    chunks = heads * shapes.v_chunks
    if recipe.center_k or recipe.balance:
        chunks += heads * shapes.k_chunks
    if recipe.balance:
        chunks += shapes.batch * shapes.q_heads * shapes.q_chunks
    blocks = Blocks.of(shapes.dim, _shares_by_128(recipe))
    tiles = shapes.tiles(blocks.tile)
    return {
        "statistics": (chunks, 128, 0),
        "summary": (heads * shapes.dim // 32, 512, 0),
        "codes": (
            min(tiles, sms * blocks.resident),
            blocks.threads,
            blocks.shared_memory(shapes.dim),
        ),
    }


def _lasting_arguments(
    spec: AttentionSpec, recipe: Fp8Recipe, shapes: Shapes, mixed: int
) -> np.ndarray[Any, Any]:
    """`struct Arguments` without what changes with each call."""
    arguments = np.zeros((), ARGUMENTS)
    for name in ("q_heads", "kv_heads", "q_len", "kv_len"):
        arguments[name] = getattr(spec, name)
    arguments["dim"] = spec.head_dim
    arguments["entries"], arguments["group"] = spec.batch, spec.q_heads // spec.kv_heads
    for name in ("q_chunks", "k_chunks", "v_chunks", "key_blocks"):
        arguments[name] = getattr(shapes, name)
    arguments["q_sharing"] = _SHARING[recipe.q_block]
    arguments["k_sharing"] = _SHARING[recipe.k_block]
    arguments["center_k"], arguments["center_v"] = recipe.center_k, recipe.center_v
    arguments["balanced"] = recipe.balance
    arguments["signs_per_head"] = recipe.rotation_per_head
    arguments["residual_mean"] = recipe.residual_mean
    arguments["keep_first"] = recipe.first_tile_16bit
    arguments["zeros"] = (shapes.places["k_means"] - shapes.places["value_tiles"]) // 16
    arguments["root"] = 1 / math.sqrt(mixed)
    return arguments
