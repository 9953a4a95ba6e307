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
from .reference_rows import Rows, times_seen, used_lengths
from .spec import AttentionSpec

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
            q_len, kv_len = used_lengths(spec, operands, b)
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


class _Block(Rows):
    """Running softmax of a block of rows."""

    def __init__(self, *where: Any) -> None:
        super().__init__(*where)
        self.top = np.full((*self.stacked, 1), -np.inf, self.dtype)
        self.total = np.zeros((*self.stacked, 1), self.dtype)
        self.sums = np.zeros((*self.stacked, self.spec.head_dim_v), self.dtype)

    def run(self, tile_keys: int) -> None:
        begin, end = self.key_range()
        for j in range(begin, end, tile_keys):
            self.add_keys(j, min(j + tile_keys, end))
        self.store()

    def add_keys(self, begin: int, end: int) -> None:
        """One step of the online softmax, over the keys [begin, end)."""
        scores = self.capped_scores(self.keys_of(self.operands.k, begin, end))
        self.add_bias(scores, begin, end)
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
        self.sums += times_seen(weights, self.keys_of(self.operands.v, begin, end), visible)

    def store(self) -> None:
        operands, where = self.operands, (self.b, self.q_heads, slice(self.first, self.last))
        rows = np.divide(self.sums, self.total, out=self.sums, where=self.total != 0)
        operands.out[where] = self.heads_apart(rows)
        if operands.lse is not None:
            shift = np.where(np.isneginf(self.top), 0, self.top)
            operands.lse[where] = self.heads_apart(shift + np.log(self.total))[..., 0]
