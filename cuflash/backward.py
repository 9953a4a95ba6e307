"""The gradients of attention: the backward pass by itself, and the pair of both passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from . import calls, kinds
from .fp8.tensors import Fp8Tensor
from .operands import adopt_all, adopt_backward
from .spec import OPTION_NAMES, Options
from .validate import check_option_names, without_unknown
from .validate_backward import BACKWARD_OPTION_NAMES

Vjp = Callable[..., tuple[Any, Any, Any]]
_VJP_OPTION_NAMES = tuple(name for name in OPTION_NAMES if name not in ("return_lse", "out"))


@without_unknown
def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    scale: float | None = None,
    causal: bool = False,
    causal_align: str = "bottom_right",
    window: Sequence[int | None] | None = None,
    softcap: float | None = None,
    mask: Any = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    block_mask: Any = None,
    q_lens: Any = None,
    kv_lens: Any = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    layout: str = "bhsd",
    kernel: str = "auto",
    deterministic: bool = False,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    **unknown: NoReturn,
) -> tuple[Any, Any, Any]:
    """Gradients of ``sum(attention(q, k, v, ...) * dout)`` by q, k and v.

    Nothing of the size of the score matrix was kept: the weights are computed again, tile by tile,
    from q, k and `lse`. The options have to be those of the forward call.

    Parameters
    ----------
    dout : array, (batch, heads, q_len, head_dim_v)
        Gradient by the result: shaped like it, in q's dtype, of any strides, stride 0 (broadcast)
        included. Rows past `q_lens` are not looked at.
    q, k, v : array
        As given to `attention`: (batch, heads, q_len, head_dim), (batch, kv_heads, kv_len,
        head_dim) and (batch, kv_heads, kv_len, head_dim_v), or with fewer axes, or as `layout` has
        them; float16, bfloat16, float32, on the CPU also float64.
    out, lse : array
        Both results of ``attention(q, k, v, ..., return_lse=True)``: shaped like `dout`, in q's
        dtype; and (batch, heads, q_len) in every layout, float32 (float64 for float64 inputs).
    scale, causal, causal_align, window, softcap, mask, bias, q_lens, kv_lens, layout
        As given to `attention`. `bias` is taken as a constant: it enters the weights, and has no
        gradient here.
    kernel : str
        ``"auto"``, or the name of a family to insist on.
    deterministic : bool
        Promise the same bits, run after run. Without it `sm80` and `sm90` sum up dq in any order;
        with it in one, in which blocks wait for one another. The other families keep to it either
        way.
    dq, dk, dv : array, optional
        Where to write the gradients: shaped like q, k and v, in their dtype, sharing no memory with
        any other array of the call.
    alibi_slopes, sinks, block_mask, dropout_p, seed
        Not supported by any family yet.

    Returns
    -------
    dq, dk, dv : ndarrays of q's array module, or those that were given
        Shaped and typed like q, k and v. With grouped heads, dk and dv are sums over the query
        heads that share a key. Exactly 0 for a row that sees no key and a key that no row sees, so
        also past `q_lens` and `kv_lens`.

    Raises
    ------
    ValueError, TypeError
        Naming the argument, what was given and what is expected, before anything runs.
    NotImplementedError
        Naming the option that no family supports, or each family's reason.

    Notes
    -----
    Sums run in float32, in float64 for float64 inputs. As in other implementations of the method,
    ``sum(dout * out)`` of a row comes from `out` as it was stored, so that its rounding to 16 bits
    enters the gradients of 16-bit inputs.

    NaN and Inf in attended inputs propagate. What hidden and unused rows hold can't reach a
    gradient on the CPU; on a GPU that is so for rows past `q_lens` and `kv_lens`.

    Dao et al., "FlashAttention" (2022), appendix B.4, algorithm 4; Dao, "FlashAttention-2" (2023),
    section 3.1.2, algorithm 2.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> rng = np.random.default_rng(0)
    >>> q = rng.standard_normal((8, 100, 64), dtype=np.float32)
    >>> k, v = rng.standard_normal((2, 2, 100, 64), dtype=np.float32)
    >>> out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    >>> dq, dk, dv = cuflash.attention_backward(np.ones_like(out), q, k, v, out, lse, causal=True)
    >>> dq.shape, dk.shape
    ((8, 100, 64), (2, 100, 64))
    """
    if unknown:
        check_option_names("attention_backward", unknown, BACKWARD_OPTION_NAMES)
    _refuse_fp8(q)
    forward = adopt_all(q, k, v, mask, bias, out, q_lens, kv_lens, layout)
    if out is None:
        raise TypeError("out: got None; expected the result of attention for these inputs")
    operands = adopt_backward(forward, dout, lse, dq, dk, dv)
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
        kernel=kernel,
        deterministic=deterministic,
    )
    _run(calls.BackwardCall, operands, options)
    given = {"dq": dq, "dk": dk, "dv": dv}
    first, second, third = (
        getattr(operands, name) if array is None else array for name, array in given.items()
    )
    return first, second, third


@without_unknown
def attention_vjp(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    causal: bool = False,
    causal_align: str = "bottom_right",
    window: Sequence[int | None] | None = None,
    softcap: float | None = None,
    mask: Any = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    block_mask: Any = None,
    q_lens: Any = None,
    kv_lens: Any = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    layout: str = "bhsd",
    kernel: str = "auto",
    deterministic: bool = False,
    **unknown: NoReturn,
) -> tuple[Any, Vjp]:
    """Attention, and the function that takes a gradient by its result to those by q, k and v.

    Parameters
    ----------
    q, k, v : array
        As in `attention`.
    scale, causal, causal_align, window, softcap, mask, bias, q_lens, kv_lens, layout
        As in `attention`; `bias` is taken as a constant.
    kernel : str
        ``"auto"``, or the name of a family to insist on, for both passes.
    deterministic : bool
        As in `attention_backward`.
    alibi_slopes, sinks, block_mask, dropout_p, seed
        Not supported by any family yet.

    Returns
    -------
    out : ndarray of q's array module
        As of `attention`.
    vjp : callable
        ``vjp(dout, *, dq=None, dk=None, dv=None)`` is `attention_backward` for this call, as often
        as it is asked. It keeps the arrays themselves, and the log-sum-exp; none of them, `out`
        included, may change in between.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        As `attention` and `attention_backward`; also where a family takes the forward pass and none
        the backward pass. In each case before anything runs.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 100, 64), dtype=np.float32)
    >>> out, vjp = cuflash.attention_vjp(q, k, v, causal=True)
    >>> dq, dk, dv = vjp(np.ones_like(out))
    """
    if unknown:
        check_option_names("attention_vjp", unknown, _VJP_OPTION_NAMES)
    _refuse_fp8(q)
    operands = adopt_all(q, k, v, mask, bias, None, q_lens, kv_lens, layout)
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
        return_lse=True,
        kernel=kernel,
        deterministic=deterministic,
    )
    _run(calls.VjpCall, operands, options)

    def vjp(dout: Any, *, dq: Any = None, dk: Any = None, dv: Any = None) -> tuple[Any, Any, Any]:
        return attention_backward(
            dout,
            operands.q,
            operands.k,
            operands.v,
            operands.out,
            operands.lse,
            scale=scale,
            causal=causal,
            causal_align=causal_align,
            window=window,
            softcap=softcap,
            mask=operands.mask,
            bias=operands.bias,
            q_lens=operands.q_lens,
            kv_lens=operands.kv_lens,
            layout=layout,
            kernel=kernel,
            deterministic=deterministic,
            dq=dq,
            dk=dk,
            dv=dv,
        )

    return operands.out, vjp


def _run(kind: type[calls.Call], operands: Any, options: Options) -> None:
    key = kinds.key_of(kind, operands, options)
    call = kinds.find(key)
    if call is None:
        call = calls.add(key, operands, options, kind)
    call.run(operands)


def _refuse_fp8(q: Any) -> None:
    if type(q) is Fp8Tensor:
        raise TypeError("q: got an Fp8Tensor; expected an array, as codes have no gradients")
