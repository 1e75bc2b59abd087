"""bar, barrier, barrier.cluster, fences, griddepcontrol; mbarrier lives in `mbarriers`.

Named barriers count warps: a warp arrives when all its living threads have arrived, and adds 32 whatever its active
lanes are. Without a thread count, every warp of the CTA that has not exited participates. A blocked instruction is
executed again when its barrier wakes, so each barrier remembers which lanes arrived in which generation.
"""

from __future__ import annotations

from softsm.engine import program as pg
from softsm.engine.program import POLLED, SEEN, Blocked
from softsm.engine.warps import Fragment
from softsm.isa import cluster_launch, mbarriers  # imported because they register their instructions
from softsm.isa.operands import lanes, set_predicate
from softsm.isa.registry import lowers
from softsm.isa.warp import converge
from softsm.memory.waitable import Waitable
from softsm.ptx.ast import Imm

COUNT = 16  # named barriers of a CTA


class Arrivals(Waitable):
    """Generations of a barrier that warps enter lane by lane."""

    __slots__ = ("__dict__",)

    def __init__(self) -> None:
        super().__init__()
        self.generation = 0
        self.inside: dict[int, dict[int, int]] = {}  # warp -> {generation: lanes that arrived and have not left}

    def __str__(self) -> str:
        """Describes for a report what a warp waits for here."""
        return self.describe()

    def describe(self) -> str:
        raise NotImplementedError

    def came(self, key: int, mask: int) -> tuple[int, int]:
        """Returns (lanes of the mask whose generation is over, lanes that still wait)."""
        over = waiting = 0
        for generation, those in self.inside.get(key, {}).items():
            if generation < self.generation:
                over |= those & mask
            else:
                waiting |= those & mask
        return over, waiting

    def enter(self, key: int, mask: int) -> None:
        entered = self.inside.setdefault(key, {})
        entered[self.generation] = entered.get(self.generation, 0) | mask

    def leave(self, key: int, mask: int) -> int:
        """Forgets lanes that continue; returns the generation in which they arrived."""
        entered = self.inside[key]
        came = -1
        for generation in [g for g, those in entered.items() if those & mask]:
            came = generation
            entered[generation] &= ~mask
            if not entered[generation]:
                del entered[generation]
        return came


class NamedBarrier(Arrivals):
    """One of the 16 barriers of a CTA."""

    def __init__(self, cta, number: int):
        super().__init__()
        self.cta, self.number = cta, number
        self.reset()
        self.results: dict[int, tuple[int, int, int]] = {}  # generation -> (popc, and, or) for bar.red
        # When races are checked: warp -> (epoch, pc, does it wait?) of this generation, and of the one before.
        self.group: dict[object, tuple[int, int, bool]] = {}
        self.group_before: dict[object, tuple[int, int, bool]] = {}

    def reset(self) -> None:
        self.arrived = 0  # threads, in warps of 32
        self.count: int | None = None  # explicit thread count of this generation
        self.partial: dict[int, int] = {}  # warp -> lanes, until the whole warp has arrived
        self.popc, self.all, self.any = 0, 1, 0

    def expected(self) -> int:
        if self.count is not None:
            return self.count
        return 32 * self.cta.live

    def arrive(self, w, mask: int, count: int | None, stays: bool = False, waits: bool = True) -> None:
        """Counts the lanes in; the last arrival ends the generation. stays: a whole warp arrives, which does nothing
        until then; waits: the lanes continue when the generation is over."""
        if count is not None and (count <= 0 or count % 32):
            raise w.fault("barrier-count", f"barrier {self.number}: thread count {count} is not a multiple of 32")
        if self.arrived and count != self.count:
            raise w.fault(
                "barrier-count",
                f"barrier {self.number}: this warp counts {count or 'all'} threads, earlier ones {self.count or 'all'}",
            )
        self.count = count
        if w.machine.observer is not None:
            w.machine.observer.bar_arrived(w, self, count, waits, stays)
        if mask == w.alive and w.index not in self.partial:
            self.counted(w)
            return
        self.partial[w.index] = self.partial.get(w.index, 0) | mask
        self.whole_warp(w)

    def whole_warp(self, w) -> None:
        """Counts a warp as 32 threads once all its living lanes have arrived."""
        if w.alive & ~self.partial.get(w.index, 0):
            return
        del self.partial[w.index]
        self.counted(w)

    def counted(self, w) -> None:
        self.arrived += 32
        expected = self.expected() if self.count is None else self.count
        if self.arrived < expected:
            return
        if self.arrived > expected:
            raise w.fault("barrier-count", f"barrier {self.number}: more threads arrive than the {expected} expected")
        self.settle()

    def settle(self) -> None:
        if self.arrived and self.arrived == self.expected():
            self.results[self.generation] = self.popc, self.all, self.any
            self.results.pop(self.generation - 64, None)
            self.generation += 1
            if self.cta.machine.observer is not None:
                self.cta.machine.observer.bar_completed(self)
            self.reset()
            self.cta.machine.writes += 1
            self.wake()

    def describe(self) -> str:
        missing = [str(warp.index) for warp in self.cta.warps if warp.fragments and warp.index not in self.inside_now()]
        count = f"{self.arrived} of {self.expected()} threads have arrived"
        return f"barrier {self.number}: {count}" + (
            f"; missing: warps {', '.join(missing)}" if self.count is None and missing else ""
        )

    def inside_now(self) -> set[int]:
        slowly = {key for key, entered in self.inside.items() if entered.get(self.generation)}
        return slowly | {f.warp.index for f in self.waiters}


def first(w, row: int, mask: int) -> int:
    """Returns the value of a register in the lowest lane of the mask."""
    return w.R.item(row, (mask & -mask).bit_length() - 1)


def named_barrier(w, row: int, mask: int) -> NamedBarrier:
    number = first(w, row, mask)
    cta = w.cta
    barrier = cta.named_barriers.get(number)
    if barrier is None:
        if number >= COUNT:
            raise w.fault("barrier-number", f"barrier {number}; a CTA has barriers 0 to {COUNT - 1}")
        if not cta.named_barriers:
            cta.exit_hooks.append(_warp_exited)
            cta.lane_hooks.append(_lanes_exited)
        barrier = cta.named_barriers[number] = NamedBarrier(cta, number)
        if w.machine.observer is not None:
            w.machine.observer.bar_created(barrier)
    return barrier


def _warp_exited(w) -> None:
    """Stops expecting an exited warp at barriers without a thread count."""
    for barrier in w.cta.named_barriers.values():
        barrier.settle()


def _lanes_exited(w) -> None:
    """Counts the warp where all its remaining lanes have already arrived."""
    for barrier in w.cta.named_barriers.values():
        if w.index in barrier.partial:
            barrier.whole_warp(w)


# -- lowering ----------------------------------------------------------------------------------------------------------


@lowers("bar", "barrier")
def bar(asm, ins):
    mods = [m for m in ins.modifiers if m != "cta"]
    if mods[:1] == ["cluster"] and ins.opcode == "barrier":
        return _cluster(asm, ins, mods[1:])
    if mods == ["warp", "sync"] and ins.opcode == "bar":
        converge(asm, ins, ins.operands[0])
        if asm.checking:
            asm.macro(do_warp_sync, ins)
            asm.answered(pg.OP_TICK)
        return None
    if ins.opcode == "bar" and "aligned" in mods:
        asm.refuse(ins, "bar is aligned by itself; .aligned belongs to barrier")
    aligned = ins.opcode == "bar" or "aligned" in mods
    mods = [m for m in mods if m != "aligned"]
    operands = list(ins.operands)
    if mods in (["sync"], ["arrive"]):
        if not 1 <= len(operands) <= 2 or (mods == ["arrive"] and len(operands) != 2):
            asm.refuse(ins, f"{len(operands)} operands")
        number, count = operands[0], operands[1] if len(operands) == 2 else None
        function, extra = (do_sync, {}) if mods == ["sync"] else (do_arrive, {})
    elif mods in (["red", "popc", "u32"], ["red", "and", "pred"], ["red", "or", "pred"]):
        if not 3 <= len(operands) <= 4:
            asm.refuse(ins, f"{len(operands)} operands")
        number, count = operands[1], operands[2] if len(operands) == 4 else None
        popc = mods[1] == "popc"
        extra = dict(op=mods[1], dst=asm.dst(operands[0], "u" if popc else "p"), vote=asm.src(operands[-1], "p"))
        function = do_red
    else:
        return asm.refuse(ins, "expected .sync, .arrive, .red.popc.u32, .red.and.pred or .red.or.pred")
    asm.macro(
        function,
        ins,
        aligned=aligned,
        number=asm.src(number, "u"),
        count=None if count is None else asm.src(count, "u"),
        fixed=asm.literal(number, "u") if isinstance(number, Imm) else None,
        fixed_count=asm.literal(count, "u") if isinstance(count, Imm) else None,
        **extra,
    )
    return None


def _cluster(asm, ins, mods):
    op, *rest = mods or [""]
    flags = set(rest) - {"aligned"}
    if op == "arrive" and not flags - {"release", "relaxed"} and len(flags) < 2:
        asm.macro(do_cluster_arrive, ins, relaxed="relaxed" in flags)
    elif op == "wait" and not flags - {"acquire"}:
        asm.macro(do_cluster_wait, ins)
    else:
        asm.refuse(ins, "expected barrier.cluster.arrive{.release,.relaxed} or .wait{.acquire}")


# -- at run time -------------------------------------------------------------------------------------------------------


def _split(w, over: int, mask: int) -> int:
    """Lets lanes that are done continue; the others, merged into this fragment meanwhile, repeat the instruction."""
    f = w.fragment
    w.fragments.append(Fragment(w, w.pc, mask & ~over, f.returns))
    f.mask &= ~(mask & ~over)
    return w.pc + 1


def _acquire(w, barrier) -> None:
    if w.machine.observer is not None:
        w.machine.observer.acquired(w, barrier)


def do_warp_sync(w, mask, o):
    """Tells observers that later accesses of the warp's lanes are ordered after earlier ones."""
    if w.machine.observer is not None:
        w.machine.observer.warp_synced(w)
    return SEEN


def do_sync(w, mask, o):
    barrier = w.cta.named_barriers.get(o.fixed) or named_barrier(w, o.number, mask)
    if mask == w.alive and w.index not in barrier.partial and not barrier.inside.get(w.index):
        # The whole warp arrives at once, as almost always. It continues after the instruction when the barrier wakes.
        generation, count = barrier.generation, o.fixed_count
        if count is None and o.count is not None:
            count = first(w, o.count, mask)
        barrier.arrive(w, mask, count, True)
        if barrier.generation != generation:
            return POLLED if w.cta.machine.in_step else None  # the last warp to arrive is the last to continue
        return Blocked(barrier, barrier, done=True, told=True)
    over, waiting = barrier.came(w.index, mask)
    if not over and not waiting:
        barrier.enter(w.index, mask)
        barrier.arrive(w, mask, None if o.count is None else first(w, o.count, mask))
        over, waiting = barrier.came(w.index, mask)
    if over:
        _acquire(w, barrier)
        barrier.leave(w.index, over)
        return None if over == mask else _split(w, over, mask)
    if waiting != mask:  # some lanes already wait, others have just arrived
        barrier.enter(w.index, mask & ~waiting)
        barrier.arrive(w, mask & ~waiting, barrier.count)
        if barrier.came(w.index, mask)[0]:
            _acquire(w, barrier)
            barrier.leave(w.index, mask)
            return None
    return Blocked(barrier, barrier)


def do_arrive(w, mask, o):
    barrier = named_barrier(w, o.number, mask)
    barrier.arrive(w, mask, first(w, o.count, mask), waits=False)


def do_red(w, mask, o):
    barrier = named_barrier(w, o.number, mask)
    over, waiting = barrier.came(w.index, mask)
    if not over and mask & ~waiting:
        fresh = mask & ~waiting
        votes = int(w.P[o.vote]) & fresh
        barrier.popc += votes.bit_count()
        barrier.all &= int(votes == fresh)
        barrier.any |= int(votes != 0)
        barrier.enter(w.index, fresh)
        barrier.arrive(w, fresh, None if o.count is None else first(w, o.count, fresh))
        over, waiting = barrier.came(w.index, mask)
    if not over:
        return Blocked(barrier, barrier)
    _acquire(w, barrier)
    popc, every, some = barrier.results[barrier.leave(w.index, over)]
    if o.op == "popc":
        w.R[o.dst, lanes(over)] = popc
    else:
        set_predicate(w, o.dst, over, pg.ALL if (every if o.op == "and" else some) else 0)
    return None if over == mask else _split(w, over, mask)


class ClusterBarrier(Arrivals):
    """The barrier of barrier.cluster: every living thread of the cluster arrives, then waits."""

    def __init__(self, cluster):
        super().__init__()
        self.cluster = cluster
        self.here: dict[object, int] = {}  # warp -> lanes that arrived in this generation
        self.loose = None  # when races are checked: what relaxed arrivals pass on by default
        for cta in cluster:
            cta.exit_hooks.append(lambda _: self.settle())
            cta.lane_hooks.append(lambda _: self.settle())

    def arrive(self, w, mask: int, relaxed: bool = False) -> None:
        here = self.here.get(w, 0)
        if here & mask:
            raise w.fault(
                "barrier-phase",
                f"lanes {here & mask:#010x} arrive twice at the cluster barrier without waiting: "
                "put barrier.cluster.wait between the two arrivals",
            )
        self.here[w] = here | mask
        if w.machine.observer is not None:
            w.machine.observer.cluster_arrived(w, self, relaxed)
        self.enter(id(w), mask)
        self.settle()

    def missing(self) -> list:
        living = (w for cta in self.cluster for w in cta.warps if w.fragments)
        return [w for w in living if w.alive & ~self.here.get(w, 0)]

    def settle(self) -> None:
        if self.here and not self.missing():
            self.here = {}
            self.generation += 1
            if self.cluster[0].machine.observer is not None:
                self.cluster[0].machine.observer.cluster_completed(self)
            self.cluster[0].machine.writes += 1
            self.wake()

    def describe(self) -> str:
        missing = self.missing()
        return f"the cluster barrier; missing: {', '.join(map(str, missing[:6]))}" + (
            f" and {len(missing) - 6} more" if len(missing) > 6 else ""
        )


def cluster_barrier(w) -> ClusterBarrier:
    first = w.cta.cluster[0]
    if first.cluster_barrier is None:
        first.cluster_barrier = ClusterBarrier(w.cta.cluster)
    return first.cluster_barrier


def do_cluster_arrive(w, mask, o):
    cluster_barrier(w).arrive(w, mask, o.relaxed)


def do_cluster_wait(w, mask, o):
    barrier = cluster_barrier(w)
    over, waiting = barrier.came(id(w), mask)
    if mask & ~(over | waiting):
        raise w.fault("barrier-phase", "barrier.cluster.wait without a barrier.cluster.arrive before it")
    if waiting:
        return Blocked(barrier, barrier)
    if w.machine.observer is not None:
        w.machine.observer.cluster_passed(w, barrier)
    barrier.leave(id(w), over)
    return None


# -- order ------------------------------------------------------------------------------------------------------------

_SCOPES = {"cta", "cluster", "gpu", "sys"}
_PROXIES = {"alias", "async", "async.global", "async.shared::cta", "async.shared::cluster"}


def fence_kind(asm, ins) -> str:
    """Returns the fence's name, one of those PTX defines. The interpreter's generic memory is coherent and in order,
    and asynchronous operations read and write it when they are performed, so a fence changes no value."""
    name = ".".join(ins.modifiers)
    mods = list(ins.modifiers)
    if ins.opcode == "membar":
        known = name in ("cta", "gl", "sys") or (mods[0] == "proxy" and ".".join(mods[1:]) in _PROXIES)
    elif mods[:1] == ["proxy"]:
        rest = ".".join(mods[1:])
        known = rest in _PROXIES or (
            len(mods) == 4
            and mods[1] == "tensormap::generic"
            and mods[2] in ("acquire", "release")
            and mods[3] in _SCOPES
        )
        known = known or (
            mods[1:2] == ["async::generic"]
            and rest.split(".")[1:]
            in (
                ["acquire", "sync_restrict::shared::cluster", "cluster"],
                ["release", "sync_restrict::shared::cta", "cluster"],
            )
        )
    elif mods[:1] == ["mbarrier_init"]:
        known = mods[1:] == ["release", "cluster"]
    else:
        order, *scope = mods if mods[0] not in _SCOPES else ["acq_rel", *mods]
        known = order in ("sc", "acq_rel", "acquire", "release") and (
            (len(scope) == 1 and scope[0] in _SCOPES)
            or mods
            in (
                ["acquire", "sync_restrict::shared::cluster", "cluster"],
                ["release", "sync_restrict::shared::cta", "cluster"],
            )
        )
    if not known:
        asm.refuse(ins, "no such fence")
    return name


@lowers("fence", "membar")
def fence(asm, ins):
    kind = fence_kind(asm, ins)
    names_map = kind.startswith("proxy.tensormap::generic.acquire")
    if names_map:
        if len(ins.operands) != 2 or getattr(ins.operands[1], "value", 0) != 128:
            asm.refuse(ins, "expected the address of a tensor map, and 128")
        asm.address(ins.operands[0])
    elif ins.operands:
        asm.refuse(ins, "it accepts no operands")
    if kind.startswith("proxy.async"):
        asm.macro(do_fence_async, ins, wide=kind in ("proxy.async", "proxy.async.shared::cluster"))
    elif asm.checking and kind.startswith("mbarrier_init"):
        asm.macro(do_fence_init, ins)
    elif asm.checking and not kind.startswith("proxy"):
        scope = next((m for m in ins.modifiers if m in ("cta", "cluster", "sys")), "gpu")
        asm.macro(do_fence, ins, release="acquire" not in kind, acquire="release" not in kind, scope=scope)
    elif asm.checking and "tensormap::generic" in ins.modifiers:
        asm.macro(do_fence_map, ins, at=asm.address_row(ins.operands[0], "q") if names_map else None)


def do_fence_async(w, mask, o):
    """Changes no value; tells observers that generic accesses are visible to asynchronous operations."""
    if w.machine.observer is not None:
        w.machine.observer.fenced_proxy(w, o.wide)
    return SEEN


def do_fence_init(w, mask, o):
    w.machine.observer.fenced_init(w)
    return SEEN


def do_fence_map(w, mask, o):
    for lane in [None] if o.at is None else lanes(mask):
        w.machine.observer.fenced_map(w, None if lane is None else int(w.Q[o.at, lane]))
    return SEEN


def do_fence(w, mask, o):
    w.machine.observer.fenced(w, o.release, o.acquire, o.scope)
    return SEEN


@lowers("griddepcontrol")
def griddepcontrol(asm, ins):
    """Launches run one after the other, so the grid on which this one depends has always finished. The race checker
    checks whether the program waited for it."""
    if ins.modifiers not in (("launch_dependents",), ("wait",)):
        asm.refuse(ins, "expected griddepcontrol.launch_dependents or .wait")
    if asm.checking and ins.modifiers == ("wait",):
        asm.macro(do_grid_wait, ins)


def do_grid_wait(w, mask, o):
    w.machine.observer.grid_waited(w)
    return SEEN


__all__ = ["ClusterBarrier", "NamedBarrier", "cluster_launch", "fence_kind", "mbarriers"]
