"""Sampled rows of a result, their exact values in float64, and whether a result is right.

`exact_rows` shares no code with the library that it judges.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .shapes import Problem

Array = np.ndarray[Any, Any]

_PLACES, _ROWS = 4, 16  # pairs of batch entry and head, and rows of each

# Relative L2 errors of random normal inputs are 3e-4, 2.3e-3, 3e-7 and, with 8 bits, up to 0.073.
BOUNDS = {"float16": 2e-3, "bfloat16": 1.2e-2, "float32": 1e-5, "8 bits": 0.12}
_ROW_FACTOR = 5.0  # a single row may be that much worse


@dataclass(frozen=True, slots=True)
class Sample:
    """Rows of one head of one batch entry."""

    entry: int
    head: int
    rows: tuple[int, ...]


def choose(problem: Problem, seed: int) -> list[Sample]:
    """The first and the last row of the first and the last head, and random others."""
    chance = random.Random(seed)
    places = {(0, 0): None, (problem.batch - 1, problem.q_heads - 1): None}
    for _ in range(8 * _PLACES):
        if len(places) == _PLACES:
            break
        places[chance.randrange(problem.batch), chance.randrange(problem.q_heads)] = None
    found = []
    for entry, head in places:
        rows = {0, problem.q_len - 1}
        rows |= {chance.randrange(problem.q_len) for _ in range(_ROWS - 2)}
        found.append(Sample(entry, head, tuple(sorted(rows))))
    return found


def rows_of(xp: Any, array: Any, samples: Sequence[Sample]) -> Array:
    """The sampled rows of a (batch, heads, seq, dim) array, one after another, as float32."""
    parts = [
        array[sample.entry, sample.head].astype(np.float32)[xp.asarray(sample.rows)]
        for sample in samples
    ]
    return _on_host(xp.concatenate(parts))


def exact_rows(
    xp: Any, problem: Problem, q: Any, k: Any, v: Any, samples: Sequence[Sample]
) -> Array:
    """Attention of the sampled rows in float64; causal masks are aligned at the last key."""
    group = problem.q_heads // problem.kv_heads
    parts = []
    for sample in samples:
        rows = xp.asarray(sample.rows)
        queries = _doubles(q[sample.entry, sample.head])[rows]
        keys = _doubles(k[sample.entry, sample.head // group])
        scores = queries @ keys.T * problem.dim**-0.5
        if problem.causal:
            last = rows[:, None] + problem.kv_len - problem.q_len
            scores = xp.where(xp.arange(problem.kv_len)[None, :] <= last, scores, -np.inf)
        weights = xp.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        parts.append(weights @ _doubles(v[sample.entry, sample.head // group]))
    return _on_host(xp.concatenate(parts))


def error_of(found: Array, exact: Array, least: float = 0.0) -> tuple[float, float]:
    """Relative L2 error of all rows, and of the worst one; infinite where an element is not finite.

    Rows below `least` of the usual size are judged as if of that: gradients may have exact rows of
    0, of which rounding leaves something.
    """
    found = found.astype(np.float64)
    if found.shape != exact.shape or not np.isfinite(found).all():
        return np.inf, np.inf
    distances, sizes = (np.linalg.norm(rows, axis=1) for rows in (found - exact, exact))
    whole = np.linalg.norm(distances) / np.linalg.norm(exact)
    usual = np.linalg.norm(sizes) / len(sizes) ** 0.5
    of_rows = distances / np.maximum(sizes, max(least * usual, 1e-30))
    return float(whole), float(of_rows.max())


def is_right(error: float, worst_row: float, kind: str) -> bool:
    """Whether errors are those of a right result of a dtype, or of ``"8 bits"``."""
    return error <= BOUNDS[kind] and worst_row <= _ROW_FACTOR * BOUNDS[kind]


def _doubles(array: Any) -> Any:
    return array.astype(np.float32).astype(np.float64)


def _on_host(array: Any) -> Array:
    host: Array = array if isinstance(array, np.ndarray) else array.get()
    return host
