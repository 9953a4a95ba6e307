"""Calls of one kind are checked and planned once; a call of another kind never passes for one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from comparison import Array
from small_calls import OUT, SCORES, Q, arrays, attention, copied, fresh, same, values

import cuflash
from cuflash import calls, families, kinds
from cuflash.spec import OPTION_NAMES

Patch = pytest.MonkeyPatch


# --- a call that comes again ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "return_lse": True},
        {"window": (3, 0), "scale": 0.5, "softcap": 2.0, "causal_align": "top_left"},
        {"mask": values(SCORES) > 0, "bias": values((6, 7))},
        {"q_lens": [6, 2], "kv_lens": np.array([7, 3], np.int32)},
        {"out": np.empty(OUT, np.float32), "kernel": "reference"},
        {"scale": np.float64(0.5), "causal": np.True_, "window": (np.int64(2), None)},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
def test_a_repeated_call_is_checked_once(options: dict[str, Any], checked: list[Any]) -> None:
    expected = copied(attention(**options))
    for _ in range(3):
        assert same(attention(**options), expected)
    assert len(checked) == 1


def test_a_repeated_call_takes_the_new_values(checked: list[Any]) -> None:
    lens = np.array([7, 3])
    mask, bias = values(SCORES) > 0, values(SCORES)
    attention(kv_lens=lens, mask=mask, bias=bias)
    lens[:] = 2, 7
    changed: dict[str, Any] = {name: array * 2 for name, array in arrays().items()}
    changed |= {"mask": ~mask, "bias": -bias, "kv_lens": lens}
    result = attention(**changed)
    assert len(checked) == 1
    assert same(result, fresh(**changed))


def test_each_call_gets_memory_of_its_own() -> None:
    (a, a_lse), (b, b_lse) = (attention(return_lse=True) for _ in range(2))
    assert not np.shares_memory(a, b)
    assert not np.shares_memory(a_lse, b_lse)


@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_results_of_every_rank_come_again(rank: int, layout: str, checked: list[Any]) -> None:
    q, k, v = (values((2, 4, 5, 8)[4 - rank :]) for _ in range(3))
    first, again = (
        cuflash.attention(q, k, v, causal=True, layout=layout, return_lse=True) for _ in range(2)
    )
    assert len(checked) == 1
    assert same(again, first)
    out, lse = first
    assert out.shape == q.shape
    rows = out.swapaxes(-3, -2) if layout == "bshd" and rank > 2 else out
    assert lse.shape == rows.shape[:-1]


def test_a_call_without_output_prepares_no_family(monkeypatch: Patch) -> None:
    def prepare(*_: Any) -> None:
        pytest.fail("a family was prepared")

    monkeypatch.setattr(families.load("reference"), "prepare", prepare)
    q = np.ones((0, 4, 6, 8), np.float32)
    k = np.ones((0, 2, 7, 8), np.float32)
    for _ in range(2):
        out, lse = cuflash.attention(q, k, k, return_lse=True)
        assert (out.shape, lse.shape) == (q.shape, q.shape[:-1])


# --- calls of another kind ------------------------------------------------------------------------


def unaligned(array: Array) -> Array:
    """The same values, two elements past a 16-byte boundary."""
    size = array.dtype.itemsize
    memory = np.zeros(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 16 + 2 * size
    view: Array = memory[start:][: array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


def aligned(array: Array) -> Array:
    memory = np.zeros(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 16
    view: Array = memory[start:][: array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


def spread(array: Array) -> Array:
    """The same values with other strides."""
    return np.repeat(array, 2, axis=-1)[..., ::2]


WHOLE, BIAS = values(SCORES) > 0, values(SCORES)
# Two calls that differ in one argument alone, both of them right.
ARRAY_CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "q shape": ({}, {"q": values((2, 4, 5, 8))}),
    "q heads": ({}, {"q": values((2, 2, 6, 8))}),
    "k, v length": ({}, {"k": values((2, 2, 9, 8)), "v": values((2, 2, 9, 5))}),
    "v dim": ({}, {"v": values((2, 2, 7, 6))}),
    "rank": ({}, {name: array[0] for name, array in arrays().items()}),
    "dtype": ({}, arrays(np.float16)),
    "dtype of the same size": (arrays(np.float16), arrays(ml_dtypes.bfloat16)),
    **{f"{name} strides": ({}, {name: spread(array)}) for name, array in arrays().items()},
    **{
        f"{name} alignment": ({name: aligned(array)}, {name: unaligned(array)})
        for name, array in arrays().items()
    },
}
OPTION_CHANGES: list[tuple[str, Any, Any]] = [
    ("scale", None, 0.5),
    ("scale", 0.5, 0.25),
    ("scale", 1, 1.0),
    ("scale", 1.0, np.float32(1)),
    ("causal", False, True),
    ("causal", True, np.True_),
    ("causal_align", "bottom_right", "top_left"),
    ("window", None, (1, 1)),
    ("window", (2, 1), (1, 2)),
    ("window", (1, None), (None, 1)),
    ("window", (1, 1), (np.int8(1), 1)),
    ("softcap", None, 2.0),
    ("softcap", 2.0, 3.0),
    ("softcap", 2, 2.0),
    ("mask", None, WHOLE),
    ("mask", WHOLE, WHOLE[:1]),
    ("mask", WHOLE[:1, :1], WHOLE[0, 0, :, :1]),
    ("mask", WHOLE[:1, :1, :, :1], WHOLE[:1, :1, :1]),
    ("mask", WHOLE, np.broadcast_to(WHOLE[:, :, :1], SCORES)),
    ("mask", np.ascontiguousarray(WHOLE[0, 0]), WHOLE[0, 0].copy(order="F")),
    ("bias", None, BIAS),
    ("bias", BIAS, BIAS[:, :1]),
    ("bias", BIAS, np.broadcast_to(BIAS[..., :1], SCORES)),
    ("q_lens", None, [6, 2]),
    ("q_lens", [6, 2], np.array([6, 2], np.uint8)),
    ("kv_lens", None, [7, 3]),
    ("kv_lens", np.array([7, 3], np.int32), np.array([7, 3], np.int16)),
    ("dropout_p", 0.0, 0),
    ("layout", "bhsd", "bshd"),
    ("return_lse", False, True),
    ("out", None, np.empty(OUT, np.float32)),
    ("out", np.empty(OUT, np.float32), np.empty((2, 6, 4, 5), np.float32).swapaxes(1, 2)),
    ("kernel", "auto", "reference"),
    ("deterministic", False, True),
]
CHANGES = [
    *(pytest.param(*pair, id=name) for name, pair in ARRAY_CHANGES.items()),
    *(
        pytest.param({name: one}, {name: other}, id=f"{name} {at}")
        for at, (name, one, other) in enumerate(OPTION_CHANGES)
    ),
]


@pytest.mark.parametrize(("one", "other"), CHANGES)
def test_another_kind_is_checked_anew(
    one: dict[str, Any], other: dict[str, Any], checked: list[Any]
) -> None:
    if "layout" in other:  # heads and lengths trade places, so both must fit
        square = {"q": values((2, 4, 4, 8)), "k": values((2, 4, 4, 8)), "v": values((2, 4, 4, 8))}
        one, other = one | square, other | square
    expected = [copied(fresh(**options)) for options in (one, other)]
    kinds.forget()
    checked.clear()
    for _ in range(2):
        for options, result in zip((one, other), expected, strict=True):
            assert same(attention(**options), result)
    assert len(checked) == 2


class Changing(Sequence[int]):
    """A window that is hashed by its identity, whatever is in it."""

    def __init__(self, *bounds: int) -> None:
        self.bounds = list(bounds)

    def __getitem__(self, at: Any) -> Any:
        return self.bounds[at]

    def __len__(self) -> int:
        return len(self.bounds)


class Plain(int):
    """A number that can't be hashed."""

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("window", [[0, 0], Changing(0, 0)], ids=["list", "hashed by identity"])
def test_a_window_that_changes_is_read_each_time(window: Any) -> None:
    narrow = attention(window=window)
    bounds = window if isinstance(window, list) else window.bounds
    bounds[0] = 6
    wide = attention(window=window)
    assert not same(narrow, wide)
    assert same(narrow, fresh(window=(0, 0)))
    assert same(wide, fresh(window=(6, 0)))


def test_a_scale_that_changes_is_read_each_time() -> None:
    scale = np.array(0.5)
    first = attention(scale=scale)
    scale[...] = 2.0
    second = attention(scale=scale)
    assert same(first, fresh(scale=0.5))
    assert same(second, fresh(scale=2.0))


@pytest.mark.parametrize(
    "options",
    [
        {"window": [1, 0]},
        {"window": range(3, -1, -3)},
        {"scale": np.array(0.5)},
        {"scale": Plain(2)},
    ],
    ids=str,
)
def test_what_may_change_or_has_no_hash_is_not_kept(
    options: dict[str, Any], checked: list[Any]
) -> None:
    assert same(attention(**options), attention(**options))
    assert len(checked) == 2
    assert not kinds._kinds


# --- errors ---------------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: int
    right: int


class Alike:
    """Equals a word, and is none."""

    def __init__(self, word: str) -> None:
        self.word = word

    def __eq__(self, other: object) -> bool:
        return self.word == other

    def __hash__(self) -> int:
        return hash(self.word)

    def __repr__(self) -> str:
        return f"Alike({self.word!r})"


WRONG: list[tuple[str, Any, Any, type[Exception]]] = [
    # The second equals the first, but for its type.
    ("causal", True, 1, TypeError),
    ("causal", False, 0, TypeError),
    ("causal", True, 1.0, TypeError),
    ("return_lse", True, 1, TypeError),
    ("return_lse", False, 0, TypeError),
    ("deterministic", False, 0, TypeError),
    ("scale", 1, True, TypeError),
    ("scale", 1.0, True, TypeError),
    ("scale", 0.0, False, TypeError),
    ("scale", 1.0, 1 + 0j, TypeError),
    ("softcap", 1.0, True, TypeError),
    ("dropout_p", 0.0, False, TypeError),
    ("dropout_p", 0, False, TypeError),
    ("window", (1, 1), (1, True), TypeError),
    ("window", (1, 0), (1, False), TypeError),
    ("window", (1, 1), (1.0, 1), TypeError),
    ("window", (1, 1), Pair(1, True), TypeError),
    *(
        (name, word, Alike(word), ValueError)
        for name, word in (("layout", "bhsd"), ("kernel", "auto"), ("causal_align", "top_left"))
    ),
    # And others.
    ("causal", True, None, TypeError),
    ("causal_align", "top_left", "top-left", ValueError),
    ("window", (1, 1), (1, -1), ValueError),
    ("window", (1, 1), (1, 1, 1), ValueError),
    ("softcap", None, 0.0, ValueError),
    ("mask", WHOLE, WHOLE[..., :3], ValueError),
    ("mask", WHOLE, WHOLE.astype(np.uint8), TypeError),
    ("bias", BIAS, BIAS.astype(np.float64), TypeError),
    ("bias", BIAS, BIAS.astype(BIAS.dtype.newbyteorder("S")), TypeError),
    ("alibi_slopes", None, values((4,)), NotImplementedError),
    ("alibi_slopes", None, 0, NotImplementedError),
    ("sinks", None, values((4,)), NotImplementedError),
    ("block_mask", None, values((1, 1)), NotImplementedError),
    ("seed", None, 0, NotImplementedError),
    ("dropout_p", 0.0, 0.5, NotImplementedError),
    ("q_lens", [6, 2], [6, 7], ValueError),
    ("q_lens", [6, 2], [-1, 2], ValueError),
    ("q_lens", [6, 2], [6.0, 2.0], TypeError),
    ("q_lens", [6, 2], [6], ValueError),
    ("kv_lens", [7, 3], [7, 8], ValueError),
    ("kv_lens", np.array([7, 3], np.uint64), np.array([7, 2**64 - 1], np.uint64), ValueError),
    ("kv_lens", np.array([1, 0]), np.array([True, False]), TypeError),
    ("layout", "bhsd", "bhds", ValueError),
    ("out", np.empty(OUT, np.float32), np.empty(Q, np.float32), ValueError),
    ("out", np.empty(OUT, np.float32), np.empty(OUT, np.float16), TypeError),
    ("kernel", "reference", "standard", NotImplementedError),
    ("kernel", "auto", "sm90", NotImplementedError),
    ("kernel", "auto", "refrence", ValueError),
]


@pytest.mark.parametrize(
    ("name", "right", "wrong", "error"),
    [pytest.param(*row, id=f"{row[0]} {at}") for at, row in enumerate(WRONG)],
)
def test_a_wrong_argument_stays_wrong_after_right_ones(
    name: str, right: Any, wrong: Any, error: type[Exception], monkeypatch: Patch
) -> None:
    with pytest.raises(error) as alone:
        fresh(**{name: wrong})
    for _ in range(2):
        attention(**{name: right})
    kept = dict(kinds._kinds)
    assert len(kept) == 1
    monkeypatch.setattr(calls.Call, "_compute", lambda *_: pytest.fail("the call was run"))
    for _ in range(2):
        with pytest.raises(error) as after:
            attention(**{name: wrong})
        assert str(after.value) == str(alone.value)
    assert kinds._kinds == kept, "a wrong call was kept"


class Anything:
    """Equals everything, and is nothing."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "Anything()"


@pytest.mark.parametrize("name", OPTION_NAMES)
def test_what_equals_everything_passes_for_nothing(name: str) -> None:
    wrong = {name: Anything()}
    refusals = (TypeError, ValueError, NotImplementedError)
    with pytest.raises(refusals) as alone:
        fresh(**wrong)
    for _ in range(2):
        attention()
    with pytest.raises(type(alone.value)) as after:
        attention(**wrong)
    assert str(after.value) == str(alone.value)


def test_every_option_was_changed_above() -> None:
    """An option that is not part of the key would go unnoticed otherwise."""
    assert {name for name, *_ in (*OPTION_CHANGES, *WRONG)} == set(OPTION_NAMES)


def test_out_is_looked_at_in_each_call() -> None:
    memory = np.zeros(4096, np.float32)
    good = memory[:240].reshape(OUT)
    q, k, v = (
        memory[at:][: array.size].reshape(array.shape)
        for at, array in zip((512, 1024, 2048), arrays().values(), strict=True)
    )
    mask, bias = np.ones(SCORES, bool), memory[3072:][:336].reshape(SCORES)
    options: dict[str, Any] = {"mask": mask, "bias": bias, "kv_lens": np.array([7, 3])}
    result = cuflash.attention(q, k, v, **options, out=good)
    assert result is good
    (call,) = kinds._kinds.values()

    read_only = good.copy()
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match=r"^out: got a read-only array"):
        cuflash.attention(q, k, v, **options, out=read_only)
    for name, at in (("q", 512), ("k", 1024 + 220), ("v", 2048 - 200), ("bias", 3072)):
        with pytest.raises(ValueError, match=f"^out: shares memory with {name};"):
            cuflash.attention(q, k, v, **options, out=memory[at : at + 240].reshape(OUT))
    beside = memory[272:512].reshape(OUT)
    assert cuflash.attention(q, k, v, **options, out=beside) is beside
    assert list(kinds._kinds.values()) == [call], "all of it was about one kind of call"


def test_rows_between_those_of_an_input_are_free_in_each_call(checked: list[Any]) -> None:
    memory = np.ones((2, 8, 4), np.float32)
    q, out = memory[:, ::2], memory[:, 1::2]
    for _ in range(2):
        assert cuflash.attention(q, q, q, out=out) is out
    with pytest.raises(ValueError, match="out: shares memory with q"):
        cuflash.attention(q, q, q, out=q)
    assert len(checked) == 1


def test_a_first_call_with_a_bad_out_prepares_nothing(monkeypatch: Patch) -> None:
    q = values(Q)
    reference = families.load("reference")
    with monkeypatch.context() as patch:
        patch.setattr(reference, "prepare", lambda *_: pytest.fail("the family was prepared"))
        with pytest.raises(ValueError, match="out: shares memory with q"):
            cuflash.attention(q, q.copy(), q.copy(), out=q)
    assert not kinds._kinds


def test_what_failed_to_compile_is_tried_again(monkeypatch: Patch) -> None:
    expected = fresh()
    kinds.forget()
    with monkeypatch.context() as patch:

        def prepare(plan: Any) -> None:
            raise RuntimeError("it did not compile")

        patch.setattr(families.load("reference"), "prepare", prepare)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="it did not compile"):
                attention()
    assert not kinds._kinds
    assert same(attention(), expected)
