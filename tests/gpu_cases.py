"""Problems for a GPU family: a selection in which each value of a factor meets many others."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import cycle
from types import ModuleType
from typing import Any

import numpy as np
from comparison import (
    DTYPES,
    STORAGES,
    WRITABLE_STORAGES,
    Array,
    assert_attention,
    away_from_zero,
    poisoned,
    shape_of,
    store,
    values_of,
)

import cuflash
from cuflash.families import sm90_tiles
from cuflash.families.backward import sm90_tiles as backward_tiles

FLOATS = ("float16", "bfloat16", "float32")
# Shape of a mask or bias over (batch, heads, q_len, kv_len): which axes it has in full, b1qk style.
PATTERNS = ("bhqk", "1hqk", "b1qk", "b11k", "11q1", "hqk", "qk", "1k", "q1", "k", "")
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "top-left": {"causal": True, "causal_align": "top_left"},
    "window": {"window": (9, 3)},
    "left window": {"window": (20, None)},
    "right window": {"window": (None, 7)},
    "top-left window": {"window": (4, 0), "causal_align": "top_left"},
    "causal window": {"window": (30, 30), "causal": True},
    "softcap": {"softcap": 3.0},
    "negative scale": {"scale": -0.2},
    "zero scale": {"scale": 0.0},
    "capped causal": {"softcap": 0.7, "causal": True},
}
# Which `problems` leaves out. The window is wider than a tile of rows and two of keys, so that some
# key tiles are seen whole.
MORE_OPTIONS: dict[str, dict[str, Any]] = {
    "negative causal": {"scale": -0.2, "causal": True},
    "wide window": {"window": (400, 5)},
    "capped wide window": {"window": (400, 5), "softcap": 0.7},
    "negative wide window": {"window": (400, 5), "scale": -0.2},
}


@dataclass(frozen=True)
class Problem:
    """One call. Masks and biases are named by a pattern of `PATTERNS`."""

    dtype: str = "float16"
    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    q_len: int = 70
    kv_len: int = 90
    dim: int = 64
    dim_v: int = 64
    rank: int = 4
    layout: str = "bhsd"
    options: str = "full"
    mask: str | None = None
    bias: str | None = None
    bias_dtype: str = "float32"
    storage: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        standard = Problem()
        changes = {
            name: value for name, value in vars(self).items() if value != getattr(standard, name)
        }
        storage = changes.pop("storage", {})
        words = [f"{name}={value}" for name, value in (changes | storage).items()]
        return " ".join(words).replace("options=", "").replace("dtype=", "") or "plain"


@dataclass
class HostCall:
    """Arrays and options of a problem, in host memory."""

    q: Array
    k: Array
    v: Array
    out: Array
    options: dict[str, Any]


def host_call(problem: Problem, seed: int = 0) -> HostCall:
    """Random inputs of a problem, stored as it says, and poisoned memory for its result."""
    p, rng = problem, np.random.default_rng(seed)
    batch = p.batch if p.rank == 4 else 1
    heads, kv_heads = (p.heads, p.kv_heads) if p.rank > 2 else (1, 1)
    dtype = DTYPES[p.dtype]

    def stored(name: str, array: Array) -> Array:
        return store(array, p.storage.get(name, "contiguous"), axis=max(array.ndim - 3, 0))

    q = values_of(rng, shape_of(p.rank, p.layout, batch, heads, p.q_len, p.dim), dtype)
    k = values_of(rng, shape_of(p.rank, p.layout, batch, kv_heads, p.kv_len, p.dim), dtype)
    v = away_from_zero(rng, shape_of(p.rank, p.layout, batch, kv_heads, p.kv_len, p.dim_v), dtype)
    options = dict((OPTIONS | MORE_OPTIONS)[p.options], layout=p.layout)
    lengths = {"b": batch, "h": heads, "q": p.q_len, "k": p.kv_len, "1": 1}
    if p.mask is not None:
        mask = np.asarray(rng.random([lengths[axis] for axis in p.mask]) < 0.6)
        options["mask"] = stored("mask", mask)
    if p.bias is not None:
        bias = np.asarray(rng.standard_normal([lengths[axis] for axis in p.bias]))
        options["bias"] = stored("bias", bias.astype(DTYPES[p.bias_dtype]))
    return HostCall(
        q=stored("q", q),
        k=stored("k", k),
        v=stored("v", v),
        out=poisoned((*q.shape[:-1], p.dim_v), dtype, p.storage.get("out", "contiguous")),
        options=options,
    )


def place(cupy: ModuleType, view: Array) -> Any:
    """The same view over a copy, on the device, of all the memory behind it."""
    root = view
    while isinstance(root.base, np.ndarray):
        root = root.base
    assert root.flags.c_contiguous
    copy = cupy.asarray(root.reshape(-1).view(np.uint8))
    offset = view.ctypes.data - root.ctypes.data
    return cupy.ndarray(view.shape, view.dtype, copy.data + offset, view.strides)


def attend(cupy: ModuleType, call: HostCall, **more: Any) -> tuple[Any, Any]:
    """`out` and LSE of a call, on the device, in memory that was full of NaN."""
    options = {
        name: place(cupy, value) if isinstance(value, np.ndarray) else value
        for name, value in call.options.items()
    }
    out = place(cupy, call.out)
    q, k, v = (place(cupy, array) for array in (call.q, call.k, call.v))
    result, lse = cuflash.attention(q, k, v, **options, out=out, return_lse=True, **more)
    assert result is out
    return out, lse


def assert_agrees(call: HostCall, out: Any, lse: Any, **more: Any) -> None:
    """Assert that results on the device are those of the call, with more options, by the oracle."""
    assert_attention(out.get(), lse.get(), call.q, call.k, call.v, **(call.options | more))


def problems() -> list[Problem]:
    """All of the selection, each once."""
    dtypes, options = cycle(FLOATS), cycle(OPTIONS)
    found: list[Problem] = []

    for dims in ((1, 1), (32, 32), (60, 60), (61, 61), (64, 64), (96, 96), (128, 128), (192, 128),
                 (192, 192), (256, 256), (64, 256), (128, 61), (8, 1)):  # fmt: skip
        for dtype in FLOATS:
            found.append(Problem(dtype, dim=dims[0], dim_v=dims[1], options=next(options)))
    for option in OPTIONS:
        for dtype in FLOATS:
            found.append(Problem(dtype, options=option, q_len=65, kv_len=129))
    for lengths in ((1, 1), (1, 2), (2, 1), (1, 257), (257, 1), (2, 63), (63, 2), (63, 64),
                    (64, 64), (65, 64), (64, 129), (129, 65), (129, 257), (257, 257)):  # fmt: skip
        for option in ("full", "causal", "top-left", "window"):
            found.append(Problem(next(dtypes), q_len=lengths[0], kv_len=lengths[1], options=option))
    for pattern in PATTERNS:
        mask = Problem(next(dtypes), mask=pattern, options=next(options))
        found.append(mask)
        for dtype in FLOATS:
            for bias_dtype in sorted({dtype, "float32"}):
                found.append(Problem(dtype, bias=pattern, bias_dtype=bias_dtype))
        found.append(replace(mask, bias="hqk", layout="bshd", options=next(options)))
    for heads in ((1, 1), (8, 1), (5, 5), (12, 4), (7, 1), (40, 1)):
        for option in ("full", "causal"):
            found.append(
                Problem(next(dtypes), heads=heads[0], kv_heads=heads[1], q_len=33, options=option)
            )
    for name in ("q", "k", "v", "out"):
        for storage in STORAGES[1:] if name != "out" else WRITABLE_STORAGES[1:]:
            for layout in ("bhsd", "bshd"):
                found.append(Problem(next(dtypes), layout=layout, storage={name: storage}))
    for storage in WRITABLE_STORAGES[1:]:
        everywhere = dict.fromkeys(("q", "k", "v", "out", "mask", "bias"), storage)
        odd = Problem(dim=61, mask="hqk", bias="b1qk", storage=everywhere, options="causal")
        found += [replace(odd, dtype=dtype) for dtype in FLOATS]
    for rank in (2, 3):
        for layout in ("bhsd", "bshd"):
            for dtype in FLOATS:
                pattern = "qk" if rank == 2 else "hqk"
                found.append(Problem(dtype, rank=rank, layout=layout, options=next(options)))
                found.append(Problem(dtype, rank=rank, layout=layout, mask=pattern, bias=pattern))
    return list({str(problem): problem for problem in found}.values())


def problems_of_sm90() -> list[Problem]:
    """Each row of its tile table in each way: all its kernels, with `used_lengths` and without."""
    masks = {
        "full": (sm90_tiles._FULL, ("full", "softcap", "negative scale")),
        "causal": (sm90_tiles._BOUNDED, ("causal", "capped causal", "negative causal")),
        "window": (
            sm90_tiles._BOUNDED,
            ("wide window", "capped wide window", "negative wide window"),
        ),
    }
    found = []
    for table, ways in masks.values():
        for (dim, dim_v), rows in table.items():
            fewer = 0  # keys, up to which the row before serves
            for most, tile in rows:
                kv_len = fewer + 701  # several tiles, the last of which is cut
                assert kv_len <= most
                for q_len in (300, 100) if tile.cluster > 1 else (300,):  # pairs may stay alone
                    found += [
                        Problem(
                            dtype, q_len=q_len, kv_len=kv_len, dim=dim, dim_v=dim_v, options=way
                        )
                        for way in ways
                        for dtype in ("float16", "bfloat16")
                    ]
                fewer = most
    return found


def problems_of_sm90_backward() -> list[Problem]:
    """Each row of the tile table of its backward pass in each way: all its kernels, with
    `used_lengths` and without, deterministic and not.
    """
    ways = ("full", "softcap", "causal", "capped causal", "wide window", "capped wide window")
    return [
        Problem(dtype, q_len=300, kv_len=701, dim=dim, dim_v=dim_v, options=way)
        for dim, dim_v in backward_tiles.PAIRS
        for way in ways
        for dtype in ("float16", "bfloat16")
    ]


def used_lengths(problem: Problem) -> dict[str, list[int]]:
    """Fewer keys in one batch entry, and fewer rows in the other."""
    assert problem.batch == 2
    return {
        "q_lens": [problem.q_len, problem.q_len // 2 + 1],
        "kv_lens": [problem.kv_len - 500, problem.kv_len],
    }


# Of which the standard family, with little memory, cuts one axis after another.
CHUNKED = [
    Problem(q_len=5, kv_len=40, batch=20, kv_heads=1, heads=2),  # batch entries
    Problem(q_len=20, kv_len=40, batch=2, kv_heads=5, heads=10, options="causal"),  # heads
    Problem(q_len=200, kv_len=129, options="causal", layout="bshd"),  # rows
    Problem("bfloat16", q_len=150, kv_len=257, mask="bhqk", options="window"),
    Problem("float32", q_len=257, kv_len=65, bias="1hqk", options="top-left"),
    Problem("float32", q_len=65, kv_len=129, heads=8, kv_heads=1, mask="b11k", bias="q1"),
    Problem(q_len=150, kv_len=20, options="causal", storage={"out": "stepped", "v": "reversed"}),
]
