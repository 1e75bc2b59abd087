"""What a timing run costs beside plain emulation."""

from __future__ import annotations

import os
import re
import resource
import sys
from collections.abc import Callable

import softsm
from softsm_time.case import Case
from softsm_time.usual import attention, matmul, rowwise

# Programs as a function of their number of CTAs, and the numbers that are timed.
COSTS: list[tuple[Callable[[int], Case], tuple[int, ...]]] = [
    (lambda n: matmul(128 * n, 128, 1024, 128, 128, 64, 3, 4), (1, 400)),
    (lambda n: attention(n, 128, 64, 128, 64, 4, 3), (1, 1056)),
    (lambda n: rowwise("add", n, 1024, 4), (1, 8192)),
    (lambda n: rowwise("softmax", n, 1024, 4), (1, 8192)),
    (lambda n: rowwise("softmax", n, 4096, 4), (1, 8192)),
    (lambda n: rowwise("layer_norm", n, 8192, 4), (1, 4096)),
    (lambda n: rowwise("layer_norm", n, 1 << 18, 4), (1,)),
]


def cost(only: str) -> str:
    """Milliseconds of the processor: a timing run, first with ptxas and nvdisasm, then with the machine code known, and
    the plain emulation of the CTAs that it looks at. Those are all that its replay runs on a multiprocessor, in a grid
    of more than one wave several in a row in each place; up to three of them are emulated, the others are like them.
    All in one process; compilation by Triton comes before all of this."""
    os.environ["SOFTSM_PROCESSES"] = "1"  # plain runs, too

    def seconds() -> float:
        return sum(
            u.ru_utime + u.ru_stime for u in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        )

    def took(work, times: int = 12) -> float:
        def once() -> float:
            begin = seconds()
            work()
            return seconds() - begin

        return 1e3 * min(once() for _ in range(times))

    lines = [
        "| program | CTAs | emulated | covered | plain, ms | timed, ms | timed again, ms | again / plain |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    grids = [(of, n) for of, numbers in COSTS for n in numbers]
    for of, n in grids:
        case = of(n)
        if not re.search(only, case.name):
            continue
        call = case.make("cpu")
        timers = []

        def timed(call=call, timers=timers) -> None:
            with softsm.timing("h200") as timer:
                call()
            timers[:] = [timer]

        with softsm.use("sm_90a", sms=132):
            of(1).make("cpu")()  # compiled by Triton, lowered by softsm
            first, again = took(timed, 1), took(timed)
            run, trace = timers[0].predictions[0].run, timers[0].predictions[0].trace
            looked = of(len(run.order)).make("cpu")
            looked()
            plain = took(looked)
        lines.append(
            f"| {case.name} | {n} | {len(trace.clusters)} | {len(run.order)} | {plain:.1f} | {first:.0f} "
            f"| {again:.1f} | {again / plain:.1f} |"
        )
        print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)
