"""What the CPU family costs on a long problem: memory, and time beside the plain computation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

SHAPE = (8, 4096, 64)

# Processor time of one thread each: other processes, and threads waiting for one another, do not
# count. The plain computation takes a head at a time, its whole score matrix in place.
MEASURE = """
import json, statistics, sys, time, tracemalloc
import numpy as np, cuflash

def plain(q, k, v):
    out = np.empty_like(q)
    hidden = ~np.tri(q.shape[1], dtype=bool)
    for h in range(len(q)):
        scores = q[h] @ k[h].T
        scores *= np.float32(q.shape[-1] ** -0.5)
        scores[hidden] = -np.inf
        scores -= scores.max(axis=1, keepdims=True)
        np.exp(scores, out=scores)
        np.divide(scores @ v[h], scores.sum(axis=1, keepdims=True), out=out[h])
    return out

q, k, v = np.random.default_rng(0).standard_normal((3, *json.loads(sys.argv[1])), dtype=np.float32)
times, results = {"plain": [], "cuflash": []}, {}
for _ in range(3):
    for name in times:
        start = time.process_time()
        if name == "plain":
            results[name] = plain(q, k, v)
        else:
            results[name] = cuflash.attention(q, k, v, causal=True)
        times[name].append(time.process_time() - start)
tracemalloc.start()
out = cuflash.attention(q, k, v, causal=True)
_, peak = tracemalloc.get_traced_memory()
print(json.dumps({
    "extra_bytes": peak - out.nbytes,
    "workspace": cuflash.explain(q, k, v, causal=True).tiling.workspace,
    "seconds": {name: statistics.median(taken) for name, taken in times.items()},
    "difference": float(np.abs(results["plain"] - results["cuflash"]).max()),
}))
"""


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    """Figures of a fresh process, whose BLAS has one thread from the start."""
    one_thread = dict.fromkeys(
        ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"),
        "1",
    )
    finished = subprocess.run(
        [sys.executable, "-c", MEASURE, json.dumps(SHAPE)],
        env=os.environ | one_thread | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    figures: dict[str, Any] = json.loads(finished.stdout)
    return figures


def test_a_long_problem_takes_at_most_twice_the_time_of_plain_blas(
    measured: dict[str, Any],
) -> None:
    assert measured["difference"] < 1e-5
    seconds = measured["seconds"]
    ratio = seconds["cuflash"] / seconds["plain"]
    assert ratio < 2, f"{ratio:.2f} times the plain time: {seconds}"


def test_a_long_problem_takes_a_few_tiles_of_memory(measured: dict[str, Any]) -> None:
    """The scores of all heads would be 512 MiB, those of one head 64 MiB."""
    assert measured["workspace"] < 16e6
    assert measured["extra_bytes"] < 4 * measured["workspace"], measured
