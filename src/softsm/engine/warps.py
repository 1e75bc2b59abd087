"""The parts of the machine: SMs, CTAs, warps and the fragments of a warp.

engine/scheduler.py runs them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from softsm.engine import program as pg
from softsm.engine.in_flight import InFlight, Warpgroup
from softsm.errors import Fault
from softsm.memory.waitable import Waitable
from softsm.ptx.roles import called_at, place_of


class Fragment:
    __slots__ = ("ahead", "blocked", "mask", "parked", "pc", "returns", "steps", "timed_out", "told_no", "warp")

    def __init__(self, warp: Warp, pc: int, mask: int, returns: tuple = ()):
        self.warp, self.pc, self.mask, self.returns = warp, pc, mask, returns
        self.blocked: pg.Blocked | None = None
        self.timed_out = False  # the time limit of its wait has expired
        self.told_no = -1  # pc of a wait that timed out at once, in order 'random'
        self.parked = 0  # lanes that it waits for at an .aligned or .sync instruction
        self.steps = 0  # run while the warp was divergent; after TURN of them another fragment runs
        self.ahead: tuple[int, int] | None = None  # set: waits for a fragment in this range, which will reach this pc

    def unblock(self) -> None:
        blocked = self.blocked
        if blocked is not None and blocked.done:
            self.pc += 1
            observer = self.warp.cta.machine.observer
            if observer is not None and not blocked.told:
                observer.acquired(self.warp, blocked.on)
        self.blocked = None
        self.warp.cta.machine.make_ready(self.warp)


class Warp:
    """32 lanes of one CTA. R, Q, P are its register files (see engine/program.py)."""

    __slots__ = (
        "P Q R S alive cta fragment fragments in_flight index local pc queued spins state view __weakref__"
    ).split()

    def __init__(self, cta: Cta, index: int, lanes: int):
        self.cta, self.index = cta, index
        self.alive = lanes
        self.fragments = [Fragment(self, 0, lanes)]
        self.fragment = self.fragments[0]
        self.queued = False
        self.spins = 0
        self.pc = 0
        self.R, self.Q, self.P, self.S, self.local = cta.machine.register_files(cta, index)
        self.state = self.S.ctypes.data
        self.S[pg.S_ALIVE] = lanes
        self.in_flight: InFlight | None = InFlight()
        self.view: Any = None  # what an observer knows of it

    @property
    def machine(self):
        return self.cta.machine

    def instruction(self):
        return self.cta.program.instructions[self.pc]

    def line(self) -> int:
        return self.cta.program.instructions[self.pc].line

    def source(self) -> str:
        loc = place_of(self.instruction())
        return f", {loc.file}:{loc.line}{called_at(loc)}" if loc else ""

    def place(self) -> str:
        return f"PTX line {self.line()}{self.source()}"

    def where(self) -> str:
        ins = self.instruction()
        return f"PTX line {ins.line} (`{ins.text}`){self.source()}, {self}"

    def __str__(self) -> str:
        return f"warp {self.index} of {self.cta}"

    def fault(self, code: str, message: str) -> Fault:
        return Fault(code, f"{message}; at {self.where()}", placed=True)

    def forget(self) -> None:
        """See Cta.forget."""
        self.fragments, self.in_flight = [], None
        self.fragment = None  # type: ignore[assignment]
        self.R = self.Q = self.P = self.S = self.local = None


class Cta(Waitable):
    """One CTA: shared memory, barriers and warps. To wait on it is to wait until one of its warps exits."""

    __slots__ = (
        "barriers cluster cluster_barrier columns ctaid exit_hooks gpu invalidated kernel lane_hooks live machine "
        "named_barriers phases phases_address program rank registers shared shared_address shared_base sm threads view "
        "warpgroups warps"
    ).split()

    def __init__(self, machine, ctaid: tuple[int, int, int], rank: int, cluster: list[Cta], sm: Sm):
        super().__init__()
        self.machine, self.ctaid, self.rank, self.cluster, self.sm = machine, ctaid, rank, cluster, sm
        self.gpu = sm.gpu
        self.kernel = machine.kernels[self.gpu]
        self.program: pg.Program = self.kernel.program
        self.shared = np.full(machine.shared_limit, 0xFF, np.uint8)  # unwritten memory reads as NaN
        self.shared_address = self.shared.ctypes.data
        self.shared_base = rank << pg.RANK_SHIFT
        self.barriers: dict[int, object] = {}  # mbarriers by shared offset
        self.invalidated: dict[int, tuple] = {}  # names of invalidated mbarriers, and the warps that did it
        # By shared offset / 8: 0, or 1 + the parity of an mbarrier's phase. The compiled loop reads it, unless an
        # observer follows each event or races are checked.
        self.phases = np.zeros(-(-machine.shared_limit // 8), np.uint8)
        self.phases_address = self.phases.ctypes.data if machine.unwatched else 0
        # First and end column of its last allocation of tensor memory, which the compiled loop may access.
        self.columns = np.zeros(2, np.int64)
        self.named_barriers: dict[int, object] = {}
        self.registers: Any = None  # the register pool of setmaxnreg, once it is used
        self.cluster_barrier: Waitable | None = None  # set in the first CTA of a cluster, once the barrier is used
        self.warpgroups: dict[int, Warpgroup] = {}  # warpgroups that have used wgmma, by number
        self.view: Any = None  # what an observer knows of it
        self.exit_hooks: list = []  # called with the warp when one has exited
        self.lane_hooks: list = []  # called with the warp when some of its lanes have exited
        self.threads = machine.block[0] * machine.block[1] * machine.block[2]
        self.warps: list[Warp] = []
        n = -(-self.threads // 32)
        for i in range(n):
            lanes = pg.ALL if i < n - 1 or self.threads % 32 == 0 else (1 << self.threads % 32) - 1
            self.warps.append(Warp(self, i, lanes))
        self.live = n

    @property
    def tmem(self):
        return self.sm.tmem

    def resolve_shared(self, address: int) -> tuple[Cta, int]:
        """Resolves a 32-bit shared::cta or shared::cluster address to (CTA, offset)."""
        rank, offset = address >> pg.RANK_SHIFT, address & ((1 << pg.RANK_SHIFT) - 1)
        if rank >= len(self.cluster):
            size = len(self.cluster)
            raise Fault("cluster-rank", f"shared address {address:#x} names CTA rank {rank}; the cluster has {size}")
        return self.cluster[rank], offset

    def check_shared(self, offset: int, size: int, what: str) -> None:
        if offset < pg.SHARED_START or offset + size > len(self.shared):
            raise Fault(
                "out-of-bounds",
                f"{what} of {size} bytes at shared offset {offset:#x}; CTA {self.ctaid} has "
                f"[{pg.SHARED_START:#x}, {len(self.shared):#x})",
            )

    def forget(self) -> None:
        """Breaks reference cycles when the cluster or the launch has ended. A CTA and its warps refer to each other and
        hold large arrays. The garbage collector counts objects, not bytes, and would leave gigabytes of them.
        Operations in flight and later reports need only the issuer and the bytes of shared memory."""
        for w in self.warps:
            w.forget()
        self.cluster, self.warps, self.barriers, self.named_barriers, self.warpgroups = [], [], {}, {}, {}
        self.exit_hooks, self.lane_hooks, self.cluster_barrier, self.view, self.registers = [], [], None, None, None

    def __str__(self) -> str:
        return f"CTA {self.ctaid}" + (f" of GPU {self.gpu}" if self.machine.gpus > 1 else "")


class Sm:
    """A streaming multiprocessor, with its resident CTAs and their tensor memory."""

    def __init__(self, index: int, tmem, gpu: int = 0):
        self.index, self.tmem, self.gpu = index, tmem, gpu
        self.resident = 0
