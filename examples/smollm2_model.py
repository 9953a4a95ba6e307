"""SmolLM2 as plain array code: a Llama-style decoder over NumPy or CuPy arrays.

Everything but attention is written out here with the array module ``xp`` in float32. Attention is a
function handed to :meth:`SmolLM2.forward`, so that the caller can use, replace, or watch it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any  # numpy.ndarray or cupy.ndarray
Attention = Callable[[Array, Array, Array], Array]
"""``(q, k, v) -> out``, where q and out have the shape ``(heads, new, head_dim)``, and k and v
``(kv_heads, seen, head_dim)``.

The new queries are the last of the positions seen, and none sees a later one.
"""


@dataclass(frozen=True)
class Config:
    """The hyperparameters of the model."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    rope_base: float
    norm_eps: float


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer, float32; every matrix is ``(outputs, inputs)``, contiguous.

    Matrices that read the same input are stacked: one large product streams the weights better than
    several small ones, and a decoding step is nothing but streaming weights.
    """

    attention_norm: Array
    query_key_value: Array
    attention_output: Array
    feed_forward_norm: Array
    gate_up: Array
    down: Array


@dataclass(frozen=True)
class Weights:
    """All weights, float32. ``unembedding`` is the same array as ``embedding`` when tied."""

    embedding: Array
    layers: tuple[LayerWeights, ...]
    output_norm: Array
    unembedding: Array


class KVCache:
    """Room for the keys and values of ``capacity`` positions, and how many are filled.

    One array of shape ``(kv_heads, capacity, head_dim)`` per layer each for keys and values.
    Attention gets the slice ``[:, :length]``: a view, whose head stride stays that of the full
    capacity.
    """

    def __init__(self, config: Config, capacity: int, dtype: Any, xp: Any) -> None:
        shape = (config.kv_heads, capacity, config.head_dim)
        self.keys = [xp.empty(shape, dtype) for _ in range(config.layers)]
        self.values = [xp.empty(shape, dtype) for _ in range(config.layers)]
        self.capacity = capacity
        self.length = 0


class SmolLM2:
    """The model: hyperparameters, weights, and the array module and dtype that it computes with.

    Parameters
    ----------
    config, weights
        As read from the model file; the weights must be arrays of ``xp``.
    xp
        ``numpy`` or ``cupy``.
    attention_dtype
        The dtype of the q, k, v that attention gets, and so of the KV cache.
    """

    def __init__(self, config: Config, weights: Weights, xp: Any, attention_dtype: Any) -> None:
        self.config = config
        self.weights = weights
        self.xp = xp
        self.attention_dtype = attention_dtype

    def new_cache(self, capacity: int) -> KVCache:
        """Return an empty cache for ``capacity`` positions."""
        if capacity > self.config.context:
            raise ValueError(
                f"{capacity} tokens wanted, but the model's context ends at {self.config.context}"
            )
        return KVCache(self.config, capacity, self.attention_dtype, self.xp)

    def forward(self, tokens: Sequence[int], cache: KVCache, attention: Attention) -> Array:
        """Append ``tokens`` to what the cache holds and predict the one after them.

        Parameters
        ----------
        tokens
            The whole prompt, or the one token decoded last.
        cache
            Gains the keys and values of ``tokens``.
        attention
            Called once per layer, first to last.

        Returns
        -------
        Array
            Float32 logits over the vocabulary, ``(vocabulary,)``, for the position after the last
            token. Those of the other positions are not computed: the product with the embedding
            is the largest of all.
        """
        xp, config = self.xp, self.config
        start, end = cache.length, cache.length + len(tokens)
        if end > cache.capacity:
            raise ValueError(f"the cache holds {cache.capacity} positions, not {end}")
        cos, sin = rotation_tables(start, end, config.head_dim, config.rope_base, xp)
        hidden = self.weights.embedding[xp.asarray(tokens)]
        for index, layer in enumerate(self.weights.layers):
            x = rms_norm(hidden, layer.attention_norm, config.norm_eps, xp)
            q, k, v = self._project(x, layer)
            cache.keys[index][:, start:end] = self._narrow(rotate_pairs(k, cos, sin, xp))
            cache.values[index][:, start:end] = self._narrow(v)
            attended = attention(
                self._narrow(rotate_pairs(q, cos, sin, xp)),
                cache.keys[index][:, :end],
                cache.values[index][:, :end],
            )
            # (heads, new, head_dim) -> (new, heads * head_dim)
            joined = attended.astype(np.float32).transpose(1, 0, 2).reshape(len(tokens), -1)
            hidden = hidden + joined @ layer.attention_output.T
            x = rms_norm(hidden, layer.feed_forward_norm, config.norm_eps, xp)
            gate, up = xp.split(x @ layer.gate_up.T, 2, axis=-1)
            hidden = hidden + (silu(gate, xp) * up) @ layer.down.T
        cache.length = end
        last = rms_norm(hidden[-1:], self.weights.output_norm, config.norm_eps, xp)
        return (last @ self.weights.unembedding.T)[0]

    def _project(self, x: Array, layer: LayerWeights) -> tuple[Array, Array, Array]:
        """Return q, k, v as ``(heads, new, head_dim)`` float32 views of one projection of ``x``."""
        heads, kv_heads = self.config.heads, self.config.kv_heads
        projected = x @ layer.query_key_value.T
        by_head = projected.reshape(len(x), heads + 2 * kv_heads, -1).transpose(1, 0, 2)
        return by_head[:heads], by_head[heads : heads + kv_heads], by_head[heads + kv_heads :]

    def _narrow(self, array: Array) -> Array:
        return array.astype(self.attention_dtype, copy=False)


def rms_norm(x: Array, weight: Array, eps: float, xp: Any) -> Array:
    """Scale each row of ``x`` ``(rows, hidden)`` to root mean square 1, and then by ``weight``."""
    mean_square = xp.mean(xp.square(x), axis=-1, keepdims=True)
    return x / xp.sqrt(mean_square + eps) * weight


def silu(x: Array, xp: Any) -> Array:
    """Return ``x * sigmoid(x)``, through tanh, which can't overflow as ``exp(-x)`` can."""
    half = 0.5 * x
    return half * (1 + xp.tanh(half))


def rotation_tables(start: int, end: int, dim: int, base: float, xp: Any) -> tuple[Array, Array]:
    """Return cosine and sine of the rotary angles, float32 ``(end - start, dim // 2)`` each.

    Pair ``i`` at position ``p`` turns by ``p * base ** (-2 i / dim)``. The angles are formed in
    float64: at position 8000 a float32 angle is already off by 5e-4.
    """
    frequencies = base ** (-np.arange(0, dim, 2) / dim)
    angles = np.outer(np.arange(start, end), frequencies)
    return xp.asarray(np.cos(angles), np.float32), xp.asarray(np.sin(angles), np.float32)


def rotate_pairs(x: Array, cos: Array, sin: Array, xp: Any) -> Array:
    """Turn each pair of neighbours ``(x[2i], x[2i + 1])`` by its angle.

    A GGUF file stores the query and key weights of Llama models with their rows reordered for this
    pairing; the checkpoint that it was made from pairs ``x[i]`` with ``x[i + dim / 2]``.

    Parameters
    ----------
    x
        ``(heads, positions, dim)``.
    cos, sin
        ``(positions, dim // 2)``, from :func:`rotation_tables`.
    """
    even, odd = x[..., 0::2], x[..., 1::2]
    rotated = xp.empty_like(x)
    rotated[..., 0::2] = even * cos - odd * sin
    rotated[..., 1::2] = even * sin + odd * cos
    return rotated


def to_numpy(array: Array) -> np.ndarray:
    """Return a NumPy array as it is, a CuPy array copied to the host."""
    return array if isinstance(array, np.ndarray) else array.get()
