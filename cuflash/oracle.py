"""The plain answer in float64: all scores at once. Slow, short, and what tests trust.

It shares no code with the families, and takes the options as `cuflash.attention` does. Following
``softmax(q @ k.T * scale) @ v`` with the masking rules of the numerical contract.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float | None = None,
    causal: bool = False,
    causal_align: str = "bottom_right",
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    mask: Array | None = None,
    bias: Array | None = None,
    q_lens: Any = None,
    kv_lens: Any = None,
    layout: str = "bhsd",
) -> tuple[Array, Array]:
    """Attention of NumPy arrays in float64.

    Parameters
    ----------
    q, k, v : ndarray
        (seq, dim), (heads, seq, dim) or (batch, heads, seq, dim); with ``layout="bshd"`` seq comes
        before heads.
    scale, causal, causal_align, window, softcap, mask, bias, q_lens, kv_lens
        As in `cuflash.attention`. Not checked.

    Returns
    -------
    out : float64 ndarray, shaped like q with v's last axis
    lse : float64 ndarray, (batch, heads, seq) without the axes that q lacks
    """
    queries, keys, values = (_four_axes(a, layout) for a in (q, k, v))
    batch, heads, n_q, dim = queries.shape
    n_k = keys.shape[2]
    group = heads // keys.shape[1] if keys.shape[1] else 1
    score_shape = (batch, heads, n_q, n_k)
    masks = None if mask is None else np.broadcast_to(mask, score_shape)
    biases = None if bias is None else np.broadcast_to(bias, score_shape)
    factor = dim**-0.5 if scale is None else float(scale)

    out = np.zeros((batch, heads, n_q, values.shape[3]))
    lse = np.full((batch, heads, n_q), -np.inf)
    for b in range(batch):
        used_q = n_q if q_lens is None else int(q_lens[b])
        used_k = n_k if kv_lens is None else int(kv_lens[b])
        visible = _visible(used_q, used_k, causal, causal_align, window)
        for h in range(heads):
            scores = (
                _float64(queries[b, h, :used_q]) @ _float64(keys[b, h // group, :used_k]).T * factor
            )
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            if biases is not None:
                scores = scores + _float64(biases[b, h, :used_q, :used_k])
            seen = visible if masks is None else visible & masks[b, h, :used_q, :used_k]
            rows = _softmax_times(scores, seen, _float64(values[b, h // group, :used_k]))
            out[b, h, :used_q], lse[b, h, :used_q] = rows

    absent = (0,) * (4 - q.ndim)
    out, lse = out[absent], lse[absent]
    return (out.swapaxes(-3, -2) if layout == "bshd" and q.ndim >= 3 else out), lse


def _four_axes(array: Array, layout: str) -> Array:
    if layout == "bshd" and array.ndim >= 3:
        array = array.swapaxes(-3, -2)
    view: Array = array.reshape((1,) * (4 - array.ndim) + array.shape)
    return view


def _float64(array: Array) -> Array:
    double: Array = np.asarray(array, np.float64)
    return double


def _visible(
    n_q: int, n_k: int, causal: bool, align: str, window: tuple[int | None, int | None] | None
) -> Array:
    distance = np.arange(n_k)[None, :] - np.arange(n_q)[:, None]
    if align == "bottom_right":
        distance = distance - (n_k - n_q)
    left, right = (None, None) if window is None else window
    visible = np.ones((n_q, n_k), dtype=bool)
    if left is not None:
        visible &= distance >= -left
    if right is not None:
        visible &= distance <= right
    if causal:
        visible &= distance <= 0
    return visible


def _softmax_times(scores: Array, seen: Array, values: Array) -> tuple[Array, Array]:
    """Rows of softmax(scores over seen keys) @ values, and their log-sum-exp; zeros and -inf where
    none is seen.
    """
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        scores = np.where(seen, scores, -np.inf)
        top = np.max(scores, axis=-1, keepdims=True, initial=-np.inf)
        weights = np.where(seen, np.exp(scores - np.where(np.isneginf(top), 0.0, top)), 0.0)
        total = weights.sum(axis=-1, keepdims=True)
        finite = np.isfinite(values).all(axis=-1)
        sums = weights[:, finite] @ values[finite]
        # A key that a row does not see must not reach it: 0 * NaN is NaN, so such values are added
        # where seen only.
        for j in np.flatnonzero(~finite):
            sums[seen[:, j]] += weights[seen[:, j], j, None] * values[j]
        rows = np.where(total == 0, 0.0, sums / total)
        return rows, (np.where(np.isneginf(top), 0.0, top) + np.log(total))[:, 0]
