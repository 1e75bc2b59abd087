"""For tests of kernels: how many multiprocessors a call sees, and which kernels it launches."""

from dsv4.runtime import dispatch
from dsv4.runtime.launch import ReadyLaunch


def multiprocessors(monkeypatch, count: int) -> None:
    """As on a GPU with so many."""
    real = dispatch.softsm_target
    monkeypatch.setattr(dispatch, "softsm_target", lambda: real()._replace(multiprocessors=count))


def launched(monkeypatch) -> list[str]:
    """Gets the names of the kernels of all launches that follow."""
    names: list[str] = []
    run = ReadyLaunch.run

    def noted(self, memory):
        names.append(self.name)
        run(self, memory)

    monkeypatch.setattr(ReadyLaunch, "run", noted)
    return names
