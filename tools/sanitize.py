"""Small calls of the fused kernels on compute capability 9.0, to be watched by compute-sanitizer.

    compute-sanitizer --tool memcheck python tools/sanitize.py forward backward fp8
    compute-sanitizer --tool racecheck python tools/sanitize.py backward --kernels sm80 --dims 128

Head dims from 64 to 256, full, causal and in a window, with and without lengths; both forms of
gradients.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import cupy as cp
import numpy as np

import cuflash
from cuflash.families.backward import sm90 as backward_sm90

DIMS = ((64, 64), (128, 128), (192, 192), (192, 128), (256, 256))
MASKS: tuple[dict[str, Any], ...] = ({}, {"causal": True}, {"window": (70, 20)})
ENTRIES = (2, 40)  # the latter are several pieces of work for some blocks
KERNELS = ("sm90", "sm80")

_random = cp.random.default_rng(3)


def arrays(entries: int, dim: int, dim_v: int, keys: int = 333) -> tuple[Any, Any, Any]:
    """q, k and v of 200 queries, heads in pairs that share keys."""
    shapes = ((entries, 2, 200, dim), (entries, 1, keys, dim), (entries, 1, keys, dim_v))
    q, k, v = (_random.standard_normal(s, dtype=np.float32).astype(np.float16) for s in shapes)
    return q, k, v


def cases(entries: int, dims: Sequence[int]) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Head dims and options; lengths begin at 0."""
    count = cp.arange(entries, dtype=np.int64)
    lengths = {"q_lens": 150 * count % 201, "kv_lens": 100 * count % 334}
    for dim, dim_v in (pair for pair in DIMS if pair[0] in dims):
        for mask in MASKS:
            yield dim, dim_v, mask
            yield dim, dim_v, {**mask, **lengths}


def forward(dims: Sequence[int], kernels: Sequence[str]) -> None:
    """Fused families."""
    for entries in ENTRIES:
        for dim, dim_v, options in cases(entries, dims):
            for kernel in kernels:
                cuflash.attention(*arrays(entries, dim, dim_v), kernel=kernel, **options)


def backward(dims: Sequence[int], kernels: Sequence[str]) -> None:
    """Fused families, in any order and in turn; by `sm90` in sections of one head, and with pieces
    of work that are split.
    """
    backward_sm90._section = lambda spec, variant: 1
    backward_sm90._blocks = lambda device: 5
    backward_sm90._parts = lambda *problem: 2
    for dim, dim_v, options in cases(2, dims):
        q, k, v = arrays(2, dim, dim_v, keys=400)
        for kernel in kernels:
            out, lse = cuflash.attention(q, k, v, kernel=kernel, return_lse=True, **options)
            for deterministic in (False, True):
                cuflash.attention_backward(
                    out, q, k, v, out, lse, kernel=kernel, deterministic=deterministic, **options
                )


def fp8(dims: Sequence[int], kernels: Sequence[str]) -> None:
    """To quantise, and to attend: by `sm90` in any case."""
    for dim, dim_v, options in cases(2, dims):
        if dim == dim_v:
            for recipe in ("f8", "i8", "f8+"):
                cuflash.attention_fp8(*arrays(2, dim, dim), recipe=recipe, **options)


PARTS = {"forward": forward, "backward": backward, "fp8": fp8}


def main() -> None:
    """Call what the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--dims", nargs="+", type=int, choices=dict(DIMS), default=[*dict(DIMS)])
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS)
    chosen = parser.parse_args()
    for part in chosen.parts:
        PARTS[part](chosen.dims, chosen.kernels)
        cp.cuda.Device().synchronize()
        print(part)


if __name__ == "__main__":
    main()
