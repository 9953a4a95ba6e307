"""Times a GPU family beside torch's FlashAttention-2 and cuDNN, and checks both against float64.

    python bench/forward_vs_torch.py [--kernel auto] [--json FILE]

Forward, batch * seq = 16,384 and heads * dim = 2,048, random normal inputs. A time is the median
over ROUNDS of CUDA events around WINDOW_MS of calls, after SETTLE_MS of the same calls unmeasured:
a board at its power limit gives each kernel another clock, and takes its time to settle. Each round
takes the ways in random order. Windows are long enough to hide the host. TFLOP/s count 4 * batch *
heads * seq^2 * dim, half when causal. Errors are relative L2 on the last 64 rows of one head.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import cuflash

TOKENS, HIDDEN = 16384, 2048
LENGTHS = (1024, 2048, 4096, 8192, 16384)
DIMS = (64, 128, 256)
ROUNDS, SETTLE_MS, WINDOW_MS = 7, 45.0, 15.0


def median_ms(ways: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median time of a call of each way."""

    def window(way: Callable[[], Any], calls: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            way()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / calls

    a_call = {}
    for name, way in ways.items():
        way()  # compiles, or loads
        a_call[name] = window(way, 3)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name in random.sample(list(ways), len(ways)):
            window(ways[name], 1 + int(SETTLE_MS / a_call[name]))
            times[name].append(window(ways[name], 1 + int(WINDOW_MS / a_call[name])))
    return {name: statistics.median(found) for name, found in times.items()}


def error_of(out: Any, q: Any, k: Any, v: Any, causal: bool) -> float:
    """Relative L2 error of the last 64 rows of the last head."""
    rows = 64
    scores = q[-1, -1, -rows:].double() @ k[-1, -1].double().T * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(scores.shape[1] - rows + 1)
        scores = scores.masked_fill(hidden, -math.inf)
    exact = scores.softmax(-1) @ v[-1, -1].double()
    return float((out[-1, -1, -rows:].double() - exact).norm() / exact.norm())


def measure(kernel: str, dtype: Any, dim: int, seq: int, causal: bool) -> dict[str, Any]:
    """Times and errors of one cell."""
    shape = (TOKENS // seq, HIDDEN // dim, seq, dim)
    q, k, v = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(3))
    out = torch.empty_like(q)

    def ours() -> Any:
        return cuflash.attention(q, k, v, causal=causal, kernel=kernel, out=out)

    def torch_by(backend: Any) -> Callable[[], Any]:
        def call() -> Any:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

        return call

    ways = {
        "cuflash": ours,
        "fa2": torch_by(SDPBackend.FLASH_ATTENTION),
        "cudnn": torch_by(SDPBackend.CUDNN_ATTENTION),
    }
    errors = {name: error_of(way(), q, k, v, causal) for name, way in ways.items()}
    times = median_ms(ways)
    flops = 4 * shape[0] * shape[1] * seq**2 * dim / (2 if causal else 1)
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "dim": dim,
        "seq": seq,
        "causal": causal,
        "ms": times,
        "tflops": {name: flops / ms / 1e9 for name, ms in times.items()},
        "errors": errors,
    }


def main() -> None:
    """Print a row a cell, and the geometric mean of the ratio to FlashAttention-2."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(f"{cuflash.info()}\ntorch {torch.__version__}\n")
    print("dtype    dim   seq mask    cuflash  FA2  cuDNN   to FA2   errors: cuflash  FA2")
    cells = []
    for dtype in (torch.float16, torch.bfloat16):
        for dim in DIMS:
            for seq in LENGTHS:
                for causal in (False, True):
                    cell = measure(options.kernel, dtype, dim, seq, causal)
                    cells.append(cell)
                    rates, errors = cell["tflops"], cell["errors"]
                    print(
                        f"{cell['dtype']:<8} {dim:>3} {seq:>5} {'causal' if causal else 'full':<6} "
                        f"{rates['cuflash']:>8.0f} {rates['fa2']:>4.0f} {rates['cudnn']:>6.0f} "
                        f"{rates['cuflash'] / rates['fa2']:>8.3f} "
                        f"{errors['cuflash']:>17.1e} {errors['fa2']:>.1e}",
                        flush=True,
                    )
    ratios = [cell["tflops"]["cuflash"] / cell["tflops"]["fa2"] for cell in cells]
    print(
        f"geometric mean to FA2: {statistics.geometric_mean(ratios):.3f}, least {min(ratios):.3f}"
    )
    if options.json:
        record = {"info": cuflash.info().to_dict(), "torch": torch.__version__, "cells": cells}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
