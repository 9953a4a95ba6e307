"""Sampled rows of gradients, and their exact values in float64.

`exact_rows` shares no code with the library that it judges.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .inputs import normal
from .samples import Array, Sample, rows_of
from .shapes import Problem

NAMES = ("dq", "dk", "dv")
LEAST = 1 / 16  # for `samples.error_of`
_SEED = 77  # of the gradient by the result
_QUERIES = 1024  # at a time


def random_dout(xp: Any, problem: Problem) -> Any:
    """The gradient by the result, the same in every process of a device."""
    return normal(xp, xp.random.RandomState(_SEED), problem.q_shape, problem.dtype)


def found_rows(
    xp: Any, problem: Problem, gradients: Sequence[Any], samples: Sequence[Sample]
) -> Array:
    """Rows of dq, dk and dv, (3, rows, dim) as float32: of k and v those of the kv head."""
    of_keys = _of_keys(problem, samples)
    chosen = zip(gradients, (samples, of_keys, of_keys), strict=True)
    return np.stack([rows_of(xp, gradient, some) for gradient, some in chosen])


def exact_rows(
    xp: Any, problem: Problem, q: Any, k: Any, v: Any, samples: Sequence[Sample]
) -> Array:
    """The same in float64, of `random_dout`; causal masks are aligned at the last key."""
    dout = random_dout(xp, problem)
    group = problem.q_heads // problem.kv_heads
    parts: list[list[Any]] = [[], [], []]
    for sample, of_keys in zip(samples, _of_keys(problem, samples), strict=True):
        keys, values = (_doubles(array[sample.entry, of_keys.head]) for array in (k, v))
        dk, dv = xp.zeros_like(keys), xp.zeros_like(values)
        for head in range(of_keys.head * group, (of_keys.head + 1) * group):
            dq = _one_head(
                xp, problem, q[sample.entry, head], dout[sample.entry, head], keys, values, dk, dv
            )
            if head == sample.head:
                parts[0].append(dq[xp.asarray(sample.rows)])
        rows = xp.asarray(of_keys.rows)
        parts[1].append(dk[rows])
        parts[2].append(dv[rows])
    exact = xp.stack([xp.concatenate(part) for part in parts])
    on_host: Array = exact if isinstance(exact, np.ndarray) else exact.get()
    return on_host


def _one_head(
    xp: Any, problem: Problem, q: Any, dout: Any, keys: Any, values: Any, dk: Any, dv: Any
) -> Any:
    """dq of a query head, which adds its share to dk and dv."""
    scale, columns = problem.dim**-0.5, xp.arange(problem.kv_len)
    parts = []
    for start in range(0, problem.q_len, _QUERIES):
        queries, given = (_doubles(array[start : start + _QUERIES]) for array in (q, dout))
        scores = queries @ keys.T * scale
        if problem.causal:
            rows = start + xp.arange(len(queries))
            last = rows[:, None] + problem.kv_len - problem.q_len
            scores = xp.where(columns[None, :] <= last, scores, -np.inf)
        weights = xp.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        slopes = given @ values.T
        slopes = weights * (slopes - (weights * slopes).sum(axis=1, keepdims=True)) * scale
        parts.append(slopes @ keys)
        dk += slopes.T @ queries
        dv += weights.T @ given
    return xp.concatenate(parts)


def _of_keys(problem: Problem, samples: Sequence[Sample]) -> list[Sample]:
    group = problem.q_heads // problem.kv_heads
    return [
        Sample(s.entry, s.head // group, tuple(row % problem.kv_len for row in s.rows))
        for s in samples
    ]


def _doubles(array: Any) -> Any:
    return array.astype(np.float32).astype(np.float64)
