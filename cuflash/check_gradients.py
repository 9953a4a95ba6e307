"""Every backward pass that this machine can run, against gradients in float64."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator
from typing import Any

import numpy as np

from . import check, dispatch, families, oracle
from .api import attention, explain
from .backward import attention_backward
from .runtime.device import CPU, Device, activate, cuda_devices

Array = np.ndarray[Any, Any]

GRADIENTS = ("dq", "dk", "dv")
# Of one rounding to the dtype, of the result itself and of the `out` that enters it.
_ROUNDINGS = {"float16": 2 * 2.0**-11, "bfloat16": 2 * 2.0**-8, "float32": 0.0, "float64": 0.0}
_UNIT_ROUNDOFF = {"float32": 2.0**-24, "float64": 2.0**-53}
# Below these a number has few digits or none.
_SMALLEST = {"float16": 2.0**-24, "bfloat16": 1e-35, "float32": 1e-35, "float64": 1e-290}


def run(
    families_wanted: tuple[str, ...] = (), dtypes: tuple[str, ...] = (), seed: int | None = None
) -> Iterator[check.Result]:
    """As `check.run`. The error of a result is the largest of an element of a gradient, in parts of
    what rounding can make of it: up to 1 is right.
    """
    rng = np.random.default_rng(secrets.randbits(64) if seed is None else seed)
    for device in (CPU, *cuda_devices()):
        for dtype, numpy_dtype in check.NUMPY_DTYPE.items():
            for problem in check.PROBLEMS:
                arrays, options = check.inputs(problem, numpy_dtype, rng)
                dout = rng.standard_normal((*arrays["q"].shape[:3], arrays["v"].shape[3]))
                arrays["dout"] = dout.astype(numpy_dtype)
                for b, length in enumerate(options.get("q_lens", ())):
                    arrays["dout"][b, :, length:] = np.nan
                for family in families.BACKWARD_BUILT:
                    if (
                        (not families_wanted or family in families_wanted)
                        and (not dtypes or dtype in dtypes)
                        and check.runs_on(family, device, dtype)
                    ):
                        yield _check(family, device, problem, dtype, arrays, options)


def _check(
    family: str,
    device: Device,
    problem: check.Problem,
    dtype: str,
    arrays: dict[str, Array],
    options: dict[str, Any],
) -> check.Result:
    place = check.name_of(device)
    with activate(device):
        dout, q, k, v = (check.moved(device, arrays[name]) for name in ("dout", "q", "k", "v"))
        given = {n: check.moved(device, o) for n, o in options.items()}
        plan = explain(q, k, v, **given, backward=True)
        if reasons := dispatch.reasons_against(family, plan.spec, device):
            why = f"refused: {'; '.join(reasons)}"
            return check.Result(family, place, dtype, problem.name, None, None, True, why)
        out, lse = attention(q, k, v, **given, return_lse=True)
        memory = {
            name: check.poisoned(device, arrays[name[1:]].shape, arrays["q"].dtype)
            for name in GRADIENTS
        }
        found = attention_backward(dout, q, k, v, out, lse, **given, **memory, kernel=family)
        dq, dk, dv = map(check.back, found)
    each = errors((dq, dk, dv), **arrays, **options)
    worst = max(each.values())
    return check.Result(family, place, dtype, problem.name, worst, None, worst <= 1)


def errors(
    gradients: tuple[Array, Array, Array],
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    **options: Any,
) -> dict[str, float]:
    """The largest error of dq, dk and dv, each element's in parts of what rounding can make of it.

    Infinite for a NaN, and where something stands to which nothing contributes. Arrays are of the
    host; options as in `cuflash.oracle.gradients`.
    """
    dtype = q.dtype.name
    exact = oracle.gradients(dout, q, k, v, **options)
    growth = max(1.0, check.score_size(q, k, options) / check.SCORE_SIZE)
    sums_in = "float64" if dtype == "float64" else "float32"
    found = {}
    (_, heads, q_len, _), (_, kv_heads, kv_len, _) = (
        check.four_axes(a, options.get("layout", "bhsd")).shape for a in (q, k)
    )
    for name, got, want, (rounded, summed, met) in zip(
        GRADIENTS, gradients, exact, _sizes(dout, q, k, v, options), strict=True
    ):
        # Equal terms, as of a broadcast dout, round alike: n of them may lose n unit roundoffs.
        terms = kv_len if name == "dq" else q_len * (heads // max(kv_heads, 1))
        accumulated = growth * check.TOLERANCE[sums_in] + terms * _UNIT_ROUNDOFF[sums_in]
        # Weights and their gradients are rounded too, and below the smallest number to nothing.
        smallest = _SMALLEST[dtype] * (1 + met / 2)
        tolerance = _ROUNDINGS[dtype] * rounded + accumulated * summed + smallest
        error = np.abs(got.astype(np.float64) - want)
        wrong = np.isnan(error).any() or np.any(got[summed == 0])
        found[name] = np.inf if wrong else float((error / tolerance).max(initial=0.0))
    return found


def _sizes(
    dout: Array, q: Array, k: Array, v: Array, options: dict[str, Any]
) -> list[tuple[Array, Array, Array]]:
    """Sums of the sizes of all terms of each gradient, which rounding errors scale with; the same
    without the derivative of softcap, ``1 - tanh**2``, whose error does not shrink with it; and the
    sums where every pair that has a weight has a gradient of 1.
    """
    layout = options.get("layout", "bhsd")
    rows, queries, keys, values = (
        check.finite_size(check.four_axes(a, layout)) for a in (dout, q, k, v)
    )
    weights = _weights(queries.shape, keys.shape, q, k, options)
    group = queries.shape[1] // max(keys.shape[1], 1)
    repeated_keys, repeated_values = (a.repeat(max(group, 1), axis=1) for a in (keys, values))
    scale = options.get("scale")
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else abs(float(scale))

    by_weight = rows @ repeated_values.swapaxes(-1, -2)
    delta = (rows * (weights @ repeated_values)).sum(-1, keepdims=True)
    plain = weights * (by_weight + delta) * factor
    sloped = plain * _slopes(q, k, max(group, 1), factor, options)
    some = (weights > 0).astype(np.float64)

    def of_keys(per_head: Array) -> Array:
        batch, heads, length, dim = per_head.shape
        groups = (batch, heads // max(group, 1), max(group, 1), length, dim)
        summed: Array = per_head.reshape(groups).sum(axis=2)
        return summed

    found = []
    for like, sums in (
        (q, [s @ repeated_keys for s in (sloped, plain, some * factor)]),
        (k, [of_keys(s.swapaxes(-1, -2) @ queries) for s in (sloped, plain, some * factor)]),
        (v, [of_keys(s.swapaxes(-1, -2) @ rows) for s in (weights, weights, some)]),
    ):
        swapped = layout == "bshd" and like.ndim >= 3
        given = [s.swapaxes(1, 2) if swapped else s for s in sums]
        rounded, summed, met = (s.reshape(like.shape) for s in given)
        found.append((rounded, summed, met))
    return found


def _weights(
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], q: Array, k: Array, options: dict[str, Any]
) -> Array:
    """Weights of every (batch, query head, query, key): attention to the identity."""
    kv_len = k_shape[2]
    one_hot = np.broadcast_to(np.eye(kv_len), (*k_shape[:2], kv_len, kv_len))
    layout = options.get("layout", "bhsd")
    if layout == "bshd":
        one_hot = one_hot.swapaxes(1, 2)
    one_hot = one_hot[(0,) * (4 - k.ndim)] if k.ndim > 2 else one_hot.reshape(kv_len, kv_len)
    rows, _ = oracle.attention(q, k, one_hot, **options)
    if layout == "bshd" and q.ndim > 2:
        rows = rows.swapaxes(-3, -2)
    return rows.reshape(*q_shape[:3], kv_len)


def _slopes(q: Array, k: Array, group: int, factor: float, options: dict[str, Any]) -> Any:
    if options.get("softcap") is None:
        return 1.0
    layout = options.get("layout", "bhsd")
    queries, keys = (np.nan_to_num(check.four_axes(a, layout).astype(np.float64)) for a in (q, k))
    scores = queries @ keys.repeat(group, axis=1).swapaxes(-1, -2) * factor
    with np.errstate(over="ignore"):
        return np.cosh(scores / options["softcap"]) ** -2
