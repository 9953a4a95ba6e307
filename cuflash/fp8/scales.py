"""Which tokens and channels share a scale, and what it is."""

from __future__ import annotations

from typing import Any

import numpy as np

from .recipe import TILE_KEYS, Block

Array = np.ndarray[Any, Any]

# Groups whose largest value is smaller become zero: the inverse of their scale would overflow.
_ZERO_BELOW = 1e-30
_COLUMN_GROUPS = 4  # threads of a quad, which hold two neighbouring columns of each 8


def scale_shape(block: Block, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Shape of the scales of a (batch, heads, tokens, channels) array."""
    batch, heads, tokens, channels = shape
    if block == "tensor":
        return 1, 1, 1, 1
    if block == "head":
        return batch, heads, 1, 1
    if block == "channel":
        return batch, heads, 1, channels
    return batch, heads, group_count(block, tokens), 1


def group_count(block: Block, tokens: int) -> int:
    """Groups of tokens along a head, where tokens don't share one scale."""
    if block == "token":
        return tokens
    if block == "columns":
        return -(-tokens // TILE_KEYS) * _COLUMN_GROUPS
    return -(-tokens // int(block))


def group_index(block: Block, tokens: int) -> Array:
    """(tokens,) group of each token, where tokens don't share one scale."""
    index = np.arange(tokens)
    if block == "token":
        return index
    if block == "columns":
        return index // TILE_KEYS * _COLUMN_GROUPS + index % 8 // 2
    return index // int(block)


def varies_along_tokens(block: Block) -> bool:
    """Whether tokens of one head have different scales."""
    return block not in ("tensor", "head", "channel")


def largest_sizes(values: Array, block: Block) -> Array:
    """The largest absolute value of each group, NaN where it holds one; 0 for an empty group."""
    shape = scale_shape(block, values.shape)
    sizes = np.abs(values)
    largest: Array
    if block == "tensor":
        largest = np.max(sizes, initial=0)
    elif block == "head":
        largest = np.max(sizes, axis=(2, 3), initial=0)
    elif block == "channel":
        largest = np.max(sizes, axis=2, initial=0)
    else:
        largest = _largest_along_tokens(np.max(sizes, axis=3, initial=0), block)
    return largest.reshape(shape)


def _largest_along_tokens(sizes: Array, block: Block) -> Array:
    """Of (batch, heads, tokens), the largest of each group."""
    if block == "token":
        return sizes
    step = TILE_KEYS if block == "columns" else int(block)
    batch, heads, tokens = sizes.shape
    steps = -(-tokens // step)
    padded = np.zeros((batch, heads, steps * step), sizes.dtype)
    padded[..., :tokens] = sizes
    largest: Array
    if block == "columns":
        largest = np.max(padded.reshape(batch, heads, steps, step // 8, 4, 2), axis=(3, 5))
    else:
        largest = np.max(padded.reshape(batch, heads, steps, step), axis=3)
    return largest


def scales_of(sizes: Array, largest_code: float) -> Array:
    """float32 scales of groups with such largest values: 0 for zero groups, NaN for NaN or Inf."""
    scales = np.where(sizes < _ZERO_BELOW, 0, sizes / np.float32(largest_code))
    scales[~np.isfinite(sizes)] = np.nan
    return scales.astype(np.float32)


def divided(values: Array, scales: Array, block: Block) -> Array:
    """Values in units of their scales; 0 in zero groups and in groups with NaN or Inf, whose scale
    tells.
    """
    usable = scales > 0  # NaN is not
    inverse = np.where(usable, 1 / np.where(usable, scales, 1), 0).astype(np.float32)
    quotient = values * spread(inverse, block, values.shape[2])
    if not usable.all():  # neither NaN nor -0 is to be left
        np.copyto(quotient, 0, where=~spread(usable, block, values.shape[2]))
    return quotient


def spread(scales: Array, block: Block, tokens: int) -> Array:
    """Scales in a shape that broadcasts against (batch, heads, tokens, channels)."""
    if not varies_along_tokens(block):
        return scales
    return scales[:, :, group_index(block, tokens)]
