"""Where the backward kernel of sm90 finds its operands: addresses as its sources work them out,
read as wgmma's descriptors are (PTX ISA, matrix descriptors and swizzling modes).
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from cuflash.families.backward import sm90_tiles
from cuflash.families.backward.sm90_tiles import Tile, choose

THREAD = np.arange(128)
WARP, LANE = THREAD // 32, THREAD % 32
TILES = [
    pytest.param(choose(pair, capped), pair, id=f"{pair} capped={capped}")
    for pair, capped in itertools.product(sm90_tiles.PAIRS, (False, True))
]


def swizzled(address: np.ndarray, row: int) -> np.ndarray:
    """Where a byte of a panel of so many bytes a row lies: units of 16 change places in 8 rows."""
    unit = address // 128 % (8 if row == 128 else 4)
    return address ^ (unit << 4)


def held(register: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(line, column) of each thread's sums, as (128, registers)."""
    line = 16 * WARP[:, None] + LANE[:, None] // 4 + 8 * (register // 2 % 2)
    return line, 8 * (register // 4) + 2 * (LANE[:, None] % 4) + register % 2


class Memory:
    """Shared memory that holds numbers in place of bytes, two bytes each."""

    def __init__(self) -> None:
        self.data = np.full(1 << 17, np.nan)

    def load_box(self, at: int, matrix: np.ndarray, panel: int) -> None:
        """As a tensor copy does, panel after panel."""
        rows = len(matrix)
        r, c = np.indices(matrix.shape)
        address = at + c // panel * rows * 2 * panel + r * 2 * panel + c % panel * 2
        self.data[swizzled(address, 2 * panel) // 2] = matrix

    def in_rows(self, start: int, lines: int, row: int) -> np.ndarray:
        """Operand of a step whose 16 columns lie together: (lines, 16)."""
        line, k = np.indices((lines, 16))
        address = start + line // 8 * 8 * row + line % 8 * row + 2 * k
        return self.data[swizzled(address, row) // 2]

    def in_columns(self, start: int, columns: int, row: int, leading: int) -> np.ndarray:
        """Operand of a step that lies transposed, panels `leading` bytes apart: (16, columns)."""
        k, column = np.indices((16, columns))
        panel = row // 2
        address = start + column // panel * leading + k // 8 * 8 * row + k % 8 * row
        return self.data[swizzled(address + column % panel * 2, row) // 2]


def column_step(step: int, rows: int, row: int) -> int:
    steps = row // 32
    return step // steps * rows * row + step % steps * 32


@pytest.mark.parametrize(("tile", "pair"), TILES)
def test_products_of_tiles_in_shared_memory(tile: Tile, pair: tuple[int, int]) -> None:
    """S, whose operands lie in rows, and the products with Q and dO, which lie transposed."""
    rng = np.random.default_rng(0)
    row, dim = 2 * tile.panel, pair[0]
    k, q = rng.integers(-4, 5, (tile.keys, dim)), rng.integers(-4, 5, (tile.q_rows, dim))
    memory = Memory()
    memory.load_box(0, k, tile.panel)
    q_at = 2 * k.size
    memory.load_box(q_at, q, tile.panel)
    for first in range(0, tile.keys, 64):
        scores = sum(
            memory.in_rows(first * row + column_step(step, tile.keys, row), 64, row)
            @ memory.in_rows(q_at + column_step(step, tile.q_rows, row), tile.q_rows, row).T
            for step in range(dim // 16)
        )
        np.testing.assert_array_equal(scores, k[first : first + 64] @ q.T)
    found = [
        memory.in_columns(q_at + step * 16 * row, dim, row, tile.q_rows * row)
        for step in range(tile.q_rows // 16)
    ]
    np.testing.assert_array_equal(np.concatenate(found), q)


def stored_transposed(memory: Memory, at: int, tile: Tile, group: int, lines: np.ndarray) -> None:
    """`store_transposed` of a warpgroup that holds `lines`, (64 keys, queries)."""
    count = tile.q_rows // 2
    line, column = held(np.arange(count))
    registers = lines[line, column].reshape(128, count // 2, 2)  # pairs of 16 bits
    row = LANE % 8 + LANE // 16 * 8
    unit = WARP * 2 + LANE // 8 % 2
    given = at + (0 if tile.parted else group * tile.q_rows * 128) + row * 128
    given = given + 16 * (unit ^ row % 8)
    for step, warp, matrix in itertools.product(range(tile.q_rows // 16), range(4), range(4)):
        fragment = np.empty((8, 8))
        threads = np.arange(32) + 32 * warp
        for half in range(2):
            fragment[np.arange(32) // 4, 2 * (np.arange(32) % 4) + half] = registers[
                threads, 4 * step + matrix, half
            ]
        for i in range(8):
            address = given[32 * warp + 8 * matrix + i] + step * 16 * 128
            memory.data[address // 2 + np.arange(8)] = fragment[:, i]


@pytest.mark.parametrize(("tile", "pair"), TILES)
def test_dq_from_registers_to_rows(tile: Tile, pair: tuple[int, int]) -> None:
    """dS from registers, transposed; its product with K; shares in the order of the workspace; rows
    as `finish_rows` finds them.
    """
    rng = np.random.default_rng(1)
    row, dim, groups = 2 * tile.panel, pair[0], sm90_tiles.GROUPS
    scores = rng.integers(-4, 5, (tile.keys, tile.q_rows))  # lines are keys
    k = rng.integers(-4, 5, (tile.keys, dim))
    memory = Memory()
    memory.load_box(0, k, tile.panel)
    at = 2 * k.size
    for group in range(1 if tile.parted else groups):
        stored_transposed(memory, at, tile, group, scores[64 * group : 64 * group + 64])
    columns = tile.dq_columns(dim)
    workspace = []
    for group, chunk in itertools.product(range(groups), range(tile.dq_chunks)):
        first_column = (0 if tile.lines else group * dim // groups) + chunk * columns
        first_row = 64 * group if tile.lines else 0
        start = first_column // tile.panel * tile.keys * row
        sums = sum(
            memory.in_rows(at + first_row * 128 + column_step(step, tile.q_rows, 128), 64, 128)
            @ memory.in_columns(start + step * 16 * row, columns, row, tile.keys * row)
            for step in range(tile.keys // 16)
        )
        line, column = held(np.arange(columns // 2))
        registers = sums[line, column]
        for i in range(0, columns // 2, 4):
            workspace += [*registers[:, i : i + 4].reshape(-1)]
    found = np.full((tile.q_rows, dim), np.nan)
    of_share = (64 if tile.lines else tile.q_rows) * dim // (1 if tile.lines else groups) // 4
    units = np.array(workspace).reshape(-1, 4)
    assert len(units) == tile.q_rows * dim // 4
    for i, unit in enumerate(units):
        share, in_share = divmod(i, of_share)
        thread = in_share % 128
        r = (64 * share if tile.lines else 0) + thread // 32 * 16 + thread % 32 // 4
        c = (0 if tile.lines else dim // groups * share) + in_share // 128 * 8 + thread % 4 * 2
        found[r, c : c + 2], found[r + 8, c : c + 2] = unit[:2], unit[2:]
    np.testing.assert_array_equal(found, scores.T @ k)


def test_row_statistics_lie_as_threads_need_them() -> None:
    """`place_of_row`, and `load_row_stats` with `column_of`."""
    row = np.arange(128)
    place = row // 16 * 16 + row // 2 % 4 * 4 + row // 8 % 2 * 2 + row % 2
    assert sorted(place) == list(range(128))
    stats = np.empty(128)
    stats[place] = row
    for lane in range(4):
        loaded = [stats[4 * lane + 16 * i + j] for i in range(8) for j in range(4)]
        for element in range(64):
            _, column = held(np.arange(64))
            assert loaded[element // 4 * 2 + element % 2] == column[lane, element]


@pytest.mark.parametrize(("tile", "pair"), TILES)
def test_sums_of_keys_are_stored_where_boxes_are_taken(tile: Tile, pair: tuple[int, int]) -> None:
    """`round`: as a tensor copy would have put them."""
    rng = np.random.default_rng(2)
    row, dim = 2 * tile.panel, pair[0]
    sums = rng.integers(-4, 5, (tile.keys, dim))
    expected, memory = Memory(), Memory()
    expected.load_box(0, sums, tile.panel)
    steps = tile.panel // 16
    for first in range(0, tile.keys, 64):
        line, column = held(np.arange(dim // 2))
        x = sums[first + line, column]
        at = first + 16 * WARP + LANE % 16
        for step in range(dim // 16):
            unit = step % steps * 2 + LANE // 16
            place = unit ^ (at % 8 if row == 128 else at // 2 % 4)
            given = (step // steps * tile.keys + at) * row + 16 * place
            for warp, matrix in itertools.product(range(4), range(4)):
                for lane, half in itertools.product(range(32), range(2)):
                    to = given[32 * warp + 8 * matrix + lane // 4] + 2 * (2 * (lane % 4) + half)
                    memory.data[to // 2] = x[32 * warp + lane, 8 * step + 2 * matrix + half]
    np.testing.assert_array_equal(memory.data, expected.data)


FAR = 1 << 29  # no bound


@pytest.mark.parametrize("tile", [Tile(64), Tile(128, lines=True), Tile(64, parted=True)], ids=str)
def test_hidden_pairs_are_those_of_brute_force(tile: Tile) -> None:
    """`Sight` and `Seen`, for each thread and element, in every tile that a warpgroup walks."""
    line, column = held(np.arange(tile.q_rows // 2))
    lane_column = 2 * (LANE[:, None] % 4)
    for (q_len, kv_len), (left, right), top_left in itertools.product(
        [(1, 1), (130, 70), (70, 261), (200, 200), (3, 257)],
        [(FAR, FAR), (FAR, 0), (40, 3), (0, 0), (FAR, 65), (129, FAR)],
        [False, True],
    ):
        diagonal = 0 if top_left else kv_len - q_len
        bounded = (left, right) != (FAR, FAR)
        for key_tile in range(-(-kv_len // tile.keys)):
            for first in range(0, tile.keys, 64):
                key = key_tile * tile.keys + first + line
                centre = key - diagonal - lane_column
                low = np.where(key >= kv_len, 1 << 30, centre - right if bounded else -(1 << 30))
                high = centre + left
                for q_tile in range(-(-q_len // tile.q_rows)):
                    at = q_tile * tile.q_rows
                    element = column - lane_column
                    hidden = element < low - at
                    if left != FAR:
                        hidden |= element > high - at
                    row = at + column
                    seen = (key < kv_len) & (key <= row + diagonal + right)
                    seen &= key >= row + diagonal - left
                    np.testing.assert_array_equal(hidden, ~seen)
