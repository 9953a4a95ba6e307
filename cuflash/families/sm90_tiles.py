"""What the sm90 kernel works on at a time, chosen by head dims, masks and length.

A row of the table fits the registers and the shared memory of a multiprocessor of compute
capability 9.0, or it is not compiled: `infeasible` says why, and tests ask it of every row.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from . import fused


@dataclass(frozen=True, slots=True)
class Tile:
    """A row of the tile table: what a block works on, how, and why.

    `groups` are the warpgroups that multiply, 64 query rows each; one more loads.
    """

    keys: int
    groups: int
    cluster: int = 1  # blocks that share what they load of K and V
    resident: int = 1  # blocks on a multiprocessor
    ping_pong: bool = False  # warpgroups take turns to issue products
    out_in_place: bool = False  # the output leaves through V's shared memory, not its own
    tickets: bool = False  # blocks draw their work even where each piece takes as long
    capped_takes: int = 0  # keys whose registers it takes to cap scores
    why: str = ""

    def capped(self) -> Tile:
        """The same for scores that are capped."""
        return replace(self, keys=self.keys - self.capped_takes, capped_takes=0)

    @property
    def q_rows(self) -> int:
        """Query rows of a block."""
        return LINES * self.groups

    def registers(self, head_dim_v: int) -> int:
        """Registers a thread for scores, weights and output, without those beside them."""
        return self.keys // 2 + self.keys // 4 + head_dim_v // 2

    def shared_memory(self, head_dim: int, head_dim_v: int) -> int:
        """Bytes a block: Q, the rings of K and V, the output, and 1,024 for barriers and work."""
        parts = [
            self.q_rows * head_dim * 2,
            _STAGES * self.keys * head_dim * 2,
            _STAGES * self.keys * head_dim_v * 2,
            0 if self.out_in_place else self.q_rows * head_dim_v * 2,
        ]
        return sum(-(-part // 1024) * 1024 for part in parts) + 1024


LINES = 64  # of scores, that a warpgroup multiplies
_STAGES = 2  # tiles of K, and of V, in flight
# Most of a block on 9.0, by how many share a multiprocessor: of its 228 KiB each takes 1 beside.
_SHARED_MEMORY = {1: 232_448, 2: 115_712}
# Registers of a thread for what `Tile.registers` counts, by groups and resident blocks: of 240, 160
# and 104, without the 24 to 28 beside them. Compiled, 208, 132 and 80 did not spill; 220, 136 and,
# with capped scores, 92 did.
_REGISTERS = {(2, 1): 208, (3, 1): 132, (2, 2): 80}
_STEP = 16  # keys that one product of weights and V takes


def infeasible(tile: Tile, head_dim: int, head_dim_v: int) -> list[str]:
    """Why a tile can't be compiled or run for buckets of the head dims; empty when it can."""
    reasons = []
    way = tile.groups, tile.resident
    if way not in _REGISTERS:
        reasons.append(
            f"{tile.groups} warpgroups that multiply in {tile.resident} blocks: expected 2 or 3 in "
            "one, or 2 in each of two"
        )
    else:
        needed, most = tile.registers(head_dim_v), _REGISTERS[way]
        if needed > most:
            reasons.append(f"{needed} registers a thread: {tile.groups} warpgroups leave {most}")
        needed, most = tile.shared_memory(head_dim, head_dim_v), _SHARED_MEMORY[tile.resident]
        if needed > most:
            reasons.append(f"{needed} bytes of shared memory: a block has {most}")
    if not _STEP <= tile.keys <= 256 or tile.keys % _STEP:
        reasons.append(f"{tile.keys} keys: expected a multiple of {_STEP} up to 256")
    reasons += [
        f"head dim {dim}: expected a multiple of 32 up to 256"
        for dim in dict.fromkeys((head_dim, head_dim_v))
        if not 32 <= dim <= 256 or dim % 32
    ]
    if tile.resident > 1 and tile.ping_pong:
        reasons.append("turns of warpgroups that another block does not wait for")
    if tile.cluster not in (1, 2):
        reasons.append(f"clusters of {tile.cluster}: expected 1 or 2")
    if tile.out_in_place and (tile.groups != _STAGES or tile.keys < LINES):
        reasons.append(
            f"the output of {tile.groups} warpgroups would take the places of {_STAGES} tiles of "
            f"{tile.keys} keys: expected one of {LINES} or more for each"
        )
    return reasons


_ANY = 1 << 31  # keys: more than there are
# By buckets of (head_dim, head_dim_v): up to how many keys, which tile. Ratios are to the better of
# FlashAttention-3 and cuDNN in the same run on an H200, in each of two runs, or in one: float16,
# batch * seq = 16,384, hidden 2,048; geometric means over the lengths of the row, from seq 512 to
# 16,384 by factors of 2, or 1,024, 4,096 and 16,384 for the head dims 96 and 192. One figure moves
# by 2 %; causal ones are from after warpgroups passed over tiles that they don't see. Those of
# tiles whose output leaves in place are to FlashAttention-3 alone, one for each length: 1,024 and
# 4,096 with head dims of 192; 512, 1,024, 2,048, 4,096 and 16,384 with 256.
_FULL = {
    (64, 64): (
        (1024, Tile(64, 2, resident=2, tickets=True,
                    why="1.11; one block of 128 keys 1.09; no tickets 5 % slower")),
        (_ANY, Tile(128, 3, ping_pong=True, tickets=True, capped_takes=16,
                    why="1.05, 1.06; 112 keys 1.02; no tickets 0 to 2 % slower")),
    ),
    (96, 96): ((_ANY, Tile(112, 3, ping_pong=True, capped_takes=16, why="1.20; 2 groups 1.13")),),
    (128, 128): (
        (1024, Tile(128, 2, why="1.07, 1.07; three groups 0.95, 1.04")),
        (_ANY, Tile(80, 3, ping_pong=True, capped_takes=16, why="1.07, 1.08; 2 groups 1.05, 1.04")),
    ),
    (192, 128): (
        (_ANY, Tile(128, 2, ping_pong=True, out_in_place=True,
                    why="1.37, 1.26; 112 keys 1 to 9 % slower")),
    ),
    (192, 192): (
        (_ANY, Tile(96, 2, ping_pong=True, out_in_place=True,
                    why="1.16, 1.05; without turns 2 to 5 % slower, 80 keys within 2 %")),
    ),
    (256, 256): (
        (1024, Tile(64, 2, out_in_place=True, why="1.16, 1.09; pairs 1 % slower")),
        (_ANY, Tile(64, 2, cluster=2, ping_pong=True, out_in_place=True,
                    why="1.06, 1.05, 1.03; alone within 2 %, without turns 2 to 4 % slower")),
    ),
}  # fmt: skip
_BOUNDED = {
    (64, 64): (
        (1024, Tile(64, 2, resident=2, why="1.15; one block of 128 keys 1.03, 3 groups 1.00")),
        (_ANY, Tile(128, 3, ping_pong=True, capped_takes=32, why="1.12; 2 groups 0.98")),
    ),
    (96, 96): ((_ANY, Tile(96, 3, ping_pong=True, why="1.15; 112 keys 1.14, 80 keys 1.10")),),
    (128, 128): (
        (4096, Tile(128, 2, ping_pong=True,
                    why="1.06 from 2,048 on; 3 groups 1.04, with 64 keys 1.03")),
        (_ANY, Tile(80, 3, ping_pong=True, why="1.12; 64 keys 1.08, 2 groups 1.07")),
    ),
    (192, 128): (
        (_ANY, Tile(128, 2, ping_pong=True, out_in_place=True,
                    why="1.31, 1.26; without turns to 7 % slower, 112 keys to 11 %")),
    ),
    (192, 192): (
        (_ANY, Tile(64, 2, ping_pong=True, out_in_place=True,
                    why="1.09, 1.04; 80 and 96 keys within 2 %")),
    ),
    (256, 256): (
        (_ANY, Tile(64, 2, ping_pong=True, out_in_place=True,
                    why="1.17, 1.13, 1.09, 1.05, 1.02; not by turns within 2 %")),
    ),
}  # fmt: skip
_BUCKETS = (64, 96, 128, 192, 256)
_UNEQUAL = ((192, 128),)  # buckets that are taken as they are; others are as wide as the larger


def buckets(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """What the kernel is compiled for."""
    return fused.buckets(head_dim, head_dim_v, _BUCKETS, _UNEQUAL)


def choose(pair: tuple[int, int], bounded: bool, capped: bool, kv_len: int) -> Tile:
    """The tile of a pair of buckets for so many keys."""
    rows = (_BOUNDED if bounded else _FULL)[pair]
    tile = next(tile for most, tile in rows if kv_len <= most)
    return tile.capped() if capped else tile


def choices(pair: tuple[int, int], bounded: bool, capped: bool) -> Iterable[Tile]:
    """Every tile that `choose` answers with, and those of its pairs that stay alone."""
    rows = [tile for _, tile in (_BOUNDED if bounded else _FULL)[pair]]
    tiles = [tile.capped() for tile in rows] if capped else rows
    return dict.fromkeys(replace(tile, cluster=n) for tile in tiles for n in (tile.cluster, 1))


def panel(head_dim: int, head_dim_v: int) -> int:
    """Columns that lie together in shared memory, and are copied at a time."""
    return 64 if head_dim % 64 == head_dim_v % 64 == 0 else 32
