"""Quantised tensors: what belongs together, and wrong arguments."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from comparison import Array
from fp8_inputs import normal

from cuflash.fp8 import Fp8Recipe, Fp8Tensors, quantize_fp8

PLAIN = Fp8Recipe(rotation=None, balance=False, center_k=False, center_v=False, residual_mean=False)
ALL = Fp8Recipe()


def inputs() -> tuple[Array, Array, Array]:
    return normal(q_heads=4, kv_heads=2, q_len=70, kv_len=300, batch=2)


# What belongs together


def changed(tensors: Fp8Tensors, name: str, **changes: Any) -> Fp8Tensors:
    tensor = dataclasses.replace(getattr(tensors, name), **changes)
    return dataclasses.replace(tensors, **{name: tensor})


@pytest.mark.parametrize(
    ("name", "changes", "error", "match"),
    [
        ("k", {"scale": np.ones((2, 2, 3, 1), np.float32)}, ValueError,
         r"k.scale: got shape \(2, 2, 3, 1\); expected \(2, 2, 12, 1\) .* k_block 'columns'"),
        ("q", {"scale": np.ones((2, 4, 70), np.float32)}, ValueError, "q.scale: got shape"),
        ("v", {"scale": np.ones((1, 1, 1, 64), np.float32)}, ValueError, "v.scale: got shape"),
        ("v", {"scale": np.ones((2, 2, 1, 64))}, TypeError, "v.scale: got dtype float64"),
        ("k", {"data": np.zeros((2, 2, 300, 64), np.int8)}, TypeError, "k.data: got dtype int8"),
        ("k", {"data": np.zeros((2, 2, 300, 63), np.uint8)}, ValueError, "k.data: .* axis of 64"),
        ("k", {"data": np.zeros(64, np.uint8)}, ValueError, "k.data: got shape"),
        ("q", {"kv_heads": 3}, ValueError, "q.kv_heads: got 3"),
        ("k", {"kv_heads": 1}, ValueError, "k.kv_heads: got 1"),
        ("k", {"balance": None}, ValueError, "k.balance: got None; expected an array"),
        ("k", {"mean": np.zeros((2, 2, 64), np.float32)}, ValueError, "k.mean: got shape"),
        ("v", {"residual": None}, ValueError, "v.residual: got None; expected an array"),
        ("v", {"role": "w"}, ValueError, "role: got 'w'"),
        ("k", {"role": "q"}, ValueError, "q.scale: got shape"),
        ("k", {"layout": "bshd"}, ValueError, "k.scale: got shape"),
        ("k", {"layout": "sbhd"}, ValueError, "layout: got 'sbhd'"),
        ("q", {"recipe": "f8"}, TypeError, "q.recipe: got 'f8'; expected an Fp8Recipe"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit(
    name: str, changes: dict[str, Any], error: type[Exception], match: str
) -> None:
    quantized = quantize_fp8(*inputs())
    with pytest.raises(error, match=match):
        changed(quantized, name, **changes)


def test_tensors_of_different_calls() -> None:
    q, k, v = inputs()
    f8 = quantize_fp8(q, k, v)

    def swap(name: str, other: Fp8Tensors) -> Fp8Tensors:
        return dataclasses.replace(f8, **{name: getattr(other, name)})

    one_rotated = quantize_fp8(q, k, v, dataclasses.replace(ALL, rotation=None))
    with pytest.raises(ValueError, match="k: got no rotation; expected one as in q"):
        swap("k", one_rotated)
    with pytest.raises(ValueError, match="k: got a rotation; expected none as in q"):
        swap("q", one_rotated)
    with pytest.raises(ValueError, match=r"k: got Fp8Recipe\(.*; expected q's recipe"):
        swap("k", quantize_fp8(q, k, v, dataclasses.replace(ALL, seed=1)))
    with pytest.raises(ValueError, match=r"v: got Fp8Recipe\(.*; expected q's recipe"):
        swap("v", quantize_fp8(q, k, v, "i8"))
    with pytest.raises(ValueError, match="v: got shape"):
        swap("v", quantize_fp8(q, k[:, :, :299], v[:, :, :299]))
    one = quantize_fp8(q[:1], k[:1], v[:1])
    with pytest.raises(ValueError, match="k: got batch 1; expected q's batch, 2"):
        dataclasses.replace(f8, k=one.k, v=one.v)
    with pytest.raises(ValueError, match="k: got head_dim 32; expected q's head_dim, 64"):
        swap("k", quantize_fp8(q[..., :32], k[..., :32], v[..., :32]))
    with pytest.raises(ValueError, match="v: got a quantised k; expected v"):
        dataclasses.replace(f8, v=f8.k)
    with pytest.raises(ValueError, match="v: got 3 axes; expected 4 as in q"):
        swap("v", quantize_fp8(q[0], k[0], v[0]))
    with pytest.raises(ValueError, match="q: got 4 kv heads; expected k's number, 2"):
        swap("q", quantize_fp8(q, np.repeat(k, 2, 1), np.repeat(v, 2, 1)))
    with pytest.raises(ValueError, match="k: got layout 'bshd'; expected q's, 'bhsd'"):
        swap("k", quantize_fp8(*(x.swapaxes(1, 2) for x in (q, k, v)), layout="bshd"))
    with pytest.raises(ValueError, match="first_values: got None; expected an array"):
        dataclasses.replace(quantize_fp8(q, k, v, "f8+"), first_values=None)
    with pytest.raises(ValueError, match="mean_scores: got shape"):
        dataclasses.replace(f8, mean_scores=np.zeros((2, 4, 71), np.float32))


# Arguments


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"recipe": "f16"}, ValueError, "recipe: got 'f16'"),
        ({"q": np.ones((2, 4, 70, 64))}, TypeError, "q: got dtype float64; expected float16"),
        ({"q": np.ones((2, 4, 70, 64), np.int8)}, TypeError, "q: got dtype int8"),
        ({"q": [[1.0]]}, TypeError, "q: got list"),
        ({"k": np.ones((2, 2, 300, 64), np.float32)}, TypeError, "k: got dtype float32"),
        ({"k": np.ones((2, 3, 300, 64), np.float16)}, ValueError, "v: got 2 heads"),
        ({"v": np.ones((2, 2, 301, 64), np.float16)}, ValueError, "v: got length 301"),
        ({"layout": "sbhd"}, ValueError, "layout: got 'sbhd'"),
        ({"kv_lens": [1]}, ValueError, "kv_lens: got shape"),
        ({"kv_lens": [1, 301]}, ValueError, r"kv_lens: got kv_lens\[1\] = 301"),
        ({"q_lens": [-1, 3]}, ValueError, r"q_lens: got q_lens\[0\] = -1"),
        ({"q_lens": [1.0, 3.0]}, TypeError, "q_lens: got dtype float64"),
        ({"recipe": Fp8Recipe(rotation=np.eye(32))}, ValueError, r"rotation: .* \(64, 64\)"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(
    changes: dict[str, Any], error: type[Exception], match: str
) -> None:
    arguments = dict(zip("qkv", inputs(), strict=True)) | changes
    if np.asarray(arguments["q"]).dtype == np.float64:
        arguments |= {name: arguments[name].astype(np.float64) for name in "kv"}
    with pytest.raises(error, match=match):
        quantize_fp8(**arguments)
