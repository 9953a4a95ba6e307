"""Problems of the 8-bit experiment: metrics by hand, baselines, exact attention."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from comparison import Array

from cuflash import oracle
from cuflash.fp8 import attention_fp8, problems
from cuflash.fp8.baselines import attention_fp16
from cuflash.fp8.distributions import DISTRIBUTIONS, Mixture
from cuflash.fp8.experiment import Problem, RandomSource, Shape, exact_attention
from cuflash.fp8.records import errors
from cuflash.fp8.sweeps import parse_recipe

TINY = Shape(heads=1, keys=96, dim=16, rows=8)


# --- metrics --------------------------------------------------------------------------------------


def test_errors_by_hand() -> None:
    found = errors(np.array([[-3.0, 4.0]], np.float16), np.array([[0.0, 5.0]]))
    assert found.rmse == pytest.approx(math.sqrt((9 + 1) / 2))
    assert found.relative_l2 == pytest.approx(math.sqrt(10) / 5)
    assert found.max_error == 3
    assert found.cosine == pytest.approx(20 / 25)


def test_errors_of_equal_opposite_and_zero() -> None:
    x, zero = np.array([1.0, -2.0]), np.zeros(2)
    same, opposite = errors(x, x), errors(-x, x)
    assert (same.rmse, same.relative_l2, same.max_error) == (0, 0, 0)
    assert same.cosine == pytest.approx(1)
    assert (opposite.relative_l2, opposite.cosine) == (pytest.approx(2), pytest.approx(-1))
    assert errors(zero, zero).relative_l2 == 0
    assert errors(zero, zero).cosine == 1
    assert math.isnan(errors(x, zero).relative_l2)
    assert errors(x, zero).cosine == errors(zero, x).cosine == 0
    nan = errors(np.array([1.0, math.nan]), x)
    assert all(math.isnan(value) for value in dataclasses.astuple(nan))


def test_errors_of_other_shapes() -> None:
    with pytest.raises(ValueError, match=r"got: shape \(2,\)"):
        errors(np.zeros(2), np.zeros(3))
    with pytest.raises(ValueError, match="not empty"):
        errors(np.zeros(0), np.zeros(0))


# --- baselines ------------------------------------------------------------------------------------


def rounded(
    seed: int, heads: int = 2, rows: int = 20, keys: int = 300, dim: int = 32
) -> list[Array]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((heads, n, dim)).astype(np.float16) for n in (rows, keys, keys)]


@pytest.mark.parametrize("name", ["fp16", "fp16-standard"])
def test_a_baseline_is_off_by_its_roundings(name: str) -> None:
    q, k, v = rounded(0)
    found = errors(attention_fp16(name, q, k, v), exact_attention(q, k, v))
    assert 5e-5 < found.relative_l2 < 1.5e-3
    seen = np.arange(300) <= np.arange(20)[:, None]
    seen[3] = False
    got = attention_fp16(name, q, k, v, seen)
    assert got.dtype == np.float16
    assert errors(got, exact_attention(q, k, v, seen)).relative_l2 < 1.5e-3
    np.testing.assert_array_equal(got[:, 3], 0)
    np.testing.assert_array_equal(got[:, 0], v[:, 0])


def test_standard_rounds_weights() -> None:
    """Three keys alike weigh float16(1/3), which times 1024 is a float16."""
    q, k = np.zeros((1, 1, 4), np.float16), np.zeros((1, 3, 4), np.float16)
    v = np.array([1024, 0, 0], np.float16).reshape(1, 3, 1)
    assert attention_fp16("fp16-standard", q, k, v).item() == float(np.float16(1 / 3)) * 1024


def test_standard_rounds_scores_and_tiled_does_not() -> None:
    # Scores 2048 and 2049: float16 has steps of 2 there, and takes them for the same.
    q = np.array([[[64, 1, 0, 0]]], np.float16)  # of scale 1/2
    k = np.array([[[64, 0, 0, 0], [64, 2, 0, 0]]], np.float16)
    v = np.array([[[0], [1]]], np.float16)
    assert attention_fp16("fp16-standard", q, k, v).item() == 0.5
    assert attention_fp16("fp16", q, k, v).item() == pytest.approx(1 / (1 + math.exp(-1)), rel=1e-3)


def test_tiled_rounds_weights_relative_to_the_running_maximum() -> None:
    # A weight of exp(-20) is 0 in float16, but counts in the sum, which is taken before rounding.
    q = np.ones((1, 1, 1), np.float16)
    k = np.array([0, -20], np.float16).reshape(1, 2, 1)
    v = np.array([0, 30000], np.float16).reshape(1, 2, 1)
    assert exact_attention(q, k, v).item() == pytest.approx(30000 * math.exp(-20), rel=1e-6)
    assert attention_fp16("fp16", q, k, v).item() == 0
    far = np.concatenate([np.full((1, 128, 1), -20, np.float16), k], axis=1)  # in an earlier tile
    values = np.concatenate([np.full((1, 128, 1), 30000, np.float16), v], axis=1)
    expected = 128 * 30000 * math.exp(-20)
    assert attention_fp16("fp16", q, far, values).item() == pytest.approx(expected, rel=1e-3)


def test_an_unknown_baseline() -> None:
    with pytest.raises(ValueError, match="baseline: got 'fp17'; expected one of fp16"):
        attention_fp16("fp17", *rounded(0))


# --- problems -------------------------------------------------------------------------------------


def test_exact_attention_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = rounded(1)
    seen = np.random.default_rng(0).random((20, 300)) < 0.5
    whole, _ = oracle.attention(q, k, v, mask=seen)
    monkeypatch.setattr(problems, "_EXACT_SCORES", 7 * 300)
    np.testing.assert_allclose(exact_attention(q, k, v, seen), whole, rtol=1e-12)


def test_a_problem_knows_both_references() -> None:
    problem = RandomSource(Mixture(), "paper").problem(TINY, 3)
    q, k, v = Mixture()(np.random.default_rng(3), 1, 8, 96, 16)
    before, _ = oracle.attention(q, k, v)
    after, _ = oracle.attention(*(x.astype(np.float16) for x in (q, k, v)))
    assert problem.exact_unrounded is not None
    np.testing.assert_allclose(problem.exact_unrounded, before, rtol=1e-12)
    np.testing.assert_allclose(problem.exact, after, rtol=1e-12)
    assert not np.allclose(before, after, rtol=1e-6)
    assert Problem.of(problem.q, problem.k, problem.v).exact_unrounded is None


def test_values_beyond_float16() -> None:
    q, k, v = (x.astype(np.float64) for x in rounded(0))
    k[0, 0, 0] = 70000
    with pytest.raises(ValueError, match="k: holds NaN, Inf or values beyond 65504"):
        Problem.of(q, k, v)


def test_all_causal_rows_are_causal_attention() -> None:
    shape = dataclasses.replace(TINY, keys=150, rows=None, causal=True)
    problem = RandomSource(DISTRIBUTIONS["normal"], "normal").problem(shape, 0)
    whole, _ = oracle.attention(problem.q, problem.k, problem.v, causal=True)
    np.testing.assert_allclose(problem.exact, whole, rtol=1e-12)
    recipe = parse_recipe("f8")
    same = attention_fp8(problem.q, problem.k, problem.v, recipe="f8", causal=True)
    np.testing.assert_array_equal(problem.attend(recipe), same)


def test_sampled_causal_rows_are_spread_without_favour() -> None:
    shape = dataclasses.replace(TINY, keys=96, rows=8, causal=True)
    source = RandomSource(DISTRIBUTIONS["normal"], "normal")
    counts = np.zeros(96)
    for seed in range(400):
        seen = source.problem(dataclasses.replace(shape, dim=1), seed).seen
        assert seen is not None
        positions = seen.sum(axis=1) - 1
        np.testing.assert_array_equal(seen, np.arange(96) <= positions[:, None])
        np.testing.assert_array_equal(positions // 12, np.arange(8))  # one in each stretch
        counts[positions] += 1
    # 33 each; a position that were never taken, or taken twice as often, would stand out.
    assert counts.min() > 10
    assert counts.max() < 60


@pytest.mark.parametrize("field", ["heads", "keys", "dim", "rows"])
def test_a_shape_without_size(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}: got 0; expected 1 or more"):
        dataclasses.replace(TINY, **{field: 0})
