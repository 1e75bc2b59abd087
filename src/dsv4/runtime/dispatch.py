"""Which code runs a problem. The path of a kernel is its entry in the dispatch table.

A module ``dsv4.kernels.<arch>.<operation>.entry`` has ``forward(problem) -> None``, which fills ``problem.out`` and
``problem.lse``, and ``supports(problem) -> str | None``: None for yes, else the reason why not, as text.
The backend "softsm" runs the same modules on a CPU, through the driver that ``softsm.use`` puts under Triton.
"""

import importlib
import importlib.util
from types import ModuleType

import torch

from dsv4.runtime import checks

# compute capability -> (kernel package, softsm's name of the architecture, oldest Triton that compiles it)
ARCHITECTURES = {
    (9, 0): ("sm90", "sm_90a", (3, 6)),
    (10, 0): ("sm100", "sm_100a", (3, 9)),
}
CPU_MODULES = {"fmha": "dsv4.fmha.cpu", "v4": "dsv4.v4.cpu"}
DEFAULT_SOFTSM_ARCH = "sm_100a"


def run(problem, backend: str) -> None:
    """Fill problem.out and problem.lse. ``problem`` is an FmhaProblem or another class with its ``operation``."""
    backend = resolve(backend, problem.q.device)
    if backend != "cpu" and problem.q.dtype not in checks.LOW_PRECISION:
        checks.fail(
            "q",
            f"dtype {problem.q.dtype} on backend {backend!r}",
            "bfloat16, float16; float32 on backend 'cpu'",
        )
    if problem.out.numel() == 0:
        return
    if problem.no_keys():
        problem.out.zero_()
        if problem.lse is not None:
            problem.lse.fill_(float("-inf"))
        return
    if backend == "cpu":
        with torch.autocast("cpu", enabled=False):  # an fp32 product inside stays one
            importlib.import_module(CPU_MODULES[problem.operation]).forward(problem)
    else:
        launch(problem, backend)


def launch(problem, backend: str) -> None:
    """Run the kernels of the backend "cuda" or "softsm"."""
    if backend == "cuda":
        with torch.cuda.device(problem.q.device):
            _run_kernel(problem, torch.cuda.get_device_capability(problem.q.device), backend)
    else:
        _run_softsm(problem)


def module_here(operation: str, device: torch.device) -> ModuleType | None:
    """The kernels for the GPU that a device is; None where there are none."""
    try:
        return kernel_module(operation, torch.cuda.get_device_capability(device))
    except RuntimeError:
        return None


def reason(problem) -> str | None:
    """None, or why the kernels of the GPU that the tensors are on cannot run the problem."""
    module = module_here(problem.operation, problem.q.device)
    return "there are none" if module is None else module.supports(problem)


def resolve(backend: str, device: torch.device) -> str:
    """ "auto" and the demands of the others on the device of the tensors."""
    checks.backend(backend)
    if backend == "auto":
        if device.type not in ("cpu", "cuda"):
            checks.fail("q", f"a tensor on {device}", "tensors on cpu or cuda")
        return device.type
    needed = "cuda" if backend == "cuda" else "cpu"
    if device.type != needed:
        checks.fail(
            "backend", f"{backend!r} with tensors on {device}", f"{backend!r} with tensors on {needed}"
        )
    return backend


def kernel_module(operation: str, capability: tuple[int, int]) -> ModuleType:
    """The kernels of this architecture; RuntimeError says what is missing."""
    if capability not in ARCHITECTURES:
        have = ", ".join(f"{major}.{minor}" for major, minor in ARCHITECTURES)
        raise RuntimeError(
            f"no dsv4 kernels for compute capability {capability[0]}.{capability[1]}; there are for {have}"
        )
    package, arch, oldest = ARCHITECTURES[capability]
    version = triton_version()
    if version is None or version < oldest:
        found = "none is installed" if version is None else f"found {version[0]}.{version[1]}"
        raise RuntimeError(f"dsv4 kernels for {arch} need triton >= {oldest[0]}.{oldest[1]}; {found}")
    name = f"dsv4.kernels.{package}.{operation}.entry"
    if importlib.util.find_spec(name) is None:
        raise RuntimeError(f"dsv4 has no {operation} kernel for {arch} yet; backend='cpu' runs it on a CPU")
    return importlib.import_module(name)


def triton_version() -> tuple[int, int] | None:
    try:
        import triton
    except ImportError:
        return None
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def softsm_arch() -> str:
    """The architecture that softsm plays now, else the default."""
    import softsm

    return softsm.active_arch() or DEFAULT_SOFTSM_ARCH


def _run_kernel(problem, capability: tuple[int, int], backend: str) -> None:
    module = kernel_module(problem.operation, capability)
    reason = module.supports(problem)
    if reason is not None:
        raise ValueError(f"backend: {backend!r} cannot run this {problem.operation} problem: {reason}")
    module.forward(problem)


def _run_softsm(problem) -> None:
    import softsm

    arch = softsm_arch()
    capability = next((c for c, entry in ARCHITECTURES.items() if entry[1] == arch), None)
    if capability is None:
        raise RuntimeError(f"backend 'softsm': no dsv4 kernels for {arch}")
    with softsm.use(arch):
        _run_kernel(problem, capability, "softsm")
