"""The tile table of the sm90 family: every row fits the hardware, and rows that do not are told."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest

from cuflash.families import fused, sm90_tiles
from cuflash.families.sm90_tiles import LINES, Tile, choices, choose, infeasible
from cuflash.runtime import source

PAIRS = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
TABLES = {"full": sm90_tiles._FULL, "bounded": sm90_tiles._BOUNDED}
ROWS = [
    pytest.param(tile, pair, id=f"{name}-{pair}-{most}")
    for name, table in TABLES.items()
    for pair, rows in table.items()
    for most, tile in rows
]
WIDE = Tile(128, 2)


@pytest.mark.parametrize(("tile", "pair"), ROWS)
def test_every_row_is_feasible(tile: Tile, pair: tuple[int, int]) -> None:
    assert infeasible(tile, *pair) == []
    assert infeasible(replace(tile, cluster=1), *pair) == [], "where a head has one tile of rows"
    assert infeasible(tile.capped(), *pair) == []
    assert tile.why


def test_every_pair_of_buckets_has_rows_for_every_length() -> None:
    found = {sm90_tiles.buckets(d, v) for d, v in itertools.product(range(8, 257, 8), repeat=2)}
    assert found == set(PAIRS)
    for name, table in TABLES.items():
        assert list(table) == PAIRS
        for rows in table.values():
            limits = [most for most, _ in rows]
            assert limits == sorted(set(limits))
            assert limits[-1] > fused.UNBOUNDED
            assert name == "full" or not any(tile.cluster > 1 for _, tile in rows)


@pytest.mark.parametrize(
    ("tile", "pair", "registers", "shared_memory"),
    [
        # 56 + 28 + 32; 24 + 28 + 28 + 24 KiB and one more
        (Tile(112, 3), (64, 64), 116, 105 * 1024),
        (Tile(128, 3), (64, 64), 128, 113 * 1024),
        (Tile(128, 2), (96, 96), 144, (24 + 48 + 48 + 24 + 1) * 1024),
        (Tile(128, 2), (128, 128), 160, 193 * 1024),
        (Tile(112, 2, out_in_place=True), (192, 192), 180, 217 * 1024),
        (Tile(128, 2, out_in_place=True), (192, 128), 160, 209 * 1024),
        (Tile(80, 2, out_in_place=True), (256, 256), 188, 225 * 1024),
        (Tile(80, 2, cluster=2, out_in_place=True), (256, 256), 188, 225 * 1024),
    ],
)
def test_registers_and_shared_memory(
    tile: Tile, pair: tuple[int, int], registers: int, shared_memory: int
) -> None:
    assert (tile.registers(pair[1]), tile.shared_memory(*pair)) == (registers, shared_memory)


def test_parts_of_shared_memory_start_on_whole_units() -> None:
    """16 keys of 96 columns are 3 KiB; half a unit of anything is rounded up to a whole one."""
    assert Tile(16, 2).shared_memory(96, 96) == (24 + 6 + 6 + 24 + 1) * 1024
    assert Tile(24, 2).shared_memory(32, 32) == (8 + 3 + 3 + 8 + 1) * 1024
    assert Tile(8, 2).shared_memory(96, 96) == (24 + 3 + 3 + 24 + 1) * 1024
    assert Tile(8, 2).shared_memory(32, 32) == (8 + 1 + 1 + 8 + 1) * 1024
    assert Tile(12, 2).shared_memory(32, 32) == (8 + 2 + 2 + 8 + 1) * 1024


@pytest.mark.parametrize(
    ("tile", "pair", "reason"),
    [
        # What was compiled and spilled, or does not fit.
        (Tile(144, 3), (64, 64), "140 registers a thread: 3 warpgroups leave 132"),
        (Tile(128, 3), (96, 96), "144 registers a thread: 3 warpgroups leave 132"),
        (Tile(96, 3), (128, 128), "136 registers a thread: 3 warpgroups leave 132"),
        (Tile(208, 2, out_in_place=True), (128, 128), "220 registers a thread: 2 warpgroups leave"),
        (Tile(112, 2, out_in_place=True), (256, 256), "212 registers a thread: 2 warpgroups leave"),
        (Tile(112, 2), (192, 192), "271360 bytes of shared memory: a block has 232448"),
        (Tile(96, 2), (192, 192), "bytes of shared memory: a block has 232448"),
        (Tile(128, 2, out_in_place=True), (192, 192), "bytes of shared memory"),
        (Tile(80, 2), (256, 256), "bytes of shared memory"),
        (Tile(96, 2, out_in_place=True), (256, 256), "bytes of shared memory"),
        (Tile(192, 2), (128, 128), "bytes of shared memory"),
        (Tile(120, 2), (128, 128), "120 keys: expected a multiple of 16"),
        (Tile(0, 2), (128, 128), "0 keys"),
        (Tile(272, 2), (64, 64), "272 keys: expected a multiple of 16 up to 256"),
        (Tile(128, 1), (64, 64), "1 warpgroups that multiply in 1 blocks: expected 2 or 3 in one"),
        (Tile(64, 4), (64, 64), "4 warpgroups that multiply in 1 blocks: expected 2 or 3 in one"),
        (Tile(64, 3, resident=2), (64, 64), "3 warpgroups that multiply in 2 blocks: expected"),
        (Tile(64, 2, resident=3), (64, 64), "2 warpgroups that multiply in 3 blocks: expected"),
        (Tile(80, 2, resident=2), (64, 64), "92 registers a thread: 2 warpgroups leave 80"),
        (Tile(48, 2, resident=2), (256, 32), "bytes of shared memory: a block has 115712"),
        (Tile(64, 2, resident=2, ping_pong=True), (64, 64), "turns of warpgroups that another"),
        (WIDE, (80, 80), "head dim 80: expected a multiple of 32"),
        (Tile(16, 2), (288, 288), "head dim 288: expected a multiple of 32 up to 256"),
        (replace(WIDE, cluster=4), (128, 128), "clusters of 4: expected 1 or 2"),
        (Tile(80, 3, out_in_place=True), (128, 128), "the output of 3 warpgroups would take"),
        (Tile(48, 2, out_in_place=True), (128, 128), "places of 2 tiles of 48 keys: expected"),
    ],
)
def test_rows_that_can_not_be(tile: Tile, pair: tuple[int, int], reason: str) -> None:
    found = infeasible(tile, *pair)
    assert any(reason in one for one in found), found


def test_one_fault_is_one_reason_and_two_are_two() -> None:
    assert len(infeasible(Tile(144, 3), 64, 64)) == 1
    assert len(infeasible(Tile(144, 3, cluster=3), 64, 64)) == 2


@pytest.mark.parametrize(("tile", "pair"), ROWS)
def test_more_keys_than_a_row_has_may_not_fit(tile: Tile, pair: tuple[int, int]) -> None:
    """The checker's limits bind: some number of keys is too many for every row."""
    fewest = LINES if tile.out_in_place else 16
    fits = [infeasible(replace(tile, keys=keys), *pair) == [] for keys in range(fewest, 257, 16)]
    assert not fits[-1]
    assert fits == sorted(fits, reverse=True), "what fits with more keys fits with fewer"


def test_the_kernel_has_the_same_limits() -> None:
    text = source.read("sm90/config.cuh")
    limits = re.search(r"BYTES <= \(Config::RESIDENT == 2 \? (\d+) : (\d+)\)", text)
    consumers = re.search(
        r"CONSUMER_REGISTERS = RESIDENT == 2 \? (\d+) : GROUPS == 4 \? \d+ : "
        r"GROUPS == 3 \? (\d+) : (\d+)",
        text,
    )
    works = re.search(r"BYTES = works \+ (\d+)", text)
    assert limits is not None
    assert consumers is not None
    assert works is not None
    assert {2: int(limits[1]), 1: int(limits[2])} == sm90_tiles._SHARED_MEMORY
    assert int(works[1]) == 1024
    for way, given in zip(((2, 2), (3, 1), (2, 1)), consumers.groups(), strict=True):
        assert sm90_tiles._REGISTERS[way] + 24 <= int(given)


@pytest.mark.parametrize(
    ("pair", "bounded", "kv_len", "row"),
    [
        ((64, 64), False, 100, 0),
        ((64, 64), False, 1025, 1),
        ((64, 64), True, 1024, 0),
        ((64, 64), True, 1025, 1),
        ((96, 96), True, 1 << 28, 0),
        ((128, 128), False, 0, 0),
        ((128, 128), False, 1 << 28, 1),
    ],
)
def test_the_row_of_a_problem(pair: tuple[int, int], bounded: bool, kv_len: int, row: int) -> None:
    table = TABLES["bounded" if bounded else "full"]
    assert choose(pair, bounded, False, kv_len) is table[pair][row][1]


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("capped", [False, True])
def test_choices_are_all_that_is_chosen(pair: tuple[int, int], bounded: bool, capped: bool) -> None:
    chosen = [choose(pair, bounded, capped, kv_len) for kv_len in range(0, 20000, 256)]
    alone = [replace(tile, cluster=1) for tile in chosen]
    assert set(choices(pair, bounded, capped)) == {*chosen, *alone}


def test_capping_takes_keys() -> None:
    plain, capped = (choose((64, 64), True, capped, 5000) for capped in (False, True))
    assert (plain.keys, capped.keys, plain.groups, capped.groups) == (128, 96, 3, 3)
    short, capped = (choose((64, 64), True, capped, 500) for capped in (False, True))
    assert short == capped
