"""Recipes: presets, fields and their errors, equality by value."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from cuflash.fp8 import PRESETS, Fp8Recipe
from cuflash.fp8.recipe import recipe_of


def test_presets_by_name() -> None:
    assert set(PRESETS) == {"per_tensor", "fa3", "f8", "f8+", "i8", "i8+"}
    for name, recipe in PRESETS.items():
        assert recipe_of(name) is recipe
    own = Fp8Recipe(p_scale=16)
    assert recipe_of(own) is own


def test_what_the_presets_say() -> None:
    f8, i8 = PRESETS["f8"], PRESETS["i8"]
    assert f8 == Fp8Recipe(reference="lagging")
    assert (f8.q_block, f8.k_block, f8.v_block) == ("token", "columns", "channel")
    assert f8.rotation == "hadamard"
    assert all((f8.balance, f8.center_k, f8.center_v, f8.residual_mean))
    assert dataclasses.replace(f8, qk_dtype="int8", reference="tile") == i8
    for plain in ("f8", "i8"):
        expected = dataclasses.replace(PRESETS[plain], first_tile_16bit=True)
        assert PRESETS[f"{plain}+"] == expected
    per_tensor, fa3 = PRESETS["per_tensor"], PRESETS["fa3"]
    assert per_tensor.rotation is None
    assert {per_tensor.q_block, per_tensor.k_block, per_tensor.v_block} == {"tensor"}
    assert {fa3.q_block, fa3.k_block, fa3.v_block} == {128}
    assert fa3.rotation == "hadamard"
    for recipe in (per_tensor, fa3):
        assert not any((recipe.balance, recipe.center_k, recipe.center_v, recipe.residual_mean))
        assert recipe.reference == "running"


@pytest.mark.parametrize(
    ("name", "error", "match"),
    [
        (
            "fa4",
            ValueError,
            r"recipe: got 'fa4'; expected one of 'per_tensor', .*, did you mean 'fa3'",
        ),
        (None, TypeError, r"recipe: got None \(NoneType\); expected a preset's name or an"),
        ({}, TypeError, "recipe: "),
    ],
)
def test_what_is_no_recipe(name: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        recipe_of(name)


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("qk_dtype", "e5m2", ValueError),
        ("qk_dtype", None, ValueError),
        ("rotation", "hadamrd", ValueError),
        ("rotation", 3, TypeError),
        ("rotation", np.ones((4, 4)), ValueError),
        ("rotation", np.ones((4, 3)), ValueError),
        ("rotation", np.ones(4), ValueError),
        ("rotation", np.empty((0, 0)), ValueError),
        ("rotation", np.full((2, 2), np.nan), ValueError),
        ("rotation", np.eye(2) * 1j, TypeError),
        ("rotation", np.array([["a"]]), TypeError),
        ("seed", -1, ValueError),
        ("seed", 1.5, TypeError),
        ("seed", True, TypeError),
        ("rotation_per_head", 1, TypeError),
        ("rotation_block", 8, ValueError),
        ("q_block", "columns", ValueError),
        ("q_block", 100, ValueError),
        ("q_block", "channel", ValueError),
        ("k_block", "channel", ValueError),
        ("k_block", 128.0, ValueError),
        ("k_block", True, ValueError),
        ("v_block", "columns", ValueError),
        ("v_block", None, ValueError),
        ("balance", "yes", TypeError),
        ("center_k", 0, TypeError),
        ("center_v", None, TypeError),
        ("residual_mean", 1.0, TypeError),
        ("p_scale", 0, ValueError),
        ("p_scale", -1, ValueError),
        ("p_scale", 449, ValueError),
        ("p_scale", float("nan"), ValueError),
        ("p_scale", "256", TypeError),
        ("reference", "row", ValueError),
        ("accumulate", "fp16", ValueError),
        ("first_tile_16bit", 1, TypeError),
    ],
)
def test_a_wrong_field_is_named(field: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"^{field}: got .*; expected "):
        Fp8Recipe(**{field: value})


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"rotation": "orthogonal", "seed": None}, "seed: got None; expected an integer"),
        ({"rotation": "orthogonal", "rotation_block": 16}, "rotation_block: got 16; expected None"),
        ({"rotation": None, "rotation_block": 16}, "rotation_block: got 16; expected None"),
        ({"rotation": np.eye(4), "rotation_per_head": True}, "rotation_per_head: got True"),
        ({"rotation": None, "rotation_per_head": True}, "rotation_per_head: got True"),
        ({"first_tile_16bit": True, "v_block": 128}, "v_block: got 128; expected one of 'tensor'"),
        ({"first_tile_16bit": True, "v_block": "token"}, "v_block: got 'token'; expected one of"),
    ],
)
def test_fields_that_exclude_each_other(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Fp8Recipe(**fields)


def test_a_mistyped_word_gets_a_suggestion() -> None:
    with pytest.raises(ValueError, match="did you mean 'hadamard'"):
        Fp8Recipe(rotation="hadamar")


def test_numpy_numbers_are_taken_as_python_ones() -> None:
    recipe = Fp8Recipe(
        q_block=np.int64(64), seed=np.uint8(3), p_scale=np.float32(256), balance=np.True_
    )
    assert recipe == Fp8Recipe(q_block=64, seed=3, p_scale=256.0, balance=True)
    assert [type(x) for x in (recipe.q_block, recipe.seed, recipe.p_scale, recipe.balance)] == [
        int, int, float, bool,
    ]  # fmt: skip


def test_recipes_are_values() -> None:
    assert Fp8Recipe(seed=1) == Fp8Recipe(seed=1)
    assert hash(Fp8Recipe(seed=1)) == hash(Fp8Recipe(seed=1))
    assert Fp8Recipe(seed=1) != Fp8Recipe(seed=2)
    assert Fp8Recipe() != "f8"
    assert len({*PRESETS.values(), *PRESETS.values()}) == len(PRESETS)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Fp8Recipe().seed = 1  # type: ignore[misc]


@pytest.mark.parametrize("field", dataclasses.fields(Fp8Recipe), ids=lambda field: field.name)
def test_each_field_tells_recipes_apart(field: dataclasses.Field[Any]) -> None:
    other: dict[str, Any] = {
        "qk_dtype": "int8", "rotation": None, "seed": 9, "rotation_per_head": True,
        "rotation_block": 32, "q_block": 64, "k_block": 64, "v_block": "head", "balance": False,
        "center_k": False, "center_v": False, "residual_mean": False, "p_scale": 16.0,
        "reference": "running", "accumulate": "single", "first_tile_16bit": True,
    }  # fmt: skip
    assert dataclasses.replace(Fp8Recipe(), **{field.name: other[field.name]}) != Fp8Recipe()


def test_a_matrix_is_copied_and_compared_by_value() -> None:
    matrix = np.eye(4)[::-1].copy()
    recipe, same = Fp8Recipe(rotation=matrix), Fp8Recipe(rotation=matrix.astype(np.float32))
    matrix[:] = 0
    assert isinstance(recipe.rotation, np.ndarray)
    assert recipe.rotation[0, 3] == 1
    assert not recipe.rotation.flags.writeable
    assert recipe == same
    assert hash(recipe) == hash(same)
    assert recipe != Fp8Recipe(rotation=np.eye(4))
    assert recipe != Fp8Recipe(rotation=np.eye(5))
    assert recipe != Fp8Recipe()
    assert dataclasses.replace(recipe, p_scale=1) != recipe
