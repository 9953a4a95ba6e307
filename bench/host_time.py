"""Times what the host needs to queue one warm call, beside torch and a bare CuPy launch.

    python bench/host_time.py [--json FILE]

A problem so small that the device keeps up: (1, 2, 64, 64) float16, causal. Medians over rounds of
CALLS calls, the device idle before each; a round calls each way, in an order of its own, so that
what else the host does slows all of them.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import cuflash

SHAPE = (1, 2, 64, 64)
ROUNDS, CALLS = 41, 100


def host_us(ways: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median host time of a call of each way in microseconds."""
    rounds: dict[str, list[float]] = {name: [] for name in ways}
    for warm in [False] + [True] * ROUNDS:
        for name in random.sample(list(ways), len(ways)):
            call = ways[name]
            cupy.cuda.Device().synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            if warm:
                rounds[name].append((time.perf_counter() - start) / CALLS * 1e6)
    return {name: statistics.median(times) for name, times in rounds.items()}


def main() -> None:
    """Print a line a way of calling."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    tensors = [torch.randn(SHAPE, device="cuda", dtype=torch.float16) for _ in range(3)]
    q, k, v = (cupy.from_dlpack(tensor) for tensor in tensors)
    out = cupy.empty_like(q)
    lens = cupy.asarray([SHAPE[2]])
    nothing = cupy.RawKernel('extern "C" __global__ void nothing() {}', "nothing")

    attend_by_torch = torch.nn.functional.scaled_dot_product_attention

    def attend(*arrays: Any, **more: Any) -> Callable[[], Any]:
        return lambda: cuflash.attention(*arrays, causal=True, **more)

    ways: dict[str, Callable[[], Any]] = {
        "cuflash": attend(q, k, v),
        "cuflash, out=": attend(q, k, v, out=out),
        "cuflash, out= and return_lse": attend(q, k, v, out=out, return_lse=True),
        "cuflash, kv_lens on the device": attend(q, k, v, kv_lens=lens),
        "cuflash, torch tensors": attend(*tensors),
        "CuPy, an empty kernel": lambda: nothing((1,), (128,), ()),
        "CuPy, an empty array": lambda: cupy.empty(SHAPE, cupy.float16),
        "torch SDPA, FLASH_ATTENTION": lambda: attend_by_torch(*tensors, is_causal=True),
    }
    print(f"{cuflash.info()}\ntorch {torch.__version__}\n")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        found = host_us(ways)
    for name, microseconds in found.items():
        print(f"{microseconds:7.1f} us  {name}")
    if options.json:
        record = {"info": cuflash.info().to_dict(), "torch": torch.__version__, "host_us": found}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
