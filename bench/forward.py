"""Times a GPU family beside its peers, and checks all against float64.

    python bench/forward.py [--kernel auto] [--peers fa3,cudnn] [--dtypes ...] [--seqs ...]

Peers are FlashAttention-2 and cuDNN as torch has them, and FlashAttention-3 and 4, whose packages
`flash_attn_interface` and `flash_attn.cute` have to be installed.

Forward, batch * seq = 16,384 and heads * dim = 2,048, random normal inputs. A time is the median
over ROUNDS of CUDA events around WINDOW_MS of calls, after SETTLE_MS of the same calls unmeasured:
a board at its power limit gives each kernel another clock, and takes its time to settle. Each round
takes the ways in random order. Windows are long enough to hide the host. TFLOP/s count 4 * batch *
heads * seq^2 * dim, half when causal. Errors are relative L2 on the last 64 rows of one head.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cupy
import ml_dtypes  # noqa: F401 - names bfloat16
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import cuflash

TOKENS, HIDDEN = 16384, 2048
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
PEERS = ("fa2", "fa3", "fa4", "cudnn")
DTYPES = ("float16", "bfloat16")
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
    rows = min(64, q.shape[-2])
    scores = q[-1, -1, -rows:].double() @ k[-1, -1].double().T * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(scores.shape[1] - rows + 1)
        scores = scores.masked_fill(hidden, -math.inf)
    exact = scores.softmax(-1) @ v[-1, -1].double()
    return float((out[-1, -1, -rows:].double() - exact).norm() / exact.norm())


def measure(
    kernel: str, peers: Sequence[str], dtype: Any, dim: int, seq: int, causal: bool
) -> dict[str, Any]:
    """Times and errors of one cell."""
    shape = (TOKENS // seq, HIDDEN // dim, seq, dim)
    q, k, v = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(3))
    out = torch.empty_like(q)
    # Once, since it takes the host longer than short problems take the device.
    arrays = [
        cupy.from_dlpack(tensor.view(torch.int16)).view(str(dtype).removeprefix("torch."))
        for tensor in (q, k, v, out)
    ]

    def ours() -> Any:
        cuflash.attention(*arrays[:3], causal=causal, kernel=kernel, out=arrays[3])
        return out

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
    rows_first = [array.transpose(1, 2).contiguous() for array in (q, k, v)]  # as these take them
    if "fa3" in peers:
        from flash_attn_interface import flash_attn_func as fa3

        ways["fa3"] = lambda: fa3(*rows_first, causal=causal).transpose(1, 2)
    if "fa4" in peers:
        from flash_attn.cute import flash_attn_func as fa4

        ways["fa4"] = lambda: fa4(*rows_first, causal=causal)[0].transpose(1, 2)
    ways = {name: ways[name] for name in ("cuflash", *peers)}
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


def _names_of(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """A reader of names between commas, each of which has to be known."""

    def read(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"got {name!r}; expected {', '.join(known)}")
        return names

    return read


def _lengths(text: str) -> tuple[int, ...]:
    for word in text.split(","):
        if not word.isdecimal() or int(word) < 1 or TOKENS % int(word):
            raise argparse.ArgumentTypeError(f"got {word!r}; expected divisors of {TOKENS:,}")
    return tuple(map(int, text.split(",")))


def main() -> None:
    """Print a row a cell, and the geometric means of the ratios to each peer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kernel", default="auto")
    parser.add_argument(
        "--peers", type=_names_of(PEERS), default=("fa2", "cudnn"), help=", ".join(PEERS)
    )
    parser.add_argument("--dtypes", type=_names_of(DTYPES), default=DTYPES, help=", ".join(DTYPES))
    parser.add_argument("--seqs", type=_lengths, default=LENGTHS, help=f"divisors of {TOKENS:,}")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ways = ("cuflash", *options.peers)
    print(f"{cuflash.info()}\ntorch {torch.__version__}\n")
    heads = " ".join(f"{way:>7}" for way in ways)
    print(f"TFLOP/s, and relative L2 errors\ndtype    dim   seq mask   {heads}  to best  {heads}")
    cells = []
    for dtype, dim, seq, causal in itertools.product(
        options.dtypes, DIMS, options.seqs, (False, True)
    ):
        cell = measure(options.kernel, options.peers, getattr(torch, dtype), dim, seq, causal)
        cells.append(cell)
        mask = "causal" if causal else "full"
        rates = " ".join(f"{cell['tflops'][way]:>7.0f}" for way in ways)
        errors = " ".join(f"{cell['errors'][way]:>7.1e}" for way in ways)
        to_best = cell["tflops"]["cuflash"] / max(cell["tflops"][peer] for peer in options.peers)
        print(
            f"{dtype:<8} {dim:>3} {seq:>5} {mask:<6} {rates} {to_best:>8.3f}  {errors}",
            flush=True,
        )
    for peer in options.peers:
        ratios = [cell["tflops"]["cuflash"] / cell["tflops"][peer] for cell in cells]
        errors = [cell["errors"]["cuflash"] / cell["errors"][peer] for cell in cells]
        print(
            f"to {peer}: geometric mean {statistics.geometric_mean(ratios):.3f}, least "
            f"{min(ratios):.3f}; errors {statistics.geometric_mean(errors):.3f}"
        )
    if options.json:
        record = {"info": cuflash.info().to_dict(), "torch": torch.__version__, "cells": cells}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
