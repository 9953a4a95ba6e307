"""8-bit attention: 16-bit arrays in and out, or what `quantize_fp8` made of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays import CPU, ArrayInfo
from ..operands import Operands, adopt_all, bhsd_view
from ..plan import is_logging, log_once
from ..runtime.device import CPU as CPU_DEVICE
from ..spec import AttentionSpec, Options
from ..validate import one_of
from .emulate import attend
from .gpu_tensors import GpuFp8Tensors
from .inputs import DTYPES, check_out, check_softcap, checked_spec
from .quantize import quantize_operands
from .recipe import Fp8Recipe, recipe_of
from .tensors import Fp8Tensor, Fp8Tensors

Array = np.ndarray[Any, Any]


def attention_fp8(
    q: Any,
    k: Any,
    v: Any,
    *,
    recipe: str | Fp8Recipe = "f8",
    scale: float | None = None,
    causal: bool = False,
    causal_align: str = "bottom_right",
    window: Sequence[int | None] | None = None,
    softcap: float | None = None,
    mask: Any = None,
    q_lens: Any = None,
    kv_lens: Any = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    out: Any = None,
) -> Any:
    """Attention with q, k, v and the softmax's weights in 8 bit.

    Parameters
    ----------
    q, k, v : array
        float16, bfloat16 or float32, shaped as in `cuflash.attention`.
    recipe : str or Fp8Recipe
        How to quantise and to sum: a preset's name or every choice by itself.
        ``"f8"`` has all of them in e4m3, ``"i8"`` q and k in int8, which is 1.5 times as precise
        or more; with a ``"+"`` the first 128 values stay in 16 bit.
    scale, causal, causal_align, window, softcap, mask, q_lens, kv_lens, layout, return_lse,
    out
        As in `cuflash.attention`. With `softcap` k keeps its mean, whatever the recipe says.

    Returns
    -------
    out : ndarray of q's dtype, or the `out` that was given
        A row that sees no key is 0.
    lse : float32 ndarray, only with ``return_lse=True``
        As in `cuflash.attention`.

    Raises
    ------
    ValueError, TypeError
        Naming the argument, what was given and what is expected, before anything runs.
    NotImplementedError
        For GPU arrays, with each reason why the kernel does not take them.

    Notes
    -----
    NaN and Inf spread further than in 16-bit attention: see `quantize_fp8`.

    Shah et al., "FlashAttention-3" (2024), section 3.3; Zhang et al., "SageAttention2" (2024);
    balancing after Xiao et al., "SmoothQuant" (2022).

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> from cuflash.fp8 import attention_fp8
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 512, 64)).astype(np.float16)
    >>> exact = cuflash.attention(q, k, v).astype(np.float32)
    >>> error = attention_fp8(q, k, v, recipe="i8") - exact
    >>> bool(np.linalg.norm(error) < 0.04 * np.linalg.norm(exact))
    True
    """
    chosen = recipe_of(recipe)
    operands = adopt_all(q, k, v, mask, None, out, q_lens, kv_lens, layout)
    options = Options(
        scale=scale,
        causal=causal,
        causal_align=causal_align,
        window=window,
        softcap=softcap,
        layout=layout,
        return_lse=return_lse,
    )
    if not isinstance(operands.q, np.ndarray):
        from . import gpu

        gpu.attend(operands, options, chosen)
        found = operands.out if out is None else out
        return (found, operands.lse) if return_lse else found
    spec = checked_spec(operands, options)
    check_out(operands)
    if is_logging():
        from .plan import plan_fp8

        log_once(plan_fp8(operands, options, chosen, CPU_DEVICE))
    if spec.softcap is not None:
        chosen = dataclasses.replace(chosen, center_k=False)
    return _attend(spec, quantize_operands(operands, chosen), operands, out)


def attention_quantized(
    tensors: Fp8Tensors,
    *,
    scale: float | None = None,
    causal: bool = False,
    causal_align: str = "bottom_right",
    window: Sequence[int | None] | None = None,
    softcap: float | None = None,
    mask: Any = None,
    return_lse: bool = False,
    dtype: str | None = None,
    out: Any = None,
) -> Any:
    """`attention_fp8` of what `quantize_fp8` returned: quantised once, attended to many times.

    Parameters
    ----------
    tensors : Fp8Tensors
        With its recipe, layout and used lengths.
    scale, causal, causal_align, window, softcap, mask, return_lse, out
        As in `attention_fp8`.
    dtype : {"float16", "bfloat16", "float32"}, optional
        Of the result; that of the arrays that were quantised where left out.

    Returns
    -------
    out, lse
        As from `attention_fp8`.

    Raises
    ------
    ValueError, TypeError
        Naming the argument, what was given and what is expected; for `softcap` too where the
        recipe subtracted k's mean, which scores then need.
    """
    if not isinstance(tensors, Fp8Tensors):
        raise TypeError(f"tensors: got {type(tensors).__name__}; expected Fp8Tensors")
    dtype = one_of("dtype", tensors.dtype if dtype is None else dtype, DTYPES)
    options = Options(
        scale=scale,
        causal=causal,
        causal_align=causal_align,
        window=window,
        softcap=softcap,
        layout=tensors.layout if isinstance(tensors, GpuFp8Tensors) else tensors.q.layout,
        return_lse=return_lse,
    )
    if isinstance(tensors, GpuFp8Tensors):
        from . import gpu

        found, lse = gpu.attend_to(tensors, options, dtype, mask, out)
        found = found if out is None else out
        return (found, lse) if return_lse else found
    q, k, v = (
        ArrayInfo((*tensor.data.shape[:-1], tensor.head_dim), dtype, CPU)
        for tensor in (tensors.q, tensors.k, tensors.v)
    )
    lens = tensors.q_lens, tensors.kv_lens
    operands = adopt_all(q, k, v, mask, None, out, *lens, options.layout, stand_ins=True)
    spec = checked_spec(operands, options)
    check_out(operands)
    check_softcap(spec, tensors.recipe)
    return _attend(spec, tensors, operands, out)


def attention_of_tensors(
    q: Fp8Tensor, k: Any, v: Any, taken: dict[str, Any], refused: dict[str, Any]
) -> Any:
    """`attention_quantized` with the options `taken`, of three tensors of one call.

    Raises
    ------
    ValueError, TypeError
        Naming the argument: k or v where they don't belong to q, and any of `refused` that is
        given.
    """
    for name, tensor in (("k", k), ("v", v)):
        if not isinstance(tensor, Fp8Tensor):
            raise TypeError(f"{name}: got {type(tensor).__name__}; expected an Fp8Tensor, as q is")
    owner = q.owner
    if owner is None or k.owner is not owner or v.owner is not owner:
        owner = _put_together(q, k, v)
    for name, value in refused.items():
        if value is not None:
            raise ValueError(
                f"{name}: got one beside Fp8Tensors; expected none: they know theirs or take none"
            )
    return attention_quantized(owner, **taken)


def _put_together(q: Fp8Tensor, k: Fp8Tensor, v: Fp8Tensor) -> Fp8Tensors:
    """What doesn't fit is told as of `Fp8Tensors`, which may need more than the three."""
    try:
        together = Fp8Tensors(q.get(), k.get(), v.get())
    except ValueError as error:
        if not str(error).startswith(("mean_scores", "first_values")):
            raise
    else:
        if isinstance(q.data, np.ndarray):
            return together
    raise ValueError(
        "k, v: got other calls' than q, or of one whose result is gone; expected q, k and v of "
        "what quantize_fp8 returned, while it exists"
    )


def _attend(spec: AttentionSpec, tensors: Fp8Tensors, operands: Operands, given: Any) -> Any:
    shape = operands.q.shape
    out = operands.out
    if out is None:
        out = np.empty((*shape[:-1], spec.head_dim_v), _numpy_dtype(spec.dtype))
    lse = np.empty((spec.batch, spec.q_heads, spec.q_len), np.float32) if spec.return_lse else None
    mask = None
    if operands.mask is not None:
        mask = np.broadcast_to(operands.mask, (spec.batch, spec.q_heads, spec.q_len, spec.kv_len))
    attend(spec, tensors, bhsd_view(out, operands.layout), lse, mask)
    result = out if given is None else given
    return result if lse is None else (result, lse[(0,) * (4 - len(shape))])


def _numpy_dtype(name: str) -> Any:
    if name == "bfloat16":
        import ml_dtypes

        return ml_dtypes.bfloat16
    return np.dtype(name)
