"""Inputs of the 8-bit experiment with their exact attention: random ones, and those of a file."""

from __future__ import annotations

import math
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from .. import oracle
from .attention import attention_fp8
from .baselines import attention_fp16
from .distributions import Distribution
from .sweeps import NamedRecipe

Array = np.ndarray[Any, Any]

_EXACT_SCORES = 1 << 21  # float64 scores at once


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of random inputs.

    Parameters
    ----------
    heads, keys, dim : int
        Heads, with keys of their own each; keys; head dim.
    rows : int or None
        Query rows of each head, at most as many as keys; None for as many as keys.
    causal : bool
        Rows see the keys up to their own position. Sampled rows stand at random positions, one in
        each of `rows` equal stretches of the sequence.

    Raises
    ------
    ValueError
        For a size below 1.
    """

    heads: int = 2
    keys: int = 4096
    dim: int = 128
    rows: int | None = 128
    causal: bool = False

    def __post_init__(self) -> None:
        for name in ("heads", "keys", "dim", "rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: got {value}; expected 1 or more")


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Inputs and their exact attention.

    Attributes
    ----------
    q : float16 ndarray, (heads, rows, dim)
    k, v : float16 ndarray, (kv heads, keys, dim)
        `heads` is a multiple of `kv heads`.
    seen : bool ndarray, (rows, keys), or None
        Which keys a row sees; None for all.
    exact : float64 ndarray, (heads, rows, dim)
        Attention of q, k, v with scale 1 / sqrt(dim).
    exact_unrounded : float64 ndarray, (heads, rows, dim), or None
        That of the inputs before they were rounded to float16, where they were.
    """

    q: Array
    k: Array
    v: Array
    seen: Array | None
    exact: Array
    exact_unrounded: Array | None

    @classmethod
    def of(cls, q: Array, k: Array, v: Array, seen: Array | None = None) -> Problem:
        """Round inputs to float16, and compute exact attention before and after.

        Raises
        ------
        ValueError
            For values that float16 does not hold.
        """
        rounded = []
        for name, x in zip("qkv", (q, k, v), strict=True):
            with np.errstate(over="ignore"):
                rounded.append(x.astype(np.float16))
            if not np.isfinite(rounded[-1]).all():
                raise ValueError(
                    f"{name}: holds NaN, Inf or values beyond 65504, float16's largest"
                )
        exact = exact_attention(rounded[0], rounded[1], rounded[2], seen)
        given = all(x.dtype == np.float16 for x in (q, k, v))
        unrounded = None if given else exact_attention(q, k, v, seen)
        return cls(rounded[0], rounded[1], rounded[2], seen, exact, unrounded)

    def attend(self, recipe: NamedRecipe) -> Array:
        """What a recipe or a baseline makes of it, float16 (heads, rows, dim)."""
        if isinstance(recipe.recipe, str):
            group = len(self.q) // len(self.k)
            k, v = (np.repeat(x, group, axis=0) for x in (self.k, self.v))
            return attention_fp16(recipe.recipe, self.q, k, v, self.seen)
        out = attention_fp8(
            self.q[None], self.k[None], self.v[None], recipe=recipe.recipe, mask=self.seen
        )
        first: Array = out[0]
        return first


def exact_attention(q: Array, k: Array, v: Array, seen: Array | None = None) -> Array:
    """Attention in float64, some rows at a time; shapes as in `Problem`."""
    step = max(1, _EXACT_SCORES // len(k[0]))
    parts = [
        oracle.attention(
            q[:, start : start + step],
            k,
            v,
            mask=None if seen is None else seen[start : start + step],
        )[0]
        for start in range(0, q.shape[1], step)
    ]
    return np.concatenate(parts, axis=1)


class Source(Protocol):
    """Where the inputs of a task come from."""

    @property
    def name(self) -> str:
        """As in `Record.inputs`."""

    def problem(self, shape: Shape, seed: int) -> Problem:
        """The inputs of a seed."""


@dataclass(frozen=True, slots=True)
class RandomSource:
    """Inputs drawn from a distribution; the same for a shape and a seed."""

    distribution: Distribution
    name: str

    def problem(self, shape: Shape, seed: int) -> Problem:
        """Draw q, k, v, and positions of the rows where it matters."""
        rng = np.random.default_rng(seed)
        rows = shape.keys if shape.rows is None else min(shape.rows, shape.keys)
        q, k, v = self.distribution(rng, shape.heads, rows, shape.keys, shape.dim)
        seen = None
        if shape.causal:
            seen = np.arange(shape.keys) <= _positions(rng, rows, shape.keys)[:, None]
        return Problem.of(q, k, v, seen)


@dataclass(frozen=True, slots=True)
class LayerSource:
    """One layer of an npz file, read when its inputs are asked for.

    Of the shape `rows` and `causal` count, the rest is the file's. Queries stand at the end of the
    keys: row i sees the keys up to i + keys - queries.
    """

    file: Path
    name: str
    arrays: tuple[str, str, str]

    def problem(self, shape: Shape, seed: int) -> Problem:
        """Read q, k, v, and take a sample of the rows of q.

        Raises
        ------
        ValueError
            For arrays whose shapes don't fit each other, or values that float16 does not hold.
        """
        with np.load(self.file) as found:
            arrays = [found[name] for name in self.arrays]
        q, k, v = (
            _three_axes(self.file, name, array)
            for name, array in zip(self.arrays, arrays, strict=True)
        )
        fits = (
            k.shape == (*v.shape[:2], q.shape[2])
            and len({math.prod(array.shape[:-3]) for array in arrays}) == 1
            and len(q) % len(k) == 0
        )
        if not fits or not (q.size and k.size and v.size):
            shapes = ", ".join(
                f"{name} {array.shape}" for name, array in zip(self.arrays, arrays, strict=True)
            )
            raise ValueError(
                f"{self.file}: got {shapes}; expected (heads, queries, dim) and twice "
                "(kv heads, keys, dim), with heads a multiple of kv heads, all of one batch"
            )
        queries, keys = q.shape[1], k.shape[1]
        rows = _positions(np.random.default_rng(seed), min(shape.rows or queries, queries), queries)
        seen = None
        if shape.causal:
            seen = np.arange(keys) <= (rows + keys - queries)[:, None]
        try:
            return Problem.of(q[:, rows], k, v, seen)
        except ValueError as error:
            raise ValueError(f"{self.file}: {self.name}: {error}") from None


_ARRAY = re.compile(r"(?:(?P<before>layer\d+)_)?(?P<which>[qkv])(?:_(?P<after>\w+))?")


def layers_of(file: Path) -> list[LayerSource]:
    """Find the layers of an npz file, in the order of their numbers.

    Parameters
    ----------
    file : Path
        Its arrays are ``q``, ``k``, ``v``; or ``q_N``, ``k_N``, ``v_N`` for every layer N; or
        ``layerN_q``, ``layerN_k``, ``layerN_v``, as ``examples/smollm2.py --dump-qkv`` writes them.
        Axes are (heads, seq, dim), with or without a batch before them, or (seq, dim). Other arrays
        are passed over.

    Raises
    ------
    ValueError
        For a file that is no npz file, that holds no layer, part of a layer only, or one twice.
    OSError
        For a file that can't be read.
    """
    with file.open("rb") as stream:  # np.load would leave a broken file open
        try:
            found = np.load(stream)
        except (ValueError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(f"{file}: no npz file ({error})") from None
        if isinstance(found, np.ndarray):
            raise ValueError(f"{file}: got a single array; expected an npz file with q, k, v")
        with found:
            names = list(found.files)
    layers: dict[str, dict[str, str]] = {}
    for name in names:
        match = _ARRAY.fullmatch(name)
        if match and not (match["before"] and match["after"]):
            layer = (match["before"] or "").removeprefix("layer") or match["after"] or ""
            arrays = layers.setdefault(layer, {})
            if other := arrays.get(match["which"]):
                raise ValueError(f"{file}: got {other} and {name}; expected one of them")
            arrays[match["which"]] = name
    if not layers:
        raise ValueError(
            f"{file}: got {', '.join(names) or 'nothing'}; expected arrays q, k, v, or q_0, k_0, "
            "v_0 and so on"
        )
    for layer, arrays in layers.items():
        if lacking := sorted(set("qkv") - set(arrays)):
            label = f"layer {layer}" if layer else "the layer"
            raise ValueError(f"{file}: {label} lacks {', '.join(lacking)}")
    ordered = sorted(
        layers, key=lambda layer: (0, int(layer), "") if layer.isdigit() else (1, 0, layer)
    )
    return [
        LayerSource(
            file,
            f"layer {layer}" if layer else file.stem,
            (layers[layer]["q"], layers[layer]["k"], layers[layer]["v"]),
        )
        for layer in ordered
    ]


def _positions(rng: np.random.Generator, count: int, length: int) -> Array:
    """One random position in each of `count` stretches of a sequence, all where there are as many.

    Each position is as likely as any other, so that the mean over the sample is that over all.
    """
    edges = np.arange(count + 1) * length / count
    found: Array = np.minimum(
        (edges[:-1] + rng.random(count) * length / count).astype(int), length - 1
    )
    return np.arange(length) if count == length else found


def _three_axes(file: Path, name: str, array: Array) -> Array:
    if not 2 <= array.ndim <= 4 or array.dtype.kind != "f":
        raise ValueError(
            f"{file}: {name}: got {array.dtype} of shape {array.shape}; expected floating-point "
            "numbers of shape (heads, seq, dim), (batch, heads, seq, dim) or (seq, dim)"
        )
    view: Array = array.reshape((math.prod(array.shape[:-2]), *array.shape[-2:]))
    return view
