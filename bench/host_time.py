"""Times what the host needs to queue one warm call, beside torch and a bare CuPy launch.

    python bench/host_time.py [--json FILE]

A problem so small that the device keeps up: (1, 2, 64, 64) float16, causal. Medians over rounds of
CALLS calls, the device idle before each round.
"""

from __future__ import annotations

import argparse
import json
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
ROUNDS, CALLS = 25, 200


def host_us(call: Callable[[], Any]) -> float:
    """Median host time of a call in microseconds."""
    for _ in range(CALLS):
        call()
    rounds = []
    for _ in range(ROUNDS):
        cupy.cuda.Device().synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        rounds.append((time.perf_counter() - start) / CALLS * 1e6)
    return statistics.median(rounds)


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
    }
    print(f"{cuflash.info()}\ntorch {torch.__version__}\n")
    found = {name: host_us(way) for name, way in ways.items()}
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        attend_by_torch = torch.nn.functional.scaled_dot_product_attention
        found["torch SDPA, FLASH_ATTENTION"] = host_us(
            lambda: attend_by_torch(*tensors, is_causal=True)
        )
    for name, microseconds in found.items():
        print(f"{microseconds:7.1f} us  {name}")
    if options.json:
        record = {"info": cuflash.info().to_dict(), "torch": torch.__version__, "host_us": found}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
