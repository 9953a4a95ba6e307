"""The threads of the sm90 backward kernel without a GPU, as steps that wait.

`run` has those of some blocks run in any order: each is a generator that yields what it waits for.
Barriers and named barriers count as the hardware's do; slots of shared memory know what they hold
and who has still to read it, so that a slot that is overwritten too early, or read too early, is a
failure.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from sm90_backward_work import Shape, Work, find, part_of, tile_at, turn

Wait = Callable[[], bool]
Thread = Iterator[Wait]


@dataclass
class Barrier:
    """An mbarrier: phases of so many arrivals, waited for by parity."""

    arrivals: int
    phase: int = 0
    arrived: int = 0

    def arrive(self) -> None:
        self.arrived += 1
        assert self.arrived <= self.arrivals, "more arrivals than a phase takes"
        if self.arrived == self.arrivals:
            self.phase, self.arrived = self.phase + 1, 0

    def done(self, parity: int) -> Wait:
        """As try_wait.parity: the phase of this parity is over, which is not the current one."""
        return lambda: self.phase % 2 != parity


@dataclass
class Meeting:
    """A named barrier of so many threads' groups: who syncs waits until all have come."""

    parties: int
    came: int = 0
    round: int = 0

    def arrive(self) -> Wait:
        self.came += 1
        assert self.came <= self.parties, "a second arrival before the first was met"
        mine = self.round
        if self.came == self.parties:
            self.came, self.round = 0, self.round + 1
        return lambda: self.round > mine


@dataclass
class Slot:
    """A place of shared memory: what it holds, and how often that has still to be read."""

    held: object = None
    readers: int = 0

    def write(self, what: object, readers: int) -> None:
        assert self.readers == 0, (
            f"{what} over {self.held}, which {self.readers} have still to read"
        )
        self.held, self.readers = what, readers

    def read(self, what: object) -> None:
        assert self.held == what, f"{self.held} where {what} is expected"
        self.readers -= 1
        assert self.readers >= 0, f"{what} is read too often"


@dataclass
class Place:
    """A place in a ring, with the parity of its round."""

    count: int
    parity: int
    slot: int = 0

    def next(self) -> None:
        self.slot += 1
        if self.slot == self.count:
            self.slot, self.parity = 0, self.parity ^ 1


@dataclass
class Kernel:
    """A configuration, and what all blocks share."""

    shape: Shape
    parted: bool = False
    q_stages: int = 2
    o_stages: int = 2
    dq_chunks: int = 1
    ordered: bool = False
    sweep: int = 1  # tiles of keys after which the order is another
    section: int = 0  # kv heads whose dQ is set to 0 together; 0: that of all is at first
    split: int = 0  # the last pieces of work, which blocks share
    parts: int = 1  # of each of those
    tickets: int = 0
    turns: dict[object, int] = field(default_factory=dict)
    added: list[object] = field(default_factory=list)
    stored: list[object] = field(default_factory=list)
    cleared: list[int] = field(default_factory=list)  # tiles of dQ
    clearings: dict[int, int] = field(default_factory=dict)  # that have ended, of each section
    joined: Counter[tuple[int, int]] = field(default_factory=Counter)  # of each split piece

    def __post_init__(self) -> None:
        heads, self.of_section = self.shape.heads, self.section or self.shape.heads
        self.sections = -(-heads // self.of_section)
        self.of_head = self.shape.group * self.shape.q_tiles
        self.cleared += range(min(self.of_section, heads) * self.of_head)

    def share_of_next(self, section: int, in_section: int) -> range:
        """Which tiles of the next section a piece of work sets to 0."""
        first = (section + 1) * self.of_section
        tiles = min(self.of_section, self.shape.heads - first) * self.of_head
        pieces = self.of_section * self.shape.key_tiles
        begin, end = (tiles * (in_section + i) // pieces for i in range(2))
        return range(first * self.of_head + begin, first * self.of_head + end)


@dataclass
class Shares:
    """Of dQ: what a warpgroup knows of those it has handed over, and the tile that is still due."""

    handed_over: int = 0
    unannounced: bool = False
    due: tuple[object, int] | None = None


class Block:
    """The threads of one block: a generator for each that matters."""

    GROUPS = 2

    def __init__(self, kernel: Kernel) -> None:
        self.k = kernel
        k, groups = kernel, self.GROUPS
        self.works = [Slot() for _ in range(2)]
        self.work_full = [Barrier(1) for _ in range(2)]
        self.work_empty = [Barrier(groups + 3) for _ in range(2)]
        self.q_full = [Barrier(1) for _ in range(k.q_stages)]
        self.q_empty = [Barrier(groups) for _ in range(k.q_stages)]
        self.o_full = [Barrier(1) for _ in range(k.o_stages)]
        self.o_empty = [Barrier(groups) for _ in range(k.o_stages)]
        self.q = [Slot() for _ in range(k.q_stages)]
        self.o = [Slot() for _ in range(k.o_stages)]
        self.k_full, self.v_full, self.kv_empty = Barrier(1), Barrier(1), Barrier(groups)
        self.keys, self.values = Slot(), Slot()
        self.dq_full = [[Barrier(1) for _ in range(2)] for _ in range(groups)]  # of each adder
        self.dq_empty = [Barrier(1) for _ in range(groups)]
        self.dq = [Slot() for _ in range(groups)]
        self.scores = [Slot() for _ in range(2)]
        self.weights = Slot()
        self.staged = 0  # sums on their way out, from where dS, weights and dQ were
        self.meet_all = Meeting(groups)
        # Where dQ is late, of each tile of dS and each warpgroup that waits for the other.
        self.full = [[Meeting(groups) for _ in range(groups)] for _ in range(2)]
        self.empty = [[Meeting(groups) for _ in range(groups)] for _ in range(2)]
        # Where tiles are parted, of what one warpgroup hands to the other.
        self.weights_full, self.weights_empty, self.scores_full = (Barrier(1) for _ in range(3))

    def threads(self) -> list[Thread]:
        consume = self.consume_parted if self.k.parted else self.consume
        groups = range(self.GROUPS)
        return [
            self.produce_queries(), self.produce_keys(),
            *(self.add(which) for which in range(2)), *(consume(g) for g in groups),
        ]  # fmt: skip

    # --- who fetches ------------------------------------------------------------------------------

    def produce_queries(self) -> Thread:
        k, shape = self.k, self.k.shape
        q, o, place = Place(k.q_stages, 1), Place(k.o_stages, 1), Place(2, 1)

        def hand_over(record: object) -> Thread:
            yield self.work_empty[place.slot].done(place.parity)
            self.works[place.slot].write(record, self.GROUPS + 3)
            self.work_full[place.slot].arrive()
            place.next()

        while True:
            yield lambda: True  # a draw takes a while
            ticket, k.tickets = k.tickets, k.tickets + 1
            whole = shape.key_tiles * shape.heads - k.split
            if ticket >= whole + k.split * k.parts:
                break
            split, part = divmod(ticket - whole, k.parts) if ticket >= whole else (-1, 0)
            ticket = min(ticket, whole + split) if split >= 0 else ticket
            section, in_section = divmod(ticket, k.of_section * shape.key_tiles)
            if shape.bounded or k.ordered:
                heads = min(k.of_section, shape.heads - section * k.of_section)
                tile, head = divmod(in_section, heads)
                tile = tile_at(shape, tile, k.sweep) if k.ordered else tile
            else:
                head, tile = divmod(in_section, shape.key_tiles)
            head += section * k.of_section
            work = find(shape, tile)
            if split >= 0:
                work = part_of(work, part, k.parts)
            yield from hand_over((head, work, section, in_section, split))
            for name in self.tiles(head, work):
                yield self.q_empty[q.slot].done(q.parity)
                self.q[q.slot].write(name, self.GROUPS)
                self.q_full[q.slot].arrive()
                q.next()
                yield self.o_empty[o.slot].done(o.parity)
                self.o[o.slot].write(name, self.GROUPS)
                self.o_full[o.slot].arrive()
                o.next()
        yield from hand_over(None)

    def tiles(self, head: int, work: Work) -> list[tuple[int, int, int]]:
        return [
            (head, of_group, tile)
            for of_group in range(self.k.shape.group)
            for tile in range(work.end - 1, work.begin - 1, -1)
        ]

    def next_work(self, place: Place, release: bool = True) -> Iterator[Wait]:
        yield self.work_full[place.slot].done(place.parity)
        record = self.works[place.slot].held
        if release:
            self.release_work(place)
        return record

    def release_work(self, place: Place) -> None:
        self.works[place.slot].readers -= 1
        self.work_empty[place.slot].arrive()
        place.next()

    def produce_keys(self) -> Thread:
        place, parity = Place(2, 0), 1
        while (record := (yield from self.next_work(place))) is not None:
            yield self.kv_empty.done(parity)
            parity ^= 1
            head, work, section, in_section, _ = record
            for slot, barrier in ((self.keys, self.k_full), (self.values, self.v_full)):
                if work.begin < work.end:
                    slot.write((head, work.tile), self.GROUPS)
                barrier.arrive()
            if section + 1 < self.k.sections:
                for tile in self.k.share_of_next(section, in_section):
                    yield lambda: True
                    self.k.cleared.append(tile)
                clearings = self.k.clearings
                clearings[section + 1] = clearings.get(section + 1, 0) + 1

    def add(self, mine: int) -> Thread:
        k, shape = self.k, self.k.shape
        works, parity, whose = Place(2, 0), 0, 0
        while (record := (yield from self.next_work(works))) is not None:
            head, work, section, *_ = record
            if section > 0:
                due = k.of_section * shape.key_tiles
                yield lambda section=section, due=due: k.clearings.get(section, 0) == due
            for name in self.tiles(head, work):
                place = (name[0] * shape.group + name[1]) * shape.q_tiles + name[2]
                assert place in k.cleared, "dQ is added to what was there"
                whose ^= 1
                if k.ordered and whose == mine:
                    continue
                if k.ordered:
                    due = turn(shape, work.tile, name[-1], k.sweep)
                    yield lambda name=name, due=due: k.turns.get(name, 0) == due
                for chunk in range(k.dq_chunks):
                    for group in range(self.GROUPS) if k.ordered else (mine,):
                        share = (*name, group)
                        yield self.dq_full[group][mine if k.ordered else 0].done(parity)
                        self.dq[group].read((share, work.tile, chunk))
                        yield lambda: True  # the copy takes a while
                        if chunk == k.dq_chunks - 1:
                            k.added.append((share, work.tile))
                        self.dq_empty[group].arrive()
                    parity ^= 1
                yield lambda: True  # until it is written
                k.turns[name] = k.turns.get(name, 0) + 1

    # --- who multiplies ---------------------------------------------------------------------------

    def write(self, slot: Slot, what: object, readers: int) -> None:
        """To a place where sums are staged between two pieces of work."""
        assert not self.staged, f"{what} over sums"
        slot.write(what, readers)

    def stage(self) -> None:
        for slot in (*self.scores, self.weights, *self.dq):
            assert slot.readers == 0, f"sums over {slot.held}"
        self.staged += 1

    def hand_over_dq(self, group: int, shares: Shares, what: object) -> Thread:
        yield self.dq_empty[group].done(shares.handed_over % 2 ^ 1)
        self.write(self.dq[group], what, 1)
        shares.unannounced = True

    def announce_dq(self, group: int, shares: Shares) -> None:
        if shares.unannounced:
            adder = shares.handed_over // self.k.dq_chunks % 2 if self.k.ordered else 0
            self.dq_full[group][adder].arrive()
            shares.handed_over += 1
        shares.unannounced = False

    def walk(self, group: int, step: Callable[..., Thread]) -> Thread:
        k = self.k
        works, shares = Place(2, 0), Shares()
        q, o = Place(k.q_stages, 0), Place(k.o_stages, 0)
        parity, staged = 0, False
        while (record := (yield from self.next_work(works, release=False))) is not None:
            head, work, *_, split = record
            yield self.k_full.done(parity)
            yield self.v_full.done(parity)
            parity ^= 1
            if staged:
                yield lambda: True  # until the stores have been read
                self.staged -= 1
            yield self.meet_all.arrive()
            if work.begin < work.end:
                for name in self.tiles(head, work):
                    assert self.keys.held == self.values.held == (head, work.tile)
                    yield from step(group, name, work.tile, q, o, shares)
                    q.next()
                    o.next()
                if shares.due:
                    self.announce_dq(group, shares)
                    yield from self.late_dq(group, q, shares)
                self.keys.readers -= 1
                self.values.readers -= 1
            self.announce_dq(group, shares)
            yield self.meet_all.arrive()
            self.kv_empty.arrive()
            for empty in self.dq_empty:
                yield empty.done(shares.handed_over % 2 ^ 1)
            self.release_work(works)
            k.joined[split, group] += 1
            if staged := split < 0 or k.joined[split, group] == k.parts:
                self.stage()
                k.stored.append((head, work.tile, group))

    def consume(self, group: int) -> Thread:
        if not self.k.ordered:
            for empty in self.empty:
                empty[group ^ 1].arrive()
        yield from self.walk(group, self.step if self.k.ordered else self.late_step)

    def first_products(self, name: object, q: Place, o: Place) -> Thread:
        """S and dP."""
        yield self.q_full[q.slot].done(q.parity)
        yield self.o_full[o.slot].done(o.parity)
        assert self.q[q.slot].held == self.o[o.slot].held == name
        yield lambda: True

    def step(
        self, group: int, name: object, tile: int, q: Place, o: Place, shares: Shares
    ) -> Thread:
        yield from self.first_products(name, q, o)
        scores = self.scores[q.slot % 2]
        if scores.held != (name, tile):  # the first of both to write its half
            self.write(scores, (name, tile), self.GROUPS)
        self.announce_dq(group, shares)
        yield self.meet_all.arrive()
        yield lambda: True  # dQ and dV
        scores.read((name, tile))
        self.o[o.slot].read(name)
        self.o_empty[o.slot].arrive()
        yield from self.hand_over_dq(group, shares, ((*name, group), tile, 0))
        yield lambda: True  # dK
        self.q[q.slot].read(name)
        self.q_empty[q.slot].arrive()

    def late_step(
        self, group: int, name: object, tile: int, q: Place, o: Place, shares: Shares
    ) -> Thread:
        yield from self.first_products(name, q, o)
        yield self.empty[q.slot][group].arrive()
        scores = self.scores[q.slot]
        if scores.held != (name, tile):  # the first of both to write its half
            self.write(scores, (name, tile), self.GROUPS)
        yield lambda: True  # the other half may be written now
        self.announce_dq(group, shares)
        self.full[q.slot][group ^ 1].arrive()
        yield lambda: True  # dV
        self.o[o.slot].read(name)
        self.o_empty[o.slot].arrive()
        if shares.due:
            yield from self.late_dq(group, q, shares)
        shares.due = name, tile
        yield lambda: True  # dK
        self.q[q.slot].read(name)
        self.q_empty[q.slot].arrive()

    def late_dq(self, group: int, q: Place, shares: Shares) -> Thread:
        """Of the tile before that in slot `q`."""
        before = q.slot ^ 1
        yield self.full[before][group].arrive()
        yield lambda: True  # dQ
        assert shares.due is not None
        name, tile = shares.due
        self.scores[before].read(shares.due)
        self.empty[before][group ^ 1].arrive()
        yield from self.hand_over_dq(group, shares, ((*name, group), tile, 0))
        shares.due = None

    def consume_parted(self, group: int) -> Thread:
        yield from self.walk(group, self.step_of_keys if group else self.step_of_values)

    def chunks(self, group: int, name: object, tile: int, shares: Shares) -> Thread:
        for chunk in range(self.k.dq_chunks):
            yield lambda: True
            yield from self.hand_over_dq(group, shares, ((*name, group), tile, chunk))
            if self.k.ordered or chunk < self.k.dq_chunks - 1:
                self.announce_dq(group, shares)

    def step_of_values(
        self, group: int, name: object, tile: int, q: Place, o: Place, shares: Shares
    ) -> Thread:
        yield self.q_full[q.slot].done(q.parity)
        self.q[q.slot].read(name)
        self.q_empty[q.slot].arrive()
        yield lambda: True  # weights
        yield self.weights_empty.done(q.slot ^ 1)
        self.write(self.weights, (name, tile), 1)
        self.announce_dq(group, shares)
        self.weights_full.arrive()
        yield self.o_full[o.slot].done(o.parity)
        yield self.scores_full.done(q.slot)
        yield lambda: True  # dV
        self.o[o.slot].read(name)
        self.o_empty[o.slot].arrive()
        self.scores[q.slot % 2].read((name, tile))
        yield from self.chunks(group, name, tile, shares)

    def step_of_keys(
        self, group: int, name: object, tile: int, q: Place, o: Place, shares: Shares
    ) -> Thread:
        yield self.q_full[q.slot].done(q.parity)
        yield self.o_full[o.slot].done(o.parity)
        self.o[o.slot].read(name)
        self.o_empty[o.slot].arrive()
        yield self.weights_full.done(q.slot)
        self.weights.read((name, tile))
        self.weights_empty.arrive()
        self.write(self.scores[q.slot % 2], (name, tile), self.GROUPS)
        self.announce_dq(group, shares)
        self.scores_full.arrive()
        yield self.scores_full.done(q.slot)
        yield from self.chunks(group, name, tile, shares)
        self.scores[q.slot % 2].read((name, tile))
        self.q[q.slot].read(name)
        self.q_empty[q.slot].arrive()


def run(kernel: Kernel, blocks: int, seed: int, resident: int | None = None) -> list[Block]:
    """Run blocks to their end, of which `resident` at a time have a place, in a random order.

    Raises
    ------
    AssertionError
        Where all that run wait for ever, or a slot is misused.
    """
    rng = random.Random(seed)
    waiting = [Block(kernel) for _ in range(blocks)]
    rng.shuffle(waiting)
    every = list(waiting)
    running: list[list[list[object]]] = []
    slow = rng.random()
    while waiting or running:
        while waiting and len(running) < (resident or blocks):
            running.append([[thread, next(thread, None)] for thread in waiting.pop().threads()])
        ready = [
            (block, pair) for block in running for pair in block if pair[1] is None or pair[1]()
        ]
        assert ready, "a deadlock"
        favoured = [one for one in ready if one[0] is running[0]]
        block, pair = rng.choice(favoured if favoured and rng.random() < slow else ready)
        if pair[1] is not None:
            pair[1] = next(pair[0], None)
        if pair[1] is None:
            block.remove(pair)
            if not block:
                running.remove(block)
    return every
