"""What the backward kernel of sm90 works on at a time, chosen by head dims and softcap.

A row of the table fits the registers and the shared memory of a multiprocessor of compute
capability 9.0, or it is not compiled: `infeasible` says why, and tests ask it of every row.
"""

from __future__ import annotations

from dataclasses import dataclass

from .. import fused


@dataclass(frozen=True, slots=True)
class Tile:
    """A row of the tile table: what a block works on, how, and why.

    Two warpgroups multiply. Each has 64 keys of its own, and dK and dV of them; or, where a tile is
    `parted`, both have the same 64 keys, and one dK, the other dV.
    """

    q_rows: int
    parted: bool = False
    lines: bool = False  # dQ is shared by rows, not by columns
    panel: int = 64  # columns that lie together in shared memory, and are copied at a time
    o_stages: int = 2  # tiles of dO in flight
    dq_chunks: int = 1  # in which it is multiplied and handed on
    early: bool = False  # rows are prepared from when the last blocks of the kernel before end
    why: str = ""

    @property
    def keys(self) -> int:
        return 64 if self.parted else 64 * GROUPS

    def dq_columns(self, head_dim: int) -> int:
        """Columns of dQ that a warpgroup multiplies at a time."""
        return head_dim // (1 if self.lines else GROUPS) // self.dq_chunks

    def floats(self, head_dim: int, head_dim_v: int) -> int:
        """That a block keeps of the sums of a part of a piece of work."""
        if self.parted:
            return 128 * max(head_dim, head_dim_v)
        return 128 * (head_dim + head_dim_v)

    def registers(self, head_dim: int, head_dim_v: int) -> int:
        """Registers a thread for scores, their gradients and sums, without those beside them."""
        scores = self.q_rows // 2
        if not self.parted:
            return 2 * scores + head_dim // 2 + head_dim_v // 2  # dQ comes where scores were
        after = scores // 2 + self.dq_columns(head_dim) // 2  # weights of 16 bits, and dQ
        return max(head_dim, head_dim_v) // 2 + max(2 * scores, after)

    def shared_memory(self, head_dim: int, head_dim_v: int) -> int:
        """Bytes a block: K and V, the rings of Q and dO, two tiles of dS, weights for the other
        warpgroup, shares of dQ, row statistics, 512 for work and barriers, and 1,024 zeros.
        """
        dq_rows = self.q_rows // GROUPS if self.lines else self.q_rows
        scores = 2 * self.q_rows * self.keys
        parts = [
            2 * self.keys * (head_dim + head_dim_v),
            2 * self.q_rows * (Q_STAGES * head_dim + self.o_stages * head_dim_v),
            2 * scores + (2 * scores if self.parted else 0),
            GROUPS * 4 * dq_rows * self.dq_columns(head_dim),
            2 * 4 * self.q_rows * Q_STAGES,
            512 + 1024,
        ]
        return sum(parts)


GROUPS = 2  # warpgroups that multiply
Q_STAGES = 2
_SHARED_MEMORY = 232_448  # most of a block on 9.0
# Of 232 a thread, without the 24 to 45 beside what `Tile.registers` counts. Compiled, 192 did not
# spill; 208 (80 queries and 128 keys at head dim 128) and 224 (96 queries) did.
_REGISTERS = 192
_STEP = 16  # columns that one product takes


def infeasible(tile: Tile, head_dim: int, head_dim_v: int) -> list[str]:
    """Why a tile can't be compiled or run for buckets of the head dims; empty when it can."""
    reasons = []
    needed = tile.registers(head_dim, head_dim_v)
    if needed > _REGISTERS:
        reasons.append(f"{needed} registers a thread: two warpgroups leave {_REGISTERS}")
    needed = tile.shared_memory(head_dim, head_dim_v)
    if needed > _SHARED_MEMORY:
        reasons.append(f"{needed} bytes of shared memory: a block has {_SHARED_MEMORY}")
    if tile.q_rows not in (64, 128):
        reasons.append(f"{tile.q_rows} queries: expected 64 or 128")
    elif tile.lines != (tile.q_rows == 64 * GROUPS):
        reasons.append("a share of dQ: expected 64 rows, all of a tile or half of them")
    if tile.panel not in (32, 64):
        reasons.append(f"panels of {tile.panel} columns: expected 32 or 64")
    else:
        columns = {"K": head_dim, "V": head_dim_v, "dQ": tile.dq_columns(head_dim)}
        reasons += [
            f"{count} columns of {name}: expected whole panels of {tile.panel}"
            for name, count in columns.items()
            if count % tile.panel or not count
        ]
    return reasons


# By buckets of (head_dim, head_dim_v). Ratios are to cuDNN's backward pass on an H200: float16,
# batch * seq = 16,384, hidden of 2,048, 4k and 16k tokens.
_TILES = {
    (64, 64): Tile(128, lines=True, early=True, why="1.20, 1.13 full, 1.22, 1.25 causal; not early "
                   "to 2 % slower"),
    (128, 128): Tile(64, why="1.15, 1.15 full, 1.24, 1.17 causal; 80 queries spill; early 1 to 4 % "
                     "slower"),
    (192, 128): Tile(64, parted=True, panel=32, why="dK and dV of 64 keys in one thread spill"),
    (192, 192): Tile(64, parted=True, panel=32, why="1.27 to 1.42; half of dQ has whole panels of "
                     "32"),
    (256, 256): Tile(64, parted=True, o_stages=1, dq_chunks=2, why="1.14 to 1.22; shared memory "
                     "leaves 16 KiB for each share of dQ"),
}  # fmt: skip
_CAPPED = _TILES | {  # the slope of tanh takes registers beside P and dP
    (64, 64): Tile(128, parted=True, lines=True, why="128 keys spill"),
    (128, 128): Tile(64, parted=True, why="128 keys serialise products"),
}
PAIRS = tuple(_TILES)
_BUCKETS = (64, 128, 192, 256)
_UNEQUAL = ((192, 128),)  # buckets that are taken as they are; others are as wide as the larger


def buckets(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """What the kernel is compiled for."""
    return fused.buckets(head_dim, head_dim_v, _BUCKETS, _UNEQUAL)


def choose(pair: tuple[int, int], capped: bool) -> Tile:
    """The tile of a pair of buckets."""
    return (_CAPPED if capped else _TILES)[pair]
