"""What the warps of an sm90 block share: work, barriers, and shared memory that tells of misuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

WARPS = 4  # of a warpgroup
FIRST_TILES = 2  # whose values are of 16 bits

Step = Callable[[], bool] | None  # what has to hold before the next one; None: nothing
Steps = Iterator[Step]
Tag = tuple[int, int]  # a piece of work, and a tile of it


class Fault(Exception):
    """What the kernel must not do."""


@dataclass(frozen=True)
class Config:
    """What the kernel is compiled for; `mutation` is a mistake to be found."""

    groups: int = 2
    stages: int = 2
    cluster: int = 1
    ping_pong: bool = False
    out_in_place: bool = False
    skips: bool = False
    lengths: bool = False
    eight: bool = False
    first: bool = False
    mutation: str = ""


@dataclass(frozen=True)
class Work:
    """Tiles that the block's rows see, and of these what each warpgroup's do."""

    begin: int
    end: int
    spans: tuple[tuple[int, int], ...]
    short: bool  # kv_len ends within the last tile

    @property
    def any(self) -> bool:
        return self.begin < self.end


class Barrier:
    """An mbarrier: a phase ends with its last arrival and the last of its bytes."""

    def __init__(self, name: str, arrivals: int) -> None:
        self.name, self.arrivals = name, arrivals
        self.left, self.copies, self.phase = arrivals, 0, 0

    def arrive(self, expect: int = 0) -> None:
        if self.left == 0:
            raise Fault(f"{self.name}: too many arrivals in a phase")
        self.left -= 1
        self.copies += expect
        self._end()

    def complete(self) -> None:
        self.copies -= 1
        self._end()

    def passed(self, parity: int) -> Callable[[], bool]:
        return lambda: self.phase % 2 != parity

    def _end(self) -> None:
        if self.left == self.copies == 0:
            self.phase += 1
            self.left = self.arrivals


class Meeting:
    """A named barrier: who waits goes on when all have come."""

    def __init__(self) -> None:
        self.come = self.met = 0

    def arrive(self, warps: int) -> int:
        self.come += 1
        now = self.met
        if self.come == warps:
            self.come, self.met = 0, self.met + 1
        return now

    def wait(self, warps: int) -> Steps:
        now = self.arrive(warps)
        yield lambda: self.met > now


@dataclass
class Region:
    """Shared memory: what it holds, part by part, and how many read it."""

    name: str
    parts: int = 1
    readers: int = 0
    holds: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.holds = [None] * self.parts

    def write(self, part: int, what: Any) -> None:
        if self.readers:
            raise Fault(f"{self.name}: written with {what} while it is read")
        self.holds[part] = what

    def write_share(self, rank: int, shares: int, what: Any) -> None:
        for part in range(rank * self.parts // shares, (rank + 1) * self.parts // shares):
            self.write(part, what)

    def check(self, what: Any) -> None:
        if any(held != what for held in self.holds):
            raise Fault(f"{self.name}: expected {what}, holds {self.holds}")


class Place:
    """Which of some stages comes next, and the parity of its barriers."""

    def __init__(self, stages: int, parity: int, slot: int = 0) -> None:
        self.stages, self.parity, self.slot = stages, parity, slot

    def next(self) -> None:
        self.slot = (self.slot + 1) % self.stages
        self.parity ^= self.slot == 0

    def copy(self) -> Place:
        return Place(self.stages, self.parity, self.slot)


class Block:
    """Barriers and shared memory."""

    def __init__(self, config: Config) -> None:
        def barriers(name: str, count: int, arrivals: int) -> list[Barrier]:
            return [Barrier(f"{name} {i}", arrivals) for i in range(count)]

        groups, stages, owners = config.groups, config.stages, config.groups * config.cluster
        self.k_full, self.v_full = barriers("k_full", stages, 1), barriers("v_full", stages, 1)
        self.k_empty = barriers("k_empty", stages, owners)
        self.v_empty = barriers("v_empty", stages, owners)
        self.q_full, self.q_empty = barriers("q_full", groups, 1), barriers("q_empty", groups, 1)
        self.work_full = barriers("work_full", 2, 1)
        self.work_empty = barriers("work_empty", 2, WARPS * groups)
        self.out_gone = barriers("out_gone", groups, config.cluster)
        (self.first_full,) = barriers("first_full", 1, 1)
        (self.first_empty,) = barriers("first_empty", 1, groups)
        self.turn, self.store = ([Meeting() for _ in range(groups)] for _ in range(2))
        self.consumers = Meeting()
        self.keys = [Region(f"K {i}", config.cluster) for i in range(stages)]
        # In as many parts as out, which may take their place.
        self.values = [Region(f"V {i}", WARPS) for i in range(stages)]
        self.cleared = [set[Any]() for _ in range(stages)]  # by which warps
        self.queries = [Region(f"Q {i}") for i in range(groups)]
        self.out = [Region(f"out {i}", WARPS) for i in range(groups)]
        self.first = Region("first values")
        self.works: list[tuple[int, Work | None] | None] = [None, None]
        self.products: list[list[dict[str, Any]]] = [[] for _ in range(groups)]
        self.stores = [0] * groups  # that still read
