"""Quantised tensors in a GPU's memory, laid out by hand in NumPy's."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fp8_inputs import normal

from cuflash.fp8 import PRESETS, Fp8Tensors, quantize_fp8
from cuflash.fp8.gpu_quantizer import Codes, Shapes
from cuflash.fp8.gpu_tensors import GpuFp8Tensors
from cuflash.fp8.scales import spread

# Where the kernel wants key p of 16: columns 2 t, 2 t + 1, 8 + 2 t, 9 + 2 t of thread t in turn.
KEY_AT = [p % 4 // 2 * 8 + p // 4 * 2 + p % 2 for p in range(16)]


def laid_out(tensors: Fp8Tensors, bucket: int, layout: str, rank: int) -> GpuFp8Tensors:
    """What a GPU would have made, of what NumPy has."""
    q, k, v = tensors.q, tensors.k, tensors.v
    batch, q_heads, q_len, _ = q.codes.shape
    kv_heads, kv_len = k.codes.shape[1:3]
    blocks = -(-kv_len // 384) * 6
    shapes = Shapes(batch, q_heads, kv_heads, q_len, kv_len, bucket, blocks, 1, 1, 1)

    def padded(array: Any, *shape: int) -> Any:
        wide = np.zeros(shape, array.dtype)
        wide[tuple(map(slice, array.shape))] = array
        return wide

    heads = batch, kv_heads
    keys = padded(v.codes.swapaxes(2, 3), *heads, bucket, blocks * 64)
    per_key = np.broadcast_to(spread(k.scale, k.block, kv_len), (*heads, kv_len, 1))
    # Of 64 keys, those of columns 2 t and 2 t + 1 of each 8: key 2 t is one of them.
    firsts = padded(per_key[..., 0], *heads, blocks * 64).reshape(*heads, blocks, 64)
    of_channels = (*heads, 1, bucket)
    norm = np.float32(1 / q.rotation.block**0.5)
    balance = np.ones((*heads, 1, q.head_dim), np.float32) if q.balance is None else q.balance
    added = sum(part for part in (v.mean, v.residual) if part is not None)
    parts = {
        "k_means": padded(np.zeros_like(balance) if k.mean is None else k.mean, *of_channels),
        "q_factors": padded(-norm * balance, *of_channels),
        "v_means": padded(np.zeros_like(balance) + added, *of_channels),
        "v_scales": padded(v.scale, *of_channels),
        "q_codes": padded(q.codes, batch, q_heads, q_len, bucket),
        "k_codes": padded(k.codes, *heads, kv_len, bucket),
        "v_codes": keys.reshape(*heads, bucket, -1, 16)[..., KEY_AT],
        "q_scales": np.broadcast_to(spread(q.scale, q.block, q_len), (*q.codes.shape[:3], 1)),
        "k_scales": firsts[..., 0:8:2],
        "lse_shifts": np.zeros(()) if tensors.mean_scores is None else tensors.mean_scores,
    }
    memory = np.zeros(shapes.places["end"], np.uint8)
    for name, part in parts.items():
        found = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
        memory[shapes.places[name] :][: found.size] = found
    codes = Codes(memory, *(0,) * 9)
    spec: Any = SimpleNamespace(dtype="float16", head_dim=q.head_dim, head_dim_v=v.head_dim)
    device: Any = None
    return GpuFp8Tensors(spec, tensors.recipe, device, codes, shapes, rank, layout, None, None)


@pytest.mark.parametrize(("dim", "bucket"), [(64, 64), (96, 128), (24, 64)])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"qk_dtype": "int8", "balance": False, "center_k": False},
        {"q_block": 64, "k_block": 64, "residual_mean": False},
        {"q_block": 128, "k_block": 128, "center_v": False, "rotation": None},
        {"center_v": False, "residual_mean": False},
    ],
)
def test_parts_are_those_of_numpy(
    changes: dict[str, Any], layout: str, dim: int, bucket: int
) -> None:
    arrays = normal(q_heads=4, q_len=150, kv_len=333, dim=dim)
    if layout == "bshd":
        arrays = tuple(x.swapaxes(1, 2) for x in arrays)  # type: ignore[assignment]
    recipe = dataclasses.replace(PRESETS["f8"], **changes)
    expected = quantize_fp8(*arrays, recipe, layout=layout)
    found = laid_out(expected, bucket, layout, 4)
    assert found.recipe == recipe
    assert found.array_shapes == [array.shape for array in arrays]
    for name in "qkv":
        mine, its = getattr(found, name), getattr(expected, name)
        np.testing.assert_array_equal(mine.data, its.data)
        np.testing.assert_array_equal(mine.scale, its.scale)
        np.testing.assert_allclose(mine.dequantize(), its.dequantize(), rtol=2e-5, atol=1e-6)
    if recipe.center_k:
        np.testing.assert_array_equal(found.mean_scores, expected.mean_scores)
    else:
        assert found.mean_scores is None
