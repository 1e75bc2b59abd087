"""Products that compiled code issues: those that go with the one before them (isa/product_chain.py).

Python issues the first product on an accumulator, and each one whose operands it has not seen in that instruction. What
it has learned of the others stands in tables of int64, one for each instruction: how many entries, then the entries
(`Entry`). `Growing` is where `product` of checks/tmem_shadow.py reads what it may go on with, and notes what it has
issued.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from softsm.engine import program as pg

MOST = 32  # entries of a table
# Fields of an entry: operands, what the product touches, which others it can be computed with, and the first and end of
# what it touches of tensor and shared memory.
E_IDESC, E_D, E_A, E_B, E_ADD, E_WORK, E_CHAIN, E_COLUMN, E_PAST_COLUMN, E_SHARED, E_PAST_SHARED, ENTRY = range(12)
TABLE = 1 + MOST * ENTRY
# Whose products (the address of a warp's state, 0: none), by which lane, on which accumulator, the tables and sites
# of its CTA, the operations of its thread, how many more may follow, how many have, and of each table, entry and number
G_OWNER, G_LANE, G_CHAIN, G_PLACES, G_ISSUED, G_ROOM, G_COUNT, G_FIRST = range(8)
G_FIELDS = 2  # table << 32 | entry, number


class Tables:
    """The chains of one kernel."""

    def __init__(self, program: pg.Program, products: dict):
        """products: by record, their operands."""
        self.rows = np.zeros((max(len(products), 1), TABLE), np.int64)
        self.works: list[list] = [[] for _ in products]
        self.chains: dict[tuple, int] = {}
        for which, (record, operands) in enumerate(products.items()):
            if program.code[record, 0] == pg.OP_CHECKED_MMA:
                program.code[record, 3], operands.which, operands.learned = which, which, self

    def chain(self, work) -> int:
        """The number of what products have in common that are computed and completed together."""
        if not work.chain:
            p, footprint = work.product, work.footprint
            key = (p.column, p.lane, p.shape, p.ws, p.pair, p.skipped, work.plan.a is None, footprint.accumulator,
                   bool(footprint.reads))  # fmt: skip
            work.chain = self.chains.setdefault(key, len(self.chains) + 1)
        return work.chain

    def learn(self, table: int, operands: tuple, work) -> None:
        """Compiled code may issue this product of instruction `table` from now on."""
        row, works = self.rows[table], self.works[table]
        if len(works) < MOST:
            at = 1 + len(works) * ENTRY
            row[at : at + ENTRY] = (*(x - (x >> 63 << 64) for x in operands), work.touched[1], self.chain(work),
                                    *work.columns, *work.shared)  # fmt: skip
            works.append(work)
            row[0], work.learned = len(works), True

    def forget(self, table: int) -> None:
        self.rows[table, 0] = 0
        self.works[table].clear()


class Growing:
    """Products in flight that others may join, of one launch; `together` are those of Python."""

    def __init__(self, order, tables: Tables, longest: int):
        self.tables = tables
        self.together: Any = None
        self.fields = np.zeros(G_FIRST + G_FIELDS * longest, np.int64)
        order.newest[pg.GROWING], order.newest[pg.PRODUCTS] = self.fields.ctypes.data, tables.rows.ctypes.data

    def begin(self, together, w, lane: int, work, places: int, room: int) -> None:
        self.together = together
        issued = w.view.issued_by(lane).at
        self.fields[:G_FIRST] = w.state, lane, self.tables.chain(work), places, issued, room, 0

    def flush(self) -> None:
        """Python learns what has been issued."""
        count = self.fields.item(G_COUNT)
        if count:
            self.fields[G_COUNT] = 0
            self.fields[G_ROOM] -= count
            cta, parts = self.together.op.warp.cta, self.together.chain.parts
            for which, number in self.fields[G_FIRST : G_FIRST + G_FIELDS * count].reshape(count, G_FIELDS).tolist():
                work = self.tables.works[which >> 32][which & 0xFFFFFFFF]
                parts.append((work.product, work.plan))
                cta.view.outstanding.append(number)

    def used(self) -> None:
        """One has joined them in Python."""
        self.fields[G_ROOM] -= 1

    def end(self) -> None:
        self.flush()
        self.fields[G_OWNER], self.together = 0, None
