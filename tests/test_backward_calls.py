"""`attention_backward` and `attention_vjp` as calls: names, wrong arguments, plans, kinds."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from comparison import Array, shape_of, store
from gradient_comparison import GRADIENTS, assert_gradients
from test_signature import CONTRACT

import cuflash
from cuflash import ArrayInfo, dispatch, families, kinds
from cuflash.validate_backward import BACKWARD_OPTION_NAMES

Q, K, V, OUT, LSE = (2, 4, 6, 8), (2, 2, 7, 8), (2, 2, 7, 5), (2, 4, 6, 5), (2, 4, 6)
SCORES = (2, 4, 6, 7)
SHARED = {name: default for name, default in CONTRACT.items() if name not in ("return_lse", "out")}
FUNCTIONS: list[Callable[..., Any]] = [cuflash.attention_backward, cuflash.attention_vjp]


def values(shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
    """The same numbers each time."""
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


def arrays(dtype: Any = np.float32, **options: Any) -> dict[str, Array]:
    q, k, v = values(Q, dtype), values(K, dtype), values(V, dtype)
    out, lse = cuflash.attention(q, k, v, **options, return_lse=True)
    return {"dout": values(OUT, dtype), "q": q, "k": k, "v": v, "out": out, "lse": lse}


def backward(**changes: Any) -> Any:
    return cuflash.attention_backward(**(arrays() | changes))


def same(a: Any, b: Any) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No family may be told to compile or load anything."""
    for name in families.BUILT:
        monkeypatch.setattr(families.load(name), "prepare", lambda *_: pytest.fail("prepared"))
    for name in families.BACKWARD_BUILT:
        module = families.load_backward(name)
        monkeypatch.setattr(module, "prepare", lambda *_: pytest.fail("prepared"))


# --- signatures -----------------------------------------------------------------------------------


def test_the_options_are_those_of_attention() -> None:
    parameters = inspect.signature(cuflash.attention_backward).parameters
    positional = ["dout", "q", "k", "v", "out", "lse"]
    assert list(parameters) == [*positional, *SHARED, *GRADIENTS]
    assert (*SHARED, *GRADIENTS) == BACKWARD_OPTION_NAMES
    both = inspect.signature(cuflash.attention_vjp).parameters
    assert list(both) == ["q", "k", "v", *SHARED]
    for name, default in SHARED.items():
        for found in (parameters[name], both[name]):
            assert found.kind is inspect.Parameter.KEYWORD_ONLY
            assert found.default == default
            assert type(found.default) is type(default)
    for name in GRADIENTS:
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[name].default is None


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_parameter_is_described(function: Callable[..., Any]) -> None:
    text = inspect.getdoc(function)
    assert text
    assert all(name in text for name in inspect.signature(function).parameters)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("given", "meant"), [("casual", "causal"), ("return_lse", None)])
def test_an_unknown_option_is_answered_with_the_nearest(
    function: Callable[..., Any], given: str, meant: str | None
) -> None:
    inputs = arrays()
    if function is cuflash.attention_vjp:
        inputs = {name: inputs[name] for name in "qkv"}
    with pytest.raises(TypeError) as caught:
        function(**inputs, **{given: True})
    message = str(caught.value)
    assert message.startswith(f"{function.__name__}: unknown option {given!r}")
    assert all(name in message for name in SHARED)
    assert meant is None or f", did you mean {meant!r}?" in message


# --- wrong arguments ------------------------------------------------------------------------------


def read_only(shape: tuple[int, ...]) -> Array:
    array = np.ones(shape, np.float32)
    array.flags.writeable = False
    return array


WRONG: list[tuple[dict[str, Any], type[Exception], str, tuple[str, ...]]] = [
    ({"dout": values(Q)}, ValueError, "dout", ("(2, 4, 6, 8)", "(2, 4, 6, 5)")),
    ({"dout": values(OUT, np.float16)}, TypeError, "dout", ("float16", "q's dtype, float32")),
    ({"dout": values(OUT)[0]}, ValueError, "dout", ("(4, 6, 5)",)),
    ({"dout": 1.0}, TypeError, "dout", ("float",)),
    ({"dout": None}, TypeError, "dout", ("NoneType",)),
    ({"dout": values(OUT).tolist()}, TypeError, "dout", ("list", "numpy.asarray")),
    ({"dout": values(OUT).astype(">f4")}, TypeError, "dout", ("byte-swapped",)),
    ({"out": values(Q)}, ValueError, "out", ("(2, 4, 6, 8)", "(2, 4, 6, 5)")),
    ({"out": values(OUT, np.float64)}, TypeError, "out", ("float64", "float32")),
    ({"out": None}, TypeError, "out", ("None",)),
    ({"lse": None}, TypeError, "lse", ("NoneType",)),
    ({"lse": values((2, 6, 4))}, ValueError, "lse", ("(batch, heads, seq) = (2, 4, 6)",)),
    ({"lse": values((*LSE, 1))}, ValueError, "lse", ("(2, 4, 6, 1)", "return_lse=True")),
    ({"lse": values(LSE, np.float64)}, TypeError, "lse", ("float64", "float32 beside float32")),
    ({"dq": np.ones(OUT, np.float32)}, ValueError, "dq", ("(2, 4, 6, 5)", "(2, 4, 6, 8)")),
    ({"dk": np.ones(Q, np.float32)}, ValueError, "dk", ("(2, 4, 6, 8)", "(2, 2, 7, 8)")),
    ({"dv": np.ones(K, np.float32)}, ValueError, "dv", ("(2, 2, 7, 8)", "(2, 2, 7, 5)")),
    ({"dk": np.ones((2, 4, 7, 8), np.float32)}, ValueError, "dk", ("(2, 4, 7, 8)",)),
    ({"dq": np.ones(Q, np.float16)}, TypeError, "dq", ("float16", "float32")),
    ({"dv": np.ones(V, np.float64)}, TypeError, "dv", ("float64", "float32")),
    ({"dk": read_only(K)}, ValueError, "dk", ("read-only",)),
    (
        {"dk": np.broadcast_to(np.ones(K[1:], np.float32), K)},
        ValueError,
        "dk",
        ("broadcast or overlapping",),
    ),
    ({"dq": ArrayInfo(Q, "float32", "cpu")}, TypeError, "dq", ("ArrayInfo",)),
    ({"q": values(K)}, ValueError, "dout", ("(2, 4, 6, 5)",)),
    ({"k": values((2, 3, 7, 8))}, ValueError, "v", ("2 heads",)),
    ({"mask": np.ones((6, 6), bool)}, ValueError, "mask", ("(6, 6)",)),
    ({"q_lens": [6, 7]}, ValueError, "q_lens", ("q_lens[1] = 7",)),
    ({"kv_lens": [1.0, 2.0]}, TypeError, "kv_lens", ("float64",)),
    ({"softcap": -1.0}, ValueError, "softcap", ("-1.0",)),
    ({"layout": "sbhd"}, ValueError, "layout", ("'sbhd'",)),
    ({"deterministic": 1}, TypeError, "deterministic", ("expected True or False",)),
    ({"kernel": "sm90_fp8"}, ValueError, "kernel", ("'sm90', 'sm80', 'standard', 'reference'",)),
    ({"dropout_p": 0.1}, NotImplementedError, "dropout_p", ("no kernel family",)),
    ({"dropout_p": 1.0}, ValueError, "dropout_p", ("0 <= dropout_p < 1",)),
    *(
        ({name: np.ones(4, np.float32)}, NotImplementedError, name, ("no kernel family",))
        for name in ("alibi_slopes", "sinks", "block_mask", "seed")
    ),
]


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(("changes", "error", "name", "parts"), WRONG)
def test_a_wrong_argument_is_named(
    changes: dict[str, Any], error: type[Exception], name: str, parts: tuple[str, ...]
) -> None:
    q, k, v, out = (values(shape) for shape in (Q, K, V, OUT))
    given = {"dout": out, "q": q, "k": k, "v": v, "out": out.copy(), "lse": values(LSE)}
    with pytest.raises(error) as caught:
        cuflash.attention_backward(**(given | changes))
    message = str(caught.value)
    assert message.startswith(f"{name}: ")
    assert all(part in message for part in parts), message
    shared = {n: a for n, a in changes.items() if n in ("q", "k", "v", *SHARED)}
    if shared == changes and name not in ("dout", "kernel"):
        with pytest.raises(error) as both:
            cuflash.attention_vjp(**({"q": q, "k": k, "v": v} | changes))
        assert str(both.value) == message


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_lse_has_the_dtype_that_attention_returns(dtype: str) -> None:
    given = arrays(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    other = np.float32 if dtype == "float64" else np.float64
    assert cuflash.attention_backward(**given)[0].dtype.name == dtype
    with pytest.raises(TypeError, match=f"^lse: got dtype .*beside {dtype}"):
        cuflash.attention_backward(**(given | {"lse": given["lse"].astype(other)}))


def test_codes_have_no_gradients() -> None:
    q = values((1, 1, 16, 64))
    coded = cuflash.quantize_fp8(q, q, q)
    with pytest.raises(TypeError, match=r"^q: got an Fp8Tensor"):
        cuflash.attention_vjp(coded.q, coded.k, coded.v)
    with pytest.raises(TypeError, match=r"^q: got an Fp8Tensor"):
        cuflash.attention_backward(q, coded.q, coded.k, coded.v, q, q[..., 0])


@pytest.mark.parametrize(
    ("name", "other"),
    [
        (name, other)
        for name in GRADIENTS
        for other in ("dout", "q", "k", "v", "out", "lse", "bias", *GRADIENTS)
        if name != other
    ],
)
def test_a_gradient_in_memory_of_another_array_is_refused(name: str, other: str) -> None:
    """Of the first call of a kind and of later ones, whose addresses alone differ."""
    memory = np.zeros(20_000, np.float32)
    given: dict[str, Any] = arrays() | {"bias": values(SCORES)}
    given |= {g: np.zeros_like(given[g[1:]]) for g in GRADIENTS}
    first, second = (
        memory[at : at + given[n].size].reshape(given[n].shape) for n, at in ((name, 3), (other, 5))
    )
    if other not in GRADIENTS:
        second[...] = given[other]
    clash = given | {name: first, other: second}
    message = f"^({name}: shares memory with {other}|{other}: shares memory with {name});"
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            cuflash.attention_backward(**clash)
        apart = given | {other: second}
        assert same(cuflash.attention_backward(**apart), backward(bias=values(SCORES)))


@pytest.mark.parametrize("storage", ["contiguous", "transposed", "stepped", "reversed", "offset"])
def test_gradients_are_written_in_place_and_nothing_beside_them(storage: str) -> None:
    expected = backward()
    memory = {
        name: store(np.full(array.shape, np.nan, np.float32), storage)
        for name, array in zip(GRADIENTS, expected, strict=True)
    }
    found = backward(**memory)
    assert all(a is memory[name] for name, a in zip(GRADIENTS, found, strict=True))
    assert same(found, expected)
    for view, written in zip(memory.values(), expected, strict=True):
        whole = view if view.base is None else view.base
        assert np.isnan(whole).sum() == whole.size - written.size


# --- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_ranks_and_layouts(rank: int, layout: str) -> None:
    q, k, v = (
        values(shape_of(rank, layout, 2, heads, length, dim))
        for heads, length, dim in ((4, 6, 8), (2, 7, 8), (2, 7, 5))
    )
    out, vjp = cuflash.attention_vjp(q, k, v, causal=True, layout=layout)
    dout = values(out.shape)
    assert_gradients(vjp(dout), dout, q, k, v, causal=True, layout=layout)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True, "causal_align": "top_left", "scale": 0.3},
    {"window": (3, 0), "softcap": 2.0, "deterministic": True},
    {"mask": values(SCORES) > 0, "bias": values((6, 7))},
    {"q_lens": [6, 2], "kv_lens": np.array([7, 3], np.int32)},
    {"kernel": "reference", "window": [2, None]},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options) or "plain")
def test_vjp_is_both_passes_in_one(options: dict[str, Any]) -> None:
    given = arrays(**options)
    q, k, v = (given[name] for name in "qkv")
    out, vjp = cuflash.attention_vjp(q, k, v, **options)
    assert np.array_equal(out, given["out"])
    expected = cuflash.attention_backward(**given, **options)
    for _ in range(2):
        assert same(vjp(given["dout"]), expected)
    memory = np.full(K, np.nan, np.float32)
    found = vjp(given["dout"], dk=memory)
    assert found[1] is memory
    assert same(found, expected)
    doubled = vjp(2 * given["dout"])
    assert all(np.allclose(b, 2 * a) for a, b in zip(expected, doubled, strict=True))
    with pytest.raises(ValueError, match=r"^dout: got shape"):
        vjp(given["q"])


def test_vjp_of_an_array_from_elsewhere() -> None:
    class Exported:
        """An array that offers DLPack alone."""

        def __init__(self, array: Array) -> None:
            self._array = array

        def __dlpack__(self, **options: Any) -> Any:
            return self._array.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return self._array.__dlpack_device__()

    given = arrays()
    out, vjp = cuflash.attention_vjp(*(Exported(given[name]) for name in "qkv"))
    assert np.array_equal(out, given["out"])
    assert same(vjp(Exported(given["dout"])), backward())


# --- what is kept of calls ------------------------------------------------------------------------


def test_a_repeated_call_is_checked_once(checked: list[Any]) -> None:
    given = arrays(causal=True)
    checked.clear()
    expected = cuflash.attention_backward(**given, causal=True)
    for _ in range(3):
        assert same(cuflash.attention_backward(**given, causal=True), expected)
    assert len(kinds._kinds) == 2, "the forward call that made `out`, and this"


KINDS: list[tuple[str, Any]] = [
    ("scale", 0.5),
    ("causal", True),
    ("causal_align", "top_left"),
    ("window", (1, 1)),
    ("softcap", 2.0),
    ("mask", values(SCORES) > 0),
    ("bias", values(SCORES)),
    ("q_lens", [6, 2]),
    ("kv_lens", [7, 3]),
    ("kernel", "reference"),
    ("deterministic", True),
    ("dq", np.empty(Q, np.float32)),
    ("dk", np.empty(K, np.float32)),
    ("dv", np.empty(V, np.float32)),
    ("dout", np.broadcast_to(np.float32(1), OUT)),
    ("out", np.asfortranarray(values(OUT))),
    ("lse", np.asfortranarray(values(LSE))),
]


@pytest.mark.parametrize(("name", "value"), KINDS, ids=[name for name, _ in KINDS])
def test_another_kind_is_planned_anew(name: str, value: Any) -> None:
    given = arrays()

    def one(**changes: Any) -> Any:
        found = cuflash.attention_backward(**(given | changes))
        return tuple(gradient.copy() for gradient in found)

    expected = one(), one(**{name: value})
    kinds.forget()
    for _ in range(2):
        assert same(one(), expected[0])
        assert same(one(**{name: value}), expected[1])
    assert len(kinds._kinds) == 2


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("causal", True, 1),
        ("scale", 1, True),
        ("window", (1, 1), (1, True)),
        ("kernel", "auto", "x"),
    ],
)
def test_what_equals_a_right_argument_stays_wrong(name: str, right: Any, wrong: Any) -> None:
    given = arrays()
    cuflash.attention_backward(**given, **{name: right})
    for _ in range(2):
        with pytest.raises((TypeError, ValueError), match=f"^{name}"):
            cuflash.attention_backward(**given, **{name: wrong})


# --- plans ----------------------------------------------------------------------------------------


def stand_in(dtype: str = "float16", place: str = "cuda:0") -> ArrayInfo:
    return ArrayInfo((2, 8, 100, 64), dtype, place)


@pytest.mark.parametrize(
    ("device", "dtype", "family"),
    [
        ("cpu", "float16", "reference"),
        ("cpu", "float64", "reference"),
        ("7.5", "float16", "standard"),
        ("8.0", "bfloat16", "sm80"),
        ("9.0", "float16", "sm90"),
        ("9.0", "float32", "standard"),
        ("12.0", "float32", "standard"),
    ],
)
def test_the_plan_says_which_family_runs_and_why_not_others(
    device: str, dtype: str, family: str
) -> None:
    q = stand_in(dtype, "cpu" if device == "cpu" else "cuda:0")
    plan = cuflash.explain(q, q, q, causal=True, device=device, backward=True)
    assert plan.family == family
    assert plan.why
    before = dispatch.BACKWARD_PREFERENCE[: dispatch.BACKWARD_PREFERENCE.index(family)]
    assert tuple(refusal.family for refusal in plan.refused) == before
    for refusal in plan.refused:
        assert refusal.family in families.BACKWARD_BUILT
    lines = str(plan).splitlines()
    assert lines[0].startswith(f"cuflash backward plan: {family} on ")
    assert any("causal" in line for line in lines)
    read = json.loads(json.dumps(plan.to_dict()))
    assert read["family"] == family
    assert read["spec"]["gradients"]["dout"]["strides"] == [51200, 6400, 64, 1]


def test_a_forward_plan_has_no_gradients() -> None:
    q = stand_in()
    plan = cuflash.explain(q, q, q, device="9.0")
    assert plan.spec.gradients is None
    assert plan.family == "sm90"


@pytest.mark.parametrize("kernel", ["sm90", "reference"])
def test_a_family_that_is_asked_for_says_why_not(kernel: str) -> None:
    q = stand_in("float16" if kernel != "sm90" else "float32")
    with pytest.raises(NotImplementedError) as caught:
        cuflash.explain(q, q, q, device="9.0", kernel=kernel, backward=True)
    message = str(caught.value)
    assert message.startswith(
        f"kernel={kernel!r}: no family takes the backward pass of this problem on sm_90"
    )
    reason = {
        "sm90": "takes float16 and bfloat16, not float32",
        "sm80": "no backward pass in this version",
        "reference": "takes NumPy arrays only",
    }[kernel]
    assert f"{kernel}: {reason}" in message


@pytest.mark.usefixtures("nothing_runs")
def test_vjp_refuses_before_the_forward_pass_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a family takes the forward pass alone."""
    module = families.load_backward("reference")
    monkeypatch.setattr(module, "supports", lambda spec, device: ["not today"])
    dispatch._choose.cache_clear()
    q = values((2, 4, 8))
    with pytest.raises(NotImplementedError, match=r"backward pass.*reference: not today"):
        cuflash.attention_vjp(q, q, q)
    dispatch._choose.cache_clear()


def test_work_of_a_backward_pass() -> None:
    """Five products; everything read and written once."""
    q, v = ArrayInfo((2, 8, 100, 64)), ArrayInfo((2, 4, 300, 32))
    k = ArrayInfo((2, 4, 300, 64))
    plan = cuflash.explain(q, k, v, device="9.0", backward=True)
    assert plan.flops == 2 * 2 * 8 * 100 * 300 * (3 * 64 + 2 * 32)
    sizes = {"q": 16 * 100 * 64, "k": 8 * 300 * 64, "v": 8 * 300 * 32, "out": 16 * 100 * 32}
    assert plan.hbm_bytes == 2 * 2 * sum(sizes.values()) + 4 * 16 * 100
    same_dims = cuflash.explain(q, k, k, device="9.0", causal=True, backward=True)
    forward = cuflash.explain(q, k, k, device="9.0", causal=True)
    assert same_dims.flops == 2.5 * forward.flops


def test_explain_takes_the_arrays_of_a_backward_pass() -> None:
    given = arrays()
    q, k, v = (given.pop(name) for name in "qkv")
    stepped = np.zeros((2, 4, 6, 16), np.float32)[..., ::2]
    plan = cuflash.explain(q, k, v, **given, dq=stepped, backward=True)
    assert plan.spec.gradients is not None
    assert plan.spec.gradients.dq.strides[3] == 2
    with pytest.raises(ValueError, match=r"^dk: got shape"):
        cuflash.explain(q, k, v, dk=stepped, backward=True)
    with pytest.raises(TypeError, match="explain: unknown option 'dk'"):
        cuflash.explain(q, k, v, dk=stepped)
    with pytest.raises(TypeError, match="explain: unknown option 'return_lse'"):
        cuflash.explain(q, k, v, return_lse=True, backward=True)
    with pytest.raises(TypeError, match=r"^backward: got 1"):
        cuflash.explain(q, k, v, backward=1)  # type: ignore[arg-type]


def test_every_backward_family_has_a_place_in_the_order() -> None:
    assert set(families.BACKWARD_BUILT) == set(dispatch.BACKWARD_PREFERENCE)
