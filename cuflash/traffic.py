"""Main-memory traffic of attention, as in the FlashAttention paper (2022, section 3.2).

Standard attention writes the score matrix S, reads it for the softmax, writes P and reads it for
the second product: four trips of q_len x kv_len elements for every head. A tiled kernel keeps both
on chip and makes none; it reads K and V again for every block of query rows (theorem 2), which a
cache holding them makes one read.
"""

from __future__ import annotations

from dataclasses import dataclass

from .arrays import ArrayInfo
from .spec import ITEM_SIZE, AttentionSpec, Options
from .validate import build_spec, one_of


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes moved between main memory and chip, by array. `scores` counts the trips of S and P."""

    q: int
    k: int
    v: int
    scores: int
    out: int
    lse: int

    @property
    def total(self) -> int:
        """Sum over the arrays."""
        return self.q + self.k + self.v + self.scores + self.out + self.lse


@dataclass(frozen=True, slots=True)
class IOBytes:
    """Traffic of one problem.

    `standard` attention; a `tiled` kernel whose K and V stay cached; and the same kernel with K and
    V read anew for each block of query rows, `tiled_uncached`.
    """

    standard: Bytes
    tiled: Bytes
    tiled_uncached: Bytes


def io_bytes(
    shape: tuple[int, ...],
    *,
    dtype: str = "float16",
    kv_heads: int | None = None,
    kv_len: int | None = None,
    head_dim_v: int | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    return_lse: bool = False,
    score_dtype: str | None = None,
    q_rows: int = 128,
) -> IOBytes:
    """Main-memory traffic of a problem under standard and under tiled attention.

    Parameters
    ----------
    shape : tuple of int
        Of q: (batch, heads, seq, dim), or without leading axes.
    dtype : str
        Of q, k, v and out.
    kv_heads, kv_len, head_dim_v : int, optional
        As q's where left out.
    causal, window, return_lse
        As in `cuflash.attention`; standard attention skips nothing for them.
    score_dtype : str, optional
        Of the score matrix that standard attention stores; `dtype` where left out, as in the paper.
    q_rows : int
        Query rows of a tile, which set how often an uncached tiled kernel reads K and V.

    Returns
    -------
    IOBytes
        In bytes.

    Raises
    ------
    ValueError, TypeError
        Naming the argument, as `cuflash.attention` would for arrays of these shapes.

    Notes
    -----
    Dao et al., "FlashAttention" (2022), section 3.2 and theorem 2.

    Examples
    --------
    >>> traffic = io_bytes((1, 8, 4096, 64), dtype="bfloat16")
    >>> traffic.standard.scores, traffic.tiled.scores
    (1073741824, 0)
    """
    if q_rows < 1:
        raise ValueError(f"q_rows: got {q_rows!r}; expected 1 or more")
    if not 2 <= len(shape) <= 4:
        raise ValueError(
            f"shape: got {shape!r}; expected (batch, heads, seq, dim), or without leading axes"
        )
    full = (1,) * (4 - len(shape)) + tuple(shape)
    batch, heads, seq, dim = full
    kv = (batch, heads if kv_heads is None else kv_heads, seq if kv_len is None else kv_len)
    spec = build_spec(
        ArrayInfo(full, dtype, "cpu"),
        ArrayInfo((*kv, dim), dtype, "cpu"),
        ArrayInfo((*kv, dim if head_dim_v is None else head_dim_v), dtype, "cpu"),
        Options(causal=causal, window=window, return_lse=return_lse),
    )
    score_size = ITEM_SIZE[one_of("score_dtype", score_dtype or dtype, tuple(ITEM_SIZE))]
    return IOBytes(
        standard_bytes(spec, score_size), tiled_bytes(spec), tiled_bytes(spec, q_rows=q_rows)
    )


def backward_bytes(spec: AttentionSpec) -> int:
    """Traffic of a tiled backward pass: what the forward pass reads and returns and `dout` are
    read, three gradients are written, each once.
    """
    forward = tiled_bytes(spec)
    lse = spec.lse_size * spec.batch * spec.q_heads * spec.q_len
    return 2 * (forward.q + forward.k + forward.v + forward.out) + lse


def standard_bytes(spec: AttentionSpec, score_size: int) -> Bytes:
    """Traffic of the three-pass computation, with scores of `score_size` bytes."""
    trips = 4
    scores = trips * spec.batch * spec.q_heads * spec.q_len * spec.kv_len * score_size
    once = tiled_bytes(spec)
    return Bytes(once.q, once.k, once.v, scores, once.out, once.lse)


def tiled_bytes(spec: AttentionSpec, q_rows: int | None = None) -> Bytes:
    """Traffic of a tiled kernel: everything once, or K and V once for each block of `q_rows` that
    sees them.
    """
    q_tokens = spec.batch * spec.q_heads * spec.q_len
    keys_read = spec.batch * spec.kv_heads * spec.kv_len
    if q_rows is not None:
        keys_read = (
            spec.batch
            * spec.q_heads
            * sum(
                end - begin
                for begin, end in (
                    spec.key_range(
                        first, min(first + q_rows, spec.q_len) - 1, spec.diagonal, spec.kv_len
                    )
                    for first in range(0, spec.q_len, q_rows)
                )
            )
        )
    size = spec.item_size
    return Bytes(
        q=q_tokens * spec.head_dim * size,
        k=keys_read * spec.head_dim * size,
        v=keys_read * spec.head_dim_v * size,
        scores=0,
        out=q_tokens * spec.head_dim_v * size,
        lse=spec.lse_size * q_tokens if spec.return_lse else 0,
    )
