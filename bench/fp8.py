"""Times 8-bit attention beside its peers, and what quantising costs.

    python bench/fp8.py [--peers fa3,cudnn] [--dims ...] [--seqs ...] [--json FILE]

Peers take e4m3 with a scale a tensor: FlashAttention-3 (`flash_attn_interface`) and cuDNN by its
frontend (`cudnn`), which have to be installed. The first table has attention to codes alone:
TFLOP/s, 4 * batch * heads * seq^2 * dim, half when causal, and relative L2 errors against float64
attention of the 16-bit arrays. The second has quantising, as a share of the rate at which the
device copies (bytes that have to be read and written: each array twice, for statistics and for
codes, and the codes), and `attention_fp8` from 16-bit arrays as a multiple of the speed of
`attention`.

Random normal inputs, batch * seq = 16,384 and heads * dim = 2,048; times as in bench/forward.py.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy
import torch
from forward import HIDDEN, TOKENS, error_of, median_ms

import cuflash
from cuflash.fp8 import attention_fp8, attention_quantized, quantize_fp8

DIMS = (64, 128, 256)
LENGTHS = (2048, 4096, 8192, 16384)
RECIPES = ("f8", "i8")
E4M3 = torch.float8_e4m3fn


def fa3_of(q: Any, k: Any, v: Any, causal: bool) -> Callable[[], Any]:
    """FlashAttention-3 on (batch, heads, seq, dim) tensors of e4m3 with scales of 1."""
    from flash_attn_interface import flash_attn_func

    rows_first = [tensor.transpose(1, 2).contiguous() for tensor in (q, k, v)]
    ones = torch.ones(q.shape[:2], device="cuda")
    scales = {f"{name}_descale": ones for name in "qkv"}
    return lambda: flash_attn_func(*rows_first, causal=causal, **scales).transpose(1, 2)


def cudnn_of(q: Any, k: Any, v: Any, causal: bool) -> Callable[[], Any]:
    """The same by a graph of cuDNN's frontend, whose output is e4m3 too."""
    import cudnn

    kinds = cudnn.data_type
    graph = cudnn.pygraph(
        io_data_type=kinds.FP8_E4M3,
        intermediate_data_type=kinds.FLOAT,
        compute_data_type=kinds.FLOAT,
    )
    arrays = [
        graph.tensor(dim=list(x.shape), stride=list(x.stride()), data_type=kinds.FP8_E4M3)
        for x in (q, k, v)
    ]
    names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    scalar = {"dim": [1, 1, 1, 1], "stride": [1, 1, 1, 1], "data_type": kinds.FLOAT}
    scales = {name: graph.tensor(**scalar) for name in names}
    made, _, *largest = graph.sdpa_fp8(
        *arrays, *scales.values(), attn_scale=q.shape[-1] ** -0.5, use_causal_mask=causal,
        is_inference=True, name="attention",
    )  # fmt: skip
    out = torch.empty_like(q)
    made.set_output(True).set_dim(list(out.shape)).set_stride(list(out.stride()))
    one = torch.ones(1, 1, 1, 1, device="cuda")
    given = dict(zip(arrays, (q, k, v), strict=True)) | dict.fromkeys(scales.values(), one)
    given[made] = out
    for tensor in largest:
        tensor.set_output(True).set_dim([1, 1, 1, 1]).set_stride([1, 1, 1, 1])
        tensor.set_data_type(kinds.FLOAT)
        given[tensor] = torch.empty_like(one)
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    workspace = torch.empty(graph.get_workspace_size(), device="cuda", dtype=torch.uint8)

    def call() -> Any:
        graph.execute(given, workspace)
        return out

    return call


PEERS = {"fa3": fa3_of, "cudnn": cudnn_of}


def measure(peers: list[str], dim: int, seq: int, causal: bool) -> dict[str, Any]:
    """Times and errors of attention to codes."""
    shape = (TOKENS // seq, HIDDEN // dim, seq, dim)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.float16) for _ in range(3))
    out = torch.empty_like(q)
    arrays = [cupy.from_dlpack(x) for x in (q, k, v, out)]
    codes = [x.to(E4M3) for x in (q, k, v)]

    def ours(recipe: str) -> Callable[[], Any]:
        tensors = quantize_fp8(*arrays[:3], recipe)

        def call() -> Any:
            attention_quantized(tensors, causal=causal, out=arrays[3])
            return out

        return call

    ways = {recipe: ours(recipe) for recipe in RECIPES}
    ways |= {peer: PEERS[peer](*codes, causal) for peer in peers}
    errors = {name: error_of(way(), q, k, v, causal) for name, way in ways.items()}
    times = median_ms(ways)
    flops = 4 * shape[0] * shape[1] * seq**2 * dim / (2 if causal else 1)
    return {
        "dim": dim, "seq": seq, "causal": causal, "ms": times, "errors": errors,
        "tflops": {name: flops / ms / 1e9 for name, ms in times.items()},
    }  # fmt: skip


def measure_whole(dim: int, seq: int, causal: bool) -> dict[str, Any]:
    """Times of quantising, of attention from 16-bit arrays, and of a copy."""
    shape = (TOKENS // seq, HIDDEN // dim, seq, dim)
    q, k, v, out = (
        cupy.random.standard_normal(shape, dtype=cupy.float32).astype(cupy.float16)
        for _ in range(4)
    )
    source = cupy.empty(1 << 30, cupy.uint8)
    target = cupy.empty_like(source)
    ways: dict[str, Callable[[], Any]] = {
        "copy": lambda: cupy.copyto(target, source),
        "float16": lambda: cuflash.attention(q, k, v, causal=causal, out=out),
    }
    for recipe in RECIPES:
        ways[f"quantise {recipe}"] = lambda recipe=recipe: quantize_fp8(q, k, v, recipe)
        ways[recipe] = lambda recipe=recipe: attention_fp8(
            q, k, v, recipe=recipe, causal=causal, out=out
        )
    times = median_ms(ways)
    copied = 2 * source.nbytes / times["copy"]
    moved = 3 * q.size * (2 + 2 + 1)
    return {
        "dim": dim, "seq": seq, "causal": causal, "ms": times,
        "copy_gb_s": copied / 1e6,
        "of_copy": {r: moved / times[f"quantise {r}"] / copied for r in RECIPES},
        "to_float16": {r: times["float16"] / times[r] for r in RECIPES},
    }  # fmt: skip


def main() -> None:
    """Print both tables, and geometric means."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", default="", help=f"of {', '.join(PEERS)}, between commas")
    parser.add_argument("--dims", default=",".join(map(str, DIMS)))
    parser.add_argument("--seqs", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    peers = [name for name in options.peers.split(",") if name]
    if unknown := set(peers) - set(PEERS):
        parser.error(f"--peers: got {', '.join(sorted(unknown))}; expected {', '.join(PEERS)}")
    dims, seqs = (list(map(int, text.split(","))) for text in (options.dims, options.seqs))
    kinds = list(itertools.product(dims, (False, True), seqs))
    print(f"{cuflash.info()}\ntorch {torch.__version__}\n")

    names = [*RECIPES, *peers]
    heads = " ".join(f"{name:>7}" for name in names)
    print(f"TFLOP/s, and relative L2 errors\ndim mask     seq {heads}  to best  {heads}")
    cells = []
    for dim, causal, seq in kinds:
        cell = measure(peers, dim, seq, causal)
        cells.append(cell)
        rates = " ".join(f"{cell['tflops'][name]:>7.0f}" for name in names)
        errors = " ".join(f"{cell['errors'][name]:>7.1e}" for name in names)
        best = max((cell["tflops"][peer] for peer in peers), default=float("nan"))
        mask = "causal" if causal else "full"
        print(
            f"{dim:>3} {mask:<6} {seq:>5} {rates} {cell['tflops']['f8'] / best:>8.3f}  {errors}",
            flush=True,
        )
    for recipe, peer in itertools.product(RECIPES, peers):
        ratios = [cell["tflops"][recipe] / cell["tflops"][peer] for cell in cells]
        mean = statistics.geometric_mean(ratios)
        print(f"{recipe} to {peer}: geometric mean {mean:.3f}, least {min(ratios):.3f}")
    for recipe in RECIPES if peers else ():
        ratios = [
            cell["tflops"][recipe] / max(cell["tflops"][peer] for peer in peers) for cell in cells
        ]
        mean = statistics.geometric_mean(ratios)
        print(f"{recipe} to the best: geometric mean {mean:.3f}, least {min(ratios):.3f}")

    heads = "  ".join(f"{r:>4} of copy  to float16" for r in RECIPES)
    print(f"\nQuantising, and the whole from float16\ndim mask     seq  GB/s  {heads}")
    whole = []
    for dim, causal, seq in kinds:
        cell = measure_whole(dim, seq, causal)
        whole.append(cell)
        figures = "  ".join(
            f"{cell['of_copy'][r]:>12.2f}  {cell['to_float16'][r]:>10.3f}" for r in RECIPES
        )
        mask = "causal" if causal else "full"
        print(f"{dim:>3} {mask:<6} {seq:>5} {cell['copy_gb_s']:>5.0f}  {figures}", flush=True)
    if options.json:
        record = {
            "info": cuflash.info().to_dict(), "torch": torch.__version__,
            "cells": cells, "whole": whole,
        }  # fmt: skip
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
