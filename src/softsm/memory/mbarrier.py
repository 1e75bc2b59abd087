"""One mbarrier object: arrivals and bytes still missing, and the phase that ends when both are in.

The 64-bit word in shared memory is opaque to PTX programs, so the state lives here and `cta.barriers` maps the word's
offset to it. Phases are counted in full (hardware keeps the parity only): a wait can then be told from a wait that
lags two phases behind, which hardware cannot tell.

    init(c)          phase 0, pending = expected = c, tx = 0
    arrive(n)        pending -= n
    expect_tx(b)     tx += b           complete_tx(b)   tx -= b  (may run first: tx is negative for a while)
    phase completes  when pending == 0 and tx == 0: phase += 1, pending = expected, and who waits is woken
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple, Protocol

from softsm.errors import Fault
from softsm.memory.waitable import Waitable

MAX_COUNT = (1 << 20) - 1  # arrivals and transaction bytes are 20-bit quantities
_PENDING_BITS = 20
_HISTORY = 16  # last events kept for a diagnosis


class BarrierEvent(NamedTuple):
    """What touched the barrier: during which phase, what it did, how much, and who (anything that prints)."""

    phase: int
    what: str  # 'init', 'arrive', 'drop', 'expect_tx', 'complete_tx', 'increment'
    amount: int
    who: Any


class BarrierObserver(Protocol):
    """Receives the events of an mbarrier, see engine/observer.py."""

    def arrived(self, barrier: Mbarrier, what: str, amount: int, relaxed: bool = False, scope: str = "") -> None: ...

    def phase_ended(self, barrier: Mbarrier) -> None: ...


class Mbarrier(Waitable):
    """An mbarrier. Warps blocked on it are woken when a phase completes."""

    __slots__ = (
        "announced array asked expected history home name next_expected observer origin overwritten pending phase "
        "place shown skipped tx watched"
    ).split()

    def __init__(self, count: int, *, name: str = "mbarrier", who: object = ""):
        super().__init__()
        if not 1 <= count <= MAX_COUNT:
            raise Fault("barrier-count", f"{name}: init with count {count}; 1..{MAX_COUNT} is accepted ({who})")
        self.name = name
        self.array = ""  # the array it belongs to in the program's source, once looked up
        self.phase = 0
        self.shown, self.place = None, 0  # an array that holds 1 + the parity of the phase, and where
        self.expected = self.pending = self.next_expected = count
        self.tx = 0
        self.observer: BarrierObserver | None = None
        # for the race checker:
        self.origin: Any = None  # the instruction that initialised it
        self.home: Any = None  # the CTA that owns it
        self.overwritten: Any = None  # what stored something else over it
        self.skipped: Any = None  # two phases ended unseen: an error if a warp waits again
        self.asked = 0  # bytes of copies that were started for it, less those that expect_tx announced
        self.watched: Any = None  # record of checks/clocks.py
        self.announced: BarrierEvent | None = None  # the last expect_tx
        self.history: deque[BarrierEvent] = deque(maxlen=_HISTORY)
        self._note("init", count, who)

    # -- arrivals and bytes ------------------------------------------------------------------------------------

    def arrive(
        self,
        count: int = 1,
        who: object = "",
        *,
        drop: bool = False,
        no_complete: bool = False,
        relaxed: bool = False,
        scope: str = "",
    ) -> int:
        """Take away `count` pending arrivals; returns the state token from before. `drop` also lowers the
        expected count of the phases that follow; `no_complete` promises that the phase will not end here.
        `relaxed` and `scope` are for observers."""
        self.check_arrivals(count, who)
        token = self.token()
        what = "drop" if drop else "arrive"
        self._note(what, count, who)
        self.pending -= count
        if drop:
            self.next_expected -= count
        if no_complete and self.pending == 0:
            raise Fault("barrier-count", f"{self.name}: arrive.noComplete completed phase {self.phase} ({who})")
        if self.observer is not None:
            self.observer.arrived(self, what, count, relaxed, scope)
        self._settle()
        return token

    def check_arrivals(self, count: int, who: object = "") -> None:
        if not 1 <= count <= MAX_COUNT:
            raise Fault("barrier-count", f"{self.name}: arrive with count {count}; 1..{MAX_COUNT} is accepted ({who})")
        if self.pending == 0:  # bytes are missing; otherwise the phase would be over
            raise Fault(
                "barrier-reuse",
                f"{self.name}: {count} more arrival(s) in phase {self.phase}, which has all {self.expected} and still "
                f"waits for {self.tx} byte(s) ({who}). {self.describe()}",
            )
        if count > self.pending:
            raise Fault(
                "barrier-count",
                f"{self.name}: {count} more arrival(s) in phase {self.phase} with {self.pending} of {self.expected} "
                f"still expected ({who}). {self.describe()}",
            )

    def expect_tx(self, nbytes: int, who: object = "") -> None:
        self._add_tx(nbytes, "expect_tx", nbytes, who)

    def complete_tx(self, nbytes: int, who: object = "") -> None:
        self._add_tx(-nbytes, "complete_tx", nbytes, who)

    def arrive_expect_tx(
        self,
        nbytes: int,
        count: int = 1,
        who: object = "",
        *,
        drop: bool = False,
        relaxed: bool = False,
        scope: str = "",
    ) -> int:
        """Executes expect_tx and arrive as one step: the phase cannot end in between."""
        token = self.token()
        self._check_tx(self.tx + nbytes, "expect_tx", nbytes, who)
        self.tx += nbytes
        self._note("expect_tx", nbytes, who)
        if self.observer is not None:
            self.observer.arrived(self, "expect_tx", nbytes)
        self.arrive(count, who, drop=drop, relaxed=relaxed, scope=scope)
        return token

    def increment_pending(self, count: int, who: object = "") -> None:
        """Executes cp.async.mbarrier.arrive without .noinc: one more arrival is expected, that of the copies."""
        if self.pending + count > MAX_COUNT:
            raise Fault("barrier-count", f"{self.name}: pending count beyond {MAX_COUNT} ({who})")
        self.pending += count
        self._note("increment", count, who)
        if self.observer is not None:
            self.observer.arrived(self, "increment", count)

    # -- questions ---------------------------------------------------------------------------------------------

    def passed_parity(self, parity: int) -> bool:
        """Returns whether the phase of that parity is the one just before the current, so that a wait for it
        succeeds.
        """
        return (self.phase & 1) != (parity & 1)

    def passed_token(self, token: int) -> bool:
        """Returns whether the phase in which the token was taken is over."""
        age = self.phase - (token >> _PENDING_BITS)
        if age not in (0, 1):
            raise Fault(
                "barrier-phase",
                f"{self.name}: waiting with a state of phase {token >> _PENDING_BITS}, the barrier is in phase "
                f"{self.phase}; only the current and the preceding phase can be named",
            )
        return age == 1

    def token(self) -> int:
        return self.phase << _PENDING_BITS | self.pending

    def describe(self) -> str:
        return f"{self.name} is {self.state()}"

    def state(self) -> str:
        """Returns what is missing and who arrived last, for deadlock and fault reports."""
        missing = []
        if self.pending:
            missing.append(f"{self.pending} of {self.expected} arrival(s)")
        if self.tx > 0:
            missing.append(f"{self.tx} byte(s)")
        elif self.tx < 0:
            missing.append(f"an expect_tx for {-self.tx} byte(s) already copied")
        last = [f"{event.what} {event.amount} by {event.who}" for event in self.history if event.who != ""][-3:]
        text = f"in phase {self.phase}, missing {' and '.join(missing) or 'nothing'}"
        return text + (f"; last: {', '.join(last)}" if last else "")

    # -- inside ------------------------------------------------------------------------------------------------

    def _add_tx(self, delta: int, what: str, amount: int, who: object) -> None:
        self._check_tx(self.tx + delta, what, amount, who)
        self.tx += delta
        self._note(what, amount, who)
        if self.observer is not None:
            self.observer.arrived(self, what, amount)
        self._settle()

    def _check_tx(self, tx: int, what: str, amount: int, who: object) -> None:
        if not -MAX_COUNT <= tx <= MAX_COUNT or not 0 <= amount <= MAX_COUNT:
            raise Fault(
                "barrier-tx",
                f"{self.name}: {what} {amount} makes the transaction count {tx}; it must stay within "
                f"+-{MAX_COUNT} ({who})",
            )

    def _settle(self) -> None:
        if self.pending == 0 and self.tx == 0:
            if self.observer is not None:
                self.observer.phase_ended(self)
            self.phase += 1
            if self.shown is not None:
                self.shown[self.place] = 1 + (self.phase & 1)
            self.expected = self.pending = self.next_expected
            if self.waiters:
                self.wake()

    def _note(self, what: str, amount: int, who: object) -> None:
        event = BarrierEvent(self.phase, what, amount, who)
        self.history.append(event)
        if what == "expect_tx":
            self.announced = event


def pending_count(token: int) -> int:
    """Returns mbarrier.pending_count: the arrivals that were pending when the token was taken."""
    return token & MAX_COUNT
