"""The inner loops of cp.async, compiled: check the addresses of a warp's lanes, and move their bytes.

A plan is 3 x 32 int64: host address of the destination, host address of the source, bytes to read of each lane that
takes part, packed from the front. Like engine/lanes.py this file is compiled as text (see `kernels`).
"""

from __future__ import annotations

import functools
import pathlib

import numpy as np

from softsm.engine.program import S_Q, S_R, S_SHARED, S_SHARED_BASE, S_SHARED_SIZE, SHARED_START

compiled = globals().get("compiled") or (lambda signature: lambda function: function)
i8, u1, u8 = np.int64, np.uint8, np.uint64


@functools.cache
def kernels():
    """The compiled functions of this file."""
    from softsm.engine import build, interpreter, program

    lanes = interpreter.lanes_module()
    names = {n: getattr(lanes, n) for n in ("known", "load8", "load64", "qget", "rget", "sget", "store8", "store64")}
    depends = (pathlib.Path(program.__file__),)
    text = pathlib.Path(__file__).read_text()
    return build.load("copies", text, depends, compiled=build.compiler, **names)


@compiled("i8(i8, i8, i8, i8, i8, i8, i8, i8)")
def plan_lanes(S, plan, mask, dst, src, used, ignored, size):
    """Fill in the plan; returns the number of lanes, or -1 if any lane's copy is not plain and legal.

    dst, src: rows of the addresses; used: row of the source sizes, or -1; ignored: lanes that read nothing."""
    R, Q = sget(S, S_R), sget(S, S_Q)  # noqa: F821 - given by `kernels`
    shared, end, base = sget(S, S_SHARED), sget(S, S_SHARED_SIZE), sget(S, S_SHARED_BASE)  # noqa: F821
    n = 0
    for lane in range(32):
        if not mask >> lane & 1:
            continue
        offset = i8(rget(R, dst, lane)) - base  # noqa: F821
        address = i8(qget(Q, src, lane))  # noqa: F821
        nbytes = size
        if used >= 0:
            nbytes = i8(rget(R, used, lane))  # noqa: F821
        if ignored >> lane & 1:
            nbytes = 0
        if offset < SHARED_START or offset + size > end or offset % size or nbytes > size:
            return -1
        if nbytes > 0 and (address % size or not known(S, address, address + nbytes)):  # noqa: F821
            return -1
        store64(plan + 8 * n, u8(shared + offset))  # noqa: F821
        store64(plan + 256 + 8 * n, u8(address))  # noqa: F821
        store64(plan + 512 + 8 * n, u8(nbytes))  # noqa: F821
        n += 1
    return n


@compiled("void(i8, i8, i8)")
def move_lanes(plan, n, size):
    """Copy, and put zeros behind a short source."""
    for k in range(n):
        to = i8(load64(plan + 8 * k))  # noqa: F821
        source = i8(load64(plan + 256 + 8 * k))  # noqa: F821
        nbytes = i8(load64(plan + 512 + 8 * k))  # noqa: F821
        if nbytes == 16:
            store64(to, load64(source))  # noqa: F821
            store64(to + 8, load64(source + 8))  # noqa: F821
            continue
        for i in range(nbytes):
            store8(to + i, load8(source + i))  # noqa: F821
        for i in range(nbytes, size):
            store8(to + i, u1(0))  # noqa: F821
