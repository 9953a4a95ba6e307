"""Random calls of `attention`, of every kind that NumPy arrays allow."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from comparison import (
    DTYPES,
    STORAGES,
    WRITABLE_STORAGES,
    Array,
    away_from_zero,
    poisoned,
    shape_of,
    store,
    values_of,
)
from hypothesis import strategies as st


@dataclass
class Call:
    """Arrays and options that the library and the oracle both take, and those of the library."""

    q: Array
    k: Array
    v: Array
    options: dict[str, Any]
    own: dict[str, Any] = field(default_factory=dict)


LENGTHS = st.integers(0, 70) | st.sampled_from([1, 16, 32, 33, 64])
DIMS = st.integers(1, 80) | st.sampled_from([1, 64, 128, 256])
BOUNDS = st.sampled_from([None, 0, 1, 5, 40, 2**40])


@st.composite
def calls(draw: st.DrawFn) -> Call:
    rank = draw(st.integers(2, 4))
    layout = draw(st.sampled_from(["bhsd", "bshd"]))
    dtype = DTYPES[draw(st.sampled_from(list(DTYPES)))]
    batch = draw(st.integers(0, 3)) if rank == 4 else 1
    kv_heads, group = (draw(st.integers(1, 3)), draw(st.integers(1, 4))) if rank > 2 else (1, 1)
    q_len, kv_len, dim, dim_v = draw(LENGTHS), draw(LENGTHS), draw(DIMS), draw(DIMS)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    options: dict[str, Any] = {"layout": layout}
    options["scale"] = draw(st.sampled_from([None, 0.0, -1.0, 0.5, 2.0]))
    if options["scale"] is not None:
        options["scale"] *= dim**-0.5
    options["causal"] = draw(st.booleans())
    options["causal_align"] = draw(st.sampled_from(["bottom_right", "top_left"]))
    options["window"] = draw(st.none() | st.tuples(BOUNDS, BOUNDS))
    options["softcap"] = draw(st.sampled_from([None, None, 0.5, 5.0, 50.0]))
    scores = (batch, kv_heads * group, q_len, kv_len)[4 - rank :]
    if draw(st.booleans()):
        kept = rng.random(draw(broadcast_shapes(scores))) < draw(st.sampled_from([0.2, 0.8, 1.0]))
        options["mask"] = store(kept, draw(st.sampled_from(WRITABLE_STORAGES)))
    if draw(st.booleans()):
        bias_dtype = draw(st.sampled_from([dtype, np.float32]))
        bias = values_of(rng, draw(broadcast_shapes(scores)), bias_dtype)
        options["bias"] = store(bias, draw(st.sampled_from(WRITABLE_STORAGES)))

    lens = {}
    for name, capacity in (("q_lens", q_len), ("kv_lens", kv_len)):
        lens[name] = [capacity] * batch
        if draw(st.booleans()):
            lens[name] = [draw(st.integers(0, capacity)) for _ in range(batch)]
            as_given = draw(st.sampled_from([list, tuple, np.int32, np.uint8, np.int64]))
            is_array = as_given not in (list, tuple)
            options[name] = np.array(lens[name], as_given) if is_array else as_given(lens[name])

    arrays = {}
    for name, heads, seq, width, make, used in (
        ("q", kv_heads * group, q_len, dim, values_of, lens["q_lens"]),
        ("k", kv_heads, kv_len, dim, values_of, lens["kv_lens"]),
        ("v", kv_heads, kv_len, dim_v, away_from_zero, lens["kv_lens"]),
    ):
        values = make(rng, shape_of(rank, layout, batch, heads, seq, width), dtype)
        storage = draw(st.sampled_from(STORAGES))
        if storage != "broadcast":
            for entry, length in zip(values if rank == 4 else [values], used, strict=True):
                by_seq = entry.swapaxes(0, 1) if layout == "bhsd" and rank > 2 else entry
                by_seq[length:] = np.nan
        # q varies along the last axis: equal products round alike, so that their errors add up.
        axis = draw(st.integers(0, rank - 2 if name == "q" else rank - 1))
        arrays[name] = store(values, storage, axis)

    own: dict[str, Any] = {"return_lse": draw(st.booleans())}
    if draw(st.booleans()):
        shape = (*arrays["q"].shape[:-1], dim_v)
        own["out"] = poisoned(shape, dtype, draw(st.sampled_from(WRITABLE_STORAGES)))
    return Call(arrays["q"], arrays["k"], arrays["v"], options, own)


@st.composite
def broadcast_shapes(draw: st.DrawFn, full: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that broadcasts to `full`: any axes 1, any leading ones missing."""
    missing = draw(st.integers(0, len(full)))
    return tuple(n if draw(st.booleans()) else 1 for n in full[missing:])
