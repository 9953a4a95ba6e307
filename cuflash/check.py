"""Every family that this machine can run, against the float64 oracle, on fresh random inputs."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from . import dispatch, families, oracle
from .api import attention, explain
from .runtime.device import CPU, Device, activate, cuda_devices

NUMPY_DTYPE = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}

# Largest |got - exact| / sum(weights * |v|) over the elements. Rounding a result to 16 bits costs
# at most the unit roundoff u of that sum, rounding the weights as much again; float32 scores and
# sums add some tens of theirs.
_FLOAT32 = 64 * 2.0**-24
TOLERANCE = {
    "float16": 2 * 2.0**-11 + _FLOAT32,
    "bfloat16": 2 * 2.0**-8 + _FLOAT32,
    "float32": _FLOAT32,
    "float64": 64 * 2.0**-53,
}
SCORE_SIZE = 32.0  # for which these tolerances hold
# Absolute error of the LSE: that of a float32 score below 32, a few units of 2**-24 * 32.
LSE_TOLERANCE = {"float16": 1e-5, "bfloat16": 1e-5, "float32": 1e-5, "float64": 1e-13}


@dataclass(frozen=True, slots=True)
class Problem:
    """Shapes and options of one check: (batch, heads, kv heads, queries, keys, dim, dim of v)."""

    name: str
    shape: tuple[int, int, int, int, int, int, int]
    options: tuple[tuple[str, Any], ...] = ()


PROBLEMS = (
    Problem("full", (2, 4, 4, 200, 200, 64, 64)),
    Problem("causal", (2, 4, 4, 257, 257, 128, 128), (("causal", True),)),
    Problem("grouped heads", (1, 6, 2, 130, 190, 64, 64), (("causal", True),)),
    Problem("several tiles", (1, 4, 2, 300, 1200, 64, 64), (("causal", True),)),
    Problem("one query", (2, 8, 1, 1, 777, 64, 64), (("causal", True),)),
    Problem("more queries than keys", (1, 2, 2, 70, 33, 64, 64), (("causal", True),)),
    Problem(
        "top-left causal",
        (1, 2, 2, 90, 150, 64, 64),
        (("causal", True), ("causal_align", "top_left")),
    ),
    Problem("window", (1, 4, 2, 300, 300, 96, 96), (("window", (40, 7)),)),
    Problem("softcap", (1, 2, 2, 128, 128, 64, 64), (("softcap", 5.0),)),
    Problem("mask", (2, 2, 1, 100, 140, 64, 64), (("mask", "random"),)),
    Problem("bias", (2, 2, 2, 100, 140, 64, 64), (("bias", "random"),)),
    Problem(
        "lengths",
        (3, 2, 2, 64, 96, 64, 64),
        (("causal", True), ("q_lens", [64, 0, 17]), ("kv_lens", [96, 40, 0])),
    ),
    Problem("negative scale", (1, 2, 2, 64, 64, 64, 64), (("scale", -0.3),)),
    Problem("odd dims", (1, 2, 2, 75, 50, 61, 19)),
    Problem("dim 32", (1, 2, 2, 150, 290, 32, 32)),
    Problem("dim 192", (1, 2, 2, 150, 290, 192, 192)),
    Problem("dims 192, 128", (1, 2, 2, 150, 150, 192, 128), (("causal", True),)),
    Problem("dim 256", (1, 2, 2, 150, 290, 256, 256), (("causal", True),)),
    Problem("dim 128, many keys", (1, 2, 1, 300, 1200, 128, 128)),
    Problem("dim 256, many keys", (1, 2, 1, 300, 1200, 256, 256)),
    Problem(  # more tiles of rows than fit a GPU at once, and few keys to keep it cheap
        "many queries",
        (1, 8, 2, 6000, 150, 64, 64),
        (("causal", True), ("causal_align", "top_left")),
    ),
)


@dataclass(frozen=True, slots=True)
class Result:
    """Outcome of one problem on one family. Where it was refused, errors are None, `note` says why,
    and `passed` is true, for nothing went wrong.
    """

    family: str
    device: str
    dtype: str
    problem: str
    error: float | None
    lse_error: float | None
    passed: bool
    note: str = ""

    @property
    def refused(self) -> bool:
        """Whether the family did not take the problem."""
        return self.error is None


def run(
    families_wanted: tuple[str, ...] = (), dtypes: tuple[str, ...] = (), seed: int | None = None
) -> Iterator[Result]:
    """Check families one problem after another; an empty selection means all.

    Parameters
    ----------
    families_wanted, dtypes : tuple of str
        Names to keep.
    seed : int, optional
        Of the inputs; fresh ones where left out.

    Yields
    ------
    Result
    """
    rng = np.random.default_rng(secrets.randbits(64) if seed is None else seed)
    for device in (CPU, *cuda_devices()):
        for dtype, numpy_dtype in NUMPY_DTYPE.items():
            for problem in PROBLEMS:
                arrays, options = inputs(problem, numpy_dtype, rng)
                for family in families.BUILT:
                    wanted = not families_wanted or family in families_wanted
                    if (
                        wanted
                        and (not dtypes or dtype in dtypes)
                        and runs_on(family, device, dtype)
                    ):
                        yield _check(family, device, problem, dtype, arrays, options)


def inputs(
    problem: Problem, dtype: Any, rng: np.random.Generator
) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, Any]]:
    """Random NumPy arrays of a problem, and its options; NaN stands where nothing may be read."""
    batch, heads, kv_heads, q_len, kv_len, dim, dim_v = problem.shape
    options = dict(problem.options)
    arrays = {
        "q": rng.standard_normal((batch, heads, q_len, dim)),
        "k": rng.standard_normal((batch, kv_heads, kv_len, dim)),
        "v": rng.standard_normal((batch, kv_heads, kv_len, dim_v)),
    }
    arrays = {name: array.astype(dtype) for name, array in arrays.items()}
    for b, length in enumerate(options.get("kv_lens", ())):
        arrays["k"][b, :, length:] = np.nan
        arrays["v"][b, :, length:] = np.nan
    if "mask" in options:
        options["mask"] = rng.random((batch, 1, q_len, kv_len)) < 0.3
        options["mask"][:, :, ::7] = False
    if "bias" in options:
        options["bias"] = rng.standard_normal((heads, q_len, kv_len)).astype(dtype)
    return arrays, options


def scaled_error(
    got: np.ndarray[Any, Any], exact: np.ndarray[Any, Any], size: np.ndarray[Any, Any]
) -> float:
    """Largest |got - exact| / size over the elements, with `size` the same attention over |v|.

    Infinite for a NaN, and where `size` is 0 (a row that sees no key) but `got` is not.
    """
    error = np.abs(got.astype(np.float64) - exact)
    if np.isnan(error).any() or (error[size == 0] > 0).any():
        return float("inf")
    return float((error / np.where(size == 0, 1.0, size)).max(initial=0.0))


def score_size(q: np.ndarray[Any, Any], k: np.ndarray[Any, Any], options: dict[str, Any]) -> float:
    """Largest ``|scale| * sum(|q| * |k|) + |bias|``: what rounding errors of scores scale with."""
    layout = options.get("layout", "bhsd")
    queries, keys = (finite_size(four_axes(a, layout)) for a in (q, k))
    group = queries.shape[1] // max(keys.shape[1], 1)
    products = queries @ keys.repeat(max(group, 1), axis=1).swapaxes(-1, -2)
    scale = options.get("scale")
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else abs(float(scale))
    bias = options.get("bias")
    largest_bias = 0.0 if bias is None else float(finite_size(bias).max(initial=0.0))
    return factor * float(products.max(initial=0.0)) + largest_bias


def finite_size(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Absolute values in float64; 0 for NaN and Inf, which no tolerance covers."""
    values = np.abs(array.astype(np.float64))
    finite: np.ndarray[Any, Any] = np.where(np.isfinite(values), values, 0.0)
    return finite


def four_axes(array: np.ndarray[Any, Any], layout: str) -> np.ndarray[Any, Any]:
    """An array as (batch, heads, seq, dim)."""
    if layout == "bshd" and array.ndim >= 3:
        array = array.swapaxes(-3, -2)
    shaped: np.ndarray[Any, Any] = array.reshape((1,) * (4 - array.ndim) + array.shape)
    return shaped


def runs_on(family: str, device: Device, dtype: str) -> bool:
    """Whether arrays of a device and a dtype are a family's at all."""
    if dtype == "float64" and device.kind == "cuda":
        return False  # refused before dispatch
    return (family == "reference") == (device.kind == "cpu")


def _check(
    family: str,
    device: Device,
    problem: Problem,
    dtype: str,
    arrays: dict[str, np.ndarray[Any, Any]],
    options: dict[str, Any],
) -> Result:
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    exact, exact_lse = oracle.attention(q, k, v, **options)
    size, _ = oracle.attention(q, k, np.abs(v), **options)
    with activate(device):
        given = {name: moved(device, value) for name, value in (arrays | options).items()}
        given["out"] = poisoned(device, exact.shape, arrays["q"].dtype)
        place = name_of(device)
        plan = explain(**given)
        if reasons := dispatch.reasons_against(family, plan.spec, device):
            return Result(
                family,
                place,
                dtype,
                problem.name,
                None,
                None,
                True,
                f"refused: {'; '.join(reasons)}",
            )
        out, lse = attention(**given, return_lse=True, kernel=family)
        out, lse = back(out), back(lse)
    error, lse_error = scaled_error(out, exact, size), _absolute_error(lse, exact_lse)
    passed = error <= TOLERANCE[dtype] and lse_error <= LSE_TOLERANCE[dtype]
    return Result(family, place, dtype, problem.name, error, lse_error, passed)


def _absolute_error(got: np.ndarray[Any, Any], exact: np.ndarray[Any, Any]) -> float:
    same = got == exact  # -inf on both sides
    with np.errstate(invalid="ignore"):
        distance = np.where(same, 0.0, np.abs(got.astype(np.float64) - exact))
    return float("inf") if np.isnan(distance).any() else float(distance.max(initial=0.0))


def name_of(device: Device) -> str:
    """As results call it."""
    return str(device) if device.kind == "cpu" else f"{device.name} {device.index}"


def moved(device: Device, option: Any) -> Any:
    """An array of the host on a device; what is no array as it is."""
    if device.kind == "cpu" or not isinstance(option, np.ndarray):
        return option
    import cupy

    return cupy.asarray(option)


def poisoned(device: Device, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Output memory full of NaN, so that an element that was not written shows."""
    return moved(device, np.full(shape, np.nan, dtype))


def back(array: Any) -> np.ndarray[Any, Any]:
    """An array of a device on the host."""
    return array if isinstance(array, np.ndarray) else array.get()
