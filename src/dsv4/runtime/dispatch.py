"""Where a call runs, and which code runs it there. The path of a kernel is its entry in the dispatch table.

A module ``dsv4.<operation>.kernels.<arch>.entry``, or ``backward`` for gradients, has ``supports(problem) -> str |
None`` (None for yes, else the reason why not) and ``prepare(problem, target, program)``, which adds its launches to the
program (program.py).
The backend "softsm" runs the same kernels on a CPU, through the driver that ``softsm.use`` puts under Triton.
"""

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

from dsv4.runtime import checks, cubins
from dsv4.runtime.settings import settings


class Architecture(NamedTuple):
    """Kernels for one compute capability."""

    package: str  # dsv4.<operation>.kernels.<package>
    name: str  # name that ptxas and softsm use
    triton: tuple[int, int]  # the oldest that compiles them
    gpus: str


ARCHITECTURES = {
    (9, 0): Architecture("sm90", "sm_90a", (3, 6), "H100, H200, GH200"),
    (10, 0): Architecture("sm100", "sm_100a", (3, 9), "B200, GB200"),
    (10, 3): Architecture("sm100", "sm_103a", (3, 9), "B300, GB300"),  # the same PTX except for its .target
}
OPERATIONS = ("fmha", "v4", "index", "compress", "moe")  # folders of dsv4
DEFAULT_SOFTSM_ARCH = "sm_100a"
DEFAULT_NUM_SMS = 132  # assumed where kernels are only compiled


class Target(NamedTuple):
    """Everything that a program depends on besides the shapes of the call."""

    backend: str  # cuda, softsm
    capability: tuple[int, int]
    num_sms: int
    aot: Path | None = None  # compiled kernels are loaded from here (aot.py)
    aot_only: bool = False  # no kernel may be taken from elsewhere

    @property
    def arch(self) -> str:
        """sm_90a, sm_100a, sm_103a."""
        return ARCHITECTURES[self.capability].name if self.capability in ARCHITECTURES else "unknown"

    @property
    def compiler(self) -> tuple[int, int]:
        """The Triton that compiles, or has compiled, the kernels: which options are fastest depends on it."""
        written = None if self.aot is None else cubins.compiler_of(self.aot)
        return written or triton_version() or (0, 0)


def use_aot(directory: str | Path | None, only: bool = False) -> None:
    """Launch from this directory if it has the kernel, and with ``only`` fail if it does not; None = from the
    wheel dsv4-cubins, if it is installed."""
    settings.aot, settings.aot_only = None if directory is None else Path(directory), only


@cache  # device.type makes a string of it in every call
def resolve(backend: str, device: torch.device, name: str = "q") -> str:
    """ "auto" and the demands of the others on the device of the tensors -> cpu, cuda or softsm. name: of the argument
    whose device it is. Under `softsm check` and similar commands, tensors report a GPU as their device, which is
    the emulator.
    """
    if device.type == "cuda" and not torch.compiler.is_compiling() and _emulated(device):
        return "cpu" if backend == "cpu" else "softsm"
    if backend == "auto":
        if device.type not in ("cpu", "cuda"):
            checks.fail(name, f"a tensor on {device}", "tensors on cpu or cuda")
        return device.type
    needed = "cuda" if backend == "cuda" else "cpu"
    if device.type != needed:
        checks.fail("backend", f"{backend!r} with tensors on {device}", f"{backend!r} with tensors on {needed}")
    return backend


def _emulated(device: torch.device) -> bool:
    """Return whether a device that calls itself a GPU is softsm's. torch.compile cannot trace this."""
    return torch.cuda.is_available() and torch.cuda.get_device_name(device).startswith("softsm ")


@contextmanager
def entered(backend: str, device: torch.device) -> Iterator[Target]:
    """Send launches inside the context to the device, or to the emulator."""
    if backend == "cuda":
        with torch.cuda.device(device):
            yield cuda_target(device)
        return
    with import_softsm().use(softsm_arch()):
        yield softsm_target()


def import_softsm() -> ModuleType:
    """Import the emulator, which is a separate distribution and only needed on request."""
    try:
        import softsm

        softsm.use  # noqa: B018  imported on first use; this is where a missing dependency shows
    except ImportError as why:
        raise ImportError(
            f"backend: got 'softsm', but `import softsm` fails: {why}; accepted: 'softsm' after `pip install "
            "./packages/softsm` in a clone of dsv4, or 'cpu'"
        ) from why
    return softsm


def cuda_target(device: torch.device) -> Target:
    return _cuda_target(device, settings.aot, settings.aot_only)


@cache
def _cuda_target(device: torch.device, aot: Path | None, aot_only: bool) -> Target:
    count = torch.cuda.get_device_properties(device).multi_processor_count
    capability = capability_of(device)
    return Target("cuda", capability, count, aot or _wheel(capability), aot_only)


def _wheel(capability: tuple[int, int]) -> Path | None:
    return cubins.folder(ARCHITECTURES[capability].name) if capability in ARCHITECTURES else None


def capability_of(device: torch.device | int | None = None) -> tuple[int, int]:
    """Return the compute capability of a GPU; (0, 0) for AMD's, whose numbers mean something else (gfx90a is 9.0)."""
    return (0, 0) if torch.version.hip else torch.cuda.get_device_capability(device)


def softsm_target() -> Target:
    """Return the target of the active emulator."""
    from triton.runtime import driver

    arch = softsm_arch()
    capability = next((c for c, entry in ARCHITECTURES.items() if entry.name == arch), None)
    if capability is None:
        raise RuntimeError(f"backend 'softsm': no dsv4 kernels for {arch}")
    active = driver.active
    count = active.utils.get_device_properties(active.get_current_device())["multiprocessor_count"]
    return Target("softsm", capability, count)


def compile_target(arch: str) -> Target:
    """Return the target of kernels that are only compiled."""
    capability = next(capability for capability, entry in ARCHITECTURES.items() if entry.name == arch)
    return Target("cuda", capability, DEFAULT_NUM_SMS)


def softsm_arch() -> str:
    """Return the architecture that softsm emulates now, else the default."""
    return import_softsm().active_arch() or DEFAULT_SOFTSM_ARCH


def kernel_module(operation: str, capability: tuple[int, int], backward: bool = False) -> ModuleType:
    """Return the kernels of this architecture; a RuntimeError names what is missing."""
    if capability not in ARCHITECTURES:
        raise RuntimeError(no_kernels(capability))
    package, arch = ARCHITECTURES[capability][:2]
    refused = too_old(capability)
    if refused and (triton_version() is None or not _written(capability, backward)):
        raise RuntimeError(refused)
    name = f"dsv4.{operation}.kernels.{package}.{'backward' if backward else 'entry'}"
    if operation not in OPERATIONS or importlib.util.find_spec(name) is None:
        what = f"{operation} gradient" if backward else operation
        raise RuntimeError(f"dsv4 has no {what} kernel for {arch} yet; backend='cpu' runs it on a CPU")
    return importlib.import_module(name)


def no_kernels(capability: tuple[int, int]) -> str:
    """Return the text that this GPU has no kernels, and the alternatives."""
    number = f"compute capability {capability[0]}.{capability[1]}" if any(capability) else "an AMD GPU"
    name = f"{torch.cuda.get_device_name()}, " if torch.cuda.is_available() else ""
    have = "; ".join(f"{major}.{minor} ({entry.gpus})" for (major, minor), entry in ARCHITECTURES.items())
    return (
        f"backend: got 'cuda' on {name}{number}, for which dsv4 has no kernels; accepted: compute capability {have}; "
        "or CPU tensors, with backend='cpu'"
    )


def _written(capability: tuple[int, int], backward: bool) -> bool:
    """Return whether there are compiled kernels, of gradients too; if so, a missing one is an error."""
    found = settings.aot or _wheel(capability)
    return found is not None and (not backward or next(found.glob("backward_*.json"), None) is not None)


def too_old(capability: tuple[int, int]) -> str | None:
    """Return why this Triton compiles no kernels for a GPU, or None if it does. Compiled ones run with any Triton."""
    if capability not in ARCHITECTURES:
        return no_kernels(capability)
    _, arch, oldest, _ = ARCHITECTURES[capability]
    version = triton_version()
    if version is not None and version >= oldest:
        return None
    needed = f"dsv4 kernels for {arch} need triton >= {oldest[0]}.{oldest[1]}"
    if version is None:
        return f"{needed}, and Triton is not installed: pip install triton (Linux only); backend='cpu' works without it"
    return (
        f"{needed}; found {version[0]}.{version[1]}. Older ones launch what `dsv4 compile --arch {arch}` has written "
        "(DSV4_AOT), or the wheel dsv4-cubins"
    )


def has_kernels(device: torch.device) -> bool:
    """Return whether there are kernels for the GPU of a device."""
    capability = capability_of(device)
    if triton_version() is None or capability not in ARCHITECTURES:
        return False
    return settings.aot is not None or _wheel(capability) is not None or too_old(capability) is None


@cache
def triton_version() -> tuple[int, int] | None:
    try:
        import triton
    except ImportError:
        return None
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)
