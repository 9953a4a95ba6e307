"""Times the reference family beside plain BLAS attention, and measures the memory of both.

    python bench/cpu_reference.py [--heads 8] [--seq 4096] [--dim 64] [--full] [--dtype float32]

Medians of several runs on random normal inputs; memory is the peak that NumPy allocates beside the
inputs, as tracemalloc counts it.
"""

from __future__ import annotations

import argparse
import statistics
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np

import cuflash

RUNS = 5


def plain_attention(q: Any, k: Any, v: Any, causal: bool) -> Any:
    """softmax(q k^T / sqrt(dim)) v with the whole score matrix in memory; one length for all."""
    scores = q @ k.swapaxes(-1, -2)
    scores *= q.shape[-1] ** -0.5
    if causal:
        n = scores.shape[-1]
        np.copyto(scores, -np.inf, where=~np.tri(n, dtype=bool))
    scores -= scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores, out=scores)
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights @ v


def median_seconds(function: Callable[[], Any]) -> float:
    """Median of RUNS runs, after one to warm up."""
    function()
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def peak_bytes(function: Callable[[], Any]) -> int:
    """Most bytes allocated at once during one run."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def main() -> None:
    """Print one line for each way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--full", action="store_true", help="not causal")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    options = parser.parse_args()
    shape = (options.heads, options.seq, options.dim)
    q, k, v = np.random.default_rng().standard_normal((3, *shape)).astype(options.dtype)
    causal = not options.full
    ways = {
        "plain BLAS": lambda: plain_attention(q, k, v, causal),
        "reference": lambda: cuflash.attention(q, k, v, causal=causal),
    }
    print(f"{options.dtype} {shape}, {'causal' if causal else 'full'}\n{cuflash.info()}\n")
    for name, way in ways.items():
        print(f"{name:<11} {median_seconds(way):7.3f} s  {peak_bytes(way) / 1e6:8.1f} MB")


if __name__ == "__main__":
    main()
