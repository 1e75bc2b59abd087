"""Cases: fresh inputs, a call of a public operation, and the measurements that decide whether it is right.

A `Case` is data. `make(draw)` builds a `Trial`, whose `run(where)` calls the library through its public names and
whose `check(got)` returns the measurements. Tests, `dsv4 verify`, `dsv4 demo` and the kernel tests all use the same
cases; only `Where` the operation runs differs.
"""

from __future__ import annotations

import contextlib
import math
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from dsv4.runtime import dispatch
from dsv4.runtime.checks import BACKENDS, Backend

ARCHS = tuple(entry.name for entry in dispatch.ARCHITECTURES.values())


class Unavailable(RuntimeError):
    """Raised if this machine cannot run a case; the message names what is missing."""


@dataclass(frozen=True)
class Where:
    """Where an operation runs: its `backend` argument, and the architecture that softsm emulates.

    `checked` (softsm): asynchronous operations complete as late as possible, and a finding of the checkers is an error.
    """

    backend: Backend = "auto"
    arch: str | None = None
    checked: bool = False

    def resolve(self) -> Where:
        """Replace `auto` and a missing arch by what will run, or raises `Unavailable`."""
        if self.backend not in BACKENDS:
            raise ValueError(f"backend: got {self.backend!r}; accepted: {', '.join(BACKENDS)}")
        if self.arch is not None and self.arch not in ARCHS:
            raise ValueError(f"arch: got {self.arch!r}; accepted: {', '.join(ARCHS)}")
        gpu = gpu_arch()
        if self.backend == "cpu":
            if self.arch is not None:
                raise ValueError(f"arch {self.arch} does not apply to backend cpu; use backend softsm or cuda")
            return self
        if self.backend == "auto":
            if self.arch is None:
                return Where("cuda", gpu) if gpu else Where("cpu")
            return replace(self, backend="cuda" if gpu == self.arch else "softsm").resolve()
        if self.backend == "cuda":
            if not torch.cuda.is_available():
                raise Unavailable("backend cuda: torch sees no CUDA device here")
            if self.arch is not None and gpu != self.arch:
                raise Unavailable(
                    f"backend cuda: this GPU is {gpu or 'none that dsv4 has kernels for'}, not {self.arch}"
                )
            return Where("cuda", gpu)
        softsm()
        return replace(self, backend="softsm", arch=self.arch or dispatch.DEFAULT_SOFTSM_ARCH)

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if self.backend == "cuda" else "cpu")

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of every call: the emulator for softsm, otherwise an empty one."""
        if self.backend != "softsm":
            return contextlib.nullcontext()
        return self._checked() if self.checked else softsm().use(self.arch)

    @contextlib.contextmanager
    def _checked(self) -> Iterator[None]:
        emulator = softsm()
        with emulator.use(self.arch), emulator.checking(order="latest") as report:
            yield
        if report:
            raise AssertionError(str(report))

    def __str__(self) -> str:
        return self.backend if self.arch is None else f"{self.backend} {self.arch}"


def gpu_arch() -> str | None:
    """Return the architecture of the current CUDA device, as kernels are named, or None if it has no kernels."""
    if not torch.cuda.is_available():
        return None
    entry = dispatch.ARCHITECTURES.get(dispatch.capability_of())
    return entry.name if entry else None


def softsm() -> Any:
    """Import the emulator, or raises `Unavailable` with the reason."""
    try:
        return dispatch.import_softsm()
    except ImportError as why:
        raise Unavailable(str(why)) from why


class Draw:
    """Draws random inputs on a device. They depend on the seed, not on the device."""

    def __init__(self, seed: int, device: torch.device | str = "cpu"):
        self.device = torch.device(device)
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self.generator) * scale).to(dtype).to(self.device)

    def integers(self, low: int, high: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator, dtype=torch.int32).to(self.device)

    def permutation(self, n: int) -> Tensor:
        return torch.randperm(n, generator=self.generator).to(torch.int32).to(self.device)

    def int32(self, values: Any) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int32, device=self.device)


@dataclass(frozen=True)
class Check:
    """A measurement and its bound. It is ok iff value <= bound (>= if `at_least`); NaN is never ok."""

    name: str
    value: float
    bound: float
    at_least: bool = False

    @property
    def ok(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    @property
    def used(self) -> float:
        """Return the used share of the allowed error; 1 is the limit. For `at_least` checks it is the share of the
        distance to 1."""
        room, need = (1 - self.bound, 1 - self.value) if self.at_least else (self.bound, self.value)
        if need <= 0:
            return 0.0
        return need / room if room > 0 else math.inf

    def __str__(self) -> str:
        return f"{self.name} {self.value:.3g} {'>=' if self.at_least else '<='} {self.bound:.3g}"


class Trial(Protocol):
    """One set of inputs, ready to run."""

    def run(self, where: Where) -> Any: ...

    def check(self, got: Any) -> list[Check]: ...


@dataclass(frozen=True)
class Case:
    """A named case of a suite. `select` filters by `features`; the maker draws fresh inputs each time."""

    suite: str
    name: str
    make: Callable[[Draw], Trial] = field(repr=False, compare=False)
    head_dim: int = 512
    dtype: torch.dtype = torch.bfloat16
    features: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return f"{self.suite}/{self.name}"

    def seed(self, seed: int) -> int:
        """Return the seed of this case in a run, which does not depend on the other cases."""
        return zlib.crc32(f"{seed}/{self.suite}/{self.name}".encode())


def brief(text: str) -> str:
    """Shorten a text to one line: its beginning and its end (a compiler quotes the kernel's source)."""
    text = " ".join(text.split())
    return text if len(text) <= 400 else f"{text[:133]} ... {text[-267:]}"


@dataclass(frozen=True)
class Result:
    case: Case
    checks: list[Check]
    error: str | None  # text of the exception, if the call raised one
    seconds: float  # time of the call alone, without inputs and oracle

    @property
    def ok(self) -> bool:
        return self.error is None and bool(self.checks) and all(check.ok for check in self.checks)

    def value(self, name: str) -> float | None:
        return next((check.value for check in self.checks if check.name == name), None)

    @property
    def tightest(self) -> Check | None:
        return max(self.checks, key=lambda check: (not check.ok, check.used), default=None)

    def why(self) -> str:
        """Say in one line what went wrong. `error` has the whole text."""
        return brief(self.error) if self.error is not None else "; ".join(str(c) for c in self.checks if not c.ok)


def run_case(case: Case, where: Where, seed: int) -> Result:
    """Draw inputs, runs and checks. An exception of the operation becomes the result's error; one of the case
    propagates."""
    trial = case.make(Draw(case.seed(seed), where.device))
    started = time.perf_counter()
    try:
        got = trial.run(where)
        if where.backend == "cuda":
            torch.cuda.synchronize()
    except Exception as error:  # the case failed; the others still run
        return Result(case, [], f"{type(error).__name__}: {error}", time.perf_counter() - started)
    seconds = time.perf_counter() - started
    return Result(case, trial.check(got), None, seconds)


def run_cases(cases: list[Case], where: Where, seed: int) -> Iterator[Result]:
    for case in cases:
        yield run_case(case, where, seed)
