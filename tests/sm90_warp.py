"""What each step of a warp of sm90 tells others or waits for; `sm90_protocol` has their order."""

from __future__ import annotations

from functools import partial
from typing import Any

from sm90_block import WARPS, Fault, Place, Region, Step, Steps, Tag, Work


class Warp:
    """A warp of a warpgroup, without the order in which it does things."""

    def __init__(self, kernel: Any, rank: int, group: int, warp: int) -> None:
        self.kernel, self.config, self.rank = kernel, kernel.config, rank
        self.block, self.group, self.warp = kernel.blocks[rank], group, warp
        self.place, self.work_place, self.q_parity = Place(self.config.stages, 0), Place(2, 0), 0
        self.first_parity = 0
        self.number, self.work, self.span = -1, Work(0, 0, (), False), (0, 0)
        self.begun = 0  # products so far
        self.flight: list[int] = []  # those that may still run
        self.weights: Tag | None = None
        self.taken: list[int] = []  # tiles whose values are in out

    # --- what they share with others ---

    @property
    def leads(self) -> bool:
        return self.warp == 0

    def release(self, values: bool, slot: int) -> None:
        if self.leads:
            for block in self.kernel.blocks:  # whose producers fill this block's stages too
                empty = (block.v_empty if values else block.k_empty)[slot]
                if block is self.block:
                    empty.arrive()
                else:
                    self.kernel.events.append(empty.arrive)

    def release_queries(self) -> None:
        if self.leads:
            self.block.q_empty[self.group].arrive()

    def release_queries_after(self, tile: int) -> None:
        if tile == self.span[0]:
            self.release_queries()

    @property
    def values_first(self) -> bool:
        late = self.config.mutation == "values are awaited before the place of out is given back"
        return (self.config.skips or self.config.lengths) and not late

    def tell_out_gone(self) -> Steps:
        if not self.config.out_in_place or not self.leads:
            return
        block, group = self.block, self.group
        if self.config.mutation != "the place of out is given back before its store has read":
            yield lambda: block.stores[group] == 0
        block.out_gone[group].arrive()
        for other in self.kernel.blocks:
            if other is not block:
                self.kernel.events.append(other.out_gone[group].arrive)

    def meet(self) -> Steps:
        return self.block.store[self.group].wait(WARPS)

    def await_turn(self) -> Steps:
        if self.config.ping_pong:
            yield from self.block.turn[self.group].wait(2 * WARPS)

    def pass_turn(self) -> None:
        if self.config.ping_pong:
            self.block.turn[(self.group + 1) % self.config.groups].arrive(2 * WARPS)

    def await_keys(self) -> Step:
        return self.block.k_full[self.place.slot].passed(self.place.parity)

    def await_values(self, place: Place) -> Step:
        return self.block.v_full[place.slot].passed(place.parity)

    # --- products: of a warpgroup, begun by all its warps, in order ---

    def multiply(self, *read: tuple[Region, Any]) -> None:
        products, number = self.block.products[self.group], self.begun
        self.begun += 1
        self.flight.append(number)
        if number == len(products):
            products.append({"warps": 0, "read": read, "done": False})
            for region, _ in read:
                region.readers += 1
        product = products[number]
        for region, what in read:
            region.check(what)
        product["warps"] += 1
        if product["warps"] == WARPS:
            self.kernel.events.append(lambda: self._end_product(number))

    def _end_product(self, number: int) -> None:
        products = self.block.products[self.group]
        if number and not products[number - 1]["done"]:
            self.kernel.events.append(lambda: self._end_product(number))
            return
        for region, what in products[number]["read"]:
            region.check(what)
            region.readers -= 1
        products[number]["done"] = True

    def wait_products(self, pending: int) -> Steps:
        while len(self.flight) > pending:
            product = self.block.products[self.group][self.flight.pop(0)]
            yield partial(product.__getitem__, "done")

    def multiply_queries_and_keys(self, tile: int) -> None:
        self.multiply(
            (self.block.queries[self.group], self.number),
            (self.block.keys[self.place.slot], (self.number, tile)),
        )

    def multiply_values(self, slot: int) -> None:
        if self.weights is None:
            raise Fault("no weights")
        tile = self.weights[1]
        last = self.config.lengths and self.work.short and tile == self.work.end - 1
        if last and len(self.block.cleared[slot]) != WARPS * self.config.groups:
            raise Fault("values past the length were not cleared")
        self.multiply((self.block.values[slot], self.weights))
        self.taken.append(tile)

    def pack_weights(self, tile: int) -> None:
        if self.flight:
            raise Fault("weights are overwritten while products read them")
        self.weights = self.number, tile
