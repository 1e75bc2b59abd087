"""When the results of tcgen05.ld and st are due, as far as the program's text determines it.

Where races are checked, such an access mostly completes as late as it can: a load at the first use of its registers or
its wait, a store at its wait or with a load after it. If the warp does nothing but arithmetic until then, no one can
tell that from an access that completes at once, and compiled code may do it (checks/tmem_shadow.py).
"""

from __future__ import annotations

from softsm.engine import program as pg

ACCESSES = (pg.OP_CHECKED_LD, pg.OP_CHECKED_ST)


def mark(program: pg.Program) -> None:
    """Give each access the number of records up to where it is due, if nothing can come between."""
    for at, record in enumerate(program.code):
        if record[0] in ACCESSES:
            record[5] |= distance(program, at) << pg.DISTANCE


def distance(program: pg.Program, first: int) -> int:
    """Returns the number of records up to the wait, 0 if something can come in between."""
    code = program.code
    load = loaded = code[first, 0] == pg.OP_CHECKED_LD
    at = first
    for steps in range(1, len(code)):
        at += 1
        if at >= len(code):
            return 0
        op, _, _, _, kind, target, guard, _ = code[at].tolist()
        if op >= pg.FIRST_MICRO:
            continue
        if guard:  # a guarded instruction may be skipped
            return 0
        if op == pg.OP_CHECKED_LD:
            loaded = True
        elif op == pg.OP_BRA:
            at = target - 1
        elif op == pg.OP_TENSOR_WAIT:
            if kind != pg.WAIT_STORES if load else loaded or kind == pg.WAIT_STORES:
                return steps
        elif op != pg.OP_CHECKED_ST:
            return 0
    return 0
