"""What `attention_fp8` and `attention_quantized` take, refuse and return."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from dlpack_exporter import Exporter
from fp8_inputs import normal

from cuflash import attention
from cuflash.fp8 import Fp8Recipe, attention_fp8, attention_quantized, quantize_fp8


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"recipe": "f9"}, ValueError, "recipe: got 'f9'"),
        ({"recipe": 8}, TypeError, "recipe: got 8"),
        ({"scale": "1"}, TypeError, "scale: got '1'"),
        ({"causal": 1}, TypeError, "causal: got 1"),
        ({"causal_align": "left"}, ValueError, "causal_align: got 'left'"),
        ({"window": (1,)}, ValueError, r"window: got \(1,\)"),
        ({"softcap": 0.0}, ValueError, "softcap: got 0.0"),
        ({"layout": "hsd"}, ValueError, "layout: got 'hsd'"),
        ({"mask": np.ones(300)}, TypeError, "mask: got dtype float64"),
        ({"kv_lens": [301]}, ValueError, "kv_lens: got "),
        ({"q": np.ones((1, 2, 40, 64), np.float32)}, TypeError, "k: got dtype float16"),
        ({"q": np.ones((1, 3, 40, 64), np.float16)}, ValueError, "k: got 2 kv heads for 3"),
        ({"q": np.ones((1, 2, 40, 300), np.float16)}, ValueError, "q: got head_dim 300"),
        ({"out": np.ones((1, 2, 40, 63), np.float16)}, ValueError, "out: got shape"),
        ({"out": np.ones((1, 2, 40, 64), np.float32)}, TypeError, "out: got dtype"),
        ({"return_lse": None}, TypeError, "return_lse: got None"),
    ],
)
def test_wrong_arguments_are_named(
    changes: dict[str, Any], error: type[Exception], match: str
) -> None:
    arguments = dict(zip("qkv", normal(), strict=True)) | changes
    with pytest.raises(error, match=match):
        attention_fp8(**arguments)


def test_outputs_that_can_not_be_written() -> None:
    q, k, v = normal()
    for name, shared in (("q", q), ("k", k), ("v", v)):
        with pytest.raises(ValueError, match=f"out: shares memory with {name}"):
            attention_fp8(q, k, v, out=shared[:, :, : q.shape[2]])
    memory = np.zeros(max(q.nbytes, q.shape[2] * k.shape[2] + 1) // 2 * 2, bool)
    mask = memory[: q.shape[2] * k.shape[2]].reshape(q.shape[2], k.shape[2])
    out = memory[: q.nbytes].view(np.float16).reshape(q.shape)
    with pytest.raises(ValueError, match="out: shares memory with mask"):
        attention_fp8(q, k, v, mask=mask, out=out)
    out = np.empty_like(q)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="out: got a read-only array"):
        attention_fp8(q, k, v, out=out)
    double = q.astype(np.float64)
    with pytest.raises(TypeError, match="q: got dtype float64; expected float16, bfloat16"):
        attention_fp8(double, k.astype(np.float64), v.astype(np.float64))


def test_the_output_that_was_given_is_returned() -> None:
    q, k, v = normal()
    tensors = quantize_fp8(q, k, v)
    for attend in (lambda out: attention_fp8(q, k, v, out=out),
                   lambda out: attention_quantized(tensors, out=out)):  # fmt: skip
        memory = np.zeros_like(q)
        given = Exporter(memory)
        assert attend(given) is given
        assert np.array_equal(memory, attention_fp8(q, k, v))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_quantised_attention_has_the_dtype_that_was_quantised(dtype: Any) -> None:
    q, k, v = (array.astype(dtype) for array in normal())
    result = attention_quantized(quantize_fp8(q, k, v))
    assert result.dtype == dtype
    assert np.array_equal(result, attention_fp8(q, k, v))
    assert attention_quantized(quantize_fp8(q, k, v), dtype="float32").dtype == np.float32


def test_wrong_arguments_of_quantised_attention() -> None:
    tensors = quantize_fp8(*normal())
    with pytest.raises(TypeError, match="tensors: got tuple; expected Fp8Tensors"):
        attention_quantized((tensors.q, tensors.k, tensors.v))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dtype: got 'float64'; expected one of 'float16'"):
        attention_quantized(tensors, dtype="float64")
    with pytest.raises(TypeError, match="out: got dtype float32; expected q's dtype, float16"):
        attention_quantized(tensors, out=np.empty((1, 2, 40, 64), np.float32))


def test_attention_takes_what_quantize_fp8_returned() -> None:
    q, k, v = (array.swapaxes(1, 2) for array in normal())
    tensors = quantize_fp8(q, k, v, "i8", layout="bshd", kv_lens=[200])
    options: dict[str, Any] = {"causal": True, "return_lse": True}
    expected = attention_quantized(tensors, **options)
    found = attention(tensors.q, tensors.k, tensors.v, **options)
    for mine, its in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, its)


def test_attention_refuses_what_does_not_belong_together() -> None:
    q, k, v = normal()
    tensors, others = quantize_fp8(q, k, v, "f8"), quantize_fp8(q, k, v, "f8")
    of_int8 = quantize_fp8(q, k, v, "i8")
    for parts, error, match in (
        ((tensors.q, k, v), TypeError, "k: got ndarray; expected an Fp8Tensor, as q is"),
        ((tensors.q, tensors.k, v), TypeError, "v: got ndarray"),
        ((q, tensors.k, tensors.v), TypeError, "k: got .*Fp8Tensor"),
        ((tensors.q, tensors.k, of_int8.v), ValueError, "v: got Fp8Recipe"),
        ((tensors.q, others.k, others.v), ValueError, "k, v: got other calls' than q"),
    ):
        with pytest.raises(error, match=match):
            attention(*parts)
    for name, value in {"bias": q, "kernel": "sm90", "kv_lens": [3], "layout": "bshd"}.items():
        with pytest.raises(ValueError, match=f"{name}: got one beside Fp8Tensors; expected none"):
            attention(tensors.q, tensors.k, tensors.v, **{name: value})
    parts = others.q, others.k, others.v
    del others
    with pytest.raises(ValueError, match="whose result is gone"):
        attention(*parts)
    plain = quantize_fp8(q, k, v, Fp8Recipe(center_k=False))  # which needs nothing else
    parts, expected = (plain.q, plain.k, plain.v), attention_quantized(plain)
    del plain
    np.testing.assert_array_equal(attention(*parts), expected)
