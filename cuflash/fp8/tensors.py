"""Quantised q, k and v, with all that is needed to attend to them or to get them back."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..arrays import module_of, to_host
from ..operands import bhsd_view
from ..validate import LAYOUTS, one_of
from .formats import decode
from .recipe import TILE_KEYS, Block, Fp8Recipe
from .rotation import Rotation, rotation_of
from .scales import scale_shape, spread

Array = np.ndarray[Any, Any]

_ROLES = ("q", "k", "v")


@dataclass(frozen=True, eq=False)
class Fp8Tensor:
    """One of q, k and v in 8 bit. CuPy has no such dtype, so the codes travel as uint8.

    With ``x' = ((x - mean) * balance) @ rotation`` for q and ``/ balance`` for k, and
    ``x' = x - mean`` for v, the codes stand for ``x' / scale``.

    Attributes
    ----------
    role : {"q", "k", "v"}
    data : uint8 array
        Codes in the layout and with the axes of the array that was quantised. The last axis of q
        and k may be longer than `head_dim`, where the rotation pads it.
    scale : float32 array
        (batch, heads, groups, 1), where groups are those that the recipe's block makes of the
        tokens, or all of them in one; (batch, heads, 1, head_dim) per channel; (1, 1, 1, 1) per
        tensor. 0 for a group of zeros, NaN for one that held NaN or Inf.
    recipe : Fp8Recipe
    head_dim : int
        Channels of the array that was quantised.
    kv_heads : int
        Heads of k and v; `balance` and per-head rotations are for these, for q too.
    layout : {"bhsd", "bshd"}
    balance : (batch, kv_heads, 1, head_dim) float32 array, or None
        Factor that q was multiplied and k divided by; None for v.
    mean : (batch, kv_heads, 1, head_dim) float32 array, or None
        What was subtracted from k, or from v.
    residual : (batch, kv_heads, 1, head_dim) float32 array, or None
        Mean rounding error of v.

    Raises
    ------
    ValueError, TypeError
        Where these don't fit each other.
    """

    role: str
    data: Array
    scale: Array
    recipe: Fp8Recipe
    head_dim: int
    kv_heads: int
    layout: str = "bhsd"
    balance: Array | None = None
    mean: Array | None = None
    residual: Array | None = None

    def __post_init__(self) -> None:
        one_of("role", self.role, _ROLES)
        one_of("layout", self.layout, LAYOUTS)
        name = self.role
        if not isinstance(self.recipe, Fp8Recipe):
            raise TypeError(f"{name}.recipe: got {self.recipe!r}; expected an Fp8Recipe")
        if self.data.dtype != np.uint8:
            raise TypeError(f"{name}.data: got dtype {self.data.dtype}; expected uint8")
        if not 2 <= self.data.ndim <= 4:
            raise ValueError(f"{name}.data: got shape {self.data.shape}; expected 2 to 4 axes")
        if self.data.shape[-1] != self.rotation.dim:
            raise ValueError(
                f"{name}.data: got shape {self.data.shape}; expected a last axis of "
                f"{self.rotation.dim}, the channels of head_dim {self.head_dim} after rotation"
            )
        if self.scale.dtype != np.float32:
            raise TypeError(f"{name}.scale: got dtype {self.scale.dtype}; expected float32")
        batch, heads = self.codes.shape[:2]
        expected = scale_shape(self.block, self.codes.shape)
        if self.scale.shape != expected:
            raise ValueError(
                f"{name}.scale: got shape {self.scale.shape}; expected {expected} for data of "
                f"shape {self.data.shape} and {name}_block {self.block!r}"
            )
        if heads != self.kv_heads and (
            name != "q" or (heads % self.kv_heads if self.kv_heads else heads)
        ):
            raise ValueError(
                f"{name}.kv_heads: got {self.kv_heads}; expected a number that fits "
                f"{heads} heads of data"
            )
        wanted = (batch, self.kv_heads, 1, self.head_dim)
        for part, allowed, used in (
            ("balance", "qk", self.recipe.balance),
            ("mean", "k", self.recipe.center_k),
            ("mean", "v", self.recipe.center_v),
            ("residual", "v", self.recipe.residual_mean),
        ):
            if name in allowed:
                _check_part(f"{name}.{part}", getattr(self, part), used, wanted)

    @property
    def owner(self) -> Fp8Tensors | None:
        """The `Fp8Tensors` that this belongs to, while they exist."""
        reference = vars(self).get("_owner")
        return None if reference is None else reference()

    def belong_to(self, owner: Fp8Tensors) -> None:
        """Become one of the `owner`'s, which is referred to weakly, unless it is another's."""
        if self.owner is None:
            vars(self)["_owner"] = weakref.ref(owner)

    @property
    def block(self) -> Block:
        """What shares a scale."""
        block: Block = getattr(self.recipe, f"{self.role}_block")
        return block

    @property
    def dtype(self) -> str:
        """Format of the codes: ``"e4m3"`` or ``"int8"``."""
        return "e4m3" if self.role == "v" else self.recipe.qk_dtype

    @property
    def rotation(self) -> Rotation:
        """The rotation of q and k, which padded their channels; v has none."""
        if self.role == "v":
            return Rotation(self.head_dim, self.head_dim)
        return rotation_of(self.recipe, self.head_dim, self.kv_heads)

    @property
    def codes(self) -> Array:
        """`data` as (batch, heads, tokens, channels), without a copy."""
        view: Array = bhsd_view(self.data, self.layout)
        return view

    def get(self) -> Fp8Tensor:
        """The same in host memory, as `cupy.ndarray.get`."""
        parts = ("data", "scale", "balance", "mean", "residual")
        held: dict[str, Any] = {
            name: to_host(part) for name in parts if (part := getattr(self, name)) is not None
        }
        return replace(self, **held)

    def dequantize(self) -> Array:
        """What the codes stand for, in float32 and in the shape that was quantised.

        Scales, rotation, balancing and means are undone. Tokens past the used lengths hold zeros
        before that, so they become the mean. A group that held NaN or Inf is NaN. What a GPU holds
        is computed on the host, and returned to the GPU.
        """
        if not isinstance(self.data, np.ndarray):
            array: Array = module_of(self.data).asarray(self.get().dequantize())
            return array
        codes = self.codes
        batch, heads, tokens, dim = codes.shape
        if not codes.size:
            return np.zeros((*self.data.shape[:-1], self.head_dim), np.float32)
        with np.errstate(invalid="ignore", over="ignore"):
            values = decode(codes, self.dtype) * spread(self.scale, self.block, codes.shape[2])
            values = self.rotation.undo(values.reshape(batch, self.kv_heads, -1, dim))
            if self.balance is not None:
                values = values / self.balance if self.role == "q" else values * self.balance
            for mean in (self.mean, self.residual):
                if mean is not None:
                    values = values + mean
        values = values.reshape(batch, heads, tokens, self.head_dim)
        if self.layout == "bshd" and self.data.ndim >= 3:
            values = values.swapaxes(1, 2)
        plain: Array = values[(0,) * (4 - self.data.ndim)]
        return plain


@dataclass(frozen=True, eq=False)
class Fp8Tensors:
    """Quantised q, k and v that belong together.

    Attributes
    ----------
    q, k, v : Fp8Tensor
    first_values : (batch, kv_heads, keys, head_dim) float16 array, or None
        v of the first 128 keys, less its `mean` and `residual`, in units of its scale, where the
        recipe's `first_tile_16bit` asks for it.
    mean_scores : (batch, q_heads, q_len) float32 array, or None
        ``q @ mean`` with the mean that was subtracted from k, which the log-sum-exp needs.
    q_lens, kv_lens : (batch,) integer array, or None
        Used lengths.
    dtype : {"float16", "bfloat16", "float32"}
        Of the arrays that were quantised.

    Raises
    ------
    ValueError
        Naming the member, for mixed recipes, a rotation of one tensor only, other layouts, and
        shapes that don't fit each other.
    """

    q: Fp8Tensor
    k: Fp8Tensor
    v: Fp8Tensor
    first_values: Array | None = None
    mean_scores: Array | None = None
    q_lens: Array | None = None
    kv_lens: Array | None = None
    dtype: str = "float16"

    def __post_init__(self) -> None:
        q, k, v = self.q, self.k, self.v
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if tensor.role != name:
                raise ValueError(f"{name}: got a quantised {tensor.role}; expected {name}")
            if tensor.layout != q.layout:
                raise ValueError(
                    f"{name}: got layout {tensor.layout!r}; expected q's, {q.layout!r}"
                )
            if tensor.data.ndim != q.data.ndim:
                raise ValueError(
                    f"{name}: got {tensor.data.ndim} axes; expected {q.data.ndim} as in q"
                )
        _check_same_recipe("k", k.recipe, q.recipe)
        _check_same_recipe("v", v.recipe, q.recipe)
        if k.head_dim != q.head_dim:
            raise ValueError(f"k: got head_dim {k.head_dim}; expected q's head_dim, {q.head_dim}")
        if q.kv_heads != k.kv_heads:
            raise ValueError(f"q: got {q.kv_heads} kv heads; expected k's number, {k.kv_heads}")
        if k.codes.shape[:3] != v.codes.shape[:3]:
            raise ValueError(
                f"v: got shape {v.data.shape}; expected k's batch, heads and length, "
                f"as in {k.data.shape}"
            )
        batch, q_heads, q_len, _ = q.codes.shape
        if k.codes.shape[0] != batch:
            raise ValueError(f"k: got batch {k.codes.shape[0]}; expected q's batch, {batch}")
        if (q.balance is None) != (k.balance is None) or (
            q.balance is not None
            and k.balance is not None
            and not np.array_equal(q.balance, k.balance, equal_nan=True)
        ):
            raise ValueError("k: got other channel factors than q's; expected those of one call")
        _check_part("mean_scores", self.mean_scores, q.recipe.center_k, (batch, q_heads, q_len))
        keys = min(v.codes.shape[2], TILE_KEYS)
        _check_part(
            "first_values",
            self.first_values,
            q.recipe.first_tile_16bit,
            (batch, v.kv_heads, keys, v.head_dim),
        )
        for tensor in (q, k, v):
            tensor.belong_to(self)

    @property
    def recipe(self) -> Fp8Recipe:
        """The recipe of all three."""
        return self.q.recipe

    def get(self) -> Fp8Tensors:
        """The same in host memory, as `cupy.ndarray.get`."""
        arrays: dict[str, Any] = {
            name: None if (array := getattr(self, name)) is None else to_host(array)
            for name in ("first_values", "mean_scores", "q_lens", "kv_lens")
        }
        return Fp8Tensors(self.q.get(), self.k.get(), self.v.get(), dtype=self.dtype, **arrays)


def _check_part(name: str, part: Array | None, used: bool, shape: tuple[int, ...]) -> None:
    if (part is not None) != used:
        raise ValueError(
            f"{name}: got {'None' if part is None else 'an array'}; expected "
            f"{'an array' if used else 'None'}, as the recipe has it"
        )
    if part is not None and part.shape != shape:
        raise ValueError(f"{name}: got shape {part.shape}; expected {shape}")


def _check_same_recipe(name: str, recipe: Fp8Recipe, expected: Fp8Recipe) -> None:
    if recipe == expected:
        return
    if (recipe.rotation is None) != (expected.rotation is None):
        raise ValueError(
            f"{name}: got {'no rotation' if recipe.rotation is None else 'a rotation'}; expected "
            f"{'none' if expected.rotation is None else 'one'} as in q: scores need both or neither"
        )
    raise ValueError(f"{name}: got {recipe}; expected q's recipe, {expected}")
