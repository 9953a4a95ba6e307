"""What one attention call computes, as plain hashable data: the key of every plan. No arrays, no
CUDA.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

MAX_HEAD_DIM = 256
SMALLEST, LARGEST = 1.2e-38, 3e38  # numbers that kernels keep, which flush smaller ones to 0

ITEM_SIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


class Options(NamedTuple):
    """The options of `cuflash.attention`, unchecked; see its docstring for their meaning."""

    scale: Any = None
    causal: Any = False
    causal_align: Any = "bottom_right"
    window: Any = None
    softcap: Any = None
    mask: Any = None
    bias: Any = None
    alibi_slopes: Any = None
    sinks: Any = None
    block_mask: Any = None
    q_lens: Any = None
    kv_lens: Any = None
    dropout_p: Any = 0.0
    seed: Any = None
    layout: Any = "bhsd"
    return_lse: Any = False
    out: Any = None
    kernel: Any = "auto"
    deterministic: Any = False


OPTION_NAMES = Options._fields


@dataclass(frozen=True, slots=True)
class Placement:
    """How a (batch, heads, seq, dim) view lies in memory: strides in elements, 16-byte alignment of
    its start.
    """

    strides: tuple[int, int, int, int]
    aligned: bool


@dataclass(frozen=True, slots=True)
class Gradients:
    """How the further arrays of a backward pass lie in memory; LSE by its strides in elements along
    (batch, heads, seq).
    """

    dout: Placement
    lse: tuple[int, int, int]
    dq: Placement
    dk: Placement
    dv: Placement


@dataclass(frozen=True, slots=True)
class ScoreArray:
    """A mask or bias over the scores: its dtype and the axes of (batch, heads, q_len, kv_len) along
    which it varies.
    """

    dtype: str
    varies: tuple[bool, bool, bool, bool]


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One attention problem, or its backward pass where there are `gradients`. Lengths count
    tokens, `scale` multiplies the raw scores.

    A query row i sees key j when ``i + diagonal - left <= j <= i + diagonal + right``, where None
    is no bound, causal masking is ``right = 0`` and the diagonal is ``kv_len - q_len`` of the batch
    entry (its used lengths, where `q_lens`/`kv_lens` are given), or 0 for `top_left`.
    """

    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    head_dim_v: int
    dtype: str
    device: str
    scale: float
    left: int | None
    right: int | None
    top_left: bool
    softcap: float | None
    mask: ScoreArray | None
    bias: ScoreArray | None
    has_q_lens: bool
    has_kv_lens: bool
    return_lse: bool
    deterministic: bool
    q: Placement
    k: Placement
    v: Placement
    out: Placement
    gradients: Gradients | None = None

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.q_heads // self.kv_heads if self.kv_heads else 0

    @property
    def diagonal(self) -> int:
        """Key that row 0 is aligned with, when every batch entry uses its whole length."""
        return 0 if self.top_left else self.kv_len - self.q_len

    @property
    def score_factors(self) -> tuple[float | None, float]:
        """What turns a raw score into units of log2: a factor before everything else (softcap's
        tanh, a maximum), or None where none is needed, and one at the end, which is positive.
        """
        log2_e = math.log2(math.e)
        if self.softcap is not None:
            # Bounds of float32: an infinite or a vanishing factor times a score could be NaN.
            before = min(max(self.scale / self.softcap, -LARGEST), LARGEST)
            return before, max(self.softcap * log2_e, SMALLEST)
        if self.scale * log2_e >= SMALLEST:
            return None, self.scale * log2_e
        # The largest raw score is not the largest scaled one, or float32 loses the factor.
        return self.scale * log2_e, 1.0

    @property
    def item_size(self) -> int:
        """Bytes of one element of q, k, v and out."""
        return ITEM_SIZE[self.dtype]

    @property
    def lse_size(self) -> int:
        """Bytes of one LSE entry: float32, or float64 beside float64 inputs."""
        return 8 if self.dtype == "float64" else 4

    @property
    def is_empty(self) -> bool:
        """Whether there is no output element to compute."""
        return 0 in (self.batch, self.q_heads, self.q_len)

    def key_range(
        self, first_row: int, last_row: int, diagonal: int, kv_len: int
    ) -> tuple[int, int]:
        """Keys [begin, end) that any of the rows first_row..last_row (inclusive) can see by window
        and length.
        """
        begin = 0 if self.left is None else first_row + diagonal - self.left
        end = kv_len if self.right is None else last_row + diagonal + self.right + 1
        begin = max(begin, 0)
        return begin, max(min(end, kv_len), begin)

    def visible_keys(
        self, first_row: int, last_row: int, diagonal: int, begin: int, end: int
    ) -> np.ndarray[Any, Any] | None:
        """Which of the rows first_row..last_row (inclusive) see which of the keys [begin, end) by
        window, as (rows, keys) of bool; None where all do.
        """
        low, high = first_row + diagonal, last_row + diagonal
        cuts_left = self.left is not None and begin < high - self.left
        cuts_right = self.right is not None and end - 1 > low + self.right
        if not (cuts_left or cuts_right):
            return None
        distance = np.arange(begin, end) - np.arange(low, high + 1)[:, None]
        visible = np.ones(distance.shape, bool)
        if self.left is not None:
            visible &= distance >= -self.left
        if self.right is not None:
            visible &= distance <= self.right
        return visible

    def visible_pairs(self) -> int:
        """(query, key) pairs of one head of one batch entry that causal and window leave; masks are
        not counted.
        """
        if self.left is None and self.right is None:
            return self.q_len * self.kv_len
        centre = np.arange(self.q_len, dtype=np.int64) + self.diagonal
        begin = np.zeros_like(centre) if self.left is None else np.maximum(centre - self.left, 0)
        end = np.full_like(centre, self.kv_len) if self.right is None else centre + self.right + 1
        return int(np.maximum(np.minimum(end, self.kv_len) - begin, 0).sum())

    @property
    def flops(self) -> int:
        """Multiplications and additions over the visible pairs: of both products, or of the five of
        a backward pass, which computes the scores again.
        """
        dims = self.head_dim + self.head_dim_v
        if self.gradients is not None:
            dims = 3 * self.head_dim + 2 * self.head_dim_v
        return 2 * self.batch * self.q_heads * self.visible_pairs() * dims
