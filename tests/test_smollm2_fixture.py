"""Attention on the q, k, v of a real layer: outlier channels in K, an attention sink, shared heads.

The file and where it comes from are described in ``data/README.md``.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash import oracle

FIXTURE = Path(__file__).parent / "data" / "smollm2_qkv.npz"
LAYER = 27
FLOAT32_ROUNDOFF = 2.0**-24
# dtype, and its unit roundoff: half the gap between 1 and the next number
DTYPES = {
    "float32": (np.dtype(np.float32), FLOAT32_ROUNDOFF),
    "float16": (np.dtype(np.float16), 2.0**-11),
    "bfloat16": (np.dtype(ml_dtypes.bfloat16), 2.0**-8),
}

CASES = [
    ("numpy", "float32"),
    ("numpy", "float16"),
    ("numpy", "bfloat16"),
    pytest.param("cupy", "float16", marks=pytest.mark.gpu),
    pytest.param("cupy", "bfloat16", marks=pytest.mark.gpu),
]
# First and last rows, and both sides of the edges that tiles of 64 and 128 keys have.
DECODED_POSITIONS = (0, 1, 62, 63, 64, 127, 128, 129, 200, 255)


@dataclass(frozen=True)
class Problem:
    """The layer in one dtype, its float64 answer, and the errors that rounding may cause."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    exact: np.ndarray
    bound: np.ndarray
    relative_l2_bound: float


@functools.cache
def problem(dtype_name: str) -> Problem:
    """Round the layer to a dtype and derive what error that dtype explains.

    With ``u`` the unit roundoff: the probabilities are rounded to the dtype before they multiply V,
    which moves an output element by at most ``u`` times the average of ``|V|`` with the same
    weights; the output is rounded once more. Scores are kept in float32: their products and the sum
    of those are each off by about ``2**-24`` of the sum of the products' sizes, in the numerator
    and in the sum of the weights that divides it. Over the whole layer errors have mixed signs, so
    that one rounding of the scores is left.
    """
    dtype, roundoff = DTYPES[dtype_name]
    q, k, v = (array.astype(dtype) for array in load_layer())
    exact, _ = oracle.attention(q, k, v, causal=True)
    average_size, _ = oracle.attention(q, k, np.abs(v.astype(np.float64)), causal=True)
    score_error = largest_score_terms(q, k) * FLOAT32_ROUNDOFF
    return Problem(
        *(q, k, v, exact),
        bound=roundoff * (average_size + np.abs(exact)) + 4 * score_error * average_size,
        relative_l2_bound=2 * roundoff + score_error,
    )


def load_layer() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    with np.load(FIXTURE) as arrays:
        q, k, v = (arrays[f"layer{LAYER}_{name}"] for name in "qkv")
    return q, k, v


def largest_score_terms(q: np.ndarray, k: np.ndarray) -> float:
    """Return the largest scaled sum of ``|q[i] * k[i]|`` over the pairs causal attention has."""
    keys = np.repeat(np.abs(k.astype(np.float64)), len(q) // len(k), axis=0)
    sums = np.abs(q.astype(np.float64)) @ keys.swapaxes(1, 2) / np.sqrt(q.shape[-1])
    return float(sums[:, np.tri(q.shape[1], dtype=bool)].max())


def array_module(name: str) -> Any:
    module = pytest.importorskip(name)
    if name == "cupy" and not module.is_available():
        pytest.skip("CuPy finds no GPU")
    return module


def to_float64(array: Any) -> np.ndarray:
    on_host = array if isinstance(array, np.ndarray) else array.get()
    return on_host.astype(np.float64)


def test_fixture_is_what_the_readme_says() -> None:
    with np.load(FIXTURE) as arrays:
        metadata = json.loads(str(arrays["metadata"]))
        tokens = arrays["tokens"]
    q, k, v = load_layer()
    assert metadata["layers"] == [LAYER]
    assert (metadata["heads"], metadata["kv_heads"], metadata["head_dim"]) == (9, 3, 64)
    assert tokens.shape == (256,)
    assert q.shape == (9, 256, 64)
    assert k.shape == v.shape == (3, 256, 64)
    assert q.dtype == k.dtype == v.dtype == np.float16
    assert FIXTURE.stat().st_size < 1_000_000


def test_keys_have_outlier_channels_in_every_head() -> None:
    _, k, _ = load_layer()
    channel_size = np.sqrt(np.mean(np.square(k, dtype=np.float64), axis=1))  # (kv_heads, dim)
    assert np.all(channel_size.max(axis=1) > 10 * np.median(channel_size, axis=1))


@pytest.mark.parametrize(("module_name", "dtype_name"), CASES)
def test_prefill_matches_float64(module_name: str, dtype_name: str) -> None:
    xp, case = array_module(module_name), problem(dtype_name)
    out = cuflash.attention(xp.asarray(case.q), xp.asarray(case.k), xp.asarray(case.v), causal=True)
    assert out.dtype == case.q.dtype
    error = to_float64(out) - case.exact
    assert np.all(np.abs(error) <= case.bound)
    assert np.linalg.norm(error) <= case.relative_l2_bound * np.linalg.norm(case.exact)


@pytest.mark.parametrize(("module_name", "dtype_name"), CASES)
def test_one_query_against_the_cache_is_a_row_of_the_prefill(
    module_name: str, dtype_name: str
) -> None:
    """Slices of k and v, with the head stride of the whole, stand for a partly filled cache."""
    xp, case = array_module(module_name), problem(dtype_name)
    q, k, v = xp.asarray(case.q), xp.asarray(case.k), xp.asarray(case.v)
    prefill = to_float64(cuflash.attention(q, k, v, causal=True))
    for position in DECODED_POSITIONS:
        row, end = slice(position, position + 1), position + 1
        decoded = to_float64(cuflash.attention(q[:, row], k[:, :end], v[:, :end], causal=True))
        error = np.abs(decoded - case.exact[:, row])
        assert np.all(error <= case.bound[:, row]), f"position {position} against float64"
        difference = np.abs(decoded - prefill[:, row])  # of two results, each within the bound
        assert np.all(difference <= 2 * case.bound[:, row]), f"position {position} against prefill"
