"""Checks arrays and options once, naming the argument, and builds the `AttentionSpec`.

Works on `ArrayInfo` alone, so every rule here can be tested without a GPU and nothing runs before
all of them hold.
"""

from __future__ import annotations

import difflib
import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from .arrays import ArrayInfo, contiguous_strides, may_repeat
from .spec import MAX_HEAD_DIM, OPTION_NAMES, AttentionSpec, Options, Placement, ScoreArray

LAYOUTS = ("bhsd", "bshd")
CAUSAL_ALIGNMENTS = ("bottom_right", "top_left")
CPU_DTYPES = ("float16", "bfloat16", "float32", "float64")
GPU_DTYPES = ("float16", "bfloat16", "float32")
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_AXES = {2: "(seq, dim)", 3: "(heads, seq, dim)", 4: "(batch, heads, seq, dim)"}

# In the signature so that calls written today keep their meaning; no family computes them yet.
_NOT_YET = ("alibi_slopes", "sinks", "block_mask", "seed")

_F = TypeVar("_F", bound=Callable[..., Any])


def build_spec(q: ArrayInfo, k: ArrayInfo, v: ArrayInfo, options: Options) -> AttentionSpec:
    """Check a whole call and describe it.

    `options.mask`, `bias` and `out` are `ArrayInfo` here; `q_lens` and `kv_lens` are `ArrayInfo`
    when they are on the GPU and integer NumPy arrays otherwise.

    Raises
    ------
    ValueError, TypeError
        Naming the argument, what was given and what is expected.
    NotImplementedError
        Naming an option that no family supports yet.
    """
    layout = one_of("layout", options.layout, LAYOUTS)
    top_left = one_of("causal_align", options.causal_align, CAUSAL_ALIGNMENTS) == "top_left"
    _refuse_unsupported(options)

    _check_dtypes_and_devices(q, k, v)
    _check_ranks(q, k, v)
    (q_shape, q_place), (k_shape, k_place), (v_shape, v_place) = (
        as_bhsd(a.shape, a.strides, a.aligned, layout) for a in (q, k, v)
    )
    _check_shapes(q_shape, k_shape, v_shape)
    batch, q_heads, q_len, head_dim = q_shape
    kv_heads, kv_len, head_dim_v = k_shape[1], k_shape[2], v_shape[3]

    # A bound beyond every pair of positions is none.
    left, right = (
        None if bound is None or bound >= q_len + kv_len else bound
        for bound in _window(options.window)
    )
    if flag("causal", options.causal):
        right = 0 if right is None else min(right, 0)
    out_place = check_output("out", options.out, (*q.shape[:-1], head_dim_v), q, layout)
    scores = (batch, q_heads, q_len, kv_len)
    _check_lens("q_lens", options.q_lens, batch, q_len, q)
    _check_lens("kv_lens", options.kv_lens, batch, kv_len, q)
    return AttentionSpec(
        batch=batch,
        q_heads=q_heads,
        kv_heads=kv_heads,
        q_len=q_len,
        kv_len=kv_len,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=q.dtype,
        device=q.device,
        scale=1.0 / math.sqrt(head_dim)
        if options.scale is None
        else _factor("scale", options.scale, q.dtype),
        left=left,
        right=right,
        top_left=top_left,
        softcap=_softcap(options.softcap, q.dtype),
        mask=_score_array("mask", options.mask, ("bool",), scores, q),
        bias=_score_array("bias", options.bias, _bias_dtypes(q), scores, q),
        has_q_lens=options.q_lens is not None,
        has_kv_lens=options.kv_lens is not None,
        return_lse=flag("return_lse", options.return_lse),
        deterministic=flag("deterministic", options.deterministic),
        q=q_place,
        k=k_place,
        v=v_place,
        out=out_place,
    )


def check_option_names(
    function: str, names: Iterable[str], known: Sequence[str] = OPTION_NAMES
) -> None:
    """Raise TypeError for an option that does not exist, with the nearest one that does."""
    for name in names:
        if name not in known:
            raise TypeError(
                f"{function}: unknown option {name!r}{suggestion(name, known)}; "
                f"options: {', '.join(known)}"
            ) from None  # Python's own error may be on its way, and says less


def without_unknown(function: _F) -> _F:
    """Leave ``**unknown`` out of a function's signature, as `help` shows it.

    It is there for mistyped options, which the function answers with the nearest right one;
    Python's own message names none.
    """
    signature = inspect.signature(function)
    known = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
    function.__signature__ = signature.replace(parameters=known)  # type: ignore[attr-defined]
    return function


def suggestion(given: str, known: Sequence[str]) -> str:
    """`, did you mean ...?` for a word close to a known one, else nothing."""
    near = difflib.get_close_matches(given, known, 1)
    return f", did you mean {near[0]!r}?" if near else ""


def one_of(name: str, value: Any, allowed: Sequence[str]) -> str:
    """`value` when it is one of the allowed words."""
    if not isinstance(value, str) or value not in allowed:
        hint = suggestion(value, allowed) if isinstance(value, str) else ""
        raise ValueError(
            f"{name}: got {value!r}; expected one of {', '.join(map(repr, allowed))}{hint}"
        )
    return value


def flag(name: str, value: Any) -> bool:
    """`value` as a bool; arrays and numbers are refused."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: got {value!r}; expected True or False")
    return bool(value)


def number(name: str, value: Any) -> float:
    """A finite float from a Python or NumPy number or a 0-d NumPy array; never from a GPU scalar,
    which would wait.
    """
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (numbers.Real, np.number)):
        raise TypeError(f"{name}: got {value!r} ({type(value).__name__}); expected a number")
    if isinstance(value, np.complexfloating):
        raise TypeError(f"{name}: got {value!r}; expected a real number")
    try:
        finite = math.isfinite(value)
    except OverflowError:  # a Python integer beyond the largest float
        finite = False
    if not finite:
        raise ValueError(f"{name}: got {value!r}; expected a finite number")
    return float(value)


def _factor(name: str, value: Any, dtype: str) -> float:
    """A number that the scores of inputs of `dtype` can be multiplied by."""
    factor = number(name, value)
    if dtype != "float64" and abs(factor) > _FLOAT32_MAX:
        raise ValueError(
            f"{name}: got {value!r}; expected a number that float32 holds, up to "
            f"{_FLOAT32_MAX:.3g} in size: scores of {dtype} inputs are float32"
        )
    return factor


def as_bhsd(
    shape: tuple[int, ...], strides: tuple[int, ...], aligned: bool, layout: str
) -> tuple[tuple[int, int, int, int], Placement]:
    """Shape and placement of the (batch, heads, seq, dim) view of an array of rank 2 to 4."""
    missing = 4 - len(shape)
    b, h, s, d = (1,) * missing + shape
    sb, sh, ss, sd = (0,) * missing + strides
    if layout == "bshd" and missing < 2:
        h, s, sh, ss = s, h, ss, sh
    return (b, h, s, d), Placement((sb, sh, ss, sd), aligned)


def _refuse_unsupported(options: Options) -> None:
    dropout_p = number("dropout_p", options.dropout_p)
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p: got {options.dropout_p!r}; expected 0 <= dropout_p < 1")
    wanted = [name for name in _NOT_YET if getattr(options, name) is not None]
    if dropout_p > 0.0:
        wanted.append("dropout_p")
    if wanted:
        raise NotImplementedError(
            f"{', '.join(wanted)}: no kernel family of this version supports this option"
        )


def _check_dtypes_and_devices(q: ArrayInfo, k: ArrayInfo, v: ArrayInfo) -> None:
    allowed = GPU_DTYPES if q.on_gpu else CPU_DTYPES
    if q.dtype not in allowed:
        place = "on the GPU" if q.on_gpu else "on the CPU"
        raise TypeError(f"q: got dtype {q.dtype}; expected {', '.join(allowed)} {place}")
    for name, info in (("k", k), ("v", v)):
        if info.dtype != q.dtype:
            raise TypeError(f"{name}: got dtype {info.dtype}; expected q's dtype, {q.dtype}")
        check_device(name, info.device, q)


def check_device(name: str, device: str, q: ArrayInfo) -> None:
    """Raise ValueError for an array that does not lie where q does."""
    if device != q.device:
        raise ValueError(f"{name}: got an array on {device}; expected q's device, {q.device}")


def _check_ranks(q: ArrayInfo, k: ArrayInfo, v: ArrayInfo) -> None:
    if len(q.shape) not in _AXES:
        raise ValueError(f"q: got shape {q.shape}; expected {', '.join(_AXES.values())}")
    for name, info in (("k", k), ("v", v)):
        if len(info.shape) != len(q.shape):
            raise ValueError(
                f"{name}: got shape {info.shape}; expected {len(q.shape)} axes as in q, {q.shape}"
            )


def _check_shapes(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> None:
    batch, q_heads, _, head_dim = q
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"q: got head_dim {head_dim}; expected 1 to {MAX_HEAD_DIM}")
    if not 1 <= v[3] <= MAX_HEAD_DIM:
        raise ValueError(f"v: got head_dim {v[3]}; expected 1 to {MAX_HEAD_DIM}")
    if k[3] != head_dim:
        raise ValueError(f"k: got head_dim {k[3]}; expected q's head_dim, {head_dim}")
    for name, shape in (("k", k), ("v", v)):
        if shape[0] != batch:
            raise ValueError(f"{name}: got batch {shape[0]}; expected q's batch, {batch}")
    if v[1] != k[1]:
        raise ValueError(f"v: got {v[1]} heads; expected k's number of heads, {k[1]}")
    if v[2] != k[2]:
        raise ValueError(f"v: got length {v[2]}; expected k's length, {k[2]}")
    kv_heads = k[1]
    if q_heads != 0 if kv_heads == 0 else q_heads % kv_heads:
        raise ValueError(
            f"k: got {kv_heads} kv heads for {q_heads} query heads; "
            f"expected a number of heads that divides {q_heads}"
        )


def _window(window: Any) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    if isinstance(window, (str, bytes)) or not isinstance(window, Sequence) or len(window) != 2:
        raise ValueError(
            f"window: got {window!r}; expected a pair (left, right) of lengths or None"
        )
    bounds: list[int | None] = []
    for bound in window:
        if bound is None:
            bounds.append(None)
        elif isinstance(bound, (bool, np.bool_)) or not isinstance(bound, numbers.Integral):
            raise TypeError(
                f"window: got {window!r}; expected integers or None, not {type(bound).__name__}"
            )
        elif bound < 0:
            raise ValueError(f"window: got {window!r}; expected lengths >= 0, or None for no bound")
        else:
            bounds.append(int(bound))
    return bounds[0], bounds[1]


def _softcap(value: Any, dtype: str) -> float | None:
    if value is None:
        return None
    cap = _factor("softcap", value, dtype)
    if cap <= 0.0:
        raise ValueError(f"softcap: got {value!r}; expected a number > 0, or None for no cap")
    return cap


def _bias_dtypes(q: ArrayInfo) -> tuple[str, ...]:
    return tuple(dict.fromkeys((q.dtype, "float32")))


def _score_array(
    name: str,
    info: ArrayInfo | None,
    dtypes: tuple[str, ...],
    scores: tuple[int, ...],
    q: ArrayInfo,
) -> ScoreArray | None:
    if info is None:
        return None
    if info.dtype not in dtypes:
        meaning = " (True attends)" if dtypes == ("bool",) else ""
        raise TypeError(f"{name}: got dtype {info.dtype}; expected {' or '.join(dtypes)}{meaning}")
    check_device(name, info.device, q)
    wanted = scores[4 - len(q.shape) :]
    shape = info.shape
    fits = len(shape) <= len(wanted) and all(
        n in (1, full) for n, full in zip(reversed(shape), reversed(wanted), strict=False)
    )
    if not fits:
        axes = ("batch", "heads", "q_len", "kv_len")[4 - len(wanted) :]
        raise ValueError(
            f"{name}: got shape {shape}; "
            f"expected one that broadcasts to ({', '.join(axes)}) = {wanted}"
        )
    padding = 4 - len(shape)
    varies = [False] * padding + [
        n > 1 and step != 0 for n, step in zip(shape, info.strides, strict=True)
    ]
    return ScoreArray(info.dtype, (varies[0], varies[1], varies[2], varies[3]))


def _check_lens(name: str, lens: Any, batch: int, capacity: int, q: ArrayInfo) -> None:
    if lens is None:
        return
    dtype = lens.dtype if isinstance(lens, ArrayInfo) else lens.dtype.name
    if not dtype.startswith(("int", "uint")):
        raise TypeError(f"{name}: got dtype {dtype}; expected integers")
    if lens.shape != (batch,):
        raise ValueError(f"{name}: got shape {lens.shape}; expected (batch,) = ({batch},)")
    if isinstance(lens, ArrayInfo):
        check_device(name, lens.device, q)
    check_length_values(name, lens, capacity)


def check_length_values(name: str, lens: Any, capacity: int) -> None:
    """Raise ValueError for a length of the host that the array does not have."""
    if not isinstance(lens, np.ndarray):
        return
    wrong = np.flatnonzero((lens < 0) | (lens > capacity))
    if wrong.size:
        at = int(wrong[0])
        raise ValueError(f"{name}: got {name}[{at}] = {int(lens[at])}; expected 0 to {capacity}")


def check_like(
    name: str, info: ArrayInfo | None, shape: tuple[int, ...], q: ArrayInfo, layout: str
) -> Placement:
    """Where an array of this shape, and of q's dtype and device, lies; contiguous where there is
    none yet.
    """
    if info is None:
        return as_bhsd(shape, contiguous_strides(shape), True, layout)[1]
    if info.shape != shape:
        raise ValueError(f"{name}: got shape {info.shape}; expected {shape}")
    if info.dtype != q.dtype:
        raise TypeError(f"{name}: got dtype {info.dtype}; expected q's dtype, {q.dtype}")
    check_device(name, info.device, q)
    return as_bhsd(info.shape, info.strides, info.aligned, layout)[1]


def check_output(
    name: str, info: ArrayInfo | None, shape: tuple[int, ...], q: ArrayInfo, layout: str
) -> Placement:
    """`check_like` of an array to be written."""
    place = check_like(name, info, shape, q, layout)
    if info is not None and may_repeat(info):
        raise ValueError(
            f"{name}: got a broadcast or overlapping view, strides {info.strides}; "
            "expected distinct elements"
        )
    return place
