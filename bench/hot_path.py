"""Finds, in the machine code of a kernel, what runs for one tile of keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

from .sass import Assembly, Loop, opcode, parse, products

Weighted = list[tuple[str, float]]


def main_loop(assembly: str, needed: int, exponentials: int) -> Weighted:
    """Instructions of the loop over tiles of keys, with how often each runs for one tile.

    It is the loop that has the products of one tile, or of two by turns; or one with loops inside,
    which with their turns, as many of each, make up what is missing. Of several, the one with the
    shortest way.

    Parameters
    ----------
    assembly : str
        As nvdisasm writes it.
    needed : int
        Matrix instructions of a warp, or a warpgroup, for a tile.
    exponentials : int
        Those of a warp for a tile; 0 for a loop that has none.

    Raises
    ------
    ValueError
        Where there is no such loop.
    """
    read = parse(assembly)
    best: Weighted = []
    for loop in read.loops:
        found = _of_loop(read, loop, needed, exponentials)
        if found and (not best or _length(found) < _length(best)):
            best = found
    if not best:
        raise ValueError(f"no loop has the {needed} products of a tile of keys")
    return best


def _of_loop(read: Assembly, loop: Loop, needed: int, exponentials: int) -> Weighted:
    inside = [other for other in read.loops if loop.holds(other)]
    body = read.code[loop.first : loop.last]
    if not exponentials and any(opcode(one).startswith("MUFU.EX2") for one in body):
        return []
    if not inside:
        for tiles in (1, 2):
            if products(body) == tiles * needed:
                weights = dict.fromkeys(range(loop.first, loop.last), 1)
                way = hot_path(read, loop, weights, tiles * needed, tiles * exponentials)
                return [(read.code[place], 1 / tiles) for place in way]
        return []
    if any(
        one.first < other.last and other.first < one.last for one, other in combinations(inside, 2)
    ):
        return []
    of_inner = sum(products(read.code[inner.first : inner.last]) for inner in inside)
    turns, rest = divmod(needed - (products(body) - of_inner), of_inner)
    if rest or turns < 2:
        return []
    weights = {
        place: turns if any(inner.first <= place < inner.last for inner in inside) else 1
        for place in range(loop.first, loop.last)
    }
    way = hot_path(read, loop, weights, needed, exponentials)
    return [(read.code[place], float(weights[place])) for place in way]


def hot_path(
    read: Assembly, loop: Loop, weights: Mapping[int, int], needed: int, exponentials: int
) -> Sequence[int]:
    """The shortest way through a loop with every product, and as many exponentials as are needed.

    What a kernel does rarely, such as moving references, stands behind branches, and a way with
    those is longer. Branches back, which wait, are not followed.
    """
    # By products and exponentials so far: the length of the shortest way, and where it came from.
    ways: dict[int, dict[tuple[int, int], tuple[int, int, tuple[int, int]]]] = {
        loop.first: {(0, 0): (0, -1, (0, 0))}
    }
    last = loop.last - 1
    for place in range(loop.first, last):
        instruction, weight = read.code[place], weights[place]
        name = opcode(instruction)
        after: list[int] = []
        target = read.targets.get(place)
        if target is None or instruction.startswith("@") or " UP" in instruction:
            after.append(place + 1)
        if target is not None and place < target <= last:
            after.append(target)
        if name.startswith(("EXIT", "RET")) and not instruction.startswith("@"):
            after = []
        for state, (length, _, _) in ways.get(place, {}).items():
            reached = (
                state[0] + weight * ("MMA" in name),
                min(state[1] + weight * name.startswith("MUFU.EX2"), exponentials),
            )
            for following in after:
                known = ways.setdefault(following, {})
                if reached not in known or length + weight < known[reached][0]:
                    known[reached] = (length + weight, place, state)
    state = (needed, exponentials)
    if state not in ways.get(last, {}):
        return range(loop.first, loop.last)
    way = [last]
    place = last
    while place != loop.first:
        _, place, state = ways[place][state]
        way.append(place)
    return way[::-1]


def _length(weighted: Weighted) -> float:
    return sum(weight for _, weight in weighted)
