"""Shared by all tests: one thread per worker, the emulator compiled once for all workers, seeds by test; and a
line at the end that says what the run cost: kernels compiled by Triton, and processor time.

torch is imported where it is needed: the process that hands tests out to workers does without, and is ready sooner."""

import atexit
import contextlib
import functools
import gc
import importlib.util
import os
import random
import secrets
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    worker = hasattr(config, "workerinput")
    if worker:
        gc.disable()  # until the tests are collected: a fifth of the time of importing torch
        import torch

        # The workers are the parallelism; more threads than cores only get in each other's way.
        torch.set_num_threads(1)
        os.environ["OMP_NUM_THREADS"] = "1"
    else:
        config.pluginmanager.register(Cost(), "cost")
        config.pluginmanager.register(Start(), "start")
    if worker or not getattr(config.option, "numprocesses", None):
        from hypothesis import HealthCheck, register_random, settings

        register_random(TORCH)

        # No limits of time: another process may have the core.
        settings.register_profile(
            "dsv4", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=40, print_blob=True
        )
        settings.load_profile("dsv4")


class TorchRandom:
    """torch's generator as Hypothesis wants it. Hypothesis sets it before every example, as it does with `random` and
    numpy's: what an example draws is a function of the example, and a failure replays."""

    def seed(self, seed: int) -> None:
        import torch

        torch.default_generator.manual_seed(seed)

    def getstate(self) -> Any:
        import torch

        return torch.default_generator.get_state()

    def setstate(self, state: Any) -> None:
        import torch

        torch.default_generator.set_state(state)


TORCH = TorchRandom()  # Hypothesis keeps a weak reference


COMPILED = {"kernels": 0, "seconds": 0.0}  # by Triton in this process, those in its cache left out


def count_compilation(times: object, cache_hit: bool, **_: object) -> None:
    if not cache_hit:
        COMPILED["kernels"] += 1
        COMPILED["seconds"] += times.total / 1e6  # type: ignore[attr-defined]


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Once the tests are collected, Triton is there if any of them needs it. What they import stays to the end: the
    garbage collector need not go through it again and again."""
    gc.disable()
    result = yield
    with contextlib.suppress(AttributeError, KeyError, OSError):
        os.unlink(session.config.workerinput["first"])  # see Start
    gc.enable()
    gc.freeze()
    gc.set_threshold(20_000)  # 700 new objects are few compared with those of one compilation
    if "triton" in sys.modules:
        from triton import knobs

        knobs.compilation.listener = count_compilation
    if testing := sys.modules.get("typer.testing"):  # it would make a command of its functions for every call
        testing._get_command = functools.cache(testing._get_command)  # type: ignore[attr-defined]
    return result


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """A worker has said all that it found. Python would go on to free every object, which takes seconds."""
    if hasattr(config, "workerinput"):
        atexit._run_exitfuncs()
        os._exit(0)
    gc.unfreeze()  # else Triton's bindings say at the end that they leak


class Start:
    """Lets the first worker write the byte code of torch and all tests, which else each would compile by itself. The
    others begin when it has collected the tests. A file is there as long as they wait, which only saves time."""

    def __init__(self) -> None:
        torch = importlib.util.find_spec("torch")
        self.cold = not sys.dont_write_bytecode and torch and torch.cached and not os.path.exists(torch.cached)
        self.waiting = ""

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        if self.cold and not self.waiting:
            file, self.waiting = tempfile.mkstemp()
            os.close(file)
            node.workerinput["first"] = self.waiting
            return
        end = time.monotonic() + 60
        while os.path.exists(self.waiting) and time.monotonic() < end:
            time.sleep(0.05)


class Cost:
    """Adds up what the workers, or this process, compiled. The processor time is that of all processes of the run. A
    worker says its own: whether the system counts it among this process's children depends on when it ends."""

    def __init__(self) -> None:
        self.kernels, self.seconds, self.workers = 0, 0.0, 0.0
        self.beside: subprocess.Popen | None = None  # compiles the emulator

    def add(self, compiled: dict) -> None:
        self.kernels += compiled["kernels"]
        self.seconds += compiled["seconds"]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        said = getattr(node, "workeroutput", {})
        self.add(said.get("compiled", {"kernels": 0, "seconds": 0}))
        self.workers += said.get("processor", 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for reason, count in reasons(terminalreporter.stats.get("skipped", ())):
            terminalreporter.write_line(f"{count} skipped: {reason}")
        self.add(COMPILED)
        compiled = f"{self.kernels} kernels compiled by Triton in {self.seconds:.0f} s"
        beside = 0.0
        if self.beside is not None:
            _, self.beside.returncode, usage = os.wait4(self.beside.pid, 0)
            beside = usage.ru_utime + usage.ru_stime
        children = beside + self.workers if self.workers else sum(os.times()[2:4])
        terminalreporter.write_line(f"{compiled}; {sum(os.times()[:2]) + children:.0f} s of processor time in all")


def reasons(skipped: Iterable[pytest.TestReport]) -> list[tuple[str, int]]:
    """Why tests were skipped, the most frequent reason first: a run says what it did not test."""
    found = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped if report.longrepr)
    return found.most_common()


EMULATOR = """
import gc

gc.disable()
import softsm
from softsm.checks.lane_operation import lane_operation
softsm.load(".version 8.7 .target sm_100a .address_size 64 .visible .entry nothing() { ret; }").launch(grid=1, block=32)
lane_operation()
"""


def pytest_sessionstart(session: pytest.Session) -> None:
    """With parallel workers the emulator is compiled once, in a separate process while they start, first what runs
    kernels, then what finds races. A test that needs it sooner waits for it; a broken one is reported by its tests."""
    if not getattr(session.config.option, "numprocesses", None):
        return
    # Numba asks the terminal for its colours at every type that it tries.
    os.environ["NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING"] = "1"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    beside = subprocess.Popen([sys.executable, "-c", EMULATOR], env=env, stderr=subprocess.DEVNULL)
    session.config.pluginmanager.get_plugin("cost").beside = beside


@functools.cache
def mkldnn_before_all_tests() -> bool:
    import torch

    return torch.backends.mkldnn.enabled


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """torch turns oneDNN off for the rest of the process after a bf16 product that this CPU cannot do, and products
    without it round differently. Before any fixture of a test it is as it was."""
    import torch

    torch.backends.mkldnn.set_flags(mkldnn_before_all_tests())


DRAWN = random.Random()  # what the commands draw
secrets.randbits = DRAWN.getrandbits


@pytest.fixture(autouse=True)
def alone(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test depends on those before it, nor on luck. One fixture, because each takes half a millisecond a test:

    - Tests that change a constant see it: no call finds what another test's call prepared.
    - What a test draws without a seed of its own depends on its name. The commands take a fresh seed from `secrets`.
    - A test that changes a setting of the process and does not restore it is named, rather than the next one."""
    import numpy
    import torch

    from dsv4.runtime import calls

    def settings() -> tuple:
        ours = torch.get_num_threads(), torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()
        return *ours, gc.isenabled()

    calls.forget()
    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    DRAWN.seed(seed)
    numpy.random.seed(seed)
    # torch.manual_seed keeps a stack for each kind of device that is not there: a third of what a test costs.
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(seed)
    before = settings()
    yield
    assert settings() == before, "threads, default dtype, default device, grad mode, garbage collector: not restored"


GPU_TESTS_THAT_RAN: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "gpu" in report.keywords and not report.skipped:
        if report.when == "call" or report.failed:
            GPU_TESTS_THAT_RAN.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker says what it compiled. A run of GPU tests alone, all of them skipped, has shown nothing: it fails."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput |= {"compiled": COMPILED, "processor": sum(os.times()[:4])}
    items = getattr(session, "items", [])
    if items and all(item.get_closest_marker("gpu") for item in items) and not GPU_TESTS_THAT_RAN:
        if not session.config.option.collectonly:
            import torch

            print(
                "\nevery GPU test was skipped (see pytest -rs); torch",
                torch.__version__,
                "sees",
                torch.cuda.device_count(),
                "CUDA devices",
            )
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(tryfirst=True)  # whoever wants another order has it
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One test that takes many seconds must not be the last, which a worker runs while the others have nothing to do. A
    test marked gpu is skipped where there is none, so that a plain pytest is green everywhere."""
    import torch

    items.sort(key=lambda item: item.path.name != "test_oldest_triton.py")
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
