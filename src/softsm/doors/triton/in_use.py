"""Whether softsm is in use, for which architecture, and how attributes of others are replaced meanwhile."""

from __future__ import annotations

ARCHITECTURES = {"sm_90a": 90, "sm_100a": 100, "sm_103a": 103}
DEFAULT_ARCH = "sm_100a"
DEFAULT_SMS = 4


class InUse:
    """One use of softsm: what it emulates. `shimmed`: device="cuda" means CPU tensors."""

    ranks = 1

    def __init__(self, arch: str, sms: int, shimmed: bool = False):
        self.arch, self.sms, self.shimmed = arch, sms, shimmed
        self.thread = 0

    def _remove(self) -> None:
        raise NotImplementedError  # install.py


stack: list[InUse] = []  # uses of the thread that owns Triton's driver now


def current() -> InUse | None:
    """Returns the innermost use, or None."""
    return stack[-1] if stack else None


def active_arch() -> str | None:
    """Return the architecture that softsm emulates now, or None when it is not in use."""
    state = current()
    return state.arch if state else None


class Patches:
    """Attributes set for a while. `undo` puts back what was there, or nothing where nothing was."""

    _absent = object()

    def __init__(self) -> None:
        self._done: list[tuple[object, str, object]] = []

    def set(self, owner: object, name: str, value: object) -> None:
        self._done.append((owner, name, vars(owner).get(name, self._absent)))
        setattr(owner, name, value)

    def undo(self) -> None:
        for owner, name, old in reversed(self._done):
            if old is self._absent:
                delattr(owner, name)
            else:
                setattr(owner, name, old)
        self._done.clear()
