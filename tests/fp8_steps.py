"""The steps of the kernel once more, for a row at a time, in float64 but for its roundings."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
from comparison import Array

from cuflash.fp8 import Fp8Tensors
from cuflash.fp8.formats import decode


def e4m3(x: Any) -> Any:
    clipped = np.clip(np.asarray(x, np.float32), -448, 448)
    return clipped.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)


def one_row(tensors: Fp8Tensors, h: int, i: int, keys: Array) -> tuple[Array, float]:
    """A row of head h of the first batch entry that sees `keys`, in float64 but for the roundings
    that the kernel makes: output and log-sum-exp.
    """
    recipe, q, k, v = tensors.recipe, tensors.q, tensors.k, tensors.v
    g = h * k.codes.shape[1] // q.codes.shape[1]
    n = k.codes.shape[2]
    pmax = recipe.p_scale
    query = decode(q.codes[0, h, i], q.dtype).astype(np.float64)
    query_scale = scale_of(q.scale, q.block, h, i)
    factor = query_scale * math.log2(math.e) / math.sqrt(q.head_dim)
    top = reference = -math.inf
    above, watch = 6 if recipe.reference == "lagging" else 0, 0.0
    octaves = 0 if recipe.reference == "running" else 20
    total = 0.0
    sums = np.zeros(v.head_dim)
    shares_scale = v.block in ("tensor", "head", "channel")
    for begin in reversed(range(0, n, 64)):
        seen = [j for j in range(begin, min(begin + 64, n)) if keys[j]]
        if not seen:
            continue
        scores = np.array(
            [
                query
                @ decode(k.codes[0, g, j], k.dtype)
                * factor
                * scale_of(k.scale, k.block, g, j)
                for j in seen
            ]
        )
        new = max(scores.max(), top - octaves)
        if recipe.reference == "lagging" and reference > -math.inf:
            # Weights of the four threads that have a row between them, in the range of e4m3.
            old = 2 ** (scores - reference) * 448 / 2**above
            sums_of = [
                sum(w for w, j in zip(old, seen, strict=True) if j % 8 // 2 == t) for t in range(4)
            ]
            low = sums_of[0] < watch
            share = sum(sums_of) * n / 64 * 8 * pmax / 448
            alike = max(sums_of) < 4 * min(sums_of)
            down = low and max(sums_of) < 1 / 4 and alike and share > total
            watch = 0 if down else sums_of[0] / 16 if low else watch
            new = max(scores.max(), reference - 20) if down or max(sums_of) > 450 else reference
        elif recipe.reference == "lagging":
            watch = 1 / 4
        top = max(top, new)
        weights = 2 ** (scores - new) * pmax / 2**above
        alpha = 0.0 if reference == -math.inf else 2 ** (reference - new)
        total, sums = total * alpha + weights.sum(), sums * alpha
        if begin < 128 and tensors.first_values is not None:
            first = tensors.first_values[0, g, seen].astype(np.float64)
            sums = sums + weights.astype(np.float16).astype(np.float64) @ first
        else:
            values = decode(v.codes[0, g, seen], "e4m3").astype(np.float64)
            if shares_scale:
                sums = sums + e4m3(weights) @ values
            else:
                scales = np.array([scale_of(v.scale, v.block, g, j) for j in seen])
                if v.block == "token":
                    tile = range(begin, min(begin + 64, n))
                    largest = max(scale_of(v.scale, v.block, g, j) for j in tile)
                    sums = sums + largest * (e4m3(weights * scales / largest) @ values)
                else:
                    sums = sums + (e4m3(weights) * scales) @ values
        reference = new
    out = sums / total * (np.broadcast_to(v.scale, (1, 2, 1, v.head_dim))[0, g, 0]
                          if shares_scale else 1)  # fmt: skip
    for mean in (v.mean, v.residual):
        if mean is not None:
            out = out + mean[0, g, 0]
    lse = (reference - math.log2(pmax) + above) * math.log(2) + math.log(total)
    if tensors.mean_scores is not None:
        lse += float(tensors.mean_scores[0, h, i]) / math.sqrt(q.head_dim)
    return out, lse


def scale_of(scales: Array, block: Any, h: int, j: int) -> float:
    if block == "tensor":
        return float(scales[0, 0, 0, 0])
    if block == "head":
        return float(scales[0, h, 0, 0])
    if block == "token":
        return float(scales[0, h, j, 0])
    if block == "columns":
        return float(scales[0, h, j // 128 * 4 + j % 8 // 2, 0])
    return float(scales[0, h, j // block, 0])
