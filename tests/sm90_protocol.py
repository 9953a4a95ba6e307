"""How the warps of an sm90 block wait for each other, without what they compute.

A producer and the warps of each warpgroup run as generators, a step at a time in random order, and
copies, products and stores end whenever they like. They meet as in `cuda_src/sm90`: producer.cuh,
warpgroup.cuh, walk16.cuh and walk8.cuh, whose names are used here. What can go wrong is a `Fault`:
shared memory that changes while it is read, or is not what a reader expects, a barrier with too
many arrivals, and a block that waits for ever.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from sm90_block import (
    FIRST_TILES,
    WARPS,
    Block,
    Config,
    Fault,
    Place,
    Step,
    Steps,
    Tag,
    Work,
)
from sm90_warp import Warp


class Kernel:
    """One cluster with its pieces of work."""

    def __init__(self, config: Config, works: list[Work], chance: random.Random) -> None:
        self.config, self.works, self.chance = config, works, chance
        self.blocks = [Block(config) for _ in range(config.cluster)]
        self.events: list[Callable[[], None]] = []  # that may happen at any time
        self.stored: set[tuple[int, ...]] = set()

    def run(self) -> None:
        """Until all have ended.

        Raises
        ------
        Fault
        """
        actors: list[Steps] = []
        for rank in range(self.config.cluster):
            actors.append(self.produce(rank))
            actors += [
                Consumer(self, rank, group, warp).run()
                for group in range(self.config.groups)
                for warp in range(WARPS)
            ]
        spread = self.chance.choice((0.0, 2.5))  # some are a few hundred times as slow as others
        weights = [10 ** -self.chance.uniform(0, spread) for _ in actors]
        haste = self.chance.choice((0.02, 0.2, 0.5, 0.9))  # of events
        waits: list[Step] = [None] * len(actors)
        running = list(range(len(actors)))
        while running:
            ready = [i for i in running if (wait := waits[i]) is None or wait()]
            if self.events and (not ready or self.chance.random() < haste):
                self.happen()
                continue
            if not ready:
                raise Fault(f"{len(running)} of {len(actors)} wait for ever")
            (chosen,) = self.chance.choices(ready, [weights[i] for i in ready])
            for _ in range(self.chance.choice((1, 1, 30))):
                try:
                    wait = waits[chosen] = next(actors[chosen])
                except StopIteration:
                    running.remove(chosen)
                    break
                if wait is not None and not wait():
                    break
        while self.events:
            self.happen()
        everyone = len(self.works) * self.config.cluster * self.config.groups * WARPS
        if len(self.stored) != everyone:
            raise Fault(f"{len(self.stored)} of {everyone} parts were stored")

    def happen(self) -> None:
        self.events.pop(self.chance.randrange(len(self.events)))()

    def produce(self, rank: int) -> Steps:
        config, block = self.config, self.blocks[rank]
        k_place, v_place = Place(config.stages, 1), Place(config.stages, 1)
        work_place, q_parity, first_parity, gone_parity = Place(2, 1), 1, 1, 0

        def hand_over(what: tuple[int, Work | None]) -> Steps:
            slot = work_place.slot
            yield block.work_empty[slot].passed(work_place.parity)
            block.works[slot] = None
            yield None
            block.works[slot] = what
            block.work_full[slot].arrive()
            work_place.next()

        def load(values: bool, place: Place, tag: Tag) -> Steps:
            slot = place.slot
            yield (block.v_empty if values else block.k_empty)[slot].passed(place.parity)
            (block.v_full if values else block.k_full)[slot].arrive(expect=config.cluster)
            for to in self.blocks:

                def come(to: Block = to) -> None:
                    region = (to.values if values else to.keys)[slot]
                    region.write_share(rank, config.cluster, tag)
                    if values:
                        to.cleared[slot].clear()
                    (to.v_full if values else to.k_full)[slot].complete()

                self.events.append(come)
            place.next()

        def await_out_gone(group: int) -> Steps:
            if config.out_in_place:
                yield block.out_gone[group].passed(gone_parity)

        def load_values(number: int, work: Work, tile: int) -> Steps:
            if tile == work.end - 1:
                yield from await_out_gone(0)
            one = config.mutation == "a single tile does not wait for the other place"
            if tile == (work.end - 2 if one else max(work.end - 2, work.begin)):
                yield from await_out_gone(1)
            yield from load(True, v_place, (number, tile))

        def load_first(number: int) -> Steps:
            nonlocal first_parity
            yield block.first_empty.passed(first_parity)
            block.first_full.arrive(expect=1)

            def come() -> None:
                block.first.write(0, number)
                block.first_full.complete()

            self.events.append(come)
            first_parity ^= 1

        for number, work in enumerate(self.works):
            yield from hand_over((number, work))
            if config.first and work.any and work.end <= FIRST_TILES:
                yield from load_first(number)
            if work.any:
                yield from load(False, k_place, (number, work.end - 1))
            for group in range(config.groups):
                yield block.q_empty[group].passed(q_parity)
                block.q_full[group].arrive(expect=work.any)
                if work.any:

                    def come(group: int = group, number: int = number) -> None:
                        block.queries[group].write(0, number)
                        block.q_full[group].complete()

                    self.events.append(come)
            q_parity ^= 1
            for tile in range(work.end - 2, work.begin - 1, -1):
                if config.first and tile == FIRST_TILES - 1:
                    yield from load_first(number)
                yield from load(False, k_place, (number, tile))
                yield from load_values(number, work, tile + 1)
            if work.any:
                yield from load_values(number, work, work.begin)
            else:
                yield from await_out_gone(0)
                yield from await_out_gone(1)
            gone_parity ^= 1
        yield from hand_over((-1, None))


class Consumer(Warp):
    """A warp of a warpgroup."""

    # --- walk16.cuh ---

    def clear_dead_values(self) -> Steps:
        if not (self.config.lengths and self.work.short):
            return
        yield self.await_values(self.place)
        slot = self.place.slot
        self.block.values[slot].check((self.number, self.work.end - 1))
        if self.block.values[slot].readers:
            raise Fault("values are cleared while they are read")
        self.block.cleared[slot].add((self.group, self.warp))
        yield from self.block.consumers.wait(WARPS * self.config.groups)

    def walk16(self) -> Steps:
        config, (begin, end) = self.config, self.span
        yield self.await_keys()
        self.multiply_queries_and_keys(end - 1)
        if not self.values_first:
            yield from self.tell_out_gone()
        yield from self.wait_products(0)
        self.release(False, self.place.slot)
        self.release_queries_after(end - 1)
        self.pack_weights(end - 1)
        for tile in range(end - 2, begin - 1, -1):
            before = self.place.copy()
            self.place.next()
            first = not config.ping_pong or self.group == 0  # the others' turn comes later
            if first:
                yield self.await_keys()
            yield from self.await_turn()
            self.multiply_queries_and_keys(tile)
            yield None
            if first:
                yield self.await_values(before)
            self.multiply_values(before.slot)
            yield None
            self.pass_turn()
            yield from self.wait_products(1)
            self.release(False, self.place.slot)
            self.release_queries_after(tile)
            yield None
            if config.mutation == "values are released too early":
                self.release(True, before.slot)
            yield from self.wait_products(0)
            if config.mutation != "values are released too early":
                self.release(True, before.slot)
            self.pack_weights(tile)
        yield self.await_values(self.place)
        self.multiply_values(self.place.slot)
        yield from self.wait_products(0)
        self.release(True, self.place.slot)
        self.place.next()

    # --- walk8.cuh ---

    def walk8(self) -> Steps:
        first_tiles = FIRST_TILES if self.config.first else 0
        begin, end = max(self.span[0], first_tiles), self.span[1]
        for tile in range(end - 1, begin - 1, -1):
            values = self.place.copy()
            if tile < end - 1:
                self.place.next()
            yield self.await_keys()
            self.multiply_queries_and_keys(tile)
            yield None
            if tile < end - 1:
                yield self.await_values(values)
                self.multiply_values(values.slot)
                yield None
            hidden = tile == end - 1 or (tile + self.number) % 3 == 0
            yield from self.wait_products(0 if hidden else 1)
            self.release(False, self.place.slot)
            yield None
            yield from self.wait_products(0)
            if tile < end - 1:
                self.release(True, values.slot)
            self.pack_weights(tile)
        if end - 1 >= begin:
            if begin == self.span[0]:
                self.release_queries()
            yield self.await_values(self.place)
            self.multiply_values(self.place.slot)
            yield from self.wait_products(0)
            self.release(True, self.place.slot)
            self.place.next()
        if self.span[0] < first_tiles:
            yield from self.await_first_values()
            for tile in range(min(end, first_tiles) - 1, self.span[0] - 1, -1):
                yield self.await_keys()
                self.multiply_queries_and_keys(tile)
                yield from self.wait_products(0)
                self.release(False, self.place.slot)
                if tile == self.span[0]:
                    self.release_queries()
                yield None
                yield self.await_values(self.place)
                self.multiply((self.block.first, self.number))
                self.taken.append(tile)
                yield from self.wait_products(0)
                self.release(True, self.place.slot)
                self.place.next()
            yield from self.release_first_values()

    def await_first_values(self) -> Steps:
        yield self.block.first_full.passed(self.first_parity)
        self.first_parity ^= 1

    def release_first_values(self) -> Steps:
        yield from self.meet()
        if self.leads:
            self.block.first_empty.arrive()

    def leave(self) -> Steps:
        config = self.config
        if not config.first or self.work.begin >= FIRST_TILES or self.span[0] < FIRST_TILES:
            return
        if config.mutation != "first values are left by those who need none":
            yield from self.await_first_values()
            yield from self.release_first_values()

    # --- warpgroup.cuh ---

    def skip(self, before: bool) -> Steps:
        """`pass`, which is a word of Python."""

        def turn() -> Steps:
            yield self.await_keys()
            yield from self.await_turn()
            self.pass_turn()

        if before:
            yield self.await_keys()
        else:
            yield from turn()
        yield self.await_values(self.place)
        if self.config.mutation != "warps that pass do not meet":
            yield from self.meet()
        self.release(False, self.place.slot)
        self.release(True, self.place.slot)
        self.place.next()
        if before:
            yield from turn()

    def store(self) -> Steps:
        if self.flight:
            raise Fault("out is stored while products write it")
        begin, end = self.span
        if self.taken != list(range(end - 1, begin - 1, -1)):
            raise Fault(f"out has tiles {self.taken}, expected {self.span}")
        block, group, config = self.block, self.group, self.config
        if not config.out_in_place or not self.work.any:
            if self.leads:
                yield lambda: block.stores[group] == 0
            if config.mutation != "out is written before its last store has read":
                yield from self.meet()
        out = block.out[group]
        if config.out_in_place:
            slot = self.place.slot ^ group
            if config.mutation != "out takes the place of values that others read":
                parity = self.place.parity ^ (slot >= self.place.slot)
                yield block.v_empty[slot].passed(parity)
            out = block.values[slot]
        out.write(self.warp, self.number)
        yield None
        yield from self.meet()
        self.kernel.stored.add((self.number, self.rank, group, self.warp))
        if self.leads:
            out.check(self.number)
            out.readers += 1
            block.stores[group] += 1
            number = self.number

            def leave() -> None:
                out.check(number)
                out.readers -= 1
                block.stores[group] -= 1

            self.kernel.events.append(leave)

    def run(self) -> Steps:
        config, block = self.config, self.block
        if config.ping_pong and self.group == 0:
            block.turn[0].arrive(2 * WARPS)
        while True:
            slot = self.work_place.slot
            yield block.work_full[slot].passed(self.work_place.parity)
            given = block.works[slot]
            if given is None:
                raise Fault("work is read while it is written")
            block.work_empty[slot].arrive()
            self.work_place.next()
            self.number, work = given
            if work is None:
                return
            self.work, self.span, self.taken = work, work.spans[self.group], []
            yield block.q_full[self.group].passed(self.q_parity)
            self.q_parity ^= 1
            if self.values_first or not work.any:
                yield from self.tell_out_gone()
            if not work.any:
                if config.mutation == "queries are released before warps have met":
                    self.release_queries()
                    yield None
                yield from self.store()
                if not config.mutation.startswith("queries"):
                    self.release_queries()
                continue
            late = config.mutation == "values are cleared after tiles that are passed"
            if not config.eight and not late:
                yield from self.clear_dead_values()
            for _ in range(work.end - self.span[1]):
                yield from self.skip(before=True)
            if not config.eight and late:
                yield from self.clear_dead_values()
            yield from self.walk8() if config.eight else self.walk16()
            for _ in range(self.span[0] - work.begin):
                yield from self.skip(before=False)
            yield from self.leave()
            yield from self.store()


def random_works(config: Config, chance: random.Random) -> list[Work]:
    """Pieces of work of a few tiles, or none; without `skips` all warpgroups see all of them."""
    works = []
    most = chance.choice((1, 2, 5))
    for _ in range(chance.randrange(1, 8)):
        begin = chance.randrange(3)
        end = begin + chance.randrange(most + 1)
        spans = [(begin, end)] * config.groups
        if config.skips and end > begin:
            for group in range(config.groups):
                high = chance.randrange(begin + 1, end + 1)
                spans[group] = chance.randrange(begin, high), high
        works.append(Work(begin, end, tuple(spans), chance.random() < 0.4))
    return works


def trial(config: Config, seed: int) -> None:
    """One random run.

    Raises
    ------
    Fault
    """
    chance = random.Random(seed)
    Kernel(config, random_works(config, chance), chance).run()
