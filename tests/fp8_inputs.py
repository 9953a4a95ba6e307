"""Inputs and recipes of the tests of 8-bit attention, and its error."""

from __future__ import annotations

from typing import Any

import numpy as np
from comparison import Array

from cuflash.fp8 import PRESETS, Fp8Recipe

RECIPES: dict[str, Fp8Recipe] = {
    **PRESETS,
    "running": Fp8Recipe(reference="running", p_scale=1),
    "lagging in blocks": Fp8Recipe(reference="lagging", p_scale=256, v_block=128, k_block=64),
    "v in blocks": Fp8Recipe(v_block=128, k_block=256, q_block=64),
    "v in small blocks": Fp8Recipe(v_block=32, k_block=32, q_block="head"),
    "v in large blocks": Fp8Recipe(v_block=256, k_block="head", p_scale=16),
    "v by token": Fp8Recipe(v_block="token", k_block="token"),
    "one v scale": Fp8Recipe(v_block="head", first_tile_16bit=True, center_v=False),
    "two levels": Fp8Recipe(accumulate="two_level"),
    "two levels in blocks": Fp8Recipe(accumulate="two_level", v_block=64),
    "one accumulator": Fp8Recipe(accumulate="single"),
    "one accumulator in blocks": Fp8Recipe(accumulate="single", v_block=64),
}


def normal(
    q_heads: int = 2, kv_heads: int = 2, q_len: int = 40, kv_len: int = 300, dim: int = 64,
    dim_v: int | None = None, batch: int = 1, dtype: Any = np.float16, seed: int = 0,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """q, k and v of a normal distribution, (batch, heads, length, dim)."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((batch, q_heads, q_len, dim))
    k = rng.standard_normal((batch, kv_heads, kv_len, dim))
    v = rng.standard_normal((batch, kv_heads, kv_len, dim if dim_v is None else dim_v))
    return q.astype(dtype), k.astype(dtype), v.astype(dtype)


def relative(found: Array, exact: Array) -> float:
    """Error in percent of the norm."""
    distance = np.linalg.norm(found.astype(np.float64) - exact)
    return float(100 * distance / np.linalg.norm(exact))
