"""The public functions: arguments to spec, spec to plan, plan to result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from . import calls, kinds
from .arrays import describe
from .dispatch import choose
from .fp8.attention import attention_of_tensors
from .fp8.recipe import Fp8Recipe, recipe_of
from .fp8.tensors import Fp8Tensor
from .operands import ARRAY_OPTIONS, Operands, adopt_all, adopt_backward, spec_of
from .plan import Plan
from .runtime.device import Device, named, of_array
from .spec import OPTION_NAMES, Options
from .validate import check_option_names, flag, without_unknown
from .validate_backward import BACKWARD_OPTION_NAMES

# Defaults of `attention`.
_CAUSAL_ALIGN, _LAYOUT, _KERNEL, _DROPOUT_P = "bottom_right", "bhsd", "auto", 0.0

_GRADIENT_ARRAYS = ("dout", "lse", "dq", "dk", "dv")
_BACKWARD_EXPLAINED = tuple(dict.fromkeys((*BACKWARD_OPTION_NAMES, "out", *_GRADIENT_ARRAYS)))


@without_unknown
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    causal: bool = False,
    causal_align: str = _CAUSAL_ALIGN,
    window: Sequence[int | None] | None = None,
    softcap: float | None = None,
    mask: Any = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    block_mask: Any = None,
    q_lens: Any = None,
    kv_lens: Any = None,
    dropout_p: float = _DROPOUT_P,
    seed: Any = None,
    layout: str = _LAYOUT,
    return_lse: bool = False,
    out: Any = None,
    kernel: str = _KERNEL,
    deterministic: bool = False,
    **unknown: NoReturn,
) -> Any:
    """Exact attention, ``softmax(q @ k.swapaxes(-1, -2) * scale) @ v``.

    Arrays may come from NumPy, CuPy, or anything with ``__dlpack__`` or
    ``__cuda_array_interface__`` (torch, JAX, Numba); none is copied on the way in. Where they lie
    decides what runs: NumPy arrays the tiled CPU family, GPU arrays the family that `explain`
    names. Work is queued on the current CuPy stream without waiting for it.

    Parameters
    ----------
    q : array
        (seq, dim), (heads, seq, dim) or (batch, heads, seq, dim). float16 or bfloat16
        (`ml_dtypes.bfloat16`) or float32; float64 too on the CPU. Any strides; stride 0 (broadcast)
        is fine. ``dim`` is at most 256.
    k, v : array
        As q, with their own length, and a number of heads that divides q's (GQA, MQA): query head h
        uses kv head ``h // (q_heads // kv_heads)``. v's last axis may differ from k's.
        q, k and v may also be the three `Fp8Tensor` of what `quantize_fp8` returned, for as long as
        that exists; they know their layout and lengths, and take the options of `attention_fp8`.
    scale : float, optional
        Factor of the raw scores; ``1 / sqrt(dim)`` where left out. Zero and negative values are
        legal.
    causal : bool
        Query i sees key j when ``j <= i + kv_len - q_len`` (aligned bottom-right).
    causal_align : {"bottom_right", "top_left"}
        ``"top_left"`` aligns causal masking and `window` at the first key instead.
    window : (left, right), optional
        Query i sees keys from ``i + offset - left`` to ``i + offset + right``, both included, with
        offset as for `causal`; None is no bound.
    softcap : float, optional
        Scores become ``softcap * tanh(score / softcap)``, before the bias.
    mask : bool array, optional
        True attends; broadcasts to (batch, heads, q_len, kv_len) in every layout.
    bias : array, optional
        Added to the scaled scores; broadcasts likewise; q's dtype or float32.
    q_lens, kv_lens : (batch,) integers, optional
        Used lengths of each batch entry; what lies beyond has no influence, whatever its bytes.
        List, NumPy array, or array on q's device; the last is not read here, so not checked: values
        beyond the length count as the length.
    layout : {"bhsd", "bshd"}
        Order of the axes of q, k, v and out.
    return_lse : bool
        Return the log-sum-exp too.
    out : array, optional
        Where to write the result; shaped like q with v's last axis, in q's dtype, sharing no memory
        with the inputs.
    kernel : str
        ``"auto"``, or the name of a family to insist on.
    deterministic : bool
        The forward pass is bitwise reproducible either way; accepted so that calls can say so.
    alibi_slopes, sinks, block_mask, dropout_p, seed
        Not supported by any family yet.

    Returns
    -------
    out : ndarray of q's array module, or the `out` that was given
        A row that sees no key is 0.
    lse : float32 ndarray, only with ``return_lse=True``
        (batch, heads, seq) without the axes that q lacks: natural logarithm of the sum of
        exponentials of the scaled and masked scores, -inf for a row that sees no key. float64
        beside float64 inputs.

    Raises
    ------
    ValueError, TypeError
        Naming the argument, what was given and what is expected, before anything runs.
    NotImplementedError
        Naming the option that no family supports, or each family's reason.

    Notes
    -----
    The GPU families multiply a hidden key's weight, 0, with its value, so NaN or Inf in a v row
    that causal masking, a window or `mask` hides from some query may reach it; rows past `kv_lens`
    never do, and the CPU family keeps hidden rows out in every case.

    Lengths given on the host are copied to the device at each call of a GPU family. The `standard`
    family can't be captured in a CUDA graph, since CuPy refuses cuBLAS calls there.

    Dao et al., "FlashAttention" (2022), algorithm 1; Dao, "FlashAttention-2" (2023), section 3.1.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> rng = np.random.default_rng(0)
    >>> q = rng.standard_normal((8, 100, 64), dtype=np.float32)
    >>> k, v = rng.standard_normal((2, 2, 100, 64), dtype=np.float32)
    >>> cuflash.attention(q, k, v, causal=True).shape
    (8, 100, 64)
    """
    if unknown:
        check_option_names("attention", unknown, OPTION_NAMES)
    if type(q) is Fp8Tensor:
        return attention_of_tensors(
            q, k, v,
            {
                "scale": scale, "causal": causal, "causal_align": causal_align, "window": window,
                "softcap": softcap, "mask": mask, "return_lse": return_lse, "out": out,
            },
            {
                "bias": bias, "alibi_slopes": alibi_slopes, "sinks": sinks,
                "block_mask": block_mask, "q_lens": q_lens, "kv_lens": kv_lens, "seed": seed,
                "dropout_p": dropout_p or None, "kernel": None if kernel == "auto" else kernel,
                "layout": None if layout == "bhsd" else layout,
            },
        )  # fmt: skip
    operands = adopt_all(q, k, v, mask, bias, out, q_lens, kv_lens, layout)
    # All that the checks and the plan depend on; with types, because 1 == 1.0 == True. They come
    # first, so that values are compared with values of their own types only. Options are compared
    # with their defaults as objects, in which no type is in question.
    are_defaults = (
        scale is None
        and window is None
        and softcap is None
        and return_lse is False
        and deterministic is False
        and causal_align is _CAUSAL_ALIGN
        and layout is _LAYOUT
        and kernel is _KERNEL
        and dropout_p is _DROPOUT_P
        and seed is None
        and alibi_slopes is None
        and sinks is None
        and block_mask is None
    )
    key = (
        operands.fingerprints(), type(causal), causal,
        are_defaults or (
            type(scale), type(causal_align), type(softcap), type(alibi_slopes), type(sinks),
            type(block_mask), type(dropout_p), type(seed), type(layout), type(return_lse),
            type(kernel), type(deterministic), None if window is None else _types(window),
            scale, causal_align, softcap, alibi_slopes, sinks, block_mask, dropout_p, seed,
            layout, return_lse, kernel, deterministic, window,
        ),
    )  # fmt: skip
    call = kinds.find(key)
    if call is None:
        options = Options(
            scale=scale,
            causal=causal,
            causal_align=causal_align,
            window=window,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            block_mask=block_mask,
            dropout_p=dropout_p,
            seed=seed,
            layout=layout,
            return_lse=return_lse,
            kernel=kernel,
            deterministic=deterministic,
        )
        call = calls.add(key, operands, options)
    call.run(operands)
    result = operands.out if out is None else out
    return (result, operands.lse) if return_lse else result


def _types(window: Any) -> tuple[type, ...]:
    return (tuple, *map(type, window)) if type(window) is tuple else (type(window),)


def explain(
    q: Any,
    k: Any,
    v: Any,
    *,
    device: Device | str | None = None,
    backward: bool = False,
    recipe: str | Fp8Recipe | None = None,
    **options: Any,
) -> Plan:
    """The plan that `attention` would follow for the same arguments, without running anything.

    Parameters
    ----------
    q, k, v : array or `ArrayInfo`
        As in `attention`; an `ArrayInfo` describes an array that need not exist.
    device : Device or str, optional
        Ask for another device, such as ``"9.0"`` for that compute capability; the arrays' own where
        left out.
    backward : bool
        Ask for the plan of `attention_backward` instead.
    recipe : str or Fp8Recipe, optional
        Ask for the plan of `attention_fp8` with it instead.
    **options
        The options of `attention`; with ``backward=True`` those of `attention_backward`, and its
        arrays `dout`, `out` and `lse`, contiguous where left out; with a recipe those of
        `attention_fp8`.

    Returns
    -------
    Plan
        ``print(plan)`` shows it whole.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        As `attention` would.
    RuntimeError
        Where the arrays' GPU is not here and no `device` is named.

    Examples
    --------
    >>> from cuflash import ArrayInfo, explain
    >>> q = ArrayInfo((1, 8, 4096, 64), "float16")
    >>> explain(q, q, q, causal=True, device="7.5").family
    'standard'
    >>> explain(q, q, q, causal=True, device="9.0", backward=True).family
    'sm90'
    >>> explain(q, q, q, causal=True, device="9.0", recipe="f8").family
    'sm90_fp8'
    """
    is_backward = flag("backward", backward)
    if recipe is not None:
        if is_backward:
            raise ValueError("recipe: got one with backward=True; 8 bits have no gradients")
        return _explain_fp8(q, k, v, recipe_of(recipe), options, device)
    check_option_names("explain", options, _BACKWARD_EXPLAINED if is_backward else OPTION_NAMES)
    gradient_arrays = {name: options.pop(name, None) for name in _GRADIENT_ARRAYS}
    chosen = Options(**options)
    given = {name: getattr(chosen, name) for name in ("layout", *ARRAY_OPTIONS)}
    operands: Operands = adopt_all(q, k, v, **given, stand_ins=True)
    if is_backward:
        operands = adopt_backward(operands, **gradient_arrays, stand_ins=True)
    spec = spec_of(operands, chosen)
    return choose(spec, _device(device, spec.device), chosen.kernel)


def _explain_fp8(
    q: Any, k: Any, v: Any, recipe: Fp8Recipe, options: dict[str, Any], device: Device | str | None
) -> Plan:
    from .fp8 import plan  # which loads a family

    check_option_names("explain with a recipe", options, plan.OPTION_NAMES)
    chosen = Options(**options)
    given = {name: getattr(chosen, name) for name in ("layout", *ARRAY_OPTIONS)}
    operands = adopt_all(q, k, v, **given, stand_ins=True)
    where = _device(device, describe("q", operands.q).device)
    return plan.plan_fp8(operands, chosen, recipe, where)


def _device(asked: Device | str | None, of_arrays: str) -> Device:
    if asked is None:
        return of_array(of_arrays)
    return named(asked) if isinstance(asked, str) else asked
