"""Inputs of the 8-bit experiment from files."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from comparison import Array

from cuflash import oracle
from cuflash.fp8 import attention_fp8
from cuflash.fp8.experiment import LayerSource, Shape, layers_of, plan_layers, run
from cuflash.fp8.records import errors
from cuflash.fp8.sweeps import parse_recipe

FIXTURE = Path(__file__).parent / "data" / "smollm2_qkv.npz"
TINY = Shape(heads=1, keys=96, dim=16, rows=8)


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
