"""What the first call of a process takes: `python -m bench.first_call` prints it as JSON, with the
modules that the cache had before, and what compiling the call's own took, then or earlier.
"""

from __future__ import annotations

import json
import time

import cupy

import cuflash
from cuflash.runtime import cache, compiler, device

from .inputs import random_inputs
from .peers import ours
from .shapes import Problem

_PROBLEM = Problem(1, 16, 16, 4096, 4096, 128, causal=True)


def main() -> None:
    """Time a call and the wait for it; arrays and the CUDA context are there before."""
    q, k, v = random_inputs(cupy, _PROBLEM, seed=1)
    before = cache.info().entries
    cupy.cuda.Device().synchronize()
    start = time.perf_counter()
    cuflash.attention(q, k, v, causal=_PROBLEM.causal)
    cupy.cuda.Device().synchronize()
    seconds = time.perf_counter() - start
    launch = cuflash.explain(q, k, v, causal=_PROBLEM.causal).tiling.launch
    entry = None
    if launch is not None:
        capability = device.cuda_device(q.device.id).compute_capability
        assert capability is not None
        arch = compiler.loadable_architecture(capability, launch.module.exact_arch)
        entry = cache.peek(launch.module, arch)
    found = {
        "seconds": seconds, "kernel": ours.make(_PROBLEM, q, k, v).note, "before": before,
        "compiling": entry.seconds if entry else 0.0,
    }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()
