"""The backward kernel of sm90 by a model: which tiles it walks, and whether its threads wait for
each other as they should, whatever the order in which they run.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from sm90_backward_model import Kernel, run
from sm90_backward_work import FAR, Shape, Work, find, part_of, tile_at, turn

SMALL = [(q, k) for q in (1, 2, 3, 4, 5, 7, 8, 9, 13) for k in (1, 2, 3, 5, 6, 8, 9, 11, 12)]
WINDOWS = [(FAR, FAR), (FAR, 0), (FAR, 2), (0, FAR), (3, FAR), (0, 0), (2, 1), (5, 4), (1, 9)]


def shapes() -> list[Shape]:
    found = [
        Shape(q, k, bm, bn, left, right, top_left)
        for q, k in SMALL
        for bm, bn in ((2, 2), (2, 4), (4, 2), (4, 4))
        for left, right in WINDOWS
        for top_left in (False, True)
    ]
    rng = random.Random(0)
    lengths = [
        Shape(
            q, k, 2, 4, left, right, top_left, used_q=rng.randint(0, q), used_kv=rng.randint(0, k)
        )
        for q, k in SMALL
        for left, right in WINDOWS
        for top_left in (False, True)
    ]
    return found + lengths


def test_tiles_and_turns_are_those_of_brute_force() -> None:
    """Every pair that is seen is walked, every pair of a clean tile is seen but for rows past the
    last, and the tiles of keys that add to a tile of queries count up in their order, with no gap.
    """
    for shape in shapes():
        q_len, _ = shape.lengths
        works = [find(shape, tile) for tile in range(shape.key_tiles)]
        for work in works:
            assert 0 <= work.begin <= work.clean_begin <= work.clean_end <= work.end
            assert work.end <= max(-(-q_len // shape.bm), work.begin), shape
            keys = range(work.tile * shape.bn, (work.tile + 1) * shape.bn)
            for q_tile in range(shape.q_tiles):
                rows = range(q_tile * shape.bm, (q_tile + 1) * shape.bm)
                pairs = [shape.sees(row, key) for row in rows if row < q_len for key in keys]
                walked = work.begin <= q_tile < work.end
                clean = work.clean_begin <= q_tile < work.clean_end
                assert walked or not any(pairs), (shape, work, q_tile)
                assert all(pairs) or not clean, (shape, work, q_tile)
                if walked and rows.stop <= q_len:
                    assert clean == all(pairs), (shape, work, q_tile)
            if shape.left == FAR:
                assert work.clean_end == work.end, "the kernel walks clean tiles first"
            assert_parts_are_the_whole(work)
        for q_tile, sweep in itertools.product(range(shape.q_tiles), (1, 2, 3)):
            order = [works[tile_at(shape, place, sweep)] for place in range(shape.key_tiles)]
            assert sorted(order) == works
            adding = [work.tile for work in order if work.begin <= q_tile < work.end]
            expected = {tile: place for place, tile in enumerate(adding)}
            for work in works:
                if work.begin <= q_tile < work.end:
                    assert turn(shape, work.tile, q_tile, sweep) == expected[work.tile], shape


def assert_parts_are_the_whole(work: Work) -> None:
    for parts in (1, 2, 3, 7):
        some = [part_of(work, part, parts) for part in range(parts)]
        for name in ("tiles", "clean"):
            first, last = ("begin", "end") if name == "tiles" else ("clean_begin", "clean_end")
            found = [
                tile for part in some for tile in range(getattr(part, first), getattr(part, last))
            ]
            assert found == list(range(getattr(work, first), getattr(work, last)))
        for part in some:
            assert part.begin <= part.clean_begin <= part.clean_end <= part.end


CONFIGURATIONS = {
    "wide": {},
    "wide ordered": {"ordered": True},
    "wide ordered, in sweeps": {"ordered": True, "sweep": 2},
    "parted": {"parted": True},
    "parted ordered": {"parted": True, "ordered": True, "sweep": 3},
    "parted in chunks": {"parted": True, "o_stages": 1, "dq_chunks": 2},
    "parted in chunks, ordered": {
        "parted": True,
        "o_stages": 1,
        "dq_chunks": 2,
        "ordered": True,
        "sweep": 2,
    },
}
LOOPS = [
    Shape(9, 12, 2, 4),
    Shape(9, 12, 2, 4, right=0),
    Shape(9, 13, 2, 4, right=0, group=3, heads=2),
    Shape(3, 13, 2, 4, right=0, top_left=True, heads=2),  # keys that no row sees
    Shape(12, 9, 2, 2, left=3, right=1, heads=2, group=2),
    Shape(12, 9, 4, 2, left=0, right=0),
    Shape(9, 12, 2, 4, used_q=0, used_kv=5, heads=2),
    Shape(9, 12, 2, 4, right=0, used_q=5, used_kv=3, heads=2),
    Shape(2, 1, 2, 4, heads=3, group=2),
]


@pytest.mark.parametrize("shape", LOOPS, ids=str)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_no_order_of_threads_ends_in_a_deadlock_or_overwrites(name: str, shape: Shape) -> None:
    """With fewer places than blocks too, as where other kernels keep some."""
    rng = random.Random(f"{name} {shape}")
    for seed, (blocks, resident) in itertools.product(
        range(4), ((1, None), (3, None), (4, 1), (5, 2))
    ):
        last = shape.heads % seed if seed else 0  # heads of the last section
        kernel = Kernel(
            shape,
            **CONFIGURATIONS[name],
            section=seed,
            split=rng.randint(0, (last or min(seed, shape.heads) or shape.heads) * shape.key_tiles),
            parts=rng.randint(2, 5),
        )
        for block in run(kernel, blocks, seed, resident):
            for slots in (block.q, block.o, block.scores, block.dq, [block.keys, block.values]):
                assert all(slot.readers == 0 for slot in slots), "something was not used"
        expected = Counter(
            ((head, of_group, q_tile, share), tile)
            for head in range(shape.heads)
            for tile in range(shape.key_tiles)
            for of_group in range(shape.group)
            for q_tile in range(find(shape, tile).begin, find(shape, tile).end)
            for share in range(2)
        )
        assert Counter(kernel.added) == expected
        assert sorted(kernel.cleared) == list(range(shape.heads * shape.group * shape.q_tiles))
        assert len(kernel.stored) == 2 * shape.heads * shape.key_tiles == len(set(kernel.stored))
        if kernel.ordered:
            order = [tile_at(shape, place, kernel.sweep) for place in range(shape.key_tiles)]
            for share in {share for share, _ in kernel.added}:
                tiles = [tile for other, tile in kernel.added if other == share]
                assert tiles == sorted(tiles, key=order.index), "dQ is added up in one order"


@pytest.mark.parametrize(("kind", "wait"), [("Barrier", "done"), ("Meeting", "arrive")])
def test_the_model_notices_a_missing_wait(
    kind: str, wait: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it might be about nothing."""
    import sm90_backward_model

    found = 0
    monkeypatch.setattr(getattr(sm90_backward_model, kind), wait, lambda *_: lambda: True)
    for seed in range(8):
        try:
            run(Kernel(Shape(9, 12, 2, 4)), 2, seed)
        except (AssertionError, TypeError, AttributeError):
            found += 1
    assert found == 8


def test_the_model_notices_turns_that_wait_for_work_not_begun() -> None:
    """Blocks that took tiles of keys from the last on would wait for ones without a place."""
    shape = Shape(9, 12, 2, 4)
    kernel = Kernel(shape, ordered=True)
    kernel.turns = {(0, 0, tile): -1 for tile in range(5)}
    with pytest.raises(AssertionError, match="deadlock"):
        run(kernel, 2, 0)
