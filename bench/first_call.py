"""What the first call of a process takes: `python -m bench.first_call` prints it as JSON."""

from __future__ import annotations

import json
import time

import cupy

import cuflash

from .inputs import random_inputs
from .peers import ours
from .shapes import Problem

_PROBLEM = Problem(1, 16, 16, 4096, 4096, 128, causal=True)


def main() -> None:
    """Time a call and the wait for it; arrays and the CUDA context are there before."""
    q, k, v = random_inputs(cupy, _PROBLEM, seed=1)
    cupy.cuda.Device().synchronize()
    start = time.perf_counter()
    cuflash.attention(q, k, v, causal=_PROBLEM.causal)
    cupy.cuda.Device().synchronize()
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "kernel": ours.make(_PROBLEM, q, k, v).note}))


if __name__ == "__main__":
    main()
