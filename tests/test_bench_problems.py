"""The bench's problems, inputs, judgement and statistics."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from bench import gradient_samples, samples, shapes, stats
from bench.inputs import digest, dtype_of, random_inputs
from bench.peers import blas, ours
from bench.samples import Sample
from bench.shapes import LISTS, Problem, select
from cuflash import oracle

SMALL = Problem(2, 4, 2, 24, 40, 16, "float32", causal=True)


def test_the_list_of_the_paper_is_its_table() -> None:
    paper = select("paper")
    assert len(paper) == 60
    assert {p.batch * p.q_len for p in paper} == {16384}
    assert {p.dim for p in paper} == {64, 96, 128, 192, 256}
    assert all(2048 - p.dim < p.q_heads * p.dim <= 2048 for p in paper)
    assert {(p.kv_len, p.causal) for p in paper} == {
        (seq, causal) for seq in (512, 1024, 2048, 4096, 8192, 16384) for causal in (False, True)
    }


def test_lists_have_what_they_are_named_after() -> None:
    assert all(p.q_heads == 4 * p.kv_heads for p in LISTS["gqa"] + LISTS["decode"])
    assert all(p.q_len != p.kv_len and not p.causal for p in LISTS["cross"])
    assert all(p.q_len <= 256 for p in LISTS["short"])
    assert max(p.kv_len for p in LISTS["long"]) == 1 << 20
    assert all(p.q_len == 1 for p in LISTS["decode"])
    assert all(p.dtype == "float32" for p in LISTS["cpu"])
    for name, problems in LISTS.items():
        assert len(set(problems)) == len(problems), name
        assert all(p.q_heads % p.kv_heads == 0 for p in problems)


def test_what_is_selected_fits_each_choice() -> None:
    found = select("paper", dims=(64, 96), seqs=(512,), dtypes=("bfloat16",), masks=("causal",))
    assert [(p.dim, p.kv_len, p.dtype, p.mask) for p in found] == [
        (64, 512, "bfloat16", "causal"), (96, 512, "bfloat16", "causal"),
    ]  # fmt: skip
    assert len(select("paper", dims=(64,), dtypes=("float16", "bfloat16"))) == 24


def test_choices_that_leave_nothing_are_told_with_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"--dims, --seqs, --masks: nothing .* 64, 96, 128"):
        select("paper", dims=(80,))
    with pytest.raises(ValueError, match=r"--list: got 'papers'; expected one of paper, gqa"):
        select("papers")


def test_work_is_counted_as_papers_do() -> None:
    problem = Problem(2, 8, 2, 100, 300, 64)
    assert problem.flops == 4 * 2 * 8 * 100 * 300 * 64
    assert dataclasses.replace(problem, causal=True).flops == problem.flops / 2
    assert problem.input_bytes == 2 * 64 * (2 * 8 * 100 + 2 * 2 * 2 * 300)
    assert problem.moved_bytes - problem.input_bytes == 2 * 64 * 2 * 8 * 100
    assert Problem(**problem.to_dict()) == problem
    assert str(problem) == "float16 b2 h8/2 s100x300 d64 full"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_inputs_are_those_of_the_seed_and_normal(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = dataclasses.replace(SMALL, dtype=dtype, q_len=200)
    inputs = random_inputs(np, problem, 1)
    assert [array.shape for array in inputs] == [
        problem.q_shape, problem.kv_shape, problem.kv_shape
    ]  # fmt: skip
    for array in inputs:
        assert array.dtype == dtype_of(dtype)
        values = array.astype(np.float64)
        assert abs(values.mean()) < 0.1
        assert 0.9 < values.std() < 1.1
    assert digest(np, random_inputs(np, problem, 1)) == digest(np, inputs)
    assert digest(np, random_inputs(np, problem, 2)) != digest(np, inputs)
    monkeypatch.setattr("bench.inputs._CHUNK", 100)
    for chunked, whole in zip(random_inputs(np, problem, 1), inputs, strict=True):
        assert np.array_equal(chunked.view(np.uint8), whole.view(np.uint8))


def test_a_digest_sees_one_bit_and_the_order() -> None:
    inputs = random_inputs(np, SMALL, 1)
    q, k, v = (array.copy() for array in inputs)
    assert digest(np, (q, v, k)) != digest(np, inputs)
    q.view(np.uint32)[0, 0, 0, 0] ^= 1
    assert digest(np, (q, k, v)) != digest(np, inputs)
    assert digest(np, (inputs[0][..., ::-1], k, v)) != digest(np, inputs)


@pytest.mark.parametrize(
    "problem",
    [
        SMALL,
        dataclasses.replace(SMALL, causal=False),
        Problem(1, 6, 1, 33, 33, 8, "float16", causal=True),
        Problem(3, 2, 2, 1, 50, 32, "bfloat16"),
    ],
    ids=str,
)
def test_exact_rows_are_those_of_the_oracle(problem: Problem) -> None:
    inputs = random_inputs(np, problem, 5)
    exact, _ = oracle.attention(*inputs, causal=problem.causal)
    chosen = samples.choose(problem, 7)
    expected = np.concatenate([exact[s.entry, s.head][list(s.rows)] for s in chosen])
    found = samples.exact_rows(np, problem, *inputs, chosen)
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)
    assert samples.is_right(
        *samples.error_of(samples.rows_of(np, exact, chosen), found), problem.dtype
    )


@pytest.mark.parametrize(
    "problem",
    [
        SMALL,
        Problem(2, 6, 2, 33, 45, 8, "float16", causal=True),
        Problem(1, 2, 1, 1500, 40, 16, "bfloat16"),
    ],
    ids=str,
)
def test_exact_rows_of_gradients_are_those_of_the_oracle(problem: Problem) -> None:
    inputs = random_inputs(np, problem, 5)
    dout = gradient_samples.random_dout(np, problem)
    exact = oracle.gradients(dout, *inputs, causal=problem.causal)
    chosen = samples.choose(problem, 7)
    expected = gradient_samples.found_rows(np, problem, exact, chosen)
    found = gradient_samples.exact_rows(np, problem, *inputs, chosen)
    for name, one, other in zip(gradient_samples.NAMES, found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5, err_msg=name)
    wrong = [gradient.copy() for gradient in exact]
    wrong[1][:, -1] *= 1.1
    of_dk = gradient_samples.found_rows(np, problem, wrong, chosen)[1]
    assert not samples.is_right(*samples.error_of(of_dk, found[1]), "float16")


def test_samples_have_the_corners_and_others() -> None:
    problem = Problem(8, 16, 16, 4096, 4096, 64)
    chosen = samples.choose(problem, 1)
    assert len(chosen) == 4
    assert {(0, 0), (7, 15)} <= {(s.entry, s.head) for s in chosen}
    for sample in chosen:
        assert {0, 4095} <= set(sample.rows)
        assert 10 < len(sample.rows) <= 16
        assert list(sample.rows) == sorted(set(sample.rows))
    assert samples.choose(problem, 1) == chosen
    assert samples.choose(problem, 2) != chosen
    assert samples.choose(Problem(1, 1, 1, 1, 9, 8), 1) == [Sample(0, 0, (0,))]


def test_errors_are_of_all_rows_and_of_the_worst() -> None:
    exact = np.full((4, 9), 1.0)
    found = exact.astype(np.float32)
    assert samples.error_of(found, exact) == (0.0, 0.0)
    found[2] = 1.1
    whole, worst = samples.error_of(found, exact)
    assert worst == pytest.approx(0.1, rel=1e-5)
    assert whole == pytest.approx(0.05, rel=1e-5)
    found[0, 0] = np.nan
    assert samples.error_of(found, exact) == (math.inf, math.inf)
    assert samples.error_of(found[:3], exact) == (math.inf, math.inf)


def test_a_small_row_that_is_wrong_is_not_lost_beside_large_ones() -> None:
    """Of a causal mask the last rows are small; of its gradients some are exactly 0."""
    exact = np.ones((20, 9))
    exact[-1] /= 100
    found = exact.astype(np.float32)
    found[-1] *= -1
    _, worst = samples.error_of(found, exact)
    assert worst == pytest.approx(2.0)
    _, worst = samples.error_of(found, exact, gradient_samples.LEAST)
    assert not samples.is_right(0.0, worst, "bfloat16")
    exact[0], found[0], found[-1] = 0.0, 1e-6, exact[-1]
    _, worst = samples.error_of(found, exact, gradient_samples.LEAST)
    assert samples.is_right(0.0, worst, "float16")


@pytest.mark.parametrize("kind", samples.BOUNDS)
def test_a_row_that_belongs_to_another_is_wrong(kind: str) -> None:
    exact = np.random.default_rng(0).standard_normal((64, 64)) / 8
    found = exact.astype(np.float32)
    assert samples.is_right(*samples.error_of(found, exact), kind)
    found[5] = found[6]
    assert not samples.is_right(*samples.error_of(found, exact), kind)


@pytest.mark.parametrize(("kind", "bound"), samples.BOUNDS.items())
def test_one_bad_row_is_not_lost_among_many(kind: str, bound: float) -> None:
    assert samples.is_right(0.9 * bound, 4 * bound, kind)
    assert not samples.is_right(0.9 * bound, 6 * bound, kind)
    assert not samples.is_right(1.1 * bound, 1.1 * bound, kind)


def test_what_a_kernel_does_not_write_is_nan() -> None:
    for dtype in ("float16", "bfloat16", "float32"):
        memory = ours.poisoned_like(np.zeros((2, 3), dtype_of(dtype)))
        assert np.isnan(memory.astype(np.float32)).all()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_plain_attention_is_right(causal: bool) -> None:
    problem = dataclasses.replace(SMALL, causal=causal)
    inputs = random_inputs(np, problem, 3)
    exact, _ = oracle.attention(*inputs, causal=causal)
    np.testing.assert_allclose(blas.plain_attention(*inputs, causal), exact, atol=1e-6)


def test_medians_come_with_the_distance_of_quartiles() -> None:
    middle, spread = stats.median_and_spread([1.0, 2.0, 3.0, 4.0, 100.0])
    assert middle == 3.0
    assert spread == pytest.approx(2.0 / 3.0)
    assert stats.median_and_spread([0.5]) == (0.5, 0.0)
    for times in ([], [1.0, 0.0]):
        with pytest.raises(ValueError, match="expected one or more above 0"):
            stats.median_and_spread(times)


def test_exponents_are_found_with_their_error() -> None:
    sizes = [1024, 2048, 4096, 8192]
    assert stats.fit_exponent(sizes, [3 * n**2 for n in sizes]) == pytest.approx((2.0, 0.0))
    noisy = [n * factor for n, factor in zip(sizes, (1.0, 1.1, 0.9, 1.05), strict=True)]
    exponent, error = stats.fit_exponent(sizes, noisy)
    # As scipy.stats.linregress has it.
    from scipy.stats import linregress

    line = linregress(np.log(sizes), np.log(noisy))
    assert exponent == pytest.approx(line.slope)
    assert error == pytest.approx(line.stderr)
    with pytest.raises(ValueError, match="expected 3 or more above 0"):
        stats.fit_exponent([1, 2], [1, 2])


def test_every_dtype_of_a_list_has_a_size() -> None:
    assert {p.dtype for some in LISTS.values() for p in some} <= shapes.ITEM_BYTES.keys()
    assert {p.dtype for some in LISTS.values() for p in some} <= samples.BOUNDS.keys()
