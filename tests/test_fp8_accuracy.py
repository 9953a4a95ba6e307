"""Errors of 8-bit attention: by recipe and distribution, of one accumulator, and its memory."""

from __future__ import annotations

import dataclasses
import math
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from comparison import Array
from fp8_inputs import normal, relative

from cuflash import oracle
from cuflash.fp8 import PRESETS, Fp8Recipe, attention_fp8, attention_quantized, quantize_fp8

# Accumulators


def test_one_accumulator_loses_means_that_are_not_subtracted() -> None:
    q, k, v = normal(1, 1, q_len=64, kv_len=4096)
    v = (v + 2 * np.random.default_rng(1).standard_normal((1, 1, 1, 64))).astype(np.float16)
    exact, _ = oracle.attention(q, k, v)
    errors = {
        (accumulate, centred): relative(
            attention_fp8(
                q, k, v,
                recipe=Fp8Recipe(
                    accumulate=accumulate, center_v=centred, residual_mean=centred
                ),
            ),
            exact,
        )
        for accumulate in ("fp32", "two_level", "single")
        for centred in (False, True)
    }  # fmt: skip
    assert errors["single", False] > 5 > 10 * errors["fp32", False]
    assert errors["two_level", False] < 1.3 * errors["fp32", False]
    for accumulate in ("two_level", "single"):
        assert errors[accumulate, True] < 1.2 * errors["fp32", True] < 0.2


# Accuracy, by the distributions that tell recipes apart


Draw = Callable[[np.random.Generator, tuple[Array, Array, Array]], None]


def large_key_channels(rng: np.random.Generator, arrays: tuple[Array, Array, Array]) -> None:
    """Large channels of k that small ones of q make up for."""
    q, k, _ = arrays
    factors = np.ones(128)
    factors[rng.choice(128, 4, replace=False)] = 10, 20, 35, 50
    q /= factors
    k *= factors


def means(rng: np.random.Generator, arrays: tuple[Array, Array, Array]) -> None:
    _, k, v = arrays
    k += 8 * rng.standard_normal((1, len(k[0]), 1, 128))
    v += 2 * rng.standard_normal((1, len(v[0]), 1, 128))


def sinks(rng: np.random.Generator, arrays: tuple[Array, Array, Array]) -> None:
    """Four keys of large scores and tiny values."""
    q, k, v = arrays
    mean = rng.standard_normal((1, len(q[0]), 1, 128))
    q += mean
    k[:, :, :4] += 8 * math.sqrt(128) * mean / np.square(mean).sum(axis=-1, keepdims=True)
    v[:, :, :4] *= 0.02


DISTRIBUTIONS: dict[str, Draw] = {
    "normal": lambda rng, arrays: None,
    "large key channels": large_key_channels,
    "means": means,
    "sinks": sinks,
}


@pytest.fixture(scope="module")
def problem() -> Callable[[str], tuple[tuple[Array, Array, Array], Array]]:
    """Inputs of a distribution and their exact attention: 2 heads, 256 queries, 4096 keys."""
    made: dict[str, tuple[tuple[Array, Array, Array], Array]] = {}

    def make(name: str) -> tuple[tuple[Array, Array, Array], Array]:
        if name not in made:
            rng = np.random.default_rng(11)
            arrays = normal(2, 2, 256, 4096, 128, dtype=np.float64, seed=12)
            DISTRIBUTIONS[name](rng, arrays)
            q, k, v = (x.astype(np.float16) for x in arrays)
            made[name] = (q, k, v), oracle.attention(q, k, v)[0]
        return made[name]

    return make


# Percent of the norm. Errors of e4m3 and int8 at these sizes are 4.8 and 3.2 (normal and channels),
# 0.07 and 0.05 (means: against a large result), 5.6 and 3.2 (sinks); the limits leave some 8 % for
# the choice of inputs, 15 to 25 % where a few large weights decide.
LIMITS = {
    ("normal", "f8"): 5.2, ("normal", "f8+"): 5.2, ("normal", "i8"): 3.5, ("normal", "i8+"): 3.5,
    ("large key channels", "f8"): 5.2, ("large key channels", "f8+"): 5.2,
    ("large key channels", "i8"): 3.5, ("large key channels", "i8+"): 3.5,
    ("means", "f8"): 0.09, ("means", "f8+"): 0.09, ("means", "i8"): 0.06, ("means", "i8+"): 0.06,
    ("sinks", "f8+"): 6.6, ("sinks", "i8+"): 3.8,
}  # fmt: skip


@pytest.mark.parametrize(("name", "recipe"), LIMITS)
def test_errors_stay_below_their_limits(name: str, recipe: str, problem: Any) -> None:
    arrays, exact = problem(name)
    error = relative(attention_fp8(*arrays, recipe=recipe), exact)
    limit = LIMITS[name, recipe]
    assert 0.6 * limit < error <= limit  # far below it, something is not rounded


def test_what_each_step_is_for(problem: Any) -> None:
    def error(name: str, recipe: str, **changes: Any) -> float:
        arrays, exact = problem(name)
        changed = dataclasses.replace(PRESETS[recipe], **changes)
        return relative(attention_fp8(*arrays, recipe=changed), exact)

    # Rotation mixes large channels into all others, unless balancing came first.
    assert error("large key channels", "fa3") > 4 * error("large key channels", "f8")
    assert error("large key channels", "f8", balance=False) > 15
    assert error("means", "f8", center_k=False) > 2 * error("means", "f8")
    assert error("means", "f8", center_v=False) > 1.3 * error("means", "f8")
    assert error("normal", "f8", residual_mean=False) > 1.02 * error("normal", "f8")
    # Weights relative to the running maximum of a sink, and not scaled up, underflow in the tiles
    # that come after it, which are those before it.
    (q, k, v), exact = problem("sinks")
    last = q, k[:, :, ::-1], v[:, :, ::-1]
    errors = [
        relative(attention_fp8(*last, recipe=dataclasses.replace(PRESETS["f8"], **way)), exact)
        for way in (
            {},
            {"reference": "running", "p_scale": 1},
            {"reference": "running", "p_scale": 256},
        )
    ]
    assert errors[1] > 2 * errors[0]
    assert errors[2] < 1.2 * errors[0]
    # A tile's largest weight is exact relative to itself.
    assert error("normal", "i8", reference="lagging") > 1.03 * error("normal", "i8")
    assert error("normal", "i8") < 0.75 * error("normal", "f8")
    assert error("normal", "i8", k_block="head", q_block="head") > 1.03 * error("normal", "i8")


@pytest.mark.parametrize("nats", [8, 10])
def test_a_reference_goes_down_to_weights_that_are_many(
    nats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first key that comes outshines all others, whose weights together are not small."""
    rng = np.random.default_rng(3)
    q = 1 + 0.1 * rng.standard_normal((1, 1, 32, 64))
    k = 0.1 * rng.standard_normal((1, 1, 8192, 64))
    v = 1 + rng.standard_normal((1, 1, 8192, 64))
    k[0, 0, -1] += nats / 8
    v[0, 0, -1] = -1
    exact = oracle.attention(q, k, v)[0]
    plain = Fp8Recipe(qk_dtype="int8", center_v=False, residual_mean=False)

    def error(reference: str) -> float:
        recipe = dataclasses.replace(plain, reference=reference)
        return relative(
            attention_fp8(*(x.astype(np.float32) for x in (q, k, v)), recipe=recipe), exact
        )

    assert error("lagging") < 1.1 * error("tile")
    monkeypatch.setattr("cuflash.fp8.emulate._LEAST", 0.0)
    assert error("lagging") > 5 * error("tile")


def test_memory_does_not_grow_with_the_product_of_the_lengths() -> None:
    q, k, v = normal(1, 1, q_len=2048, kv_len=16384, dim=32)
    tensors = quantize_fp8(q, k, v, "f8")
    tracemalloc.start()
    attention_quantized(tensors, causal=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    scores = 4 * 2048 * 16384
    assert peak < scores / 10, f"{peak / 2**20:.0f} MiB"


# Arguments
