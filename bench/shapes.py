"""Problems to measure, as named lists."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Problem:
    """Attention of normal random inputs: query heads share kv heads, all of one head dim."""

    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    dim: int
    dtype: str = "float16"
    causal: bool = False

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        """Of q and of the result."""
        return self.batch, self.q_heads, self.q_len, self.dim

    @property
    def kv_shape(self) -> tuple[int, int, int, int]:
        """Of k and of v."""
        return self.batch, self.kv_heads, self.kv_len, self.dim

    @property
    def mask(self) -> str:
        """``"causal"`` or ``"full"``."""
        return "causal" if self.causal else "full"

    @property
    def flops(self) -> float:
        """As attention papers count: 4 a pair and dim, half of the pairs where causal."""
        pairs = self.batch * self.q_heads * self.q_len * self.kv_len
        return 4.0 * pairs * self.dim / (2 if self.causal else 1)

    @property
    def input_bytes(self) -> int:
        """Bytes of q, k and v."""
        q = self.batch * self.q_heads * self.q_len
        kv = self.batch * self.kv_heads * self.kv_len
        return (q + 2 * kv) * self.dim * ITEM_BYTES[self.dtype]

    @property
    def moved_bytes(self) -> int:
        """Bytes that have to be moved: inputs read once, the result written once."""
        out = self.batch * self.q_heads * self.q_len * self.dim * ITEM_BYTES[self.dtype]
        return self.input_bytes + out

    def to_dict(self) -> dict[str, Any]:
        """Every field, JSON-ready."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        heads = f"{self.q_heads}" if self.q_heads == self.kv_heads else self.grouping
        lengths = f"{self.q_len}" if self.q_len == self.kv_len else f"{self.q_len}x{self.kv_len}"
        return f"{self.dtype} b{self.batch} h{heads} s{lengths} d{self.dim} {self.mask}"

    @property
    def grouping(self) -> str:
        """Query heads and kv heads, such as ``"32/8"``."""
        return f"{self.q_heads}/{self.kv_heads}"


TOKENS, HIDDEN = 16384, 2048  # of FlashAttention's tables: batch * seq, heads * dim
PAPER_DIMS = (64, 128, 256, 96, 192)  # what papers have first: a run may be out of time
PAPER_SEQS = (512, 1024, 2048, 4096, 8192, 16384)
MASKS = (False, True)


def _paper() -> list[Problem]:
    return [
        Problem(TOKENS // seq, HIDDEN // dim, HIDDEN // dim, seq, seq, dim, causal=causal)
        for dim in PAPER_DIMS
        for causal in MASKS
        for seq in PAPER_SEQS
    ]


def _gqa() -> list[Problem]:
    return [
        Problem(TOKENS // seq, 32, 8, seq, seq, 128, causal=causal)
        for causal in reversed(MASKS)
        for seq in (1024, 4096, 8192, 16384)
    ]


def _cross() -> list[Problem]:
    """Images to a prompt of 77 tokens, a decoder to 1,500 frames of sound, latents to an input."""
    return [
        Problem(8, 10, 10, 4096, 77, 64),
        Problem(16, 20, 20, 448, 1500, 64),
        Problem(8, 16, 16, 512, 16384, 128),
        Problem(8, 16, 16, 16384, 512, 128),
    ]


def _short() -> list[Problem]:
    return [
        Problem(batch, HIDDEN // dim, HIDDEN // dim, seq, seq, dim, causal=causal)
        for dim in (64, 128)
        for causal in MASKS
        for batch, seq in ((1, 256), (64, 128), (64, 256))
    ]


def _long() -> list[Problem]:
    """Fewer heads the longer they are."""
    return [
        Problem(1, heads, max(heads // 4, 1), seq, seq, 128, causal=True)
        for heads, seq in ((16, 1 << 16), (4, 1 << 18), (1, 1 << 20))
    ]


def _decode() -> list[Problem]:
    return [
        Problem(batch, 32, 8, 1, kv_len, 128)
        for batch, kv_len in ((1, 8192), (16, 8192), (64, 8192), (1, 65536), (16, 65536))
    ]


def _cpu() -> list[Problem]:
    return [
        Problem(1, 8, 8, seq, seq, 64, "float32", causal)
        for causal in reversed(MASKS)
        for seq in (1024, 4096)
    ]


def _fp8() -> list[Problem]:
    return [
        Problem(TOKENS // seq, HIDDEN // dim, HIDDEN // dim, seq, seq, dim, causal=causal)
        for dim in (128, 256, 64)
        for causal in MASKS
        for seq in (2048, 4096, 8192, 16384)
    ]


LISTS = {
    "paper": _paper(),
    "gqa": _gqa(),
    "cross": _cross(),
    "short": _short(),
    "long": _long(),
    "decode": _decode(),
    "fp8": _fp8(),
    "cpu": _cpu(),
}
"""Named lists.

`paper`: FlashAttention's table. `gqa`: prefill of a language model. `cross`: queries and keys of
different lengths. `short`, `long`: sequences. `decode`: one token against a cache. `fp8`: 8 bits.
`cpu`: what a processor does in seconds.
"""


def select(
    name: str,
    *,
    dims: Sequence[int] = (),
    seqs: Sequence[int] = (),
    dtypes: Sequence[str] = (),
    masks: Sequence[str] = (),
) -> list[Problem]:
    """The problems of a list that fit every choice, in each dtype; an empty choice is all.

    Raises
    ------
    ValueError
        For an unknown list, and where nothing is left.
    """
    if name not in LISTS:
        raise ValueError(f"--list: got {name!r}; expected one of {', '.join(LISTS)}")
    kept = [
        problem
        for problem in LISTS[name]
        if (not dims or problem.dim in dims)
        and (not seqs or problem.kv_len in seqs)
        and (not masks or problem.mask in masks)
    ]
    if not kept:
        raise ValueError(
            f"--dims, --seqs, --masks: nothing of the list {name!r} is left; it has dims "
            f"{_values(LISTS[name], 'dim')}, seqs {_values(LISTS[name], 'kv_len')}"
        )
    return [
        problem if not dtypes else dataclasses.replace(problem, dtype=dtype)
        for dtype in dtypes or ("",)
        for problem in kept
    ]


def _values(problems: Iterable[Problem], field: str) -> str:
    return ", ".join(map(str, sorted({getattr(problem, field) for problem in problems})))
