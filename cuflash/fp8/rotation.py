"""Orthogonal maps over the head dim that leave ``q @ k.T`` as it is and spread outliers.

The Hadamard rotation with random signs follows QuIP's incoherence processing (Chee et al. 2023),
as FlashAttention-3 (Shah et al. 2024, section 3.3) applies it to q and k.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from .recipe import Fp8Recipe

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Rotation:
    """A map of rows of `head_dim` channels to rows of `dim`, at least as many.

    Its arrays have a leading axis of kv heads, of length 1 where all heads share them.

    Attributes
    ----------
    head_dim, dim : int
        Channels before, and after padding.
    signs : (heads, 1, dim) float32, or None
        Of a Hadamard rotation.
    block : int
        Channels that a Hadamard rotation mixes.
    matrix : (heads, head_dim, head_dim) float32, or None
        Of any other rotation.
    """

    head_dim: int
    dim: int
    signs: Array | None = None
    block: int = 1
    matrix: Array | None = None

    def apply(self, rows: Array, factors: Array | None = None) -> Array:
        """float32 rows (..., heads, n, head_dim), times `factors` (..., heads, 1, head_dim) where
        they are given, rotated: (..., heads, n, dim).
        """
        if self.signs is None:
            scaled: Array = rows if factors is None else rows * factors
            return scaled if self.matrix is None else scaled @ self.matrix
        # One factor per channel for all there is to multiply with, as the kernel has it.
        weights = self.signs * self._norm
        if factors is not None:
            weights = np.array(np.broadcast_to(weights, (*factors.shape[:-1], self.dim)))
            weights[..., : self.head_dim] *= factors
        padded = np.zeros((*rows.shape[:-1], self.dim), np.float32)
        padded[..., : self.head_dim] = rows
        padded *= weights
        return self._mix(padded)

    def undo(self, rows: Array) -> Array:
        """The rows before `apply`."""
        if self.matrix is not None:
            product: Array = rows @ self.matrix.swapaxes(-1, -2)
            return product
        if self.signs is None:
            return rows
        mixed = self._mix(rows)
        mixed *= self.signs * self._norm
        return mixed[..., : self.head_dim]

    @property
    def _norm(self) -> np.float32:
        """What makes the Hadamard matrix of a block orthogonal."""
        norm: np.float32 = np.float32(1 / math.sqrt(self.block))
        return norm

    def _mix(self, rows: Array) -> Array:
        mixed: Array = walsh_hadamard(rows.reshape(-1, self.block)).reshape(rows.shape)
        return mixed


@functools.lru_cache(maxsize=16)
def rotation_of(recipe: Fp8Recipe, head_dim: int, heads: int) -> Rotation:
    """The rotation of a recipe for a head dim and a number of kv heads.

    Raises
    ------
    ValueError
        Where a matrix in the recipe is not (head_dim, head_dim).
    """
    rotation = recipe.rotation
    if rotation is None:
        return Rotation(head_dim, head_dim)
    heads = heads if recipe.rotation_per_head else 1
    if isinstance(rotation, np.ndarray):
        if len(rotation) != head_dim:
            raise ValueError(
                f"rotation: got a matrix of shape {rotation.shape}; "
                f"expected ({head_dim}, {head_dim}), the head dim of q and k"
            )
        return Rotation(head_dim, head_dim, matrix=rotation[None])
    if rotation == "orthogonal":
        assert recipe.seed is not None
        return Rotation(head_dim, head_dim, matrix=random_orthogonal(recipe.seed, heads, head_dim))
    block = recipe.rotation_block or 1 << (head_dim - 1).bit_length()
    dim = -(-head_dim // block) * block
    return Rotation(head_dim, dim, random_signs(recipe.seed, heads, dim), block)


def walsh_hadamard(rows: Array) -> Array:
    """Each float32 row times the Sylvester Hadamard matrix of its length, a power of two, in
    ``n log2(n)`` additions.
    """
    count, length = rows.shape
    # Channels outermost, so that every addition runs along many rows.
    mixed = np.array(rows.T, order="C")
    half = 1
    while half < length:
        pairs = mixed.reshape(length // (2 * half), 2, half, count)
        difference = pairs[:, 0] - pairs[:, 1]
        pairs[:, 0] += pairs[:, 1]
        pairs[:, 1] = difference
        half *= 2
    return np.ascontiguousarray(mixed.T)


def random_signs(seed: int | None, heads: int, dim: int) -> Array:
    """(heads, 1, dim) of 1 and -1, the same for a seed everywhere; all 1 without a seed."""
    if seed is None:
        return np.ones((heads, 1, dim), np.float32)
    # The bit generator's raw output is fixed for good, unlike what a Generator makes of it.
    top_bits = np.random.PCG64(seed).random_raw(heads * dim) >> np.uint64(63)
    signs: Array = (1 - 2 * top_bits.astype(np.float32)).reshape(heads, 1, dim)
    signs.flags.writeable = False
    return signs


def random_orthogonal(seed: int, heads: int, dim: int) -> Array:
    """(heads, dim, dim) orthogonal matrices of the Haar distribution, the same for a seed.

    QR of normal matrices, with the signs that make it unique (Mezzadri 2007).
    """
    raw = np.random.PCG64(seed).random_raw(2 * heads * dim * dim)
    # Box and Muller's map, on raw output for the reason given above.
    uniform = ((raw >> np.uint64(11)) + 0.5) * 2.0**-53
    radius, angle = uniform.reshape(2, heads, dim, dim)
    normal = np.sqrt(-2 * np.log(radius)) * np.cos(2 * np.pi * angle)
    orthogonal, triangular = np.linalg.qr(normal)
    signs = np.sign(np.diagonal(triangular, axis1=-2, axis2=-1))
    rotation: Array = (orthogonal * signs[:, None, :]).astype(np.float32)
    rotation.flags.writeable = False
    return rotation
