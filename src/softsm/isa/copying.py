"""The common part of all asynchronous copies: how one is started, and who has waited for it. engine/in_flight.py
has their groups.

Registers are read when an instruction is issued, memory when the operation is performed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from softsm.engine.in_flight import AsyncOp
from softsm.errors import Fault
from softsm.isa.operands import located


def attributed(w, effects: Callable[[], None]) -> Callable[[], None]:
    """Wraps effects, which run later and elsewhere, so that their faults name this instruction."""
    ins = w.instruction()

    def run() -> None:
        try:
            effects()
        except (Fault, ValueError) as error:
            fault = error if isinstance(error, Fault) else Fault("copy", str(error))
            if fault.placed:
                raise
            issued = f"in the copy issued at PTX line {ins.line} (`{ins.text}`), {w}"
            raise Fault(fault.code, f"{fault.message}; {issued}", placed=True) from None

    return run


def start(w, lane: int, kind: str, effects, after=(), signals=(), reads=(), writes=(), nbytes: int = 0) -> AsyncOp:
    op = AsyncOp(kind, w, lane, w.line(), attributed(w, effects), after, signals, reads, writes, nbytes=nbytes)
    return w.machine.issue(op)


def waited(w, op: AsyncOp) -> None:
    """Records that the issuing thread has waited for op."""
    if w.machine.observer is not None:
        w.machine.observer.waited(w, op)


def global_view(w, address: int, size: int, what: str) -> np.ndarray:
    """Returns bytes of global memory, checked when the copy is issued, so that a fault names the instruction."""
    return located(w, w.machine.global_memory.view, address, size, what)
