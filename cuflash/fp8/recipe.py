"""How 8-bit attention quantises and sums: one value that quantiser and kernels go by."""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..validate import flag, number, one_of, suggestion

Array = np.ndarray[Any, Any]
Block = int | str

TILE_KEYS = 128

QK_DTYPES = ("e4m3", "int8")
ROTATIONS = ("hadamard", "orthogonal")
REFERENCES = ("tile", "lagging", "running")
ACCUMULATIONS = ("fp32", "two_level", "single")
_TOKENS = (32, 64, 128, 256)
Q_BLOCKS: tuple[Block, ...] = ("tensor", "head", *_TOKENS, "token")
K_BLOCKS: tuple[Block, ...] = (*Q_BLOCKS, "columns")
V_BLOCKS: tuple[Block, ...] = (*Q_BLOCKS, "channel")
ROTATION_BLOCKS = (16, 32, 64)

_BLOCKS_BEYOND_TOKENS: tuple[Block, ...] = ("tensor", "head", "channel")
_LARGEST_P_SCALE = 448.0
_ORTHOGONAL_WITHIN = 1e-4


@dataclass(frozen=True, eq=False)
class Fp8Recipe:
    """Every choice of an 8-bit attention; the defaults are the preset ``"f8"``.

    Parameters
    ----------
    qk_dtype : {"e4m3", "int8"}
        Format of q and k. P and v are e4m3.
    rotation : None, "hadamard", "orthogonal" or (dim, dim) array
        Orthogonal map that spreads outliers of q and k over all channels: a Hadamard matrix with
        random signs (FlashAttention-3, section 3.3, "incoherent processing"), a random orthogonal
        matrix, or ``x @ matrix`` with the array that is given, which is copied.
    seed : int or None
        Of the signs, or of the random matrix. None is a Hadamard matrix without signs.
    rotation_per_head : bool
        Draw signs, or matrices, for each kv head, rather than one for all.
    rotation_block : {None, 16, 32, 64}
        Rotate blocks of so many channels by themselves; None pads the head dim to a power of two.
        Of ``"hadamard"`` alone.
    q_block, k_block, v_block
        What shares one scale: ``"tensor"``, ``"head"``, that many tokens (32, 64, 128, 256), or
        each ``"token"``. For k also ``"columns"``, the 32 keys of each 128 that one thread of a
        wgmma accumulator holds (the per-thread scales of SageAttention2); for v also
        ``"channel"``.
    balance : bool
        Multiply q and divide k by a factor per channel that evens out their sizes (the exact
        rescaling of SmoothQuant, between q and k). Sizes are those of all rows, or of a sample of
        at least 2,048 where a head has 4,096 or more: any factor is exact.
    center_k : bool
        Subtract each channel's mean over the keys, or over such a sample, from k, which softmax
        ignores (SageAttention, section 4.2). Off in calls with `softcap`, which does not ignore it.
    center_v : bool
        Subtract each channel's mean from v and add it to the result.
    residual_mean : bool
        Add the mean rounding error of v to the result too.
    p_scale : float
        Weights reach this size before rounding; above 0, up to 448.
    reference : {"tile", "lagging", "running"}
        What the weights of 64 keys are relative to: the row maximum of those, whose weight then is
        exact; that of earlier ones, as long as these weights stay in the range of e4m3, which
        saves time; or the running maximum as in FlashAttention-2. The first two go at most 20
        octaves below what was before.
    accumulate : {"fp32", "two_level", "single"}
        How P V is summed: in float32; or as FP8 tensor cores do, which align 32 products and the
        sum so far to the largest exponent and keep 13 fraction bits, each tile by itself and then
        added in float32 (``"two_level"``), or all tiles in one accumulator (``"single"``).
    first_tile_16bit : bool
        Multiply the weights of the first 128 keys with the original v in 16 bit: attention sinks
        carry much weight. Tokens then share v's scale: `v_block` is "tensor", "head" or "channel".

    Raises
    ------
    ValueError, TypeError
        Naming the field, what was given and what is expected.

    Notes
    -----
    Recipes are hashable, and equal where all fields are, a matrix by its values.
    """

    qk_dtype: str = "e4m3"
    rotation: str | Array | None = "hadamard"
    seed: int | None = 0
    rotation_per_head: bool = False
    rotation_block: int | None = None
    q_block: Block = "token"
    k_block: Block = "columns"
    v_block: Block = "channel"
    balance: bool = True
    center_k: bool = True
    center_v: bool = True
    residual_mean: bool = True
    p_scale: float = 448.0
    reference: str = "tile"
    accumulate: str = "fp32"
    first_tile_16bit: bool = False

    def __post_init__(self) -> None:
        one_of("qk_dtype", self.qk_dtype, QK_DTYPES)
        one_of("reference", self.reference, REFERENCES)
        one_of("accumulate", self.accumulate, ACCUMULATIONS)
        for name in (
            "rotation_per_head",
            "balance",
            "center_k",
            "center_v",
            "residual_mean",
            "first_tile_16bit",
        ):
            object.__setattr__(self, name, flag(name, getattr(self, name)))
        for name, allowed in (("q_block", Q_BLOCKS), ("k_block", K_BLOCKS), ("v_block", V_BLOCKS)):
            object.__setattr__(self, name, _one_of_blocks(name, getattr(self, name), allowed))
        p_scale = number("p_scale", self.p_scale)
        if not 0.0 < p_scale <= _LARGEST_P_SCALE:
            raise ValueError(
                f"p_scale: got {self.p_scale!r}; expected 0 < p_scale <= {_LARGEST_P_SCALE:g}, "
                "which e4m3 holds"
            )
        object.__setattr__(self, "p_scale", p_scale)
        self._check_rotation()
        if self.first_tile_16bit and self.v_block not in _BLOCKS_BEYOND_TOKENS:
            raise ValueError(
                f"v_block: got {self.v_block!r}; expected one of "
                f"{', '.join(map(repr, _BLOCKS_BEYOND_TOKENS))} with first_tile_16bit, whose "
                "products share v's scale"
            )

    def _check_rotation(self) -> None:
        rotation = self.rotation
        if isinstance(rotation, np.ndarray):
            object.__setattr__(self, "rotation", _orthogonal_copy(rotation))
        elif rotation is not None:
            if not isinstance(rotation, str):
                raise TypeError(
                    f"rotation: got {rotation!r}; expected None, "
                    f"{', '.join(map(repr, ROTATIONS))} or a square NumPy array"
                )
            one_of("rotation", rotation, ROTATIONS)
        object.__setattr__(self, "seed", _seed(self.seed))
        if self.seed is None and isinstance(rotation, str) and rotation == "orthogonal":
            raise ValueError("seed: got None; expected an integer for a random rotation")
        if self.rotation_block is not None:
            block = _one_of_blocks("rotation_block", self.rotation_block, ROTATION_BLOCKS)
            object.__setattr__(self, "rotation_block", block)
            if not isinstance(rotation, str) or rotation != "hadamard":
                raise ValueError(
                    f"rotation_block: got {block}; expected None unless rotation is 'hadamard'"
                )
        if self.rotation_per_head and not isinstance(rotation, str):
            raise ValueError(
                "rotation_per_head: got True; expected False unless rotation is "
                f"{' or '.join(map(repr, ROTATIONS))}"
            )

    @functools.cached_property
    def _key(self) -> Hashable:
        values = (getattr(self, field.name) for field in dataclasses.fields(self))
        return tuple(
            (value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value
            for value in values
        )

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, Fp8Recipe) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key)


def _one_of_blocks(name: str, value: Any, allowed: tuple[Block, ...]) -> Block:
    wrong_type = isinstance(value, (bool, np.bool_)) or not isinstance(
        value, (str, numbers.Integral)
    )
    if wrong_type or value not in allowed:
        raise ValueError(f"{name}: got {value!r}; expected one of {', '.join(map(repr, allowed))}")
    return value if isinstance(value, str) else int(value)


def _seed(value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Integral):
        raise TypeError(f"seed: got {value!r}; expected an integer or None")
    if value < 0:
        raise ValueError(f"seed: got {value!r}; expected 0 or more")
    return int(value)


def _orthogonal_copy(matrix: Array) -> Array:
    """A read-only float32 copy of an orthogonal matrix."""
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or matrix.shape[0] == 0:
        raise ValueError(f"rotation: got shape {matrix.shape}; expected a square matrix")
    try:
        double = np.asarray(matrix).astype(np.float64, casting="same_kind")
    except TypeError as error:
        raise TypeError(f"rotation: got dtype {matrix.dtype}; expected real numbers") from error
    if not np.isfinite(double).all():
        raise ValueError("rotation: got NaN or Inf; expected an orthogonal matrix")
    error_size = float(np.abs(double @ double.T - np.eye(len(double))).max())
    if error_size > _ORTHOGONAL_WITHIN:
        raise ValueError(
            f"rotation: got a matrix M with M @ M.T {error_size:.3g} away from the identity; "
            f"expected an orthogonal one, within {_ORTHOGONAL_WITHIN:g}"
        )
    copy = double.astype(np.float32)
    copy.flags.writeable = False
    return copy


_PLAIN = Fp8Recipe(
    rotation=None,
    q_block="tensor",
    k_block="tensor",
    v_block="tensor",
    balance=False,
    center_k=False,
    center_v=False,
    residual_mean=False,
    p_scale=256.0,
    reference="running",
)
_F8 = Fp8Recipe(reference="lagging")
_I8 = Fp8Recipe(qk_dtype="int8")

PRESETS: dict[str, Fp8Recipe] = {
    # One scale per tensor and nothing else: the baseline of FlashAttention-3's accuracy table.
    "per_tensor": _PLAIN,
    # Block quantisation and incoherent processing: FlashAttention-3, section 3.3.
    "fa3": dataclasses.replace(_PLAIN, rotation="hadamard", q_block=128, k_block=128, v_block=128),
    "f8": _F8,
    "i8": _I8,
    "f8+": dataclasses.replace(_F8, first_tile_16bit=True),
    "i8+": dataclasses.replace(_I8, first_tile_16bit=True),
}


def recipe_of(recipe: str | Fp8Recipe) -> Fp8Recipe:
    """The recipe itself, or the preset of that name.

    Raises
    ------
    ValueError
        For a name that no preset has.
    TypeError
        For anything but a name or a recipe.
    """
    if isinstance(recipe, Fp8Recipe):
        return recipe
    if not isinstance(recipe, str):
        raise TypeError(
            f"recipe: got {recipe!r} ({type(recipe).__name__}); expected a preset's name or an "
            "Fp8Recipe"
        )
    if recipe not in PRESETS:
        raise ValueError(
            f"recipe: got {recipe!r}; expected one of {', '.join(map(repr, PRESETS))}"
            f"{suggestion(recipe, tuple(PRESETS))}"
        )
    return PRESETS[recipe]
