"""FlashAttention's backward pass on NumPy arrays, tiled, with BLAS for the products.

Method: Dao et al. 2022, appendix B.4; Dao 2023, section 3.1.2. The weights of a tile are computed
again from the scores and LSE, ``weights = exp(scores - lse)``, so that nothing of the size of the
score matrix is kept. With ``delta = sum(dout * out)`` of a row, the gradient by its scores is
``weights * (dout @ v.T - delta)``. Sums run in float32, in float64 for float64 inputs. Extra memory
is a few tiles of scores, and the sums for dk and dv of the heads at work.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .operands import BackwardOperands
from .plan import Tiling
from .reference_rows import Array, Rows, for_blas, times_seen, used_lengths
from .spec import AttentionSpec

# Measured best on two AVX-512 cores; fewer keys than forward, as two tiles of scores are alive.
_TILE_SCORES = 1 << 17
_TILE_KEYS = 256


def choose_tiling(spec: AttentionSpec) -> Tiling:
    """Query rows x keys x kv heads of a tile. Heads of a group share their keys, so their rows are
    stacked.
    """
    group = max(spec.group, 1)
    keys = max(1, min(spec.kv_len, _TILE_KEYS))
    q_rows = max(1, min(spec.q_len, _TILE_SCORES // (keys * group)))
    if q_rows * group * keys < _TILE_SCORES:  # few rows: wider tiles instead
        keys = max(1, min(spec.kv_len, _TILE_SCORES // (q_rows * group)))
    heads = max(1, min(spec.kv_heads, _TILE_SCORES // (q_rows * group * keys)))
    rows = heads * group * q_rows
    size = 8 if spec.dtype == "float64" else 4
    dims = spec.head_dim + spec.head_dim_v
    slopes = 1 if spec.softcap is not None else 0
    tile = rows * keys * (2 + slopes) + heads * keys * 2 * dims  # keys, values, and what they add
    block = rows * (3 * spec.head_dim + 3 * spec.head_dim_v + 2)
    sums = heads * spec.kv_len * dims
    return Tiling(
        q_rows,
        keys,
        heads,
        size * (tile + block + sums),
        f"{group} query heads stacked" if group > 1 else "",
    )


def differentiate(spec: AttentionSpec, tiling: Tiling, operands: BackwardOperands) -> None:
    """Fill `operands.dq`, `dk` and `dv`."""
    dtype = np.float64 if spec.dtype == "float64" else np.float32
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        for b in range(spec.batch):
            q_len, kv_len = used_lengths(spec, operands, b)
            operands.dq[b, :, q_len:] = 0
            for gradient in (operands.dk, operands.dv):
                gradient[b, :, kv_len:] = 0
            for head in range(0, spec.kv_heads, tiling.heads):
                kv = slice(head, min(head + tiling.heads, spec.kv_heads))
                heads = kv.stop - kv.start
                dk = np.zeros((heads, kv_len, spec.head_dim), dtype)
                dv = np.zeros((heads, kv_len, spec.head_dim_v), dtype)
                for row in range(0, q_len, tiling.q_rows):
                    last = min(row + tiling.q_rows, q_len)
                    block = _Block(dk, dv, spec, operands, b, kv, row, last, q_len, kv_len)
                    block.run(tiling.keys)
                operands.dk[b, kv, :kv_len] = dk
                operands.dv[b, kv, :kv_len] = dv


class _Block(Rows):
    """Gradients that a block of rows takes part in: its own dq, and its share of dk and dv."""

    operands: BackwardOperands

    def __init__(self, dk: Array, dv: Array, *where: Any) -> None:
        super().__init__(*where)
        self.dk, self.dv = dk, dv
        self.dq = np.zeros((*self.stacked, self.spec.head_dim), self.dtype)
        self.dout = for_blas(self.rows_of(self.operands.dout), self.dtype)
        out = self.rows_of(self.operands.out).astype(self.dtype, copy=False)
        self.delta = np.sum(self.dout * out, axis=-1, keepdims=True)
        lse = self.rows_of(self.operands.lse[..., None]).astype(self.dtype, copy=False)
        # exp(-inf - lse) of a row without keys is 0 then, not NaN.
        self.lse = np.where(np.isneginf(lse), np.inf, lse)

    def run(self, tile_keys: int) -> None:
        begin, end = self.key_range()
        for j in range(begin, end, tile_keys):
            self.add_keys(j, min(j + tile_keys, end))
        self.dq *= self.dtype(self.spec.scale)
        rows = slice(self.first, self.last)
        self.operands.dq[self.b, self.q_heads, rows] = self.heads_apart(self.dq)

    def add_keys(self, begin: int, end: int) -> None:
        """The five products of the rows and the keys [begin, end)."""
        keys = self.keys_of(self.operands.k, begin, end)
        values = self.keys_of(self.operands.v, begin, end)
        visible = self.visible_keys(begin, end)

        scores = self.capped_scores(keys)
        slopes = self.slopes(scores)
        self.add_bias(scores, begin, end)
        scores -= self.lse
        weights = np.exp(scores, out=scores)
        by_score: Array = self.dout @ values.swapaxes(1, 2)
        by_score -= self.delta
        by_score *= weights
        if slopes is not None:
            by_score *= slopes
        seen_by = None
        if visible is not None:
            hidden, seen_by = ~visible, visible.swapaxes(1, 2)
            np.copyto(weights, 0, where=hidden)
            np.copyto(by_score, 0, where=hidden)

        self.dq += times_seen(by_score, keys, visible)
        # q holds the scale already.
        self.dk[:, begin:end] += times_seen(by_score.swapaxes(1, 2), self.q, seen_by)
        self.dv[:, begin:end] += times_seen(weights.swapaxes(1, 2), self.dout, seen_by)

    def slopes(self, capped: Array) -> Array | None:
        """Derivative of softcap, ``1 - tanh(score / softcap)**2``; None without one."""
        if self.spec.softcap is None:
            return None
        tanh = capped / self.spec.softcap
        np.square(tanh, out=tanh)
        slopes: Array = np.subtract(1, tanh, out=tanh)
        return slopes
