"""FlashAttention's tiled online softmax on NumPy arrays, with BLAS for the products.

Method: Milakov and Gimelshein 2018 (online normaliser); Dao et al. 2022, algorithm 1; Dao 2023,
section 3.1 (query rows outside, one division at the end). Sums run in float32, in float64 for
float64 inputs. Extra memory is one tile of scores and the rows' running results, whatever the
lengths.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .operands import Operands
from .plan import Tiling
from .spec import AttentionSpec

Array = np.ndarray[Any, Any]

# A tile of scores stays in the second-level cache; more rows save conversions of 16-bit keys,
# measured best on two AVX-512 cores.
_TILE_SCORES = 1 << 17
_TILE_KEYS = 512


def choose_tiling(spec: AttentionSpec) -> Tiling:
    """Query rows x keys x kv heads of a tile. Heads of a group share their keys, so their rows are
    stacked.
    """
    group = max(spec.group, 1)
    keys = max(1, min(spec.kv_len, _TILE_KEYS))
    q_rows = max(1, min(spec.q_len, _TILE_SCORES // (keys * group)))
    if q_rows * group * keys < _TILE_SCORES:  # few rows, as when decoding: wider tiles instead
        keys = max(1, min(spec.kv_len, _TILE_SCORES // (q_rows * group)))
    heads = max(1, min(spec.kv_heads, _TILE_SCORES // (q_rows * group * keys)))
    rows = heads * group * q_rows
    size = 8 if spec.dtype == "float64" else 4
    converted = heads * keys * (spec.head_dim + spec.head_dim_v)
    workspace = size * (rows * (keys + spec.head_dim + 2 * spec.head_dim_v + 8) + converted)
    return Tiling(
        q_rows, keys, heads, workspace, f"{group} query heads stacked" if group > 1 else ""
    )


def attend(spec: AttentionSpec, tiling: Tiling, operands: Operands) -> None:
    """Fill `operands.out` and `operands.lse`."""
    out, lse = operands.out, operands.lse
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        for b in range(spec.batch):
            q_len = spec.q_len if operands.q_lens is None else int(operands.q_lens[b])
            kv_len = spec.kv_len if operands.kv_lens is None else int(operands.kv_lens[b])
            out[b, :, q_len:] = 0
            if lse is not None:
                lse[b, :, q_len:] = -np.inf
            for head in range(0, spec.kv_heads, tiling.heads):
                kv = slice(head, min(head + tiling.heads, spec.kv_heads))
                for row in range(0, q_len, tiling.q_rows):
                    block = _Block(
                        spec, operands, b, kv, row, min(row + tiling.q_rows, q_len), q_len, kv_len
                    )
                    block.run(tiling.keys)


class _Block:
    """Running softmax of the rows first..last-1 of the query heads of kv heads `kv`.

    Rows are stacked as (kv heads, group * rows, dim) so that one product serves a whole group.
    """

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

        rows = operands.q[b, self.q_heads, first:last].reshape(*self.stacked, spec.head_dim)
        self.q = rows.astype(self.dtype) * self.dtype(spec.scale)
        self.top = np.full((*self.stacked, 1), -np.inf, self.dtype)
        self.total = np.zeros((*self.stacked, 1), self.dtype)
        self.sums = np.zeros((*self.stacked, spec.head_dim_v), self.dtype)

    def run(self, tile_keys: int) -> None:
        begin, end = self.spec.key_range(self.first, self.last - 1, self.diagonal, self.kv_len)
        for j in range(begin, end, tile_keys):
            self.add_keys(j, min(j + tile_keys, end))
        self.store()

    def add_keys(self, begin: int, end: int) -> None:
        """One step of the online softmax, over the keys [begin, end)."""
        spec, operands = self.spec, self.operands
        scores = self.q @ _for_blas(operands.k[self.b, self.kv, begin:end], self.dtype).swapaxes(
            1, 2
        )
        if spec.softcap is not None:
            scores /= spec.softcap
            np.tanh(scores, out=scores)
            scores *= spec.softcap
        if operands.bias is not None:
            bias = operands.bias[self.b, self.q_heads, self.first : self.last, begin:end]
            scores += bias.astype(self.dtype).reshape(scores.shape)
        visible = self.visible_keys(begin, end)
        if visible is not None:
            np.copyto(scores, -np.inf, where=~visible)

        top = np.maximum(self.top, scores.max(axis=-1, keepdims=True))
        shift = np.where(
            np.isneginf(top), 0, top
        )  # a row that has seen nothing yet keeps weights of 0, not NaN
        scores -= shift
        weights = np.exp(scores, out=scores)
        rescale = np.exp(self.top - shift)
        self.top = top
        self.total *= rescale
        self.total += weights.sum(axis=-1, keepdims=True)
        self.sums *= rescale
        values = _for_blas(operands.v[self.b, self.kv, begin:end], self.dtype)
        if visible is None:
            self.sums += weights @ values
        else:
            self.sums += _times_seen_values(weights, values, visible)

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

    def store(self) -> None:
        spec, operands = self.spec, self.operands
        rows = np.divide(self.sums, self.total, out=self.sums, where=self.total != 0)
        operands.out[self.b, self.q_heads, self.first : self.last] = rows.reshape(
            self.q_heads.stop - self.q_heads.start, self.last - self.first, spec.head_dim_v
        )
        if operands.lse is not None:
            shift = np.where(np.isneginf(self.top), 0, self.top)
            lse = (shift + np.log(self.total)).reshape(-1, self.last - self.first)
            operands.lse[self.b, self.q_heads, self.first : self.last] = lse


def _for_blas(tile: Array, dtype: Any) -> Array:
    """(heads, keys, dim) in `dtype` with strides that BLAS takes; NumPy's own loop over others is
    far slower.
    """
    item = np.dtype(dtype).itemsize
    if tile.dtype == dtype and tile.strides[2] == item and tile.strides[1] >= tile.shape[2] * item:
        return tile
    return np.ascontiguousarray(tile, dtype)


def _times_seen_values(weights: Array, values: Array, visible: Array) -> Array:
    """weights @ values in which a key reaches only the rows that see it, NaN and Inf included (0 *
    NaN is NaN).
    """
    finite = np.isfinite(values)
    if finite.all():
        return weights @ values
    sums = weights @ np.where(finite, values, 0)
    for h, j in np.argwhere(~finite.all(axis=-1)):
        stray = np.where(finite[h, j], 0, values[h, j])
        sums[h] += np.where(visible[h, :, j, None], weights[h, :, j, None] * stray, 0)
    return sums
