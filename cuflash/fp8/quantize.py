"""16-bit q, k and v to 8 bit: statistics, an exact transform, scales, rounding.

The steps before rounding leave attention as it is: softmax ignores that k loses its mean
(SageAttention, Zhang et al. 2024, section 4.2), ``q @ k.T`` that q is multiplied and k divided by
a factor per channel (after SmoothQuant, Xiao et al. 2022) and that both are rotated
(FlashAttention-3, Shah et al. 2024, section 3.3); v's mean is added to the result again, since
the weights of a row sum to 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..operands import Operands, adopt_all, bhsd_view
from ..spec import Options
from .formats import decode, encode, largest
from .inputs import checked_spec
from .recipe import TILE_KEYS, Block, Fp8Recipe, recipe_of
from .rotation import rotation_of
from .sample import sampled, spacing
from .scales import divided, largest_sizes, scales_of, spread
from .tensors import Fp8Tensor, Fp8Tensors

Array = np.ndarray[Any, Any]

_LARGEST_BALANCE = 256.0


def quantize_fp8(
    q: Any,
    k: Any,
    v: Any,
    recipe: str | Fp8Recipe = "f8",
    *,
    layout: str = "bhsd",
    kv_lens: Any = None,
    q_lens: Any = None,
) -> Fp8Tensors:
    """Quantise q, k and v for 8-bit attention.

    Parameters
    ----------
    q, k, v : array
        float16, bfloat16 or float32, shaped as in `cuflash.attention`. Statistics of q are over
        all query heads that share a kv head.
    recipe : str or Fp8Recipe
        A preset's name (``"f8"``, ``"i8"``, ``"f8+"``, ``"i8+"``, ``"fa3"``, ``"per_tensor"``), or
        every choice by itself.
    layout : {"bhsd", "bshd"}
        Order of the axes.
    kv_lens, q_lens : (batch,) integers, optional
        Used lengths; what lies beyond has no influence, whatever its bytes, and its codes are 0.

    Returns
    -------
    Fp8Tensors

    Raises
    ------
    ValueError, TypeError
        Naming the argument, what was given and what is expected.
    NotImplementedError
        For GPU arrays, with each reason why the kernel does not take them.

    Notes
    -----
    k's mean and the sizes for balance are those of some rows where there are 4,096 or more
    (`cuflash.fp8.sample`), which attention does not depend on.

    NaN or Inf in q make NaN of each row of the result that shares their scale. In k they make NaN
    of every row of the head where the recipe subtracts its mean and they are among the rows that it
    is of, else of each row that sees a key with the same scale. In v, for the channels that share
    the scale, of every row of the head where the recipe subtracts its mean or adds its mean error,
    or its scales are not along tokens, else of each row that sees a key of their tiles of 128.
    Values should be 0 or between 1e-30 and 1e37 in size: groups of smaller ones become 0.

    Examples
    --------
    >>> import numpy as np
    >>> from cuflash.fp8 import quantize_fp8
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 256, 64)).astype(np.float16)
    >>> quantized = quantize_fp8(q, k, v, "f8")
    >>> quantized.k.data.dtype, quantized.k.scale.shape
    (dtype('uint8'), (1, 2, 8, 1))
    >>> error = quantized.k.dequantize() - k
    >>> bool(np.linalg.norm(error) < 0.03 * np.linalg.norm(k.astype(np.float32)))
    True
    """
    chosen = recipe_of(recipe)
    operands = adopt_all(q, k, v, None, None, None, q_lens, kv_lens, layout)
    options = Options(layout=layout, return_lse=True)  # which may be asked for later
    if not isinstance(operands.q, np.ndarray):
        from . import gpu

        return gpu.quantize(operands, options, chosen)
    checked_spec(operands, options)
    return quantize_operands(operands, chosen)


def quantize_operands(operands: Operands, recipe: Fp8Recipe) -> Fp8Tensors:
    """`quantize_fp8` of arrays that were checked."""
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        q, k, mean_scores = _quantize_scores(operands, recipe)
        v, first_values = _quantize_values(operands, recipe)
    q_lens, kv_lens = (
        None if lens is None else lens.astype(np.int64)
        for lens in (operands.q_lens, operands.kv_lens)
    )
    dtype = operands.q.dtype.name
    return Fp8Tensors(q, k, v, first_values, mean_scores, q_lens, kv_lens, dtype)


def _quantize_scores(
    operands: Operands, recipe: Fp8Recipe
) -> tuple[Fp8Tensor, Fp8Tensor, Array | None]:
    """q and k, and what each row's scores lack without k's mean."""
    layout = operands.layout
    queries = _used(bhsd_view(operands.q, layout), operands.q_lens)
    keys = _used(bhsd_view(operands.k, layout), operands.kv_lens)
    q_shape, head_dim = queries.rows.shape[:3], queries.rows.shape[3]
    kv_heads = keys.rows.shape[1]
    of_queries = queries.sample().per_kv_head(kv_heads)
    queries = queries.per_kv_head(kv_heads)

    mean, mean_scores = None, None
    if recipe.center_k:
        mean = keys.sample().mean()
        keys = keys.minus(mean)
        mean_scores = (queries.rows @ mean.swapaxes(-1, -2)).reshape(q_shape)
    balance, inverse = None, None
    if recipe.balance:
        balance = _balance(of_queries, keys.sample())
        inverse = 1 / balance
    rotation = rotation_of(recipe, head_dim, kv_heads)
    q_rows = queries.masked(rotation.apply(queries.rows, balance)).reshape(*q_shape, rotation.dim)
    k_rows = keys.masked(rotation.apply(keys.rows, inverse))
    q_codes, q_scale = _round(q_rows, recipe.q_block, recipe.qk_dtype)
    k_codes, k_scale = _round(k_rows, recipe.k_block, recipe.qk_dtype)

    def tensor(role: str, codes: Array, scale: Array, mean: Array | None = None) -> Fp8Tensor:
        data = _in_layout(codes, layout, operands.q.ndim)
        return Fp8Tensor(role, data, scale, recipe, head_dim, kv_heads, layout, balance, mean)

    return tensor("q", q_codes, q_scale), tensor("k", k_codes, k_scale, mean), mean_scores


def _quantize_values(operands: Operands, recipe: Fp8Recipe) -> tuple[Fp8Tensor, Array | None]:
    """v, and its first tile in 16 bit where the recipe asks for it."""
    values = _used(bhsd_view(operands.v, operands.layout), operands.kv_lens)
    mean = values.mean() if recipe.center_v else None
    if mean is not None:
        values = values.minus(mean)
    codes, scale = _round(values.rows, recipe.v_block, "e4m3")
    residual = None
    if recipe.residual_mean:
        rounded = decode(codes, "e4m3") * spread(scale, recipe.v_block, codes.shape[2])
        residual = values.with_rows(values.rows - rounded).mean()
    first = None
    if recipe.first_tile_16bit:  # without all that is added to results
        first = values.rows[:, :, :TILE_KEYS] - (0 if residual is None else residual)
        first = (first / np.where(scale == 0, 1, scale)).astype(np.float16)
    _, kv_heads, _, head_dim = codes.shape
    data = _in_layout(codes, operands.layout, operands.v.ndim)
    v = Fp8Tensor(
        "v", data, scale, recipe, head_dim, kv_heads, operands.layout, None, mean, residual
    )
    return v, first


@dataclass(frozen=True, eq=False)
class _Rows:
    """float32 (batch, heads, tokens, channels), 0 past the used lengths.

    `used` broadcasts against `rows`, or is None where all tokens are used; `counts`, used tokens,
    against their sums.
    """

    rows: Array
    used: Array | None
    counts: Array | int

    def with_rows(self, rows: Array) -> _Rows:
        return _Rows(rows, self.used, self.counts)

    def sample(self) -> _Rows:
        """The rows that statistics are of which need not be exact."""
        tokens = self.rows.shape[2]
        lengths = np.broadcast_to(self.counts, (len(self.rows), 1, 1, 1)).ravel()
        if all(spacing(length) == 1 for length in lengths.tolist()):
            return self
        taken = np.zeros((len(lengths), 1, tokens, 1), bool)
        for entry, length in enumerate(lengths.tolist()):
            taken[entry, 0, sampled(length)] = True
        rows = np.where(taken, self.rows, 0)
        return _Rows(rows, taken, taken.sum(axis=2, keepdims=True))

    def per_kv_head(self, kv_heads: int) -> _Rows:
        """Query heads of a group below each other, as if their rows were one head's."""
        batch, heads, tokens, channels = self.rows.shape
        group = heads // kv_heads if kv_heads else 0
        rows = self.rows.reshape(batch, kv_heads, group * tokens, channels)
        used = None if self.used is None else np.tile(self.used, (1, 1, group, 1))
        return _Rows(rows, used, self.counts * group)

    def mean(self) -> Array:
        """float32 means over the used tokens: (batch, heads, 1, channels)."""
        sums = self.rows.sum(axis=-2, keepdims=True, dtype=np.float64)
        means: Array = (sums / np.maximum(self.counts, 1)).astype(np.float32)
        return means

    def mean_square(self) -> Array:
        return self.with_rows(np.square(self.rows)).mean()

    def minus(self, means: Array) -> _Rows:
        return self.with_rows(self.masked(self.rows - means))

    def masked(self, rows: Array) -> Array:
        """Rows of the same tokens with 0 past the used lengths; `rows` may be written to."""
        if self.used is not None:
            np.copyto(rows, 0, where=~self.used)
        return rows


def _used(array: Array, lens: Array | None) -> _Rows:
    rows = np.array(array, np.float32, order="C")
    if lens is None:
        return _Rows(rows, None, rows.shape[2])
    counts = lens.astype(np.int64).reshape(-1, 1, 1, 1)
    used = np.arange(rows.shape[2])[:, None] < counts
    np.copyto(rows, 0, where=~used)
    return _Rows(rows, used, counts)


def _balance(queries: _Rows, keys: _Rows) -> Array:
    """Per kv head and channel, the factor that makes both of one size: sqrt(rms k / rms q)."""
    q_size, k_size = queries.mean_square(), keys.mean_square()
    factor = np.sqrt(np.sqrt(k_size / q_size))
    factor = np.clip(factor, 1 / _LARGEST_BALANCE, _LARGEST_BALANCE)
    usable = np.isfinite(q_size) & np.isfinite(k_size) & (q_size > 0) & (k_size > 0)
    balance: Array = np.where(usable, factor, 1).astype(np.float32)
    return balance


def _round(rows: Array, block: Block, dtype: str) -> tuple[Array, Array]:
    """Codes and scales of rows."""
    scales = scales_of(largest_sizes(rows, block), largest(dtype))
    return encode(divided(rows, scales, block), dtype), scales


def _in_layout(codes: Array, layout: str, rank: int) -> Array:
    """(batch, heads, tokens, channels) with the axes of the caller, in C order."""
    if layout == "bshd" and rank >= 3:
        codes = codes.swapaxes(1, 2)
    return np.ascontiguousarray(codes[(0,) * (4 - rank)])
