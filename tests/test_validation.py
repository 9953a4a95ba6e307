"""Every wrong argument: the exception, that it names the argument, and that nothing has run."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from comparison import Array
from numpy.lib.stride_tricks import as_strided

import cuflash
from cuflash import ArrayInfo, families

# (batch, heads, seq, dim) of q; k has 2 heads and 7 keys, v 5 columns.
Q, K, V = (2, 4, 6, 8), (2, 2, 7, 8), (2, 2, 7, 5)
OUT, SCORES = (2, 4, 6, 5), (2, 4, 6, 7)


def ones(shape: tuple[int, ...], dtype: Any = np.float16) -> Array:
    return np.ones(shape, dtype)


def info(shape: tuple[int, ...], dtype: str = "float16", device: str = "cuda:0") -> ArrayInfo:
    return ArrayInfo(shape, dtype, device)


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Families fail the test when they are told to compile or load anything."""

    def prepare(*_: Any) -> None:
        pytest.fail("a family was prepared")

    for name in families.BUILT:
        monkeypatch.setattr(families.load(name), "prepare", prepare)


def attention(**changes: Any) -> Any:
    arrays = {"q": ones(Q), "k": ones(K), "v": ones(V)}
    return cuflash.attention(**(arrays | changes))


def swapped(shape: tuple[int, ...]) -> Array:
    """Not the byte order of this machine."""
    return ones(shape).astype(np.dtype(np.float16).newbyteorder("S"))


def masked(shape: tuple[int, ...]) -> Any:
    return np.ma.masked_array(ones(shape), ones(shape, bool))


def read_only(shape: tuple[int, ...]) -> Array:
    array = ones(shape)
    array.flags.writeable = False
    return array


def field_view(shape: tuple[int, ...]) -> Array:
    """Items of two bytes, five bytes apart."""
    records = np.zeros(shape, [("x", np.float16), ("pad", np.uint8, 3)])
    view: Array = records["x"]
    return view


Row = tuple[dict[str, Any], type[Exception], str, tuple[str, ...]]

SHAPES: list[Row] = [
    ({"q": ones((8,))}, ValueError, "q", ("(8,)", "(seq, dim), (heads, seq, dim), (batch")),
    ({"q": ones(())}, ValueError, "q", ("got shape ()", "(seq, dim)")),
    ({"q": ones((1, *Q))}, ValueError, "q", ("(1, 2, 4, 6, 8)", "(batch, heads, seq, dim)")),
    ({"k": ones(K[1:])}, ValueError, "k", ("(2, 7, 8)", "4 axes as in q")),
    ({"v": ones((*V, 1))}, ValueError, "v", ("(2, 2, 7, 5, 1)", "4 axes")),
    ({"k": ones((3, 2, 7, 8))}, ValueError, "k", ("batch 3", "q's batch, 2")),
    ({"v": ones((1, 2, 7, 5))}, ValueError, "v", ("batch 1", "q's batch, 2")),
    ({"k": ones((2, 2, 7, 9))}, ValueError, "k", ("head_dim 9", "q's head_dim, 8")),
    ({"v": ones((2, 4, 7, 5))}, ValueError, "v", ("4 heads", "k's number of heads, 2")),
    ({"v": ones((2, 2, 8, 5))}, ValueError, "v", ("length 8", "k's length, 7")),
    (
        {"k": ones((2, 3, 7, 8)), "v": ones((2, 3, 7, 5))},
        ValueError,
        "k",
        ("3 kv heads for 4 query heads", "divides 4"),
    ),
    (
        {"k": ones((2, 8, 7, 8)), "v": ones((2, 8, 7, 5))},
        ValueError,
        "k",
        ("8 kv heads for 4 query heads", "divides 4"),
    ),
    (
        {"k": ones((2, 0, 7, 8)), "v": ones((2, 0, 7, 5))},
        ValueError,
        "k",
        ("0 kv heads", "divides 4"),
    ),
    ({"q": ones((2, 4, 6, 0))}, ValueError, "q", ("head_dim 0", "1 to 256")),
    ({"q": ones((2, 4, 6, 257))}, ValueError, "q", ("head_dim 257", "1 to 256")),
    ({"v": ones((2, 2, 7, 257))}, ValueError, "v", ("head_dim 257", "1 to 256")),
    ({"v": ones((2, 2, 7, 0))}, ValueError, "v", ("head_dim 0", "1 to 256")),
    # Taken as (batch, seq, heads, dim), the heads and lengths are others.
    ({"layout": "bshd"}, ValueError, "k", ("7 kv heads for 6 query heads",)),
]

DTYPES: list[Row] = [
    ({"k": ones(K, np.float32)}, TypeError, "k", ("float32", "q's dtype, float16")),
    ({"v": ones(V, ml_dtypes.bfloat16)}, TypeError, "v", ("bfloat16", "q's dtype, float16")),
    *(
        ({"q": ones(Q, dtype)}, TypeError, "q", (name, "float16, bfloat16, float32, float64"))
        for dtype, name in (
            (np.int8, "int8"),
            (np.int64, "int64"),
            (bool, "bool"),
            (np.complex64, "complex64"),
            (object, "object"),
            (np.longdouble, np.dtype(np.longdouble).name),
            (ml_dtypes.float8_e4m3fn, "float8_e4m3fn"),
        )
    ),
    ({"q": np.full(Q, "x")}, TypeError, "q", ("str", "expected float16")),
    ({"q": swapped(Q)}, TypeError, "q", ("byte-swapped float16", "native")),
    ({"v": swapped(V)}, TypeError, "v", ("byte-swapped float16", "native")),
    ({"bias": swapped(SCORES)}, TypeError, "bias", ("byte-swapped float16", "native")),
    ({"out": swapped(OUT)}, TypeError, "out", ("byte-swapped float16", "native")),
    ({"k": field_view(K)}, ValueError, "k", ("byte strides", "multiples of the item size, 2")),
]

NOT_ARRAYS: list[Row] = [
    *(
        ({name: value}, TypeError, name, (f"got {kind}", "expected a", "array"))
        for name in ("q", "k", "v")
        for value, kind in (
            ([[1.0]], "list"),
            (None, "None"),
            ("abc", "str"),
            (3, "int"),
            (1.5, "float"),
            (np.float64(2), "numpy.float64"),
            (object(), "object"),
            (info(Q), "cuflash.arrays.ArrayInfo"),
        )
    ),
    ({"q": [1.0]}, TypeError, "q", ("wrap it with numpy.asarray(...)",)),
    ({"k": masked(K)}, TypeError, "k", ("masked array", ".filled(...)")),
    ({"mask": masked(SCORES)}, TypeError, "mask", ("masked array", ".filled(...)")),
    *(
        ({name: [[True]]}, TypeError, name, ("got list", "expected a NumPy or CuPy array"))
        for name in ("mask", "bias", "out")
    ),
    ({"mask": True}, TypeError, "mask", ("got bool", "expected a NumPy or CuPy array")),
    ({"out": info(OUT)}, TypeError, "out", ("got cuflash.arrays.ArrayInfo", "expected")),
]

OPTIONS: list[Row] = [
    ({"layout": "bhds"}, ValueError, "layout", ("'bhds'", "'bhsd', 'bshd'", "did you mean")),
    ({"layout": None}, ValueError, "layout", ("None", "'bhsd', 'bshd'")),
    ({"layout": 4}, ValueError, "layout", ("4", "'bhsd', 'bshd'")),
    ({"causal_align": "top-left"}, ValueError, "causal_align", ("did you mean 'top_left'?",)),
    ({"causal_align": None}, ValueError, "causal_align", ("None", "'bottom_right', 'top_left'")),
    *(
        ({name: value}, TypeError, name, (f"got {value!r}", "expected True or False"))
        for name in ("causal", "return_lse", "deterministic")
        for value in (1, None, "yes", np.array(True))
    ),
    *(
        ({"window": value}, ValueError, "window", (f"got {value!r}", "pair (left, right)"))
        for value in (5, 1.5, "11", b"ab", (), (1,), (1, 2, 3), {1, 2}, {1: 2, 3: 4})
    ),
    *(
        ({"window": value}, ValueError, "window", (f"got {value!r}", ">= 0, or None"))
        for value in ((-1, 0), (0, -1), (None, -2), [np.int64(-1), None])
    ),
    *(
        ({"window": value}, TypeError, "window", (f"got {value!r}", f"not {kind}"))
        for value, kind in (
            ((1.0, 0), "float"),
            ((0, "1"), "str"),
            ((True, 0), "bool"),
            ((0, np.False_), "bool"),
            ((0, 1j), "complex"),
        )
    ),
    *(
        ({name: value}, ValueError, name, ("got", "finite"))
        for name in ("scale", "softcap", "dropout_p")
        for value in (np.nan, np.inf, -np.inf, np.float32("nan"), np.array(np.inf), 10**400)
    ),
    *(
        ({name: value}, TypeError, name, ("got", "number"))
        for name in ("scale", "softcap", "dropout_p")
        for value in ("1", True, np.True_, 1j, np.complex64(1), [1.0], np.ones(1), np.array("1"))
    ),
    *(
        ({"softcap": value}, ValueError, "softcap", (f"got {value!r}", "> 0, or None"))
        for value in (0, 0.0, -1.0)
    ),
    *(
        ({"dropout_p": value}, ValueError, "dropout_p", (f"got {value!r}", "0 <= dropout_p < 1"))
        for value in (-0.1, 1.0, 1.5)
    ),
    ({"dropout_p": 0.1}, NotImplementedError, "dropout_p", ("no kernel family",)),
    ({"alibi_slopes": ones((4,))}, NotImplementedError, "alibi_slopes", ("no kernel family",)),
    ({"sinks": ones((4,))}, NotImplementedError, "sinks", ("no kernel family",)),
    ({"block_mask": ones((1, 1), bool)}, NotImplementedError, "block_mask", ("no kernel family",)),
    ({"seed": 0}, NotImplementedError, "seed", ("no kernel family",)),
    ({"seed": 0, "sinks": 1}, NotImplementedError, "sinks, seed", ("no kernel family",)),
    ({"kernel": "refrence"}, ValueError, "kernel", ("did you mean 'reference'?", "'auto'")),
    ({"kernel": "sm9"}, ValueError, "kernel", ("'sm9'", "did you mean 'sm90'?")),
    ({"kernel": None}, ValueError, "kernel", ("None", "'auto'", "'standard'")),
]

SCORE_ARRAYS: list[Row] = [
    *(
        ({"mask": ones(SCORES, dtype)}, TypeError, "mask", (name, "bool", "True attends"))
        for dtype, name in ((np.float16, "float16"), (np.uint8, "uint8"), (np.int32, "int32"))
    ),
    *(
        ({"bias": ones(SCORES, dtype)}, TypeError, "bias", (name, "float16 or float32"))
        for dtype, name in (
            (bool, "bool"),
            (np.float64, "float64"),
            (ml_dtypes.bfloat16, "bfloat16"),
        )
    ),
    *(
        ({name: ones(shape, dtype)}, ValueError, name, (str(shape), f"{SCORES}", "kv_len"))
        for name, dtype in (("mask", bool), ("bias", np.float32))
        for shape in ((6,), (7, 6), (2, 6, 7), (3, 1, 1, 1), (2, 4, 6, 0), (1, *SCORES))
    ),
]

LENS: list[Row] = [
    *(
        ({name: value}, error, name, says)
        for name, most in (("q_lens", 6), ("kv_lens", 7))
        for value, error, says in (
            ([1.0, 2.0], TypeError, ("float64", "integers")),
            ([True, False], TypeError, ("bool", "integers")),
            ([None, 1], TypeError, ("object", "integers")),
            (["1", "2"], TypeError, ("str", "integers")),
            (3, TypeError, ("got int", "expected")),
            ("12", TypeError, ("got str", "expected")),
            ([1, 2, 3], ValueError, ("(3,)", "(batch,) = (2,)")),
            ([], ValueError, ("(0,)", "(batch,) = (2,)")),
            ([[1, 2]], ValueError, ("(1, 2)", "(batch,) = (2,)")),
            ([[1], [2, 3]], ValueError, ("(batch,)",)),
            (np.array(3), ValueError, ("()", "(batch,) = (2,)")),
            ([0, -1], ValueError, (f"{name}[1] = -1", f"0 to {most}")),
            ([most + 1, 0], ValueError, (f"{name}[0] = {most + 1}", f"0 to {most}")),
            (np.array([0, 2**64 - 1], np.uint64), ValueError, (f"{name}[1] = {2**64 - 1}",)),
        )
    ),
]

OUTS: list[Row] = [
    ({"out": ones(Q)}, ValueError, "out", ("(2, 4, 6, 8)", "(2, 4, 6, 5)")),
    ({"out": ones(OUT[1:])}, ValueError, "out", ("(4, 6, 5)", "(2, 4, 6, 5)")),
    ({"out": ones(OUT, np.float32)}, TypeError, "out", ("float32", "q's dtype, float16")),
    ({"out": read_only(OUT)}, ValueError, "out", ("read-only",)),
    (
        {"out": np.broadcast_to(ones((1, 4, 6, 5)), OUT)},
        ValueError,
        "out",
        ("broadcast", "distinct"),
    ),
    (
        {"out": as_strided(ones((500,)), OUT, (480, 120, 2, 2))},
        ValueError,
        "out",
        ("strides", "distinct"),
    ),
]


def rows(*tables: list[Row]) -> pytest.MarkDecorator:
    """Parameters of a test, named by what was given."""

    def name(changes: dict[str, Any]) -> str:
        given = {
            key: f"{value.dtype}{value.shape}" if isinstance(value, np.ndarray) else value
            for key, value in changes.items()
        }
        return " ".join(f"{key}={value}" for key, value in given.items())[:60]

    return pytest.mark.parametrize(
        ("changes", "error", "argument", "says"),
        [pytest.param(*row, id=name(row[0])) for table in tables for row in table],
    )


def assert_says(caught: pytest.ExceptionInfo[Exception], argument: str, says: Any) -> None:
    message = str(caught.value)
    assert message.startswith(f"{argument}: "), message
    for fragment in says:
        assert fragment in message


@rows(SHAPES, DTYPES, NOT_ARRAYS, OPTIONS, SCORE_ARRAYS, LENS, OUTS)
def test_a_wrong_argument_is_named(
    changes: dict[str, Any], error: type[Exception], argument: str, says: tuple[str, ...]
) -> None:
    with pytest.raises(error) as caught:
        attention(**changes)
    assert caught.type is error
    assert_says(caught, argument, says)


@pytest.mark.parametrize("name", ["q", "k", "v", "mask", "bias"])
def test_out_must_not_share_memory_with_an_input(name: str) -> None:
    memory = np.zeros(2**12, np.uint8)
    given: dict[str, Array] = {
        "q": memory[:768].view(np.float16).reshape(Q),
        "k": memory[:448].view(np.float16).reshape(K),
        "v": memory[:280].view(np.float16).reshape(V),
        "mask": memory[:336].view(bool).reshape(SCORES),
        "bias": memory[:672].view(np.float16).reshape(SCORES),
    }
    out = memory[256:736].view(np.float16).reshape(OUT)
    with pytest.raises(ValueError, match=f"^out: shares memory with {name}; expected memory of"):
        attention(out=out, **{name: given[name]})


GPU: dict[str, Any] = {"q": info(Q), "k": info(K), "v": info(V)}
CPU = {name: dataclasses.replace(array, device="cpu") for name, array in GPU.items()}
DEVICES: list[Row] = [
    ({"k": info(K, device="cuda:1")}, ValueError, "k", ("on cuda:1", "q's device, cuda:0")),
    ({"v": info(V, device="cpu")}, ValueError, "v", ("on cpu", "q's device, cuda:0")),
    ({"q": info(Q, device="cpu")}, ValueError, "k", ("on cuda:0", "q's device, cpu")),
    ({"k": ones(K)}, ValueError, "k", ("on cpu", "q's device, cuda:0")),
    ({"mask": ones(SCORES, bool)}, ValueError, "mask", ("on cpu", "q's device, cuda:0")),
    ({"bias": info(SCORES, device="cuda:1")}, ValueError, "bias", ("on cuda:1", "cuda:0")),
    ({"out": ones(OUT)}, ValueError, "out", ("on cpu", "q's device, cuda:0")),
    ({"q_lens": info((2,), "int32", "cuda:1")}, ValueError, "q_lens", ("on cuda:1", "cuda:0")),
    ({"kv_lens": info((2,), "int32", "cuda:1")}, ValueError, "kv_lens", ("on cuda:1", "cuda:0")),
    (CPU | {"kv_lens": info((2,), "int64")}, ValueError, "kv_lens", ("on cuda:0", "cpu")),
    ({"kv_lens": info((3,), "int64")}, ValueError, "kv_lens", ("(3,)", "(batch,) = (2,)")),
    ({"q_lens": info((2,), "float32")}, TypeError, "q_lens", ("float32", "integers")),
    ({"q_lens": info((2,), "bfloat16")}, TypeError, "q_lens", ("bfloat16", "integers")),
    *(
        ({"q": info(Q, name)}, TypeError, "q", (name, "float16, bfloat16, float32 on the GPU"))
        for name in ("float64", "int8", "fp16")
    ),
    ({"bias": info(SCORES, "float64")}, TypeError, "bias", ("float64", "float16 or float32")),
    ({"out": info(OUT, "float32")}, TypeError, "out", ("float32", "q's dtype, float16")),
    (
        {"out": ArrayInfo(OUT, strides=(0, 30, 5, 1))},
        ValueError,
        "out",
        ("broadcast", "(0, 30, 5, 1)"),
    ),
]


@rows(DEVICES)
def test_a_wrong_stand_in_is_named(
    changes: dict[str, Any], error: type[Exception], argument: str, says: tuple[str, ...]
) -> None:
    with pytest.raises(error) as caught:
        cuflash.explain(**(GPU | changes), device="8.0")
    assert caught.type is error
    assert_says(caught, argument, says)


def test_arguments_of_another_device_are_right_on_their_own() -> None:
    """What the table above changes is all that is wrong there."""
    assert cuflash.explain(**GPU, device="8.0").family == "sm80"
    assert cuflash.explain(**CPU).family == "reference"
    lens: dict[str, Any] = {"q_lens": [1, 2], "kv_lens": info((2,), "int32")}
    assert cuflash.explain(**GPU, **lens, device="8.0").spec.has_kv_lens
    with pytest.raises(pytest.fail.Exception, match="a family was prepared"):
        attention()


def test_out_may_not_share_memory_with_lengths() -> None:
    out = np.zeros((2, 4, 8), np.float64)
    lens = out.reshape(-1).view(np.int64)[:1]
    q = np.ones((2, 4, 8))
    with pytest.raises(ValueError, match=r"^out: shares memory with kv_lens"):
        cuflash.attention(q, q, q, kv_lens=lens, out=out)
