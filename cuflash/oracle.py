"""The plain answer in float64: all scores at once. Slow, short, and what tests trust.

It shares no code with the families, and takes the options as `cuflash.attention` does. Following
``softmax(q @ k.T * scale) @ v`` with the masking rules of the numerical contract.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    problem = _Problem(
        q, k, v, scale, causal, causal_align, window, softcap, mask, bias, q_lens, kv_lens, layout
    )
    out = np.zeros((*problem.queries.shape[:3], problem.values.shape[3]))
    lse = np.full(problem.queries.shape[:3], -np.inf)
    for b, h, used in problem.heads():
        scores, seen, _ = problem.scores(b, h, used)
        values = problem.values_of(b, h, used)
        out[b, h, : used[0]], lse[b, h, : used[0]] = _softmax_times(scores, seen, values)
    return problem.as_given(out, q), lse[(0,) * (4 - q.ndim)]


def gradients(
    dout: Array,
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
) -> tuple[Array, Array, Array]:
    """Gradients of ``sum(attention(q, k, v, ...) * dout)`` in float64.

    The chain rule, one product after the other, with the whole matrix of weights. Neither the
    result nor the log-sum-exp of another computation enters.

    Parameters
    ----------
    dout : ndarray
        Shaped like the result.
    q, k, v, scale, causal, causal_align, window, softcap, mask, bias, q_lens, kv_lens, layout
        As in `attention`.

    Returns
    -------
    dq, dk, dv : float64 ndarrays, shaped like q, k and v
    """
    problem = _Problem(
        q, k, v, scale, causal, causal_align, window, softcap, mask, bias, q_lens, kv_lens, layout
    )
    douts = _four_axes(dout, layout)
    dq, dk, dv = (
        np.zeros(array.shape) for array in (problem.queries, problem.keys, problem.values)
    )
    for b, h, (used_q, used_k) in problem.heads():
        scores, seen, slopes = problem.scores(b, h, (used_q, used_k))
        weights = _softmax(scores, seen)
        row_grads = _float64(douts[b, h, :used_q])
        with np.errstate(invalid="ignore", over="ignore"):
            by_weight = row_grads @ problem.values_of(b, h, (used_q, used_k)).T
            by_weight = np.where(seen, by_weight, 0.0)
            mean = (weights * by_weight).sum(axis=-1, keepdims=True)
            by_score = np.where(seen, weights * (by_weight - mean) * slopes, 0.0) * problem.factor
        kv = h // problem.group
        keys = _float64(problem.keys[b, kv, :used_k])
        queries = _float64(problem.queries[b, h, :used_q])
        dq[b, h, :used_q] = _times_seen(by_score, keys, seen)
        dk[b, kv, :used_k] += _times_seen(by_score.T, queries, seen.T)
        dv[b, kv, :used_k] += _times_seen(weights.T, row_grads, seen.T)
    return problem.as_given(dq, q), problem.as_given(dk, k), problem.as_given(dv, v)


class _Problem:
    """Arrays as (batch, heads, seq, dim), and the options."""

    def __init__(
        self,
        q: Array,
        k: Array,
        v: Array,
        scale: float | None,
        causal: bool,
        align: str,
        window: tuple[int | None, int | None] | None,
        softcap: float | None,
        mask: Array | None,
        bias: Array | None,
        q_lens: Any,
        kv_lens: Any,
        layout: str,
    ) -> None:
        self.layout, self.softcap = layout, softcap
        self.queries, self.keys, self.values = (_four_axes(a, layout) for a in (q, k, v))
        _, heads, n_q, dim = self.queries.shape
        kv_heads, n_k = self.keys.shape[1:3]
        self.group = heads // kv_heads if kv_heads else 1
        self.factor = dim**-0.5 if scale is None else float(scale)
        score_shape = (*self.queries.shape[:3], n_k)
        self.mask = None if mask is None else np.broadcast_to(mask, score_shape)
        self.bias = None if bias is None else np.broadcast_to(bias, score_shape)
        self.q_lens = [n_q] * len(self.queries) if q_lens is None else [int(n) for n in q_lens]
        self.kv_lens = [n_k] * len(self.queries) if kv_lens is None else [int(n) for n in kv_lens]
        self._masking = (causal, align, window)

    def heads(self) -> Iterator[tuple[int, int, tuple[int, int]]]:
        """Each batch entry and query head, with the rows and keys that the entry uses."""
        for b, h in np.ndindex(self.queries.shape[:2]):
            yield b, h, (self.q_lens[b], self.kv_lens[b])

    def scores(self, b: int, h: int, used: tuple[int, int]) -> tuple[Array, Array, Array | float]:
        """Scores of a head, which of them are seen, and the derivative of softcap."""
        used_q, used_k = used
        queries = _float64(self.queries[b, h, :used_q])
        scores = queries @ _float64(self.keys[b, h // self.group, :used_k]).T * self.factor
        slopes: Array | float = 1.0
        if self.softcap is not None:
            with np.errstate(over="ignore"):
                slopes = np.cosh(scores / self.softcap) ** -2
            scores = self.softcap * np.tanh(scores / self.softcap)
        if self.bias is not None:
            scores = scores + _float64(self.bias[b, h, :used_q, :used_k])
        seen = _visible(used_q, used_k, *self._masking)
        if self.mask is not None:
            seen = seen & self.mask[b, h, :used_q, :used_k]
        return scores, seen, slopes

    def values_of(self, b: int, h: int, used: tuple[int, int]) -> Array:
        """The values that a query head uses."""
        return _float64(self.values[b, h // self.group, : used[1]])

    def as_given(self, result: Array, like: Array) -> Array:
        """A result with the axes and the layout of an input."""
        result = result[(0,) * (4 - like.ndim)]
        return result.swapaxes(-3, -2) if self.layout == "bshd" and like.ndim >= 3 else result


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
        weights, top, total = _exponentials(scores, seen)
        rows = np.where(total == 0, 0.0, _times_seen(weights, values, seen) / total)
        return rows, (np.where(np.isneginf(top), 0.0, top) + np.log(total))[:, 0]


def _softmax(scores: Array, seen: Array) -> Array:
    """Weights of each row over the keys it sees; zeros where it sees none."""
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        weights, _, total = _exponentials(scores, seen)
        return np.where(seen & (total != 0), weights / total, 0.0)


def _exponentials(scores: Array, seen: Array) -> tuple[Array, Array, Array]:
    """exp(scores - largest of the row) of seen keys and 0 of others, that largest, and the sum."""
    scores = np.where(seen, scores, -np.inf)
    top = np.max(scores, axis=-1, keepdims=True, initial=-np.inf)
    weights = np.where(seen, np.exp(scores - np.where(np.isneginf(top), 0.0, top)), 0.0)
    return weights, top, weights.sum(axis=-1, keepdims=True)


def _times_seen(weights: Array, values: Array, seen: Array) -> Array:
    """weights @ values. What is not finite must not reach a row that does not see it, where 0 * NaN
    would be NaN, so it is added where seen only.
    """
    finite = np.isfinite(values).all(axis=-1)
    with np.errstate(invalid="ignore", over="ignore"):
        sums: Array = weights[:, finite] @ values[finite]
        for j in np.flatnonzero(~finite):
            sums[seen[:, j]] += weights[seen[:, j], j, None] * values[j]
    return sums
