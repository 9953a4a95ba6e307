"""The 8-bit experiment: records, recipes as text, sweeps."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cuflash.fp8 import Fp8Recipe, attention_fp8
from cuflash.fp8.distributions import DISTRIBUTIONS
from cuflash.fp8.experiment import RandomSource, Shape, plan_layers, plan_random, run
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
