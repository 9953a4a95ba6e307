"""16-bit attention with the roundings of GPU kernels, to compare 8 bits with."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

BASELINES = MappingProxyType(
    {
        "fp16": "FP16 tiled: scores and softmax in float32, weights rounded to float16",
        "fp16-standard": "FP16 standard: scores and weights rounded to float16",
    }
)
"""Their names, and what each rounds."""

_TILE = 128


def attention_fp16(name: str, q: Array, k: Array, v: Array, seen: Array | None = None) -> Array:
    """Attention of float16 arrays with the roundings of a 16-bit GPU kernel.

    Products are exact in float32 and summed there. ``"fp16"`` keeps scores in float32, takes tiles
    of 128 keys with a running maximum, and rounds the unnormalised weights of a tile to float16 for
    the product with V, as FlashAttention does; the sum of the weights is that before rounding.
    ``"fp16-standard"`` writes the scaled scores as float16, takes the softmax of these in float32,
    and writes the weights as float16. Both round the result to float16.

    Parameters
    ----------
    name : str
        A key of `BASELINES`.
    q : float16 ndarray, (heads, rows, dim)
    k, v : float16 ndarray, (heads, keys, dim)
    seen : bool ndarray, (rows, keys), optional
        Which keys a row sees; all where left out. A row that sees none gives 0.

    Returns
    -------
    float16 ndarray, (heads, rows, dim)

    Raises
    ------
    ValueError
        For an unknown name.
    """
    if name not in BASELINES:
        raise ValueError(f"baseline: got {name!r}; expected one of {', '.join(BASELINES)}")
    attend = _tiled if name == "fp16" else _standard
    out = np.empty((*q.shape[:2], v.shape[2]), np.float16)
    with np.errstate(invalid="ignore", over="ignore"):
        for head in range(len(q)):
            of_q, of_k, of_v = (x[head].astype(np.float32) for x in (q, k, v))
            scores = of_q @ of_k.T * np.float32(q.shape[2] ** -0.5)
            if seen is not None:
                scores = np.where(seen, scores, np.float32(-np.inf))
            out[head] = attend(scores, of_v)
    return out


def _standard(scores: Array, v: Array) -> Array:
    stored = scores.astype(np.float16).astype(np.float32)
    weights = np.exp(stored - _finite(stored.max(axis=1, keepdims=True)))
    total = weights.sum(axis=1, keepdims=True)
    weights = (weights / np.where(total == 0, 1, total)).astype(np.float16)
    return weights.astype(np.float32) @ v


def _tiled(scores: Array, v: Array) -> Array:
    rows = len(scores)
    top = np.full((rows, 1), -np.inf, np.float32)
    total = np.zeros((rows, 1), np.float32)
    out = np.zeros((rows, v.shape[1]), np.float32)
    for start in range(0, scores.shape[1], _TILE):
        tile = scores[:, start : start + _TILE]
        higher = np.maximum(top, tile.max(axis=1, keepdims=True))
        weights = np.exp(tile - _finite(higher))
        shrink = np.exp(top - _finite(higher))
        total = total * shrink + weights.sum(axis=1, keepdims=True)
        stored = weights.astype(np.float16).astype(np.float32)
        out = out * shrink + stored @ v[start : start + _TILE]
        top = higher
    return out / np.where(total == 0, 1, total)


def _finite(top: Array) -> Array:
    """0 for -inf: the maximum of a row that has seen no key, of which -inf can't be taken."""
    return np.where(np.isneginf(top), np.float32(0), top)
