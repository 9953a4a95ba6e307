"""Rotations of the head dim: orthogonal, reproducible, and of use against outliers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import scipy.linalg
from comparison import Array

from cuflash.fp8 import Fp8Recipe
from cuflash.fp8.rotation import random_orthogonal, random_signs, rotation_of, walsh_hadamard

RECIPES = {
    "none": Fp8Recipe(rotation=None),
    "hadamard": Fp8Recipe(seed=3),
    "plain hadamard": Fp8Recipe(seed=None),
    "blocks of 16": Fp8Recipe(rotation_block=16),
    "blocks of 64": Fp8Recipe(rotation_block=64),
    "signs per head": Fp8Recipe(rotation_per_head=True),
    "orthogonal": Fp8Recipe(rotation="orthogonal", seed=5),
    "orthogonal per head": Fp8Recipe(rotation="orthogonal", rotation_per_head=True),
}
# As drawn by another reader of the same bits: 1 where Generator(PCG64(0)).random() is below 0.5.
SIGNS_OF_SEED_0 = [-1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, 1]
DIMS = (1, 3, 16, 64, 80, 96, 128, 200, 256)


def rows(dim: int, heads: int = 2, tokens: int = 5, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((1, heads, tokens, dim)).astype(np.float32)


@pytest.mark.parametrize("length", [1, 2, 8, 64, 256])
def test_the_fast_transform_is_the_product_with_the_matrix(length: int) -> None:
    x = rows(length)[0, 0]
    expected = x.astype(np.float64) @ scipy.linalg.hadamard(length)
    np.testing.assert_allclose(walsh_hadamard(x), expected, rtol=1e-5, atol=1e-5)


def test_the_fast_transform_leaves_its_input() -> None:
    x = rows(8, 1, 1)[0, 0]
    before = x.copy()
    walsh_hadamard(x)
    np.testing.assert_array_equal(x, before)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", RECIPES)
def test_scores_stay_and_the_way_back_leads_back(name: str, dim: int) -> None:
    rotation = rotation_of(RECIPES[name], dim, 2)
    q, k = rows(dim), rows(dim, seed=1)
    rotated_q, rotated_k = rotation.apply(q), rotation.apply(k)
    assert rotated_q.dtype == np.float32
    assert rotated_q.shape == (1, 2, 5, rotation.dim)
    np.testing.assert_allclose(
        rotated_q @ rotated_k.swapaxes(-1, -2), q @ k.swapaxes(-1, -2), rtol=1e-4, atol=1e-4
    )
    np.testing.assert_allclose(rotation.undo(rotated_q), q, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("dim", "block", "padded"),
    [(64, None, 64), (80, None, 128), (80, 16, 80), (80, 32, 96), (192, 64, 192), (129, None, 256)],
)
def test_padding_is_to_a_power_of_two_or_to_whole_blocks(
    dim: int, block: int | None, padded: int
) -> None:
    assert rotation_of(Fp8Recipe(rotation_block=block), dim, 1).dim == padded


def test_blocks_do_not_mix() -> None:
    x = np.zeros((1, 1, 1, 64), np.float32)
    x[..., 17] = 1
    rotated = rotation_of(Fp8Recipe(rotation_block=16), 64, 1).apply(x)[0, 0, 0]
    np.testing.assert_allclose(np.abs(rotated[16:32]), 0.25)
    assert not rotated[:16].any()
    assert not rotated[32:].any()


def test_an_outlier_is_spread_evenly() -> None:
    x = np.zeros((1, 1, 1, 128), np.float32)
    x[..., 40] = 100
    rotated = rotation_of(Fp8Recipe(), 128, 1).apply(x)
    np.testing.assert_allclose(np.abs(rotated), 100 / np.sqrt(128), rtol=1e-6)


def test_signs_keep_a_constant_row_from_becoming_one_channel() -> None:
    x = np.ones((1, 1, 1, 128), np.float32)
    plain = rotation_of(Fp8Recipe(seed=None), 128, 1).apply(x)[0, 0, 0]
    assert np.count_nonzero(np.abs(plain) > 1e-5) == 1
    signed = rotation_of(Fp8Recipe(seed=0), 128, 1).apply(x)
    assert np.abs(signed).max() < 4.5


def test_signs_are_fixed_by_the_seed_alone() -> None:
    first = random_signs(0, 1, 16)
    assert first.shape == (1, 1, 16)
    # The top bits of PCG64's output, which NumPy keeps as it is.
    assert first.astype(int).ravel().tolist() == SIGNS_OF_SEED_0
    np.testing.assert_array_equal(random_signs(0, 1, 128)[..., :16], first)
    assert set(random_signs(7, 3, 64).ravel()) == {-1.0, 1.0}
    assert not np.array_equal(random_signs(1, 1, 128), random_signs(0, 1, 128))
    per_head = random_signs(0, 2, 128)
    assert not np.array_equal(per_head[0], per_head[1])
    assert abs(random_signs(2, 64, 256).mean()) < 0.05


def test_random_matrices_are_orthogonal_and_fixed_by_the_seed() -> None:
    matrices = random_orthogonal(4, 3, 48)
    assert matrices.shape == (3, 48, 48)
    for matrix in matrices:
        np.testing.assert_allclose(matrix @ matrix.T, np.eye(48), atol=1e-5)
    np.testing.assert_array_equal(random_orthogonal(4, 3, 48), matrices)
    assert np.abs(random_orthogonal(5, 1, 48)[0] - matrices[0]).max() > 0.1
    assert np.abs(matrices[1] - matrices[0]).max() > 0.1


def test_random_matrices_have_no_preferred_direction() -> None:
    """Without the signs after QR, the diagonal would lean to one side."""
    diagonals = np.diagonal(random_orthogonal(0, 400, 8), axis1=1, axis2=2)
    assert abs(diagonals.mean()) < 0.03  # of 3200 numbers with standard deviation 0.35
    assert diagonals.std() == pytest.approx(8**-0.5, rel=0.05)


def test_a_matrix_of_the_user_multiplies_from_the_right() -> None:
    matrix = scipy.linalg.dft(4).real  # not orthogonal
    with pytest.raises(ValueError, match=r"rotation: got a matrix M .*expected an orthogonal"):
        Fp8Recipe(rotation=matrix)
    turn = np.eye(4)[[1, 2, 3, 0]]
    rotation = rotation_of(Fp8Recipe(rotation=turn), 4, 2)
    x = rows(4)
    np.testing.assert_array_equal(rotation.apply(x), x @ turn.astype(np.float32))
    np.testing.assert_array_equal(rotation.apply(x)[..., 0], x[..., 3])
    with pytest.raises(ValueError, match=r"rotation: got .* \(4, 4\); expected \(5, 5\)"):
        rotation_of(Fp8Recipe(rotation=turn), 5, 2)


def test_heads_differ_only_where_asked() -> None:
    x = np.broadcast_to(rows(64, heads=1), (1, 2, 5, 64))
    for rotation in ("hadamard", "orthogonal"):
        shared = Fp8Recipe(rotation=rotation)
        same = rotation_of(shared, 64, 2).apply(x)
        np.testing.assert_array_equal(same[:, 0], same[:, 1])
        per_head = dataclasses.replace(shared, rotation_per_head=True)
        other = rotation_of(per_head, 64, 2).apply(x)
        assert np.abs(other[:, 0] - other[:, 1]).max() > 0.1
