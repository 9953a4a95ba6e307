"""A small set for pytest-benchmark: `pytest bench --benchmark-only`.

The CPU family, and on a machine with a GPU what it runs there. Times are of the host, which waits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bench import samples
from bench.inputs import random_inputs
from bench.peers import Prepared, blas, ours
from bench.shapes import Problem
from cuflash.runtime import device

pytest.importorskip("pytest_benchmark")

ON_CPU = [Problem(1, 4, 2, 512, 512, 64, "float32", causal) for causal in (False, True)]
ON_GPU = [Problem(2, 16, 16, 2048, 2048, dim, causal=c) for dim in (64, 128) for c in (False, True)]


def measure(benchmark: Any, xp: Any, problem: Problem, make: Any) -> None:
    """Time calls, and judge the last."""
    inputs = random_inputs(xp, problem, seed=1)
    prepared: Prepared = make(problem, *inputs)
    assert prepared.result is not None
    wait = (lambda: None) if xp is np else xp.cuda.Device().synchronize

    def call() -> None:
        prepared.call()
        wait()

    benchmark.extra_info["problem"], benchmark.extra_info["kernel"] = str(problem), prepared.note
    benchmark(call)
    chosen = samples.choose(problem, seed=1)
    exact = samples.exact_rows(xp, problem, *inputs, chosen)
    error, worst = samples.error_of(samples.rows_of(xp, prepared.result(), chosen), exact)
    assert samples.is_right(error, worst, problem.dtype)


@pytest.mark.parametrize("problem", ON_CPU, ids=str)
def test_reference(benchmark: Any, problem: Problem) -> None:
    """Tiled attention on NumPy arrays."""
    measure(benchmark, np, problem, ours.make)


@pytest.mark.parametrize("problem", ON_CPU, ids=str)
def test_blas(benchmark: Any, problem: Problem) -> None:
    """The whole score matrix by BLAS."""
    measure(benchmark, np, problem, blas.make)


@pytest.mark.skipif(bool(device.unavailable_reason()), reason="no GPU")
@pytest.mark.parametrize("problem", ON_GPU, ids=str)
def test_gpu(benchmark: Any, problem: Problem) -> None:
    """The family that the device has for 16 bits."""
    import cupy

    measure(benchmark, cupy, problem, ours.make)
