"""What both passes of the CPU family do with a block of query rows: their scores and who sees whom.

Rows are stacked as (kv heads, group * rows, dim) so that one product serves a whole group of heads.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .operands import Operands
from .spec import AttentionSpec

Array = np.ndarray[Any, Any]


def used_lengths(spec: AttentionSpec, operands: Operands, b: int) -> tuple[int, int]:
    """Rows and keys that a batch entry uses."""
    q_len = spec.q_len if operands.q_lens is None else int(operands.q_lens[b])
    kv_len = spec.kv_len if operands.kv_lens is None else int(operands.kv_lens[b])
    return q_len, kv_len


class Rows:
    """The rows first..last-1 of the query heads of kv heads `kv`."""

    def __init__(
        self,
        spec: AttentionSpec,
        operands: Operands,
        b: int,
        kv: slice,
        first: int,
        last: int,
        q_len: int,
        kv_len: int,
    ) -> None:
        self.spec, self.operands = spec, operands
        self.b, self.kv, self.kv_len = b, kv, kv_len
        self.first, self.last = first, last
        self.diagonal = 0 if spec.top_left else kv_len - q_len
        self.dtype = np.float64 if spec.dtype == "float64" else np.float32
        self.q_heads = slice(kv.start * spec.group, kv.stop * spec.group)
        self.grouped = (kv.stop - kv.start, spec.group, last - first)
        self.stacked = (kv.stop - kv.start, spec.group * (last - first))
        self.q = self.rows_of(operands.q).astype(self.dtype) * self.dtype(spec.scale)

    def rows_of(self, array: Array) -> Array:
        """These rows of an array like q, stacked."""
        rows: Array = array[self.b, self.q_heads, self.first : self.last]
        return rows.reshape(*self.stacked, array.shape[3])

    def key_range(self) -> tuple[int, int]:
        """Keys [begin, end) that any row can see."""
        return self.spec.key_range(self.first, self.last - 1, self.diagonal, self.kv_len)

    def keys_of(self, array: Array, begin: int, end: int) -> Array:
        """Keys or values of these heads, as BLAS takes them."""
        return for_blas(array[self.b, self.kv, begin:end], self.dtype)

    def capped_scores(self, keys: Array) -> Array:
        """Scaled scores of the rows, after softcap."""
        scores: Array = self.q @ keys.swapaxes(1, 2)
        if self.spec.softcap is not None:
            scores /= self.spec.softcap
            np.tanh(scores, out=scores)
            scores *= self.spec.softcap
        return scores

    def add_bias(self, scores: Array, begin: int, end: int) -> None:
        """Add the bias of the keys [begin, end), where there is one."""
        if self.operands.bias is not None:
            bias = self.operands.bias[self.b, self.q_heads, self.first : self.last, begin:end]
            scores += bias.astype(self.dtype).reshape(scores.shape)

    def visible_keys(self, begin: int, end: int) -> Array | None:
        """Which rows see which of the keys, shaped like the scores; None where all do."""
        visible = self.spec.visible_keys(self.first, self.last - 1, self.diagonal, begin, end)
        if self.operands.mask is not None:
            mask = self.operands.mask[self.b, self.q_heads, self.first : self.last, begin:end]
            mask = mask.reshape(*self.grouped, end - begin)
            visible = mask if visible is None else mask & visible
        if visible is None:
            return None
        return np.broadcast_to(visible, (*self.grouped, end - begin)).reshape(
            *self.stacked, end - begin
        )

    def heads_apart(self, stacked: Array) -> Array:
        """Stacked rows as (query heads, rows, dim)."""
        heads = self.q_heads.stop - self.q_heads.start
        return stacked.reshape(heads, self.last - self.first, stacked.shape[2])


def for_blas(tile: Array, dtype: Any) -> Array:
    """(heads, keys, dim) in `dtype` with strides that BLAS takes; NumPy's own loop over others is
    far slower.
    """
    item = np.dtype(dtype).itemsize
    if tile.dtype == dtype and tile.strides[2] == item and tile.strides[1] >= tile.shape[2] * item:
        return tile
    return np.ascontiguousarray(tile, dtype)


def times_seen(weights: Array, values: Array, visible: Array | None) -> Array:
    """weights @ values, (heads, a, b) @ (heads, b, dim), in which a row of `values` reaches only
    those that `visible` names, NaN and Inf included (0 * NaN is NaN). None: all of them.
    """
    if visible is None:
        return weights @ values
    finite = np.isfinite(values)
    if finite.all():
        return weights @ values
    sums: Array = weights @ np.where(finite, values, 0)
    for h, j in np.argwhere(~finite.all(axis=-1)):
        stray = np.where(finite[h, j], 0, values[h, j])
        sums[h] += np.where(visible[h, :, j, None], weights[h, :, j, None] * stray, 0)
    return sums
