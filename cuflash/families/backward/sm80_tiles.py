"""What blocks of the backward kernel of sm80 work on, chosen by head dims and shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from ...runtime.device import Device

ROW_BYTES = 8  # of what describes a row


@dataclass(frozen=True, slots=True)
class Tile:
    """A row of the tile table: what a block of the main kernel works on, and why.

    Warps are a grid of `key_groups` for scores, dK and dV, and one of `query_groups` for dQ.
    `stages` counts tiles of Q in shared memory, `unroll` steps of Q Kᵀ and dO Vᵀ.
    """

    q_rows: int
    keys: int
    warps: int
    blocks: int  # of one multiprocessor, which share its 65,536 registers
    key_groups: int
    query_groups: int
    stages: int
    unroll: int
    why: str

    def __post_init__(self) -> None:
        whole = (
            self.warps % self.key_groups == self.warps % self.query_groups == 0
            and self.keys % (16 * self.key_groups) == 0
            and self.q_rows % (16 * self.sides) == self.q_rows % (16 * self.query_groups) == 0
            and {self.sides, self.query_groups, self.dq_sides} <= {1, 2, 4}
        )
        if not whole:
            raise ValueError(f"tile: got {self}; expected a grid of warps with whole products")

    @property
    def sides(self) -> int:
        """Warps that share keys: each has a part of the queries of S, and of dK's columns."""
        return self.warps // self.key_groups

    @property
    def dq_sides(self) -> int:
        """Warps that share rows of dQ: each has a part of its columns."""
        return self.warps // self.query_groups

    def padded(self, dim: int) -> int:
        """Columns of a head dim of whole parts for all that share them."""
        step = 16 * max(2, self.sides, self.dq_sides)
        return -(-dim // step) * step

    def registers(self, head_dim: int, head_dim_v: int) -> int:
        """Registers a thread of the main kernel for sums, without the 50 or so beside them."""
        keys, threads = self.keys, 32 * self.warps
        scores = 2 * keys * self.q_rows // threads
        dq = self.q_rows * head_dim // threads
        return keys * (head_dim + head_dim_v) // threads + max(scores, dq)

    def shared_memory(self, head_dim: int, head_dim_v: int) -> int:
        """Bytes a block of the main kernel: tiles in panels of 64 columns, and rows."""
        dim, dim_v, queries = (_panels(n) for n in (head_dim, head_dim_v, self.q_rows))
        elements = self.keys * (dim + dim_v) + self.q_rows * (self.stages * dim + dim_v)
        return 2 * (elements + 2 * self.keys * queries) + self.stages * self.q_rows * ROW_BYTES


# By the larger of both head dims, rounded up to a bucket; the first that fits. None has been timed:
# they are those that read least of shared memory among what keeps every value in registers.
_TILES = {
    32: (
        Tile(128, 64, 4, 2, 2, 4, 2, 2, "as 64"),
        Tile(64, 64, 4, 2, 2, 2, 2, 2, "two blocks in less shared memory"),
        Tile(64, 64, 4, 2, 2, 2, 1, 2, "two blocks in 99 KiB"),
    ),
    64: (
        Tile(128, 64, 4, 2, 2, 4, 2, 4, "136 matrix loads a warp for 320 products"),
        Tile(64, 64, 4, 2, 2, 2, 2, 4, "160 loads; two blocks in less shared memory"),
        Tile(64, 64, 4, 2, 2, 2, 1, 4, "two blocks in 99 KiB"),
    ),
    96: (
        Tile(64, 64, 4, 2, 2, 2, 2, 6, "as 128"),
        Tile(64, 64, 4, 2, 2, 2, 1, 6, "two blocks in 163 KiB"),
        Tile(64, 64, 8, 1, 4, 4, 2, 6, "one block in 99 KiB, of twice the warps"),
    ),
    128: (
        Tile(64, 64, 4, 2, 2, 2, 2, 8, "136 matrix loads a warp for 320 products"),
        Tile(64, 64, 4, 2, 2, 2, 1, 8, "two blocks in 163 KiB"),
        Tile(64, 64, 8, 1, 2, 2, 2, 8, "one block in 99 KiB, of twice the warps"),
    ),
    192: (
        Tile(64, 64, 8, 1, 2, 2, 2, 12, "dK and dV of 128 keys do not fit the registers"),
        Tile(64, 64, 8, 1, 2, 2, 1, 12, "one stage"),
        Tile(32, 64, 8, 1, 4, 2, 1, 12, "one block in 99 KiB"),
    ),
    256: (
        Tile(64, 64, 8, 1, 2, 2, 2, 4, "as 192; on 8.0 spills where unrolled by 16"),
        Tile(64, 64, 8, 1, 2, 2, 1, 4, "one stage, in 163 KiB"),
        Tile(32, 32, 4, 1, 2, 2, 1, 4, "one block in 99 KiB"),
    ),
}
_BLACKWELL = {
    64: (
        Tile(128, 64, 4, 2, 2, 4, 2, 2, "spills where unrolled by 4 on 10.0"),
        *_TILES[64][1:],
    ),
    128: (
        Tile(64, 64, 4, 2, 2, 4, 2, 1, "two groups of queries spill on 10.0"),
        *_TILES[128][1:],
    ),
    256: (
        Tile(64, 64, 8, 1, 2, 4, 2, 2, "two groups of queries spill on 10.0"),
        *_TILES[256][1:],
    ),
}
# Where blocks add to dQ in turn, which takes some registers more.
_BLACKWELL_IN_TURN = {
    96: (
        Tile(64, 64, 4, 2, 2, 2, 2, 2, "spills where unrolled by 6 on 10.0"),
        *_TILES[96][1:],
    ),
    128: _TILES[128][2:],  # four warps spill on 10.0
    256: _TILES[256][1:],  # two stages spill on 10.0
}
_BUCKETS = tuple(_TILES)
_RESERVED = 1024 + 256  # shared memory that each block takes beside its tiles: system's, kernel's


def bucket(dim: int) -> int:
    """What the kernel is compiled for, at or above a head dim."""
    return next(bucket for bucket in _BUCKETS if dim <= bucket)


def choose(head_dim: int, head_dim_v: int, device: Device, in_turn: bool = False) -> Tile:
    """The first row of the tile table, of these buckets, that fits the device's shared memory;
    `in_turn` says whether blocks add to dQ in turn.
    """
    dim = max(head_dim, head_dim_v)
    generation, _ = device.compute_capability or (0, 0)
    tables = {
        dim: _TILES[dim],
        **(_BLACKWELL if generation > 9 else {}),
        **(_BLACKWELL_IN_TURN if generation > 9 and in_turn else {}),
    }
    tiles = tables[dim]
    return next((tile for tile in tiles if fits(tile, head_dim, head_dim_v, device)), tiles[-1])


def fits(tile: Tile, head_dim: int, head_dim_v: int, device: Device) -> bool:
    """Whether a multiprocessor has the shared memory of as many blocks as a tile is meant for."""
    bytes_each = tile.shared_memory(head_dim, head_dim_v) + _RESERVED
    # What the system takes of one block is not counted in the device's most for a block.
    return tile.blocks * bytes_each <= device.shared_memory_per_block + 1024


def _panels(columns: int) -> int:
    return -(-columns // 64) * 64
