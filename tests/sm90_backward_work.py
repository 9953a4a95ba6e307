"""What blocks of the sm90 backward kernel work on, and in which order: `struct Work` of
cuda_src/sm90_backward/work.cuh, in tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

FAR = 1 << 29


@dataclass(frozen=True)
class Shape:
    """A problem of one batch entry, in tiles of `bm` queries and `bn` keys."""

    q_len: int
    kv_len: int
    bm: int
    bn: int
    left: int = FAR
    right: int = FAR
    top_left: bool = False
    group: int = 1
    heads: int = 1  # kv heads
    used_q: int | None = None
    used_kv: int | None = None

    @property
    def bounded(self) -> bool:
        return (self.left, self.right) != (FAR, FAR)

    @property
    def key_tiles(self) -> int:
        return -(-self.kv_len // self.bn)

    @property
    def q_tiles(self) -> int:
        return -(-self.q_len // self.bm)

    @property
    def lengths(self) -> tuple[int, int]:
        used_q = self.q_len if self.used_q is None else self.used_q
        return used_q, self.kv_len if self.used_kv is None else self.used_kv

    @property
    def diagonal(self) -> int:
        q_len, kv_len = self.lengths
        return 0 if self.top_left else kv_len - q_len

    def sees(self, row: int, key: int) -> bool:
        q_len, kv_len = self.lengths
        centre = row + self.diagonal
        return row < q_len and key < kv_len and centre - self.left <= key <= centre + self.right


class Work(NamedTuple):
    """Tiles of queries of a tile of keys."""

    tile: int
    begin: int
    end: int
    clean_begin: int
    clean_end: int


def find(shape: Shape, tile: int) -> Work:
    """`Work::find_queries`."""
    q_len, kv_len = shape.lengths
    bm, bn, diagonal, left = shape.bm, shape.bn, shape.diagonal, shape.left != FAR
    first = tile * bn
    last = min(first + bn, kv_len) - 1
    begin, end = 0, (q_len + bm - 1) // bm
    clean_begin, clean_end = 0, end
    if shape.bounded:
        begin = max(0, first - diagonal - shape.right) // bm
        clean_begin = (max(0, last - diagonal - shape.right) + bm - 1) // bm
        if left:
            end = min(end, (max(0, last - diagonal + shape.left + 1) + bm - 1) // bm)
            clean_end = max(0, first - diagonal + shape.left + 1) // bm
    if last < first or end < begin:
        end = begin
    if last < first + bn - 1:
        clean_begin = end
    clean_begin = min(max(clean_begin, begin), end)
    clean_end = min(max(clean_end, clean_begin), end)
    return Work(tile, begin, end, clean_begin, clean_end)


def part_of(work: Work, part: int, parts: int) -> Work:
    """`Work::find` of a split piece of work: some of its tiles of queries."""
    count = work.end - work.begin
    begin, end = (work.begin + count * i // parts for i in (part, part + 1))
    clean_begin, clean_end = (
        min(max(edge, begin), end) for edge in (work.clean_begin, work.clean_end)
    )
    return Work(work.tile, begin, end, clean_begin, clean_end)


def sweeps(shape: Shape) -> bool:
    """`Work::SWEEPS`, where tiles of keys add to dQ in turn."""
    return shape.bounded and shape.left == FAR


def tile_at(shape: Shape, place: int, sweep: int) -> int:
    """`Work::find_tile`: the tile of keys at a place of the order, in sweeps of so many."""
    first = place // sweep * sweep
    if not sweeps(shape) or place // sweep % 2 == 1:
        return place
    return first + min(first + sweep, shape.key_tiles) - 1 - place


def turn(shape: Shape, tile: int, q_tile: int, sweep: int) -> int:
    """`Work::turn`."""
    if shape.left != FAR:
        return tile - max(0, q_tile * shape.bm + shape.diagonal - shape.left) // shape.bn
    if not sweeps(shape) or tile // sweep % 2 == 1:
        return tile
    _, kv_len = shape.lengths
    first = tile // sweep * sweep
    last = min(first + sweep, shape.key_tiles) - 1
    end_row = (q_tile + 1) * shape.bm
    last_key = kv_len - 1 - max(0, kv_len - end_row - shape.diagonal - shape.right)
    return first + min(last, last_key // shape.bn) - tile
