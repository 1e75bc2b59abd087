"""Computes consecutive tcgen05.mma on one accumulator together.

A tile of D is the sum of several MMAs along k. Computed one by one, each would read and write D in memory. So an MMA
that has been performed may be postponed until the next one of its kind. No instruction can notice, because postponed
MMAs are computed (`AsyncEngine.settle`) before anything else happens in the machine. The sums are the same as one by
one: fused multiply-adds in ascending k."""

from __future__ import annotations

import threading

import numpy as np

from softsm.engine import program as pg
from softsm.engine.in_flight import AsyncOp
from softsm.isa import tensor_kernels
from softsm.isa.instruction_descriptor import K_OF_KIND
from softsm.isa.tcgen05_product import Plan, Product, multiply
from softsm.isa.tensor_product import address, native_multiply

KIND = "tcgen05.mma"
LONGEST = 8  # MMAs: their operands should stay in the CPU's cache


class Room(threading.local):
    """Buffers for the operands of a chain. They are kept because Python needs longer to get an array's address than to
    use it."""

    def __init__(self) -> None:
        steps = LONGEST * max(K_OF_KIND.values())
        self.a, self.b = np.empty((steps, 128), np.uint32), np.empty((256, steps), np.uint32)
        tiles = np.empty(2 * LONGEST * tensor_kernels.TILE, np.int64)
        self.tiles = tiles.data.cast("B")
        self.at_a, self.at_b, self.at_tiles = address(self.a), address(self.b), address(tiles)


room = Room()


class Chain:
    """Postponed MMAs. following: the record of the next one, if the program certainly executes it next."""

    kind = KIND

    def __init__(self, product: Product, plan: Plan, ctas: list):
        self.parts, self.ctas = [(product, plan)], ctas
        self.following = -1

    def takes(self, p: Product, plan: Plan, ctas: list) -> bool:
        """Returns whether the MMA continues the postponed sums."""
        first, first_plan = self.parts[0]
        return (
            len(self.parts) < LONGEST
            and plan.adds
            and p.column == first.column
            and p.lane == first.lane
            and ctas == self.ctas
            and (p.shape is first.shape or p.shape == first.shape)
            and p.ws == first.ws
            and p.pair == first.pair
            and p.skipped == first.skipped
            and (plan.a is None) == (first_plan.a is None)
        )

    def perform(self) -> None:
        """Computes the postponed MMAs, whose operands have been checked to lie in shared memory."""
        parts, ctas = self.parts, self.ctas
        p, plan = parts[0]
        if plan.tiles is None:
            for product, its_plan in parts:
                multiply(product, its_plan, ctas)
            return
        k, n = p.shape.k, p.shape.n
        count, total, own = len(parts), len(parts) * k, n // len(ctas)
        gather = tensor_kernels.gather_tiles
        both = [x.tiles for _, x in parts if x.tiles is not None]  # all of them have tiles if the first one has
        tiles = b"".join([a for a, _ in both] + [b for _, b in both])
        room.tiles[: len(tiles)] = tiles
        to_a, to_b, of_a = room.at_a, room.at_b, room.at_tiles
        of_b = of_a + len(tiles) // 2
        if not plan.whole:
            room.a[:total] = 0
        for i, cta in enumerate(ctas):
            gather(cta.shared_address, 0, of_b, count, to_b + 4 * own * i * total, total, 4 * k)
        for i, cta in enumerate(ctas):
            tmem, quarters = cta.tmem.address, plan.at + i * 4 * 3 * 8
            gather(cta.shared_address, tmem, of_a, count, to_a, 128, 4 * 128 * k)
            native_multiply()(tmem, 4 * p.column, quarters, 4, to_a, to_b, total, plan.keep)


def add(engine, product: Product, plan: Plan, ctas: list) -> None:
    """Postpones the effects of an MMA, after those with which it can be computed."""
    chain = engine.postponed
    if chain is not None:
        if chain.takes(product, plan, ctas):
            chain.parts.append((product, plan))
            return
        engine.settle()
    engine.postponed = Chain(product, plan, ctas)


class Together:
    """Consecutive MMAs in flight of one thread on one accumulator, as one operation. They complete in this order, and
    in order 'latest' nothing comes between them. It is called when they complete."""

    def __init__(self, engine, product: Product, plan: Plan, ctas: list):
        self.engine, self.chain = engine, Chain(product, plan, ctas)
        self.op: AsyncOp | None = None
        self.compiled = None  # with the race checker: MMAs that compiled code may issue (engine/mma_chains.py)

    def takes(self, w, thread: int, footprint, product: Product, plan: Plan | None, ctas: list) -> bool:
        """Returns whether the next MMA may join them. Nothing has been issued since."""
        if self.compiled is not None:
            self.compiled.flush()
        op, in_flight = self.op, w.in_flight
        return (
            plan is not None
            and op is not None
            and not op.done
            and op.warp is w
            and op.lane == thread
            and in_flight.products == len(in_flight.tensor_ops)
            and footprint.accumulator == op.footprint.accumulator
            and bool(footprint.reads) == bool(op.footprint.reads)
            and self.chain.takes(product, plan, ctas)
        )

    def add(self, product: Product, plan: Plan) -> None:
        self.chain.parts.append((product, plan))
        if self.compiled is not None:
            self.compiled.used()

    def end(self) -> None:
        """Ends the chain: no MMA joins it any more. (Another chain may grow when this one completes.)"""
        if self.engine.growing is self:
            self.engine.growing = None
        if self.compiled is not None:
            self.compiled.end()
            self.compiled = None

    def __call__(self) -> None:
        self.end()
        self.engine.settle()
        self.engine.postponed = self.chain
        self.engine.completed += len(self.chain.parts) - 1


def mark(program: pg.Program, products: dict) -> None:
    """Sets the record of the following MMA in the operands of each MMA (products: record -> operands) if the warp
    executes only arithmetic between the two and their guard does not change."""
    code = program.code
    for record, operands in products.items():
        operands.following = -1
        guard = code[record, 6:8].tolist()
        for at in range(record + 1, len(code)):
            if at in products:
                if code[at, 6:8].tolist() == guard:
                    operands.following = at
                break
            if code[at, 0] < pg.FIRST_MICRO or guard[0] and _writes_predicate(program, at, guard[0]):
                break


def _writes_predicate(program: pg.Program, at: int, row: int) -> bool:
    """Returns whether the micro-operation may write the predicate, or the row of that number in another file."""
    return int(program.code[at, 1]) == row
