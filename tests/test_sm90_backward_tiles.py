"""The backward tiles of sm90: every row fits the hardware, and rows that do not are told."""

from __future__ import annotations

import itertools
import re

import pytest

from cuflash.families.backward import sm90_tiles
from cuflash.families.backward.sm90_tiles import PAIRS, Tile, buckets, choose, infeasible
from cuflash.runtime import source

ROWS = [
    pytest.param(table[pair], pair, id=f"{name}-{pair}")
    for name, table in (("plain", sm90_tiles._TILES), ("capped", sm90_tiles._CAPPED))
    for pair in PAIRS
]


@pytest.mark.parametrize(("tile", "pair"), ROWS)
def test_every_row_is_feasible(tile: Tile, pair: tuple[int, int]) -> None:
    assert infeasible(tile, *pair) == []
    assert tile.why


def test_every_pair_of_buckets_has_a_row() -> None:
    found = {buckets(d, v) for d, v in itertools.product(range(8, 257, 8), repeat=2)}
    assert found == set(PAIRS) == set(sm90_tiles._CAPPED)
    assert buckets(96, 96) == (128, 128)
    assert buckets(192, 96) == buckets(136, 128) == (192, 128)
    assert buckets(128, 192) == (192, 192)


@pytest.mark.parametrize(
    ("pair", "capped", "registers", "shared_memory"),
    [
        # 2 x 64 + 64; 32 + 64 + 64 + 32 KiB, and statistics
        ((64, 64), False, 192, (192 + 3) * 1024 + 512),
        ((128, 128), False, 192, (192 + 2) * 1024 + 512),
        ((192, 128), False, 160, 207_360),
        ((192, 192), False, 160, 231_936),
        ((256, 256), False, 192, 231_936),
        ((64, 64), True, 160, 183_808),
        ((128, 128), True, 128, 166_400),
    ],
)
def test_registers_and_shared_memory(
    pair: tuple[int, int], capped: bool, registers: int, shared_memory: int
) -> None:
    tile = choose(pair, capped)
    assert (tile.registers(*pair), tile.shared_memory(*pair)) == (registers, shared_memory)


@pytest.mark.parametrize(
    ("tile", "pair", "reason"),
    [
        (Tile(80), (128, 128), "208 registers a thread: two warpgroups leave 192"),
        (Tile(96), (128, 128), "224 registers a thread"),
        (Tile(64), (192, 128), "224 registers a thread"),
        (Tile(64), (256, 256), "320 registers a thread"),
        (Tile(80), (128, 128), "80 queries: expected 64 or 128"),
        (Tile(128, lines=True), (96, 96), "224 registers a thread"),
        (Tile(64, parted=True, o_stages=2, dq_chunks=2), (256, 256), "bytes of shared memory"),
        (Tile(64, parted=True, o_stages=1), (256, 256), "bytes of shared memory: a block has"),
        (Tile(64, parted=True), (192, 192), "96 columns of dQ: expected whole panels of 64"),
        (Tile(64), (96, 96), "96 columns of K: expected whole panels of 64"),
        (Tile(64, panel=32), (96, 96), "48 columns of dQ: expected whole panels of 32"),
        (Tile(64, panel=48), (96, 96), "panels of 48 columns: expected 32 or 64"),
        (Tile(64, lines=True), (64, 64), "a share of dQ: expected 64 rows"),
        (Tile(128), (64, 64), "a share of dQ: expected 64 rows"),
    ],
)
def test_rows_that_can_not_be(tile: Tile, pair: tuple[int, int], reason: str) -> None:
    found = infeasible(tile, *pair)
    assert any(reason in one for one in found), found


def test_the_kernel_has_the_same_limits() -> None:
    text = source.read("sm90_backward/config.cuh")
    limit = re.search(r"BYTES == CONFIG_SHARED_MEMORY && BYTES <= (\d+)", text)
    registers = re.search(r"PRODUCER_REGISTERS = (\d+), CONSUMER_REGISTERS = (\d+)", text)
    stages = re.search(r"Q_STAGES == (\d)", text)
    groups = re.search(r"GROUPS == (\d)", text)
    assert limit is not None
    assert registers is not None
    assert stages is not None
    assert groups is not None
    assert int(limit[1]) == sm90_tiles._SHARED_MEMORY
    producer, consumer = map(int, registers.groups())
    assert consumer >= sm90_tiles._REGISTERS + 24
    # What a block is launched with: 168 of each of three warpgroups.
    assert producer + sm90_tiles.GROUPS * consumer <= 3 * 168
    assert int(stages[1]) == sm90_tiles.Q_STAGES
    assert int(groups[1]) == sm90_tiles.GROUPS
