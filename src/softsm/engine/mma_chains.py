"""MMAs that compiled code issues because they join the one before them (isa/product_chain.py).

Python issues the first MMA on an accumulator, and each one whose operands are new for its instruction. What it learns
about the others goes into int64 tables, one per instruction: the number of entries, then the entries (`Entry`).
`product` of checks/tmem_shadow.py reads the chain that it may continue from `Growing`, and records there what it
issues.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from softsm.engine import program as pg

MOST = 32  # entries of a table
# Fields of an entry: the operands, the accesses, the chain that the MMA can join, and the bounds of its accesses to
# tensor and shared memory.
E_IDESC, E_D, E_A, E_B, E_ADD, E_WORK, E_CHAIN, E_COLUMN, E_PAST_COLUMN, E_SHARED, E_PAST_SHARED, ENTRY = range(12)
TABLE = 1 + MOST * ENTRY
# The issuer (address of a warp's state, 0: none), its lane, the accumulator, the tables and sites of its CTA, the
# operations of its thread, how many more may follow, how many have, and for each of these table, entry and number
G_OWNER, G_LANE, G_CHAIN, G_PLACES, G_ISSUED, G_ROOM, G_COUNT, G_FIRST = range(8)
G_FIELDS = 2  # table << 32 | entry, number


class Tables:
    """The chains of one kernel."""

    def __init__(self, program: pg.Program, products: dict):
        """products: the operands of each MMA, by record."""
        self.rows = np.zeros((max(len(products), 1), TABLE), np.int64)
        self.works: list[list] = [[] for _ in products]
        self.chains: dict[tuple, int] = {}
        for which, (record, operands) in enumerate(products.items()):
            if program.code[record, 0] == pg.OP_CHECKED_MMA:
                program.code[record, 3], operands.which, operands.learned = which, which, self

    def chain(self, work) -> int:
        """Returns the number of the chain: MMAs with the same number can be computed and completed together."""
        if not work.chain:
            p, footprint = work.product, work.footprint
            product = p.column, p.lane, p.shape, p.ws, p.pair, p.skipped, work.plan.a is None
            key = (*product, footprint.accumulator, bool(footprint.reads))
            work.chain = self.chains.setdefault(key, len(self.chains) + 1)
        return work.chain

    def learn(self, table: int, operands: tuple, work) -> None:
        """Allows compiled code to issue this MMA of instruction `table`."""
        row, works = self.rows[table], self.works[table]
        if len(works) < MOST:
            at = 1 + len(works) * ENTRY
            row[at : at + ENTRY] = (
                *(x - (x >> 63 << 64) for x in operands),
                work.touched[1],
                self.chain(work),
                *work.columns,
                *work.shared,
            )
            works.append(work)
            row[0], work.learned = len(works), True

    def forget(self, table: int) -> None:
        self.rows[table, 0] = 0
        self.works[table].clear()


class Growing:
    """The MMAs of one launch that others may join. `together`: those that Python issued."""

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
        """Passes what compiled code has issued to Python."""
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
        """Counts one that Python issued."""
        self.fields[G_ROOM] -= 1

    def end(self) -> None:
        self.flush()
        self.fields[G_OWNER], self.together = 0, None
