"""Names, defaults and spellings of the options; the answer to a name that does not exist."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import ArrayInfo
from cuflash.spec import OPTION_NAMES, Options

# The public contract, in its order.
CONTRACT = {
    "scale": None,
    "causal": False,
    "causal_align": "bottom_right",
    "window": None,
    "softcap": None,
    "mask": None,
    "bias": None,
    "alibi_slopes": None,
    "sinks": None,
    "block_mask": None,
    "q_lens": None,
    "kv_lens": None,
    "dropout_p": 0.0,
    "seed": None,
    "layout": "bhsd",
    "return_lse": False,
    "out": None,
    "kernel": "auto",
    "deterministic": False,
}
STAND_IN = ArrayInfo((2, 4, 16, 8), "float16", "cpu")


def spec_of(**options: Any) -> Any:
    return cuflash.explain(STAND_IN, STAND_IN, STAND_IN, **options).spec


# --- signature ------------------------------------------------------------------------------------


def test_attention_has_the_options_of_the_contract() -> None:
    parameters = inspect.signature(cuflash.attention).parameters
    assert list(parameters) == ["q", "k", "v", *CONTRACT]
    for name in "qkv":
        assert parameters[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        assert parameters[name].default is inspect.Parameter.empty
    for name, default in CONTRACT.items():
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[name].default == default
        assert type(parameters[name].default) is type(default)


def test_options_mirror_the_signature() -> None:
    assert tuple(CONTRACT) == OPTION_NAMES
    assert Options()._asdict() == CONTRACT
    assert spec_of() == spec_of(**CONTRACT)


@pytest.mark.parametrize("name", ["attention", "explain", "merge_states", "io_bytes", "info"])
def test_public_functions_describe_every_parameter(name: str) -> None:
    function = getattr(cuflash, name)
    text = inspect.getdoc(function)
    assert text
    for parameter in inspect.signature(function).parameters:
        assert parameter in text, f"{name}: {parameter} is not described"


def test_the_public_names_exist() -> None:
    assert all(hasattr(cuflash, name) for name in cuflash.__all__)
    assert cuflash.__all__ == sorted(cuflash.__all__)


def test_options_are_keyword_only() -> None:
    q = np.ones((3, 4), np.float16)
    with pytest.raises(TypeError, match="positional"):
        cuflash.attention(q, q, q, 0.5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'v'"):
        cuflash.attention(q, q)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("casual", "causal"),
        ("is_causal", "causal"),
        ("softmax_scale", None),
        ("attn_mask", "mask"),
        ("windows", "window"),
        ("soft_cap", "softcap"),
        ("kvlens", "kv_lens"),
        ("zzz", None),
    ],
)
@pytest.mark.parametrize("function", [cuflash.attention, cuflash.explain])
def test_an_unknown_option_is_answered_with_the_nearest(
    function: Callable[..., Any], given: str, meant: str | None
) -> None:
    q = np.ones((3, 4), np.float16)
    with pytest.raises(TypeError) as caught:
        function(q, q, q, **{given: True})
    message = str(caught.value)
    assert message.startswith(f"{function.__name__}: unknown option {given!r}")
    assert all(name in message for name in CONTRACT)
    if meant:
        assert f", did you mean {meant!r}?" in message


# --- spellings that mean the same -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["scale", "softcap"])
@pytest.mark.parametrize(
    "value",
    [2, 2.0, np.float16(2), np.float32(2), np.float64(2), np.int8(2), np.array(2), np.array(2.0),
     Fraction(2)],
    ids=repr,
)  # fmt: skip
def test_any_real_number(name: str, value: Any) -> None:
    stored = getattr(spec_of(**{name: value}), name)
    assert stored == 2.0
    assert type(stored) is float


@pytest.mark.parametrize("value", [0, -1.5, -0.0, 1e-300, 1e30])
def test_scale_may_be_zero_negative_or_extreme(value: float) -> None:
    assert spec_of(scale=value).scale == value


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("name", "value"), [("scale", 1e39), ("scale", -1e39), ("softcap", 1e39)])
def test_factors_beyond_float32_are_refused(name: str, value: float, dtype: str) -> None:
    """They would be infinite, and results NaN. float64 inputs have float64 scores."""
    q = ArrayInfo((1, 2, 3, 8), dtype, "cpu")
    with pytest.raises(ValueError, match=f"^{name}: got .*; expected a number that float32 holds"):
        cuflash.explain(q, q, q, **{name: value})
    wide = replace(q, dtype="float64")
    assert getattr(cuflash.explain(wide, wide, wide, **{name: value}).spec, name) == value


def test_default_scale_is_that_of_the_head_dim() -> None:
    assert spec_of().scale == 1 / math.sqrt(8)
    assert spec_of(scale=None).scale == 1 / math.sqrt(8)


@pytest.mark.parametrize("value", [0, 0.0, np.float32(0), np.array(0)])
def test_dropout_of_zero_is_none(value: Any) -> None:
    assert spec_of(dropout_p=value) == spec_of()


@pytest.mark.parametrize("value", [True, np.True_])
@pytest.mark.parametrize("name", ["causal", "return_lse", "deterministic"])
def test_flags(name: str, value: Any) -> None:
    assert spec_of(**{name: value}) == spec_of(**{name: True}) != spec_of()


@pytest.mark.parametrize(
    "value",
    [(3, 0), [3, 0], (np.int64(3), np.uint8(0)), [np.int16(3), 0], range(3, -1, -3)],
    ids=str,
)
def test_windows(value: Any) -> None:
    spec = spec_of(window=value)
    assert (spec.left, spec.right) == (3, 0)
    assert spec == spec_of(window=(3, 0))


@pytest.mark.parametrize(
    ("options", "bounds"),
    [
        ({}, (None, None)),
        ({"window": (None, None)}, (None, None)),
        ({"causal": True}, (None, 0)),
        ({"window": (None, 0)}, (None, 0)),
        ({"window": (5, 3)}, (5, 3)),
        ({"window": (5, 3), "causal": True}, (5, 0)),
        ({"window": (5, None), "causal": True}, (5, 0)),
        ({"window": (0, 0)}, (0, 0)),
    ],
    ids=str,
)
def test_causal_is_a_window(options: dict[str, Any], bounds: tuple[int | None, ...]) -> None:
    spec = spec_of(**options)
    assert (spec.left, spec.right) == bounds


@pytest.mark.parametrize(
    "largest", [2**31, 2**62, 2**63 - 1, 2**63, 2**70, 10**400], ids=lambda n: f"{n:#x}"[:20]
)
def test_a_window_of_any_size_is_no_bound(largest: int) -> None:
    q, k = np.ones((3, 4), np.float32), np.arange(20, dtype=np.float32).reshape(5, 4)
    for window, alike in (
        ((largest, largest), None),
        ((largest, 0), (None, 0)),
        ((0, largest), (0, None)),
    ):
        plan = cuflash.explain(q, k, k, window=window)
        assert plan.flops == cuflash.explain(q, k, k, window=alike).flops
        assert str(plan)
        wide, open_ = (cuflash.attention(q, k, k, window=w) for w in (window, alike))
        assert np.array_equal(wide, open_)


LENS: list[Any] = [
    [3, 0],
    (3, 0),
    [np.int64(3), np.uint8(0)],
    np.array([3, 0], np.int32),
    np.array([3, 0], np.uint64),
    np.array([3, 9, 0, 9], np.int16)[::2],
    np.array([0, 3], np.int64)[::-1],
]


@pytest.mark.parametrize("value", LENS, ids=repr)
def test_lengths(value: Any) -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 2, 5, 4))
    expected = cuflash.attention(q, k, v, kv_lens=np.array([3, 0]))
    assert np.array_equal(cuflash.attention(q, k, v, kv_lens=value), expected)
    assert not expected[1].any()


@pytest.mark.parametrize("value", [[], (), np.zeros(0, np.int32)], ids=repr)
def test_lengths_of_an_empty_batch(value: Any) -> None:
    q = np.ones((0, 2, 5, 4), np.float32)
    assert cuflash.attention(q, q, q, q_lens=value, kv_lens=value).shape == q.shape


def test_lengths_without_a_batch_axis() -> None:
    q = np.ones((5, 4), np.float32)
    assert np.array_equal(cuflash.attention(q, q, q, q_lens=[2])[:, 0], [1, 1, 0, 0, 0])


@pytest.mark.parametrize("bias_dtype", ["float16", "float32"])
def test_bias_dtypes(bias_dtype: str) -> None:
    bias = ArrayInfo((16, 16), bias_dtype, "cpu")
    assert spec_of(bias=bias).bias.dtype == bias_dtype


@pytest.mark.parametrize(
    ("shape", "strides", "varies"),
    [
        ((), (), (False,) * 4),
        ((16,), (), (False, False, False, True)),
        ((16, 1), (), (False, False, True, False)),
        ((4, 1, 1), (), (False, True, False, False)),
        ((2, 4, 16, 16), (), (True,) * 4),
        ((1, 4, 1, 16), (), (False, True, False, True)),
        ((2, 4, 16, 16), (0, 0, 16, 1), (False, False, True, True)),
    ],
    ids=str,
)
def test_masks_of_every_broadcast_pattern(
    shape: tuple[int, ...], strides: tuple[int, ...], varies: tuple[bool, ...]
) -> None:
    mask = ArrayInfo(shape, "bool", "cpu", strides)
    assert spec_of(mask=mask).mask.varies == varies


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_placement_follows_the_strides(rank: int, layout: str) -> None:
    shape, strides = (2, 4, 16, 8)[4 - rank :], (1000, 200, 10, 1)[4 - rank :]
    info = ArrayInfo(shape, "float16", "cpu", strides, aligned=False)
    spec = cuflash.explain(info, info, info, layout=layout).spec
    expected = (*(0,) * (4 - rank), *strides)
    if layout == "bshd" and rank > 2:
        expected = (expected[0], expected[2], expected[1], expected[3])
    assert spec.q.strides == spec.k.strides == spec.v.strides == expected
    assert not spec.q.aligned
    heads, seq = (16, 4) if layout == "bshd" and rank > 2 else (4 if rank > 2 else 1, 16)
    assert (spec.batch, spec.q_heads, spec.q_len) == (2 if rank == 4 else 1, heads, seq)
