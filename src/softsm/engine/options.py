"""How launches run: the options of a `with` block, and the sessions that follow its launches."""

from __future__ import annotations

import contextlib
import contextvars
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from softsm import accepted
from softsm.engine.observer import Observer, Observers


class Session:
    """Follows the launches of a `with` block (`observing`)."""

    races: bool = False  # It needs programs that are assembled for the race checker.
    computes: ClassVar[bool] = True  # False: launches do not compute all values; sessions that need all of them pause.
    needs_values: ClassVar[bool] = False
    one_gpu: ClassVar[bool] = False  # It follows launches of one GPU.

    def options(self, chosen: Options) -> Options:
        """Returns the options of a launch that the session follows."""
        return chosen

    def observer(self, machine: Any) -> Observer | None:
        """Returns the observer of one launch."""
        raise NotImplementedError


@dataclass(frozen=True)
class Options:
    """How launches run. `order`: 'eager', 'latest' or 'random' completion of asynchronous operations."""

    order: str = "eager"
    seed: int = 0
    sms: int = 4
    budget: int = accepted.number_in("SOFTSM_BUDGET", 20_000_000_000)
    patience: int = 0  # operations without progress after which a launch is ended; 0: never
    arch: str = ""
    processes: int = 0  # processes that share a launch, at most; 0: engine/processes.py decides
    dependent: bool = False  # programmatic dependent launch: the grid may begin before the one before it has ended
    follows: bool = False  # several GPUs: the host did not wait for all of them before this launch
    workspace: int = 0  # address of the words by which the CTAs of a cooperative launch meet (%envreg1, %envreg2)
    sessions: tuple[Session, ...] = ()  # sessions that follow the launch (engine/observer.py)
    meeting: Any = None  # softsm.engine.ranks.Meeting, of a rank's program

    def __post_init__(self) -> None:
        accepted.one_of("order", self.order, accepted.ORDERS)
        accepted.whole("sms", self.sms, 1, accepted.MOST_SMS)
        for name, least in (("seed", 0), ("budget", 1), ("patience", 0), ("processes", 0)):
            accepted.whole(name, getattr(self, name), least)


_DEFAULT = Options()
_options: contextvars.ContextVar[Options] = contextvars.ContextVar("softsm_options", default=_DEFAULT)


@contextlib.contextmanager
def options(**changes):
    """Launches inside run with these options."""
    token = _options.set(replace(_options.get(), **changes))
    try:
        yield
    finally:
        _options.reset(token)


@contextlib.contextmanager
def observing(session: Session):
    """Lets the session follow launches inside, in place of an outer one of its kind."""
    others = [x for x in _options.get().sessions if type(x) is not type(session)]
    with options(sessions=(*others, session)):
        yield


def current_options() -> Options:
    return _options.get()


def observer_of(machine: Any, sessions: tuple[Session, ...]) -> Observer | None:
    found = [x for x in (session.observer(machine) for session in sessions) if x is not None]
    return Observers(found) if len(found) > 1 else found[0] if found else None
