"""For tests of kernels: how many multiprocessors a call sees, and which kernels it launches."""

from dsv4.runtime import dispatch, launch
from dsv4.runtime.driver import DriverLaunch
from dsv4.runtime.launch import TritonLaunch


def num_sms(monkeypatch, count: int) -> None:
    """As on a GPU with so many."""
    real = dispatch.softsm_target
    monkeypatch.setattr(dispatch, "softsm_target", lambda: real()._replace(num_sms=count))


def launched(monkeypatch) -> list[str]:
    """Gets the names of the kernels of all launches that follow."""
    names: list[str] = []

    def noting(run):
        def noted(self, *memory):
            names.append(self.name)
            run(self, *memory)

        return noted

    for way in (TritonLaunch, DriverLaunch):  # in the emulator, on a GPU
        monkeypatch.setattr(way, "run", noting(way.run))
    return names


def one_by_one(monkeypatch) -> list[str]:
    """The same of those outside of prepared calls."""
    names: list[str] = []
    now = launch.now

    def noted(kernel, *rest, **constants):
        names.append(kernel.__name__)
        now(kernel, *rest, **constants)

    monkeypatch.setattr(launch, "now", noted)
    return names
