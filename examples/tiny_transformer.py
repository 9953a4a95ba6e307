"""A small byte-level transformer with explicit gradients, on NumPy or CuPy arrays.

Each step returns its result and a function that takes a gradient by the result to those by its
inputs, in the manner of `cuflash.attention_vjp`; running these backwards is the whole of
backpropagation. Attention itself is handed in, so that two of them can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any  # a numpy.ndarray or a cupy.ndarray
Parameters = dict[str, Array]
Attention = Callable[[Array, Array, Array], tuple[Array, Callable[[Array], tuple[Array, ...]]]]

BYTES = 256
_EPSILON = 1e-5


@dataclass(frozen=True)
class Config:
    """Sizes of the model. Query heads share key-value heads in groups."""

    layers: int = 3
    width: int = 96
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 24
    hidden: int = 256
    context: int = 128

    def __post_init__(self) -> None:
        """Check what the rest relies on."""
        if self.layers < 1 or self.heads % self.kv_heads:
            raise ValueError(f"expected a layer, and heads in groups: got {self}")


def initial_parameters(config: Config, rng: np.random.Generator, dtype: Any) -> Parameters:
    """Random weights in host memory; what adds to the residual stream starts smaller."""
    c = config

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Array:
        return (rng.standard_normal((rows, columns)) * gain / np.sqrt(rows)).astype(dtype)

    found = {
        "embedding": (0.05 * rng.standard_normal((BYTES, c.width))).astype(dtype),
        "position": (0.05 * rng.standard_normal((c.context, c.width))).astype(dtype),
        "norm": np.ones(c.width, dtype),
        "head": matrix(c.width, BYTES, 0.5),
    }
    small = (2 * c.layers) ** -0.5
    for layer in range(c.layers):
        found |= {
            f"{layer}.attention_norm": np.ones(c.width, dtype),
            f"{layer}.q": matrix(c.width, c.heads * c.head_dim),
            f"{layer}.k": matrix(c.width, c.kv_heads * c.head_dim),
            f"{layer}.v": matrix(c.width, c.kv_heads * c.head_dim),
            f"{layer}.o": matrix(c.heads * c.head_dim, c.width, small),
            f"{layer}.hidden_norm": np.ones(c.width, dtype),
            f"{layer}.up": matrix(c.width, c.hidden),
            f"{layer}.down": matrix(c.hidden, c.width, small),
        }
    return found


def loss_and_gradients(
    parameters: Mapping[str, Array],
    tokens: Array,
    config: Config,
    attention: Attention,
    xp: Any,
) -> tuple[Array, Parameters]:
    """Mean cross-entropy, in nats, of each byte given those before it, and its gradients.

    Parameters
    ----------
    parameters : mapping
        As of `initial_parameters`, in `xp`'s arrays.
    tokens : (batch, seq + 1) integer array
        Rows of text; the first seq bytes go in, the last seq are predicted.
    attention : callable
        Takes q, k and v as (batch, seq, heads, dim) to the causal result and its vjp.
    xp : module
        NumPy or CuPy.
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    length = inputs.shape[1]
    x = parameters["embedding"][inputs] + parameters["position"][:length]
    backward: list[Callable[[Array], tuple[Array, Parameters]]] = []
    for layer in range(config.layers):
        weights = {
            name.partition(".")[2]: array
            for name, array in parameters.items()
            if name.startswith(f"{layer}.")
        }
        for branch in (_attention_branch, _hidden_branch):
            added, vjp = branch(x, weights, config, attention, xp)
            x = x + added
            backward.append(vjp)
    normed, norm_vjp = rms_norm(x, parameters["norm"], xp)
    logits, head_vjp = linear(normed, parameters["head"])
    loss, dlogits = cross_entropy(logits, targets, xp)

    # The gradient of the sum over all bytes: the mean's would be too small for 16 bits.
    dnormed, dhead = head_vjp(dlogits)
    dx, dnorm = norm_vjp(dnormed)
    gradients = {"head": dhead, "norm": dnorm}
    for at in reversed(range(len(backward))):
        dbranch, dweights = backward[at](dx)
        dx = dx + dbranch
        gradients |= {f"{at // 2}.{name}": gradient for name, gradient in dweights.items()}
    gradients["position"] = xp.zeros_like(parameters["position"])
    gradients["position"][:length] = dx.sum(axis=0)
    rows = one_hot(inputs.reshape(-1), dx.dtype, xp)
    gradients["embedding"] = rows.T @ dx.reshape(-1, dx.shape[-1])
    return loss, {name: gradient / targets.size for name, gradient in gradients.items()}


def _attention_branch(
    x: Array, weights: Mapping[str, Array], config: Config, attention: Attention, xp: Any
) -> tuple[Array, Callable[[Array], tuple[Array, Parameters]]]:
    """What attention adds to the residual stream."""
    c = config
    normed, norm_vjp = rms_norm(x, weights["attention_norm"], xp)
    projected = {name: linear(normed, weights[name]) for name in "qkv"}
    heads = {"q": c.heads, "k": c.kv_heads, "v": c.kv_heads}
    split = {
        name: rows.reshape(*x.shape[:2], heads[name], c.head_dim)
        for name, (rows, _) in projected.items()
    }
    out, attention_vjp = attention(split["q"], split["k"], split["v"])
    added, out_vjp = linear(out.reshape(*x.shape[:2], -1), weights["o"])

    def vjp(dadded: Array) -> tuple[Array, Parameters]:
        dout, do = out_vjp(dadded)
        found = {"o": do}
        dnormed = xp.zeros_like(normed)
        for name, gradient in zip("qkv", attention_vjp(dout.reshape(out.shape)), strict=True):
            dpart, found[name] = projected[name][1](gradient.reshape(projected[name][0].shape))
            dnormed += dpart
        dx, found["attention_norm"] = norm_vjp(dnormed)
        return dx, found

    return added, vjp


def _hidden_branch(
    x: Array, weights: Mapping[str, Array], config: Config, attention: Attention, xp: Any
) -> tuple[Array, Callable[[Array], tuple[Array, Parameters]]]:
    """What the two-layer network with squared ReLU adds."""
    normed, norm_vjp = rms_norm(x, weights["hidden_norm"], xp)
    up, up_vjp = linear(normed, weights["up"])
    active = xp.maximum(up, 0)
    added, down_vjp = linear(active * active, weights["down"])

    def vjp(dadded: Array) -> tuple[Array, Parameters]:
        dsquared, ddown = down_vjp(dadded)
        dnormed, dup = up_vjp(2 * active * dsquared)
        dx, dnorm = norm_vjp(dnormed)
        return dx, {"down": ddown, "up": dup, "hidden_norm": dnorm}

    return added, vjp


# --- steps ----------------------------------------------------------------------------------------


def linear(x: Array, weight: Array) -> tuple[Array, Callable[[Array], tuple[Array, Array]]]:
    """``x @ weight``."""

    def vjp(dout: Array) -> tuple[Array, Array]:
        rows, drows = (array.reshape(-1, array.shape[-1]) for array in (x, dout))
        return dout @ weight.T, rows.T @ drows

    return x @ weight, vjp


def rms_norm(
    x: Array, gain: Array, xp: Any
) -> tuple[Array, Callable[[Array], tuple[Array, Array]]]:
    """Rows of mean square 1, times a gain for each channel."""
    inverse = 1 / xp.sqrt((x * x).mean(axis=-1, keepdims=True) + _EPSILON)
    unit = x * inverse

    def vjp(dout: Array) -> tuple[Array, Array]:
        dunit = dout * gain
        along = (dunit * unit).mean(axis=-1, keepdims=True)
        dgain = (dout * unit).reshape(-1, gain.size).sum(axis=0)
        return (dunit - unit * along) * inverse, dgain

    return unit * gain, vjp


def cross_entropy(logits: Array, targets: Array, xp: Any) -> tuple[Array, Array]:
    """Mean of -log of each target's probability, and the gradient of their sum by the logits."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    weights = xp.exp(shifted)
    total = weights.sum(axis=-1, keepdims=True)
    hit = one_hot(targets, logits.dtype, xp)
    loss = (xp.log(total[..., 0]) - (shifted * hit).sum(axis=-1)).mean()
    return loss, weights / total - hit


def one_hot(tokens: Array, dtype: Any, xp: Any) -> Array:
    """1 in the column of each byte, 0 elsewhere."""
    return (tokens[..., None] == xp.arange(BYTES)).astype(dtype)


def dense_attention(
    q: Array, k: Array, v: Array, xp: Any
) -> tuple[Array, Callable[[Array], tuple[Array, Array, Array]]]:
    """Causal attention of (batch, seq, heads, dim) the standard way, with the whole matrices."""
    batch, length, heads, dim = q.shape
    group = heads // k.shape[2]

    def by_head(array: Array, repeats: int = 1) -> Array:
        return xp.repeat(array.swapaxes(1, 2), repeats, axis=1)

    queries, keys, values = by_head(q), by_head(k, group), by_head(v, group)
    scale = dim**-0.5
    scores = queries @ keys.swapaxes(-1, -2) * scale
    scores = xp.where(xp.tri(length, dtype=bool), scores, scores.dtype.type(-np.inf))
    weights = xp.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = weights / weights.sum(axis=-1, keepdims=True)

    def of_group(per_head: Array) -> Array:
        summed = per_head.reshape(batch, heads // group, group, length, -1).sum(axis=2)
        return summed.swapaxes(1, 2)

    def vjp(dout: Array) -> tuple[Array, Array, Array]:
        rows = by_head(dout)
        dweights = rows @ values.swapaxes(-1, -2)
        mean = (dweights * weights).sum(axis=-1, keepdims=True)
        dscores = weights * (dweights - mean) * scale
        dq = (dscores @ keys).swapaxes(1, 2)
        dk = of_group(dscores.swapaxes(-1, -2) @ queries)
        return dq, dk, of_group(weights.swapaxes(-1, -2) @ rows)

    return (weights @ values).swapaxes(1, 2), vjp
