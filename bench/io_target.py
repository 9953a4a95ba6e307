"""What Nsight Compute profiles for `python -m bench io`.

    python -m bench.io_target CASES

CASES is JSON: of each case the kernel to insist on, and its problem. Every case runs once to
compile, and once profiled between a kernel that bears its number and one that reads enough to send
all that the L2 cache still has to write to memory.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

from .inputs import random_inputs
from .peers import ours
from .shapes import Problem

MARK, EVICT = "bench_case_", "bench_evict"
_THREADS = 1024
_EVICT_SOURCE = f"""\
extern "C" __global__ void {EVICT}(const float4* in, float* out, long long count) {{
    float sum = 0.f;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count;
         i += (long long)gridDim.x * blockDim.x)
        sum += in[i].x + in[i].y + in[i].z + in[i].w;
    if (sum == 12345.678f) *out = sum;
}}
"""


def main() -> None:
    """Run the cases."""
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    size = max(4 * properties["l2CacheSize"], 128 << 20)
    scratch = cupy.random.RandomState(2).standard_normal(size // 4, dtype=np.float32)
    out = cupy.zeros(1, np.float32)
    kernel = cupy.RawKernel(_EVICT_SOURCE, EVICT)
    blocks = 4 * properties["multiProcessorCount"]

    def evict() -> None:
        kernel((blocks,), (_THREADS,), (scratch, out, np.int64(size // 16)))

    for number, case in enumerate(json.loads(sys.argv[1])):
        _profile(cupy, number, case, evict)


def _profile(cupy: Any, number: int, case: dict[str, Any], evict: Any) -> None:
    problem = Problem(**case["problem"])
    inputs = random_inputs(cupy, problem, seed=1)
    call = ours.make(problem, *inputs, kernel=case["kernel"]).call
    name = f"{MARK}{number}"
    mark = cupy.RawKernel(f'extern "C" __global__ void {name}() {{}}', name)
    for work in (call, lambda: mark((1,), (1,), ()), evict):  # compile, and a clean cache
        work()
    cupy.cuda.Device().synchronize()
    cupy.cuda.runtime.profilerStart()
    mark((1,), (1,), ())
    call()
    evict()
    cupy.cuda.Device().synchronize()
    cupy.cuda.runtime.profilerStop()


if __name__ == "__main__":
    main()
