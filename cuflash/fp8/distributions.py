"""Random q, k, v with the outliers that 8-bit attention has to survive.

Every distribution is a frozen object that is called as ``draw(rng, heads, q_len, kv_len, dim)`` and
returns float64 arrays q of shape (heads, q_len, dim), k and v of shape (heads, kv_len, dim).
Scores are meant to be ``q @ k.T / sqrt(dim)``. N(m, s) stands for a normal number of mean m and
*variance* s, as in the published experiment; fields of the objects are standard deviations where
they say so. Numbers are drawn anew for each array, and for every head, unless said otherwise.

Draws happen in the same order whatever the strength of the outliers is, so that two distributions
that differ in strength alone share their other numbers when their generators share a seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

Array = np.ndarray[Any, Any]
Inputs = tuple[Array, Array, Array]

_OUTLIER_CHANNELS = 4
_SINK_KEYS = 4
_SINK_VALUE_STD = 0.02


class Distribution(Protocol):
    """What all distributions have in common."""

    @property
    def name(self) -> str:
        """Short name, as on the command line."""

    def __call__(
        self, rng: np.random.Generator, heads: int, q_len: int, kv_len: int, dim: int
    ) -> Inputs:
        """Draw float64 q (heads, q_len, dim), k and v (heads, kv_len, dim)."""


def _check_size(name: str, value: float) -> None:
    if not 0.0 <= value < math.inf:
        raise ValueError(f"{name}: got {value}; expected a finite number of 0 or more")


def _check_positive(name: str, value: float) -> None:
    if not 0.0 < value < math.inf:
        raise ValueError(f"{name}: got {value}; expected a finite number above 0")


def _check_probability(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name}: got {value}; expected a number from 0 to 1")


@dataclass(frozen=True, slots=True)
class Mixture:
    """Normal numbers among which a few are far larger, in q, k and v.

    x = N(0, 1) + B · N(0, outlier_std²), with B = 1 at `probability`, else 0. The defaults are the
    mixture N(0, 1) + N(0, 100) · Bernoulli(0.001) of FlashAttention-3 (Shah et al. 2024, section
    3.3 and the table of numerical error), there with all elements drawn independently, as here.

    Raises
    ------
    ValueError
        For a negative or infinite `outlier_std` or a `probability` outside 0 to 1.
    """

    outlier_std: float = 10.0
    probability: float = 0.001

    def __post_init__(self) -> None:
        _check_size("outlier_std", self.outlier_std)
        _check_probability("probability", self.probability)

    @property
    def name(self) -> str:
        """`paper`."""
        return "paper"

    def __call__(
        self, rng: np.random.Generator, heads: int, q_len: int, kv_len: int, dim: int
    ) -> Inputs:
        """Draw q, k, v."""

        def draw(length: int) -> Array:
            shape = (heads, length, dim)
            normal, large = rng.standard_normal((2, *shape))
            chosen = rng.random(shape) < self.probability
            drawn: Array = normal + np.where(chosen, self.outlier_std * large, 0.0)
            return drawn

        return draw(q_len), draw(kv_len), draw(kv_len)


@dataclass(frozen=True, slots=True)
class Normal:
    """N(0, 1) in q, k and v."""

    @property
    def name(self) -> str:
        """`normal`."""
        return "normal"

    def __call__(
        self, rng: np.random.Generator, heads: int, q_len: int, kv_len: int, dim: int
    ) -> Inputs:
        """Draw q, k, v."""
        return _normal(rng, heads, q_len, kv_len, dim)


@dataclass(frozen=True, slots=True)
class KeyChannels:
    """N(0, 1), with four large channels of K and the same four channels of Q small.

    In each head four random channels of K are multiplied by ratio^(log f / log 50) with f = 10, 20,
    35, 50, and those of Q divided by the same number, which leaves every score as it was. The
    default gives the factors f themselves; 1 gives plain normal numbers.

    Raises
    ------
    ValueError
        For a `ratio` that is not a finite number above 0, or a `dim` below 4.
    """

    ratio: float = 50.0

    def __post_init__(self) -> None:
        _check_positive("ratio", self.ratio)

    @property
    def name(self) -> str:
        """`chanK`."""
        return "chanK"

    def __call__(
        self, rng: np.random.Generator, heads: int, q_len: int, kv_len: int, dim: int
    ) -> Inputs:
        """Draw q, k, v."""
        q, k, v = _normal(rng, heads, q_len, kv_len, dim)
        factors = _channel_factors(rng, heads, dim, self.ratio, (10.0, 20.0, 35.0, 50.0))
        return q / factors, k * factors, v


@dataclass(frozen=True, slots=True)
class KeyValueChannels:
    """N(0, 1), with four large channels of K and four of V; Q is as it was.

    In each head four random channels of K are multiplied by ratio^(log f / log 30) with f = 10, 10,
    20, 30, and four random channels of V, drawn on their own, likewise. The default gives the
    factors f themselves. The scores' standard deviation becomes sqrt(1 + (Σ f² - 4) / dim): a sharp
    softmax, in which few keys count.

    Raises
    ------
    ValueError
        For a `ratio` that is not a finite number above 0, or a `dim` below 4.
    """

    ratio: float = 30.0

    def __post_init__(self) -> None:
        _check_positive("ratio", self.ratio)

    @property
    def name(self) -> str:
        """`chanQKV`."""
        return "chanQKV"

    def __call__(
        self, rng: np.random.Generator, heads: int, q_len: int, kv_len: int, dim: int
    ) -> Inputs:
        """Draw q, k, v."""
        q, k, v = _normal(rng, heads, q_len, kv_len, dim)
        base = (10.0, 10.0, 20.0, 30.0)
        of_k, of_v = (_channel_factors(rng, heads, dim, self.ratio, base) for _ in range(2))
        return q, k * of_k, v * of_v


@dataclass(frozen=True, slots=True)
class ChannelMeans:
    """N(0, 1) around means that differ from channel to channel.

    x = N(0, 1) + m_c, with one m_c = N(0, s²) for each head and channel c, and s = `q_mean_std`,
    `k_mean_std`, `v_mean_std`. A mean of K adds the same number to all scores of a row, and leaves
    the weights as they were.

    Raises
    ------
    ValueError
        For a negative or infinite standard deviation.
    """

    k_mean_std: float = 8.0
    v_mean_std: float = 2.0
    q_mean_std: float = 0.0

    def __post_init__(self) -> None:
        for field in ("k_mean_std", "v_mean_std", "q_mean_std"):
            _check_size(field, getattr(self, field))

    @property
    def name(self) -> str:
        """`kmean`, or `qkmean` where Q has a mean too."""
        return "qkmean" if self.q_mean_std else "kmean"

    def __call__(
        self, rng: np.random.Generator, heads: int, q_len: int, kv_len: int, dim: int
    ) -> Inputs:
        """Draw q, k, v."""
        q, k, v = _normal(rng, heads, q_len, kv_len, dim)
        of_k, of_v, of_q = rng.standard_normal((3, heads, 1, dim))
        return (
            q + self.q_mean_std * of_q,
            k + self.k_mean_std * of_k,
            v + self.v_mean_std * of_v,
        )


@dataclass(frozen=True, slots=True)
class Tokens:
    """N(0, 1), with whole tokens multiplied by a factor.

    Each row of k and v is multiplied by `factor` at `probability`, the same rows in both. With
    `values_only` k is as it was; else rows of q are multiplied likewise, chosen on their own, for q
    need not have the tokens of k.

    Raises
    ------
    ValueError
        For a `factor` that is not a finite number above 0 or a `probability` outside 0 to 1.
    """

    factor: float = 20.0
    probability: float = 0.002
    values_only: bool = False

    def __post_init__(self) -> None:
        _check_positive("factor", self.factor)
        _check_probability("probability", self.probability)

    @property
    def name(self) -> str:
        """`token`, or `tokenV` for V alone."""
        return "tokenV" if self.values_only else "token"

    def __call__(
        self, rng: np.random.Generator, heads: int, q_len: int, kv_len: int, dim: int
    ) -> Inputs:
        """Draw q, k, v."""
        q, k, v = _normal(rng, heads, q_len, kv_len, dim)
        of_kv, of_q = (
            np.where(rng.random((heads, length, 1)) < self.probability, self.factor, 1.0)
            for length in (kv_len, q_len)
        )
        return (q, k, v * of_kv) if self.values_only else (q * of_q, k * of_kv, v * of_kv)


@dataclass(frozen=True, slots=True)
class StudentT:
    """Student's t with `freedom` degrees of freedom, scaled to variance 1, in q, k and v.

    x = t · sqrt((freedom - 2) / freedom). With 3 degrees the fourth moment is infinite: some
    outliers at every size, without a gap to the rest as in `Mixture`.

    Raises
    ------
    ValueError
        For 2 degrees of freedom or fewer, which have no variance.
    """

    freedom: float = 3.0

    def __post_init__(self) -> None:
        if not 2.0 < self.freedom < math.inf:
            raise ValueError(f"freedom: got {self.freedom}; expected a finite number above 2")

    @property
    def name(self) -> str:
        """`t3`, or what stands for the degrees of freedom."""
        return f"t{self.freedom:g}"

    def __call__(
        self, rng: np.random.Generator, heads: int, q_len: int, kv_len: int, dim: int
    ) -> Inputs:
        """Draw q, k, v."""
        unit = math.sqrt((self.freedom - 2) / self.freedom)
        q, k, v = (
            unit * rng.standard_t(self.freedom, (heads, length, dim))
            for length in (q_len, kv_len, kv_len)
        )
        return q, k, v


@dataclass(frozen=True, slots=True)
class Sink:
    """Attention sinks: the first four keys get large scores, and their values are tiny.

    q = N(0, 1) + m with one m_c = N(0, 1) for each head and channel; k = N(0, 1), and in its first
    four rows N(0, 1) + logit · sqrt(dim) · m / |m|², so that their scores have the mean `logit` and
    a standard deviation near sqrt(2 + logit² / dim); v = N(0, 1), and in those rows 0.02 · N(0, 1).
    Trained models grow such sinks on their first token (Xiao et al. 2023, "Efficient streaming
    language models with attention sinks").

    Raises
    ------
    ValueError
        For a `logit` that is not finite.
    """

    logit: float = 8.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.logit):
            raise ValueError(f"logit: got {self.logit}; expected a finite number")

    @property
    def name(self) -> str:
        """`sink8`, or what stands for the logit."""
        return f"sink{self.logit:g}"

    def __call__(
        self, rng: np.random.Generator, heads: int, q_len: int, kv_len: int, dim: int
    ) -> Inputs:
        """Draw q, k, v."""
        q, k, v = _normal(rng, heads, q_len, kv_len, dim)
        mean = rng.standard_normal((heads, 1, dim))
        square = np.sum(mean**2, axis=-1, keepdims=True)
        k[:, :_SINK_KEYS] += self.logit * math.sqrt(dim) * mean / square
        v[:, :_SINK_KEYS] *= _SINK_VALUE_STD
        return q + mean, k, v


DISTRIBUTIONS: Mapping[str, Distribution] = MappingProxyType(
    {
        distribution.name: distribution
        for distribution in (
            Mixture(),
            Normal(),
            KeyChannels(),
            KeyValueChannels(),
            ChannelMeans(),
            ChannelMeans(q_mean_std=2.0),
            Tokens(),
            Tokens(values_only=True),
            StudentT(),
            Sink(8.0),
            Sink(12.0),
        )
    }
)
"""The named ones with their usual strength; `named` also knows sinks of other logits."""


def named(name: str) -> Distribution:
    """The distribution of a name: a key of `DISTRIBUTIONS`, or ``sinkX`` with X a number.

    Raises
    ------
    ValueError
        For an unknown name.
    """
    if name in DISTRIBUTIONS:
        return DISTRIBUTIONS[name]
    prefix, number = name[:4], name[4:]
    if prefix == "sink":
        try:
            return Sink(float(number))
        except ValueError:
            pass
    raise ValueError(
        f"distribution: got {name!r}; expected one of {', '.join(DISTRIBUTIONS)}, "
        "or sinkX with X a number"
    )


def _normal(
    rng: np.random.Generator, heads: int, q_len: int, kv_len: int, dim: int
) -> tuple[Array, Array, Array]:
    q, k, v = (rng.standard_normal((heads, length, dim)) for length in (q_len, kv_len, kv_len))
    return q, k, v


def _channel_factors(
    rng: np.random.Generator, heads: int, dim: int, ratio: float, base: tuple[float, ...]
) -> Array:
    """Factors of shape (heads, 1, dim): 1 but for a few random channels of each head, where they
    are `base`, each to the power that turns the largest into `ratio`.
    """
    if dim < _OUTLIER_CHANNELS:
        raise ValueError(f"dim: got {dim}; four outlier channels need at least 4")
    factors = np.ones((heads, 1, dim))
    power = math.log(ratio) / math.log(base[-1])
    for head in factors:
        head[0, rng.permutation(dim)[: len(base)]] = np.power(base, power)
    return factors
