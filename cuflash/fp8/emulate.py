"""The 8-bit kernel on NumPy arrays: the same tiles, roundings and order of steps, in float32.

Online softmax over tiles of keys, from the last to the first (Dao 2023, section 3.1), with P in
e4m3 (FlashAttention-3, section 3.3; SageAttention2). What a tile's weights are relative to may go
below the running maximum, so that the weights of every tile use the range of e4m3; results so far
then grow by a factor, up to 2**20, instead of shrinking. Memory beside the inputs is that of one
head's keys and values in float32 and of one tile of scores.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..spec import AttentionSpec
from .accumulate import add_products
from .formats import decode, round_weights
from .recipe import TILE_KEYS
from .scales import spread, varies_along_tokens
from .tensors import Fp8Tensors

Array = np.ndarray[Any, Any]

# Keys of a tile, which share a reference, as the GPU kernel takes them.
REFERENCE_KEYS = 64
# How far a tile's reference may lie below the running maximum: what was summed grows by 2**20 at
# most, and stays far from overflow.
_OCTAVES_BELOW = 20.0
# How far a score may be above a lagging reference, in octaves. Relative to the largest weight:
# what a quarter of a tile's weights may sum to, and below what they are subnormal.
_ABOVE, _MOST, _LEAST = 6.0, 450 / 448, 0.25 / 448
BLOCK_ROWS = 1024  # one tile of scores is a quarter of a MiB


def attend(
    spec: AttentionSpec,
    tensors: Fp8Tensors,
    out: Array,
    lse: Array | None,
    mask: Array | None = None,
) -> None:
    """Fill `out` (batch, q_heads, q_len, dim of v) and `lse` (batch, q_heads, q_len); True in
    `mask` (batch, q_heads, q_len, kv_len) attends.
    """
    with np.errstate(invalid="ignore", over="ignore", divide="ignore", under="ignore"):
        for b in range(spec.batch):
            q_len = spec.q_len if tensors.q_lens is None else int(tensors.q_lens[b])
            kv_len = spec.kv_len if tensors.kv_lens is None else int(tensors.kv_lens[b])
            out[b, :, q_len:] = 0
            if lse is not None:
                lse[b, :, q_len:] = -np.inf
            for head in range(spec.kv_heads):
                keys = _Keys(spec, tensors, b, head, kv_len)
                rows = max(1, BLOCK_ROWS // spec.group)
                for first in range(0, q_len, rows):
                    last = min(first + rows, q_len)
                    block = _Block(spec, tensors, keys, mask, first, last, q_len)
                    block.run()
                    block.store(out, lse)


class _Keys:
    """What the rows of all query heads of one kv head share: its keys and values, decoded."""

    def __init__(
        self, spec: AttentionSpec, tensors: Fp8Tensors, b: int, head: int, kv_len: int
    ) -> None:
        k, v = tensors.k, tensors.v
        self.b, self.head, self.length = b, head, kv_len
        self.k = decode(k.codes[b, head, :kv_len], k.dtype)
        self.v = decode(v.codes[b, head, :kv_len], v.dtype)
        tokens = spec.kv_len
        self.k_scale = _of_head(spread(k.scale, k.block, tokens), b, head, tokens)[:kv_len, 0]
        v_scale = _of_head(spread(v.scale, v.block, tokens), b, head, tokens)[:kv_len]
        # Scales that tokens share are left to the end.
        self.varies = varies_along_tokens(v.block)
        self.v_scale = v_scale[:, 0]
        self.end_scale = np.float32(1) if self.varies or not kv_len else v_scale[0]
        # Keys that are summed before a scale is applied; tokens with scales of their own have
        # these folded into their weights.
        block = v.block
        self.piece = min(block, TILE_KEYS) if isinstance(block, int) else TILE_KEYS
        self.folds = block == "token"
        first = tensors.first_values
        self.first = None if first is None else first[b, head, :kv_len].astype(np.float32)
        self.added = np.zeros((), np.float32)
        for mean in (v.mean, v.residual):
            if mean is not None:
                self.added = self.added + mean[b, head]


class _Block:
    """Running softmax of the rows first..last-1 of the query heads of a kv head, stacked."""

    def __init__(
        self,
        spec: AttentionSpec,
        tensors: Fp8Tensors,
        keys: _Keys,
        mask: Array | None,
        first: int,
        last: int,
        q_len: int,
    ) -> None:
        recipe, q, b = tensors.recipe, tensors.q, keys.b
        self.spec, self.keys, self.recipe = spec, keys, recipe
        self.first, self.last = first, last
        self.diagonal = 0 if spec.top_left else keys.length - q_len
        self.q_heads = slice(keys.head * spec.group, (keys.head + 1) * spec.group)
        self.mask = None if mask is None else mask[b, self.q_heads, first:last]
        self.mean_scores = None
        if tensors.mean_scores is not None:
            self.mean_scores = tensors.mean_scores[b, self.q_heads, first:last].reshape(-1, 1)

        codes = q.codes[b, self.q_heads, first:last]
        scale = np.broadcast_to(spread(q.scale, q.block, spec.q_len), (*q.codes.shape[:3], 1))
        self.q = decode(codes, q.dtype).reshape(-1, codes.shape[-1])
        before, after = spec.score_factors
        self.factor = scale[b, self.q_heads, first:last].reshape(-1, 1) * np.float32(
            after if before is None else before
        )
        self.after = None if before is None or spec.softcap is None else np.float32(after)

        rows = len(self.q)
        # Of the weight of a score at the reference; the largest is p_scale.
        above = _ABOVE if recipe.reference == "lagging" else 0.0
        self.log2_weight = np.float32(math.log2(recipe.p_scale) - above)
        self.octaves = np.float32(0 if recipe.reference == "running" else _OCTAVES_BELOW)
        self.top = np.full((rows, 1), -np.inf, np.float32)
        self.reference = self.top.copy()
        self.least = np.zeros((rows, 1), np.float32)  # sums below it may move a lagging reference
        self.total = np.zeros((rows, 1), np.float32)
        self.sums = np.zeros((rows, spec.head_dim_v), np.float32)

    def run(self) -> None:
        begin, end = self.spec.key_range(self.first, self.last - 1, self.diagonal, self.keys.length)
        if begin < end:
            keys = REFERENCE_KEYS
            for j in reversed(range(begin // keys * keys, end, keys)):
                self.add_tile(j, min(j + keys, self.keys.length))

    def add_tile(self, begin: int, end: int) -> None:
        scores = self.scores(begin, end)
        tile_top = scores.max(axis=-1, keepdims=True)
        # A row that sees none of the tile stays as it is, whichever rows it is computed with.
        unseen = np.isneginf(tile_top)
        if self.recipe.reference == "lagging":
            weights = self.weights(scores)
            moves, floor = self.moves_of(weights, ~unseen), self.reference
        else:
            weights, moves, floor = np.empty_like(scores), ~unseen, self.top
        before = _finite(self.reference)
        moved = np.maximum(tile_top, floor - self.octaves)
        self.reference = np.where(moves, moved, self.reference)
        self.top = np.maximum(self.top, self.reference)
        rows = moves[:, 0] if self.recipe.reference == "lagging" else slice(None)
        weights[rows] = self.weights(scores, rows)
        rescale = np.exp2(before - _finite(self.reference))
        self.total = self.total * rescale + weights.sum(axis=-1, keepdims=True)
        self.sums *= rescale
        if begin < TILE_KEYS and self.keys.first is not None:
            halves = weights.astype(np.float16).astype(np.float32)
            self.sums += halves @ self.keys.first[begin:end]
        else:
            self.add_values(weights, begin, end, unseen)

    def weights(self, scores: Array, rows: Any = slice(None)) -> Array:
        weights: Array = np.exp2(scores[rows] - (_finite(self.reference[rows]) - self.log2_weight))
        return weights

    def moves_of(self, weights: Array, seen: Array) -> Array:
        """Which lagging references move: up where weights may outgrow e4m3, and once down where
        they are subnormal, much alike, and together not small.
        """
        weights = np.pad(weights, ((0, 0), (0, -weights.shape[1] % 8)))
        # A thread of the kernel has two of each eight columns.
        quarters = weights.reshape(len(weights), -1, 4, 2).sum(axis=(1, 3))
        largest, whole = quarters.max(axis=1, keepdims=True), quarters.sum(axis=1, keepdims=True)
        most, least = (np.float32(self.recipe.p_scale * x) for x in (_MOST, _LEAST))
        first = np.isneginf(self.reference)
        low = quarters[:, :1] < self.least
        share = whole * np.float32(self.spec.kv_len * 8 / REFERENCE_KEYS)
        alike = largest < 4 * quarters.min(axis=1, keepdims=True)
        down = low & (largest < least) & alike & (share > self.total)
        self.least[low] = quarters[:, :1][low] / 16
        self.least[down] = 0
        self.least[first & seen] = least
        moves: Array = (first | down | (largest > most)) & seen
        return moves

    def scores(self, begin: int, end: int) -> Array:
        """Scaled and masked scores in units of log2."""
        # Integer products stay below 2**24, where float32 is exact.
        scores: Array = self.q @ self.keys.k[begin:end].T
        scores *= self.factor * self.keys.k_scale[begin:end]
        if self.after is not None:
            np.tanh(scores, out=scores)
            scores *= self.after
        visible = self.spec.visible_keys(self.first, self.last - 1, self.diagonal, begin, end)
        if self.mask is not None:
            mask = self.mask[:, :, begin:end]
            visible = mask if visible is None else mask & visible
        if visible is not None:
            stacked = scores.reshape(self.spec.group, self.last - self.first, end - begin)
            np.copyto(stacked, -np.inf, where=~visible)
        return scores

    def add_values(self, weights: Array, begin: int, end: int, unseen: Array) -> None:
        keys = self.keys
        if not keys.varies:
            self.sums = self.plus_products(weights, keys.v[begin:end], np.float32(1))
            return
        for first in range(begin, end, keys.piece):
            piece = slice(first, min(first + keys.piece, end))
            part, scale = weights[:, first - begin : piece.stop - begin], keys.v_scale[piece]
            if keys.folds:
                largest = scale.max()  # NaN stays NaN
                if largest > 0:
                    part = part * (scale / largest)
                scale = largest
            else:
                scale = scale[0]
            sums = self.plus_products(part, keys.v[piece], scale)
            self.sums = np.where(unseen, self.sums, sums) if np.isnan(scale) else sums

    def plus_products(self, weights: Array, values: Array, scale: Any) -> Array:
        """The sums with ``weights @ values * scale`` added, weights rounded."""
        rounded = round_weights(weights)
        if self.recipe.accumulate == "fp32":
            products = rounded @ values
        elif self.recipe.accumulate == "two_level":
            products = add_products(np.zeros_like(self.sums), rounded, values)
        elif scale == 0:
            return self.sums
        else:
            sums = add_products(self.sums / scale, rounded, values)
            sums *= scale
            return sums
        products *= scale
        products += self.sums
        return products

    def store(self, out: Array, lse: Array | None) -> None:
        spec, keys = self.spec, self.keys
        seen = self.total != 0  # NaN too
        rows = np.divide(self.sums, self.total, out=self.sums, where=seen)
        rows *= keys.end_scale
        rows += keys.added
        np.copyto(rows, 0, where=~seen)
        shape = (spec.group, self.last - self.first)
        out[keys.b, self.q_heads, self.first : self.last] = rows.reshape(*shape, -1)
        if lse is None:
            return
        logs = (_finite(self.reference) - self.log2_weight) * np.float32(math.log(2)) + np.log(
            self.total
        )
        if self.mean_scores is not None:
            logs += np.float32(spec.scale) * self.mean_scores
        np.copyto(logs, -np.inf, where=~seen)
        lse[keys.b, self.q_heads, self.first : self.last] = logs.reshape(shape)


def _finite(reference: Array) -> Array:
    return np.where(np.isneginf(reference), np.float32(0), reference)


def _of_head(scales: Array, b: int, head: int, tokens: int) -> Array:
    """(tokens, channels) scales of one head; the axes that scales share may have length 1."""
    b, head = min(b, scales.shape[0] - 1), min(head, scales.shape[1] - 1)
    return np.broadcast_to(scales[b, head], (tokens, scales.shape[3]))
