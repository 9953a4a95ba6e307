"""The input distributions of the 8-bit experiment: their definitions, moments and errors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from cuflash.fp8.distributions import (
    DISTRIBUTIONS,
    ChannelMeans,
    KeyChannels,
    KeyValueChannels,
    Mixture,
    Normal,
    Sink,
    StudentT,
    Tokens,
    named,
)

Array = np.ndarray[Any, Any]
SHAPE = (2, 300, 400, 32)  # heads, q_len, kv_len, dim


def draw(distribution: Any, seed: int = 0, shape: tuple[int, ...] = SHAPE) -> list[Array]:
    return list(distribution(np.random.default_rng(seed), *shape))


def channel_rms(x: Array) -> Array:
    return np.sqrt(np.mean(x**2, axis=1))


@pytest.mark.parametrize("name", [*DISTRIBUTIONS, "sink3.5"])
def test_shapes_types_and_seeds(name: str) -> None:
    q, k, v = draw(named(name))
    assert [x.shape for x in (q, k, v)] == [(2, 300, 32), (2, 400, 32), (2, 400, 32)]
    assert all(x.dtype == np.float64 and np.isfinite(x).all() for x in (q, k, v))
    again = draw(named(name))
    other = draw(named(name), seed=1)
    for x, same, different in zip((q, k, v), again, other, strict=True):
        np.testing.assert_array_equal(x, same)
        assert not np.array_equal(x, different)
    assert named(name).name == name


def test_the_names() -> None:
    assert list(DISTRIBUTIONS) == [
        "paper", "normal", "chanK", "chanQKV", "kmean", "qkmean", "token", "tokenV", "t3",
        "sink8", "sink12",
    ]  # fmt: skip
    assert named("sink-2.5") == Sink(-2.5)


@pytest.mark.parametrize("which", range(3), ids="qkv")
def test_normal(which: int) -> None:
    x = draw(Normal(), shape=(4, 500, 500, 64))[which]
    assert abs(x.mean()) < 0.01
    assert x.std() == pytest.approx(1, abs=0.01)
    assert stats.kurtosis(x.ravel(), fisher=False) == pytest.approx(3, abs=0.1)


@pytest.mark.parametrize("which", range(3), ids="qkv")
def test_paper_is_the_published_mixture(which: int) -> None:
    x = draw(Mixture(), shape=(8, 500, 500, 128))[which]  # 512,000 numbers, 512 outliers
    assert x.var() == pytest.approx(1 + 0.001 * 100, abs=0.02)
    # Beyond 5 there are next to none but outliers, of variance 1 + 100.
    expected = 0.001 * 2 * stats.norm.sf(5 / math.sqrt(101))
    assert np.mean(np.abs(x) > 5) == pytest.approx(expected, rel=0.2)


def test_outliers_alone_depend_on_their_strength() -> None:
    none, usual, large = (draw(Mixture(outlier_std=std)) for std in (0.0, 10.0, 30.0))
    for x, y, z in zip(none, usual, large, strict=True):
        struck = x != y
        assert np.mean(struck) == pytest.approx(0.001, rel=0.7)
        np.testing.assert_allclose(z - x, 3 * (y - x), atol=1e-12)
        assert x.std() == pytest.approx(1, abs=0.02)
    rare, common = (draw(Mixture(probability=p)) for p in (0.001, 0.1))
    for x, y, z in zip(none, rare, common, strict=True):
        assert np.all((x == y) | (y == z))  # an outlier stays one when more join it
        assert np.mean(x != z) == pytest.approx(0.1, rel=0.1)


def test_large_key_channels_leave_scores_as_they_were() -> None:
    plain, large = draw(Normal()), draw(KeyChannels())
    np.testing.assert_allclose(
        large[0] @ large[1].swapaxes(1, 2), plain[0] @ plain[1].swapaxes(1, 2), atol=1e-9
    )
    np.testing.assert_array_equal(large[2], plain[2])
    factors = channel_rms(large[1]) / channel_rms(plain[1])
    np.testing.assert_allclose(np.sort(factors)[:, -4:], [[10, 20, 35, 50]] * 2)
    np.testing.assert_allclose(np.sort(factors)[:, :-4], 1)
    np.testing.assert_allclose(channel_rms(large[0]) / channel_rms(plain[0]), 1 / factors)
    assert not np.allclose(factors[0], factors[1])  # each head has its own channels


def test_the_ratio_of_key_channels() -> None:
    plain, none, some = draw(Normal()), draw(KeyChannels(1.0)), draw(KeyChannels(7.0))
    np.testing.assert_array_equal(none[1], plain[1])
    factors = np.sort(channel_rms(some[1]) / channel_rms(plain[1]))
    assert factors[0, -1] == pytest.approx(7)
    assert np.all((factors[0, -4:-1] > 1) & (factors[0, -4:-1] < 7))


def test_key_and_value_channels() -> None:
    plain, large = draw(Normal()), draw(KeyValueChannels())
    np.testing.assert_array_equal(large[0], plain[0])
    of_k, of_v = (channel_rms(large[i]) / channel_rms(plain[i]) for i in (1, 2))
    for factors in (of_k, of_v):
        np.testing.assert_allclose(np.sort(factors)[:, -4:], [[10, 10, 20, 30]] * 2)
        np.testing.assert_allclose(np.sort(factors)[:, :-4], 1)
    assert not np.allclose(of_k, of_v)
    wide = draw(KeyValueChannels(), shape=(20, 50, 50, 32))
    scores = wide[0] @ wide[1].swapaxes(1, 2) / math.sqrt(32)
    expected = math.sqrt(1 + (100 + 100 + 400 + 900 - 4) / 32)
    assert scores.std() == pytest.approx(expected, rel=0.1)


def test_channel_means() -> None:
    shape = (40, 400, 400, 32)
    q, k, v = draw(named("qkmean"), shape=shape)
    for x, size in ((q, 2.0), (k, 8.0), (v, 2.0)):
        means = x.mean(axis=1)
        assert means.std() == pytest.approx(size, rel=0.1)
        assert (x - means[:, None]).std() == pytest.approx(1, abs=0.01)
    plain, moved = draw(Normal()), draw(named("kmean"))
    np.testing.assert_array_equal(moved[0], plain[0])
    shift = plain[0] @ (moved[1] - plain[1]).swapaxes(1, 2)
    np.testing.assert_allclose(shift, shift[..., :1].repeat(400, axis=2), atol=1e-9)


def test_large_tokens_are_the_same_in_keys_and_values() -> None:
    shape = (3, 4000, 4000, 8)
    plain, large = draw(Normal(), shape=shape), draw(Tokens(), shape=shape)
    of_q, of_k, of_v = (y / x for x, y in zip(plain, large, strict=True))
    np.testing.assert_allclose(of_k, of_v)
    for factors in (of_q, of_k):
        assert np.all(np.isclose(factors, 1) | np.isclose(factors, 20))
        np.testing.assert_allclose(factors, factors[..., :1].repeat(8, axis=2))
        assert np.mean(factors > 2) == pytest.approx(0.002, rel=0.7)
    assert not np.allclose(of_q, of_k)
    values = draw(Tokens(values_only=True), shape=shape)
    for i, expected in enumerate((plain[0], plain[1], large[2])):
        np.testing.assert_array_equal(values[i], expected)


@pytest.mark.parametrize("freedom", [3.0, 5.0])
def test_student_t(freedom: float) -> None:
    x = draw(StudentT(freedom), shape=(8, 10, 500, 128))[1]
    assert x.var() == pytest.approx(1, abs=0.15)
    unit = math.sqrt(freedom / (freedom - 2))
    for size in (1.0, 4.0):
        expected = 2 * stats.t.sf(size * unit, freedom)
        assert np.mean(np.abs(x) > size) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("logit", [0.0, 8.0, 12.0])
def test_sink(logit: float) -> None:
    q, k, v = draw(Sink(logit), shape=(20, 300, 300, 128))
    scores = q @ k.swapaxes(1, 2) / math.sqrt(128)
    sinks, others = scores[..., :4], scores[..., 4:]
    assert sinks.mean() == pytest.approx(logit, abs=0.3)
    assert sinks.std() == pytest.approx(math.sqrt(2 + logit**2 / 128), rel=0.15)
    assert others.mean() == pytest.approx(0, abs=0.1)
    assert v[:, :4].std() == pytest.approx(0.02, rel=0.1)
    assert v[:, 4:].std() == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mixture(outlier_std=-1.0), "outlier_std: got -1.0"),
        (lambda: Mixture(outlier_std=math.inf), "outlier_std: got inf"),
        (lambda: Mixture(probability=1.5), "probability: got 1.5"),
        (lambda: KeyChannels(0.0), "ratio: got 0.0"),
        (lambda: KeyValueChannels(math.nan), "ratio: got nan"),
        (lambda: ChannelMeans(v_mean_std=-2.0), "v_mean_std: got -2.0"),
        (lambda: Tokens(factor=0.0), "factor: got 0.0"),
        (lambda: Tokens(probability=-0.1), "probability: got -0.1"),
        (lambda: StudentT(2.0), "freedom: got 2.0"),
        (lambda: Sink(math.nan), "logit: got nan"),
        (lambda: draw(KeyChannels(), shape=(1, 2, 2, 3)), "dim: got 3"),
        (lambda: named("uniform"), "distribution: got 'uniform'; expected one of paper, normal"),
        (lambda: named("sinkhole"), "distribution: got 'sinkhole'"),
        (lambda: named("sinkinf"), "distribution: got 'sinkinf'"),
    ],
)
def test_errors_name_what_is_wrong(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
