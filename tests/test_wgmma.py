"""The generated header of warpgroup products is the generator's, and holds what the tiles need."""

from __future__ import annotations

import itertools
import re
import runpy
from pathlib import Path

import pytest

from cuflash.families import sm90_tiles
from cuflash.families.backward import sm90_tiles as backward_tiles
from cuflash.runtime import source

GENERATOR = Path(__file__).resolve().parent.parent / "tools" / "generate_wgmma.py"
HEADER = "common/ptx_wgmma.cuh"


@pytest.mark.skipif(not GENERATOR.exists(), reason="the generator is in the repository only")
def test_the_header_is_the_generators() -> None:
    generated = runpy.run_path(str(GENERATOR))["text"]()
    assert source.read(HEADER) == generated, "run python tools/generate_wgmma.py"


def test_every_tile_finds_its_products() -> None:
    text = source.read(HEADER)
    shapes = {
        (name, 2 * int(count), operand)
        for name, count, operand in re.findall(
            r"void (multiply_\w+)\(float \(&sums\)\[(\d+)\], ([^,]+),", text
        )
    }
    for pair, bounded, capped in itertools.product(sm90_tiles._FULL, (False, True), (False, True)):
        for tile in sm90_tiles.choices(pair, bounded, capped):
            assert ("multiply_keys", tile.keys, "u64 a") in shapes
            assert ("multiply_values", pair[1], "const u32 (&a)[4]") in shapes


def test_every_tile_of_the_backward_pass_finds_its_products() -> None:
    text = source.read(HEADER)
    for pair, capped in itertools.product(backward_tiles.PAIRS, (False, True)):
        tile = backward_tiles.choose(pair, capped)
        found = {
            "multiply_keys": (tile.q_rows, "u64 a"),
            "multiply_tiles": (tile.dq_columns(pair[0]), "u64 a"),
        }
        products = [*found.items(), *(("multiply_values", (n, "const u32 (&a)[4]")) for n in pair)]
        for name, (columns, operand) in products:
            for element in ("Float16", "Bfloat16"):
                head = (
                    f"{name}(float (&sums)[{columns // 2}], {operand}, u64 b, bool add, {element})"
                )
                assert head in text
