"""The 8-bit experiment: metrics by hand, baselines, records, sweeps, and inputs from files."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cuflash import oracle
from cuflash.fp8 import Fp8Recipe, attention_fp8, problems
from cuflash.fp8.baselines import attention_fp16
from cuflash.fp8.distributions import DISTRIBUTIONS, Mixture
from cuflash.fp8.experiment import (
    LayerSource,
    Problem,
    RandomSource,
    Shape,
    exact_attention,
    layers_of,
    plan_layers,
    plan_random,
    run,
)
from cuflash.fp8.records import (
    Record,
    errors,
    read_csv,
    read_json,
    summarise,
    write_csv,
    write_json,
)
from cuflash.fp8.sweeps import LIMITS, PUBLISHED, SWEEPS, parse_recipe

Array = np.ndarray[Any, Any]
FIXTURE = Path(__file__).parent / "data" / "smollm2_qkv.npz"
TINY = Shape(heads=1, keys=96, dim=16, rows=8)
RECORD = Record(
    sweep="block",
    recipe="f8:rotation=none",
    inputs="paper",
    setting="K, V",
    x=None,
    heads=2,
    rows=3,
    keys=4,
    dim=5,
    causal=True,
    seed=6,
    rmse=0.1 + 0.2,
    relative_l2=1e-300,
    max_error=2.5,
    cosine=1 / 3,
    rmse_unrounded=None,
    size=7.0,
)


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


# --- records --------------------------------------------------------------------------------------


def test_files_of_records_give_them_back(tmp_path: Path) -> None:
    records = [
        RECORD,
        dataclasses.replace(RECORD, x=0.5, causal=False, rmse_unrounded=1e-9, setting="", sweep=""),
        dataclasses.replace(RECORD, x=-3.0, inputs='a, "b"', recipe="ä"),
    ]
    for write, read in ((write_csv, read_csv), (write_json, read_json)):
        path = tmp_path / write.__name__
        write(path, records)
        assert read(path) == records
        write(path, [dataclasses.replace(RECORD, rmse=math.nan)])
        (back,) = read(path)
        assert math.isnan(back.rmse)
        assert dataclasses.replace(back, rmse=1.0) == dataclasses.replace(RECORD, rmse=1.0)


def test_json_is_plain(tmp_path: Path) -> None:
    write_json(tmp_path / "a", [dataclasses.replace(RECORD, rmse=math.nan)])
    text = (tmp_path / "a").read_text()
    assert "NaN" not in text
    assert json.loads(text)["records"][0]["rmse"] is None
    assert json.loads(text)["numpy"] == np.__version__


def test_files_of_another_form(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("x,y\n1,2\n")
    with pytest.raises(ValueError, match="its columns are not sweep, recipe"):
        read_csv(path)
    with pytest.raises(ValueError, match="no file of records"):
        read_json(path)
    write_csv(path, [RECORD])
    path.write_text(path.read_text().replace("2.5", "much"))
    with pytest.raises(ValueError, match="max_error: got 'much'"):
        read_csv(path)


def test_summaries() -> None:
    records = [
        dataclasses.replace(RECORD, recipe=recipe, seed=seed, rmse=size * seed)
        for recipe, size in (("a", 1.0), ("b", 10.0))
        for seed in range(11)
    ]
    a, b = summarise(records, "rmse")
    assert (a.recipe, a.seeds, a.low, a.median, a.high) == ("a", 11, 1.0, 5.0, 9.0)
    assert (b.recipe, b.median, b.metric) == ("b", 50.0, "rmse")
    assert summarise(records, "rmse_unrounded") == []
    with pytest.raises(ValueError, match="metric: got 'l2'; expected one of rmse"):
        summarise(records, "l2")


# --- recipes and sweeps ---------------------------------------------------------------------------


def test_recipes_as_text() -> None:
    assert parse_recipe("fp16").recipe == "fp16"
    assert parse_recipe("f8").recipe == Fp8Recipe(reference="lagging")
    text = "i8:rotation=none:balance=false:q_block=64:p_scale=1.5:k_block=head:seed=3"
    named = parse_recipe(text)
    assert named.label == text
    assert named.recipe == Fp8Recipe(
        qk_dtype="int8",
        rotation=None,
        balance=False,
        q_block=64,
        p_scale=1.5,
        k_block="head",
        seed=3,
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("f9", "recipe: got 'f9'; expected one of per_tensor"),
        ("fp16:seed=1", "recipe: got 'fp16:seed=1'"),
        ("f8:sed=1", "expected after a colon FIELD=VALUE, with a field of qk_dtype"),
        ("f8:seed", "expected after a colon FIELD=VALUE"),
        ("f8:p_scale=1000", "recipe: got 'f8:p_scale=1000'; p_scale: got 1000"),
        ("f8:rotation=twist", "recipe: got 'f8:rotation=twist'; rotation: got 'twist'"),
    ],
)
def test_recipes_that_are_none(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_recipe(text)


@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_runs_and_varies_something(name: str) -> None:
    sweep = SWEEPS[name]
    settings = sweep.settings
    assert len({setting.label for setting in settings}) == len(settings)
    tasks = plan_random(TINY, [0], sweep)
    shortest = min(task.shape.keys for task in tasks)
    chosen = [task for task in tasks if task.shape.keys == shortest]
    if name == "limits":  # the largest of all
        chosen = [dataclasses.replace(task, shape=TINY) for task in chosen]
    records = list(run(chosen))
    assert len(records) == sum(len(task.measurements) for task in chosen)
    assert {record.sweep for record in records} == {name}
    assert {record.recipe for record in records} == set(sweep.recipes)
    assert {record.inputs for record in records} == set(sweep.distributions)
    assert all(math.isfinite(record.rmse) and record.rmse > 0 for record in records)
    measured = {
        (task.source, task.shape, measurement.recipe)
        for task in tasks
        for measurement in task.measurements
    }
    total = len(settings) * len(sweep.recipes)
    assert len(measured) == total * (1 if sweep.about_inputs else len(sweep.distributions))


def test_the_sweeps_are_those_of_the_documentation() -> None:
    assert list(SWEEPS) == [
        "ablation", "limits", "rotation", "block", "balance", "centring", "accumulation", "p-scale",
        "outlier", "probability", "channel", "kmean", "sink", "length", "dim",
    ]  # fmt: skip


def test_published_numbers_belong_to_recipes_that_are_run() -> None:
    assert set(PUBLISHED) <= set(SWEEPS["ablation"].recipes)
    recipes = {name: parse_recipe(name).recipe for name in PUBLISHED}
    block, rotation = recipes["fa3:rotation=none"], recipes["per_tensor:rotation=hadamard"]
    both, neither = recipes["fa3"], recipes["per_tensor"]
    assert all(isinstance(r, Fp8Recipe) for r in (block, rotation, both, neither))
    assert [(r.rotation, r.k_block) for r in (neither, block, rotation, both)] == [
        (None, "tensor"), (None, 128), ("hadamard", "tensor"), ("hadamard", 128),
    ]  # fmt: skip
    assert [PUBLISHED[n].rmse for n in ("fp16", "per_tensor", "fa3")] == [1.9e-4, 2.4e-2, 9.1e-3]


def test_limits_are_kept_on_a_sample() -> None:
    """Two heads of the sweep's keys; what has no outliers is near its mean already."""
    assert set(LIMITS) == set(SWEEPS["limits"].recipes)
    assert all(set(limits) == set(DISTRIBUTIONS) for limits in LIMITS.values())
    chosen = ["normal", "chanK", "kmean", "tokenV"]
    shape = Shape(heads=2, keys=4096, dim=128, rows=128)
    for record in run(plan_random(shape, [0], None, tuple(LIMITS), chosen)):
        limit = LIMITS[record.recipe][record.inputs]
        assert 0.5 * limit < record.relative_l2 < limit


def test_a_record_is_what_was_measured() -> None:
    shape = dataclasses.replace(TINY, heads=2, causal=True)
    (record,) = run(plan_random(shape, [5], None, ["i8"], ["sink3"]))
    problem = RandomSource(DISTRIBUTIONS["normal"], "").problem(shape, 5)  # the same rows
    source = plan_random(shape, [5], None, ["i8"], ["sink3"])[0].source.problem(shape, 5)
    got = attention_fp8(
        source.q[None], source.k[None], source.v[None], recipe="i8", mask=source.seen
    )[0]
    assert source.exact_unrounded is not None
    assert source.q.shape == problem.q.shape == (2, 8, 16)
    assert (
        dataclasses.asdict(errors(got, source.exact)).items() <= dataclasses.asdict(record).items()
    )
    assert record.rmse_unrounded == errors(got, source.exact_unrounded).rmse
    assert record.size == pytest.approx(np.sqrt(np.mean(source.exact**2)))
    assert (record.inputs, record.recipe, record.setting, record.x) == ("sink3", "i8", "", None)
    assert (record.heads, record.rows, record.keys, record.dim) == (2, 8, 96, 16)
    assert (record.causal, record.seed) == (True, 5)


def median(records: list[Record], recipe: str) -> float:
    return float(np.median([r.relative_l2 for r in records if r.recipe == recipe]))


def test_rotation_helps_on_the_published_mixture_and_hurts_on_paired_channels() -> None:
    shape = Shape(heads=4, keys=1024, dim=64, rows=64)
    recipes = ["fp16", "fa3", "fa3:rotation=none", "f8", "f8:balance=false", "i8"]
    paper = list(run(plan_random(shape, range(3), None, recipes, ["paper"])))
    channels = list(run(plan_random(shape, range(1), None, recipes, ["chanK"])))
    assert median(paper, "fa3") < 0.8 * median(paper, "fa3:rotation=none")
    assert median(paper, "i8") < 0.8 * median(paper, "f8")
    assert median(paper, "fp16") < 0.01 * median(paper, "f8")
    assert median(channels, "fa3") > 2.5 * median(channels, "fa3:rotation=none")
    assert median(channels, "f8:balance=false") > 2.5 * median(channels, "f8")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: plan_random(TINY, [0], SWEEPS["sink"], (), ["normal"]),
            "distribution: got normal",
        ),
        (lambda: plan_random(TINY, [0], None, ["f8"]), "distribution: none given"),
        (lambda: plan_random(TINY, [0], None, (), ["normal"]), "recipe: none given"),
        (lambda: plan_random(TINY, [0], None, ["f8"], ["norm"]), "distribution: got 'norm'"),
        (lambda: plan_layers([], TINY, [0], SWEEPS["sink"]), "sweep: got 'sink'.*its own inputs"),
        (lambda: plan_layers([], TINY, [0], SWEEPS["length"]), "got 'length'.*its own shapes"),
    ],
)
def test_plans_that_make_no_sense(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# --- files ----------------------------------------------------------------------------------------


def test_a_real_layer() -> None:
    (layer,) = layers_of(FIXTURE)
    assert layer.name == "layer 27"
    shape = dataclasses.replace(TINY, rows=None, causal=True)
    records = list(run(plan_layers([layer], shape, [0], None, ["fp16", "f8", "i8", "i8+"])))
    first = records[0]
    assert (first.heads, first.rows, first.keys, first.dim) == (9, 256, 256, 64)
    assert first.rmse_unrounded is None
    found = {record.recipe: record.relative_l2 for record in records}
    assert found["fp16"] < 1e-3 < found["i8+"] < found["i8"] < found["f8"] < 0.15


def test_sampled_rows_of_a_layer_see_what_they_saw() -> None:
    (layer,) = layers_of(FIXTURE)
    whole = layer.problem(dataclasses.replace(TINY, rows=None, causal=True), 0)
    sample = layer.problem(dataclasses.replace(TINY, rows=10, causal=True), 0)
    assert sample.seen is not None
    rows = sample.seen.sum(axis=1) - 1
    assert len(set(rows)) == 10
    np.testing.assert_array_equal(sample.q, whole.q[:, rows])
    np.testing.assert_allclose(sample.exact, whole.exact[:, rows], rtol=1e-12)


def save(path: Path, **arrays: Array) -> Path:
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize("dims", [2, 3, 4])
def test_one_layer_with_more_or_fewer_axes(dims: int, tmp_path: Path) -> None:
    lead = (2, 4)[4 - dims :] if dims > 2 else ()
    rng = np.random.default_rng(0)
    q = rng.standard_normal((*lead, 5, 8)).astype(np.float32)
    k, v = rng.standard_normal((2, *lead, 20, 8)).astype(np.float32)
    if dims == 4:  # two query heads for each of two kv heads, in each of the batch
        k, v = k[:, :2], v[:, :2]
    (layer,) = layers_of(save(tmp_path / "mine.npz", q=q, k=k, v=v, more=np.zeros(3)))
    assert layer.name == "mine"
    problem = layer.problem(dataclasses.replace(TINY, causal=True), 0)
    exact, _ = oracle.attention(q, k, v, causal=True)
    assert problem.exact_unrounded is not None
    np.testing.assert_allclose(problem.exact_unrounded.reshape(exact.shape), exact, rtol=1e-12)
    fp8 = attention_fp8(*(x.astype(np.float16) for x in (q, k, v)), causal=True, recipe="f8")
    got = problem.attend(parse_recipe("f8")).reshape(exact.shape)
    assert errors(got, exact).relative_l2 == pytest.approx(
        errors(fp8, exact).relative_l2, rel=0.5 if dims == 4 else 1e-3
    )


def test_layers_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    x = np.zeros((4, 2), np.float16)
    plain = {f"{name}_{n}": x for n in ("10", "9", "last") for name in "qkv"}
    names = [layer.name for layer in layers_of(save(tmp_path / "a.npz", **plain))]
    assert names == ["layer 9", "layer 10", "layer last"]
    dumped = {f"layer{n}_{name}": x for n in (3, 20) for name in "qkv"}
    found = layers_of(save(tmp_path / "b.npz", **dumped))
    assert [layer.name for layer in found] == ["layer 3", "layer 20"]
    assert found[1].arrays == ("layer20_q", "layer20_k", "layer20_v")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": (4, 2)}, "got a; expected arrays q, k, v, or q_0"),
        ({"q": (4, 2), "k": (4, 2)}, "the layer lacks v"),
        ({"q_1": (4, 2), "k_0": (4, 2), "v_0": (4, 2), "q_0": (4, 2)}, "layer 1 lacks k, v"),
    ],
)
def test_files_without_layers(
    arrays: dict[str, tuple[int, ...]], message: str, tmp_path: Path
) -> None:
    path = save(tmp_path / "a.npz", **{n: np.zeros(s) for n, s in arrays.items()})
    with pytest.raises(ValueError, match=message):
        layers_of(path)


@pytest.mark.parametrize(
    ("q", "k", "v", "message"),
    [
        ((4, 2), (4, 3), (4, 3), r"got q \(4, 2\), k \(4, 3\)"),
        ((4, 2), (4, 2), (5, 2), "expected .heads, queries, dim. and twice"),
        ((3, 4, 2), (2, 4, 2), (2, 4, 2), "heads a multiple of kv heads"),
        ((0, 2), (4, 2), (4, 2), r"got q \(0, 2\)"),
        ((2, 4, 4, 2), (1, 4, 4, 2), (1, 4, 4, 2), r"got q \(2, 4, 4, 2\).* all of one batch"),
        ((4,), (4, 2), (4, 2), r"q: got float64 of shape \(4,\)"),
    ],
)
def test_arrays_that_do_not_fit(q: Any, k: Any, v: Any, message: str, tmp_path: Path) -> None:
    path = save(tmp_path / "a.npz", q=np.zeros(q), k=np.zeros(k), v=np.zeros(v))
    with pytest.raises(ValueError, match=message):
        layers_of(path)[0].problem(TINY, 0)


def test_a_layer_with_too_large_values_is_named(tmp_path: Path) -> None:
    x = np.ones((4, 2))
    path = save(tmp_path / "a.npz", q_3=x, k_3=x * 1e5, v_3=x)
    with pytest.raises(ValueError, match=r"a\.npz: layer 3: k: holds NaN, Inf or values beyond"):
        layers_of(path)[0].problem(TINY, 0)


def test_integers_are_no_inputs(tmp_path: Path) -> None:
    x = np.zeros((4, 2), np.int32)
    (layer,) = layers_of(save(tmp_path / "a.npz", q=x, k=x, v=x))
    assert isinstance(layer, LayerSource)
    with pytest.raises(ValueError, match="q: got int32"):
        layer.problem(TINY, 0)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 and no more", b"words"])
def test_files_that_are_no_npz(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.npz: no npz file"):
        layers_of(path)
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(ValueError, match="got a single array"):
        layers_of(tmp_path / "one.npy")
    with pytest.raises(FileNotFoundError):
        layers_of(tmp_path / "none.npz")
