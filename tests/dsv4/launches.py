"""Helpers of kernel tests: run a problem, also free of races, set how many SMs a call sees, list its launches."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dsv4.runtime import calls, dispatch
from dsv4.runtime.driver import DriverLaunch
from dsv4.runtime.launch import Ready, TritonLaunch
from dsv4.runtime.program import tensors_of


def run(problem: Any) -> None:
    """A problem or a request that has its outputs, by the kernels of its GPU or of the emulator in use."""
    device = problem.q.device
    target = dispatch.cuda_target(device) if device.type == "cuda" else dispatch.softsm_target()
    tensors = tensors_of(problem)
    program = calls.program_of(problem, target, tensors, device)
    Ready(program, target).run([*tensors.values()], [x.data_ptr() for x in tensors.values()])


@contextmanager
def race_free(arch: str, order: str = "latest", seed: int = 0, **machine: Any) -> Iterator[None]:
    """What runs inside runs in the emulator, which must find nothing."""
    import softsm  # here: tests on a GPU use this file too, and do without it

    with softsm.use(arch, **machine), softsm.checking(races=True, order=order, seed=seed) as report:
        yield
    assert not report, str(report)


def num_sms(monkeypatch, count: int) -> None:
    """Calls see a GPU with this many SMs."""
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
