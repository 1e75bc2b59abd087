"""`softsm.load_ptx(text)[grid, block](...)` launches a kernel from PTX, as kernels of other languages are launched."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from softsm import accepted
from softsm.doors.triton.in_use import ARCHITECTURES
from softsm.engine.launch import Kernel, load
from softsm.engine.scheduler import Machine


class PtxKernel:
    """A kernel of a PTX module. `kernel[grid, block]` or `kernel[grid, block, cluster]` launches it; each is one number
    or up to three."""

    def __init__(self, kernel: Kernel, arch: str):
        self.kernel, self.arch = kernel, arch

    @property
    def name(self) -> str:
        return self.kernel.name

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.kernel.function.params)

    def __getitem__(self, shape: tuple) -> PtxLaunch:
        if not isinstance(shape, tuple) or len(shape) not in (2, 3):
            accepted.refuse("launch", shape, "[grid, block] and [grid, block, cluster]")
        return PtxLaunch(self, *shape)

    def __repr__(self) -> str:
        return f"<PTX kernel {self.name}({', '.join(self.parameters)}) on {self.arch}>"


class PtxLaunch:
    def __init__(self, kernel: PtxKernel, grid: Any, block: Any, cluster: Any = None):
        self.kernel, self.grid, self.block = kernel, grid, block
        required = kernel.kernel.function.directives.get("reqnctapercluster", (1, 1, 1))
        self.cluster = required if cluster is None else cluster
        if required != (1, 1, 1) and accepted.sides("cluster", self.cluster) != accepted.sides("cluster", required):
            accepted.refuse("cluster", cluster, f"{required}, which the kernel requires (.reqnctapercluster)")

    def __call__(self, *args: Any, shared: int = 0, **options: Any) -> Machine | None:
        """Run the grid to its end.

        Args:
            args: one per parameter: an array or a CPU tensor (a pointer), a number, raw bytes, or
                `softsm.tensor_map(array, box)`.
            shared: bytes of dynamic shared memory.
            options: order, seed and sms of this launch.
        """
        return self.kernel.kernel.launch(
            self.grid, self.block, args, shared=shared, cluster=self.cluster, arch=self.kernel.arch, **options
        )


def load_ptx(ptx: str | Path, name: str | None = None, *, arch: str = "") -> PtxKernel:
    """Load a kernel from PTX.

    Args:
        ptx: the text, or the path of a file: a Path, or a string that ends with ".ptx".
        name: the kernel's name; optional if the module has only one.
        arch: the GPU to emulate, sm_90a, sm_100a or sm_103a; default: the module's `.target`.
    """
    if not isinstance(ptx, (str, Path)):
        accepted.refuse("ptx", ptx, "PTX text and the path of a file")
    text = Path(ptx).read_text() if isinstance(ptx, Path) or ptx.endswith(".ptx") else ptx
    kernel = load(text, name)
    return PtxKernel(kernel, machine_of(kernel.module.target, arch))


def machine_of(target: str, arch: str) -> str:
    """Returns the architecture to emulate for a module compiled for `target`."""
    if not arch:
        return target
    accepted.one_of("arch", arch, tuple(ARCHITECTURES))
    made, suffix = _parts(target)
    number, _ = _parts(arch)
    family = suffix == "f" and made // 10 == number // 10 and made <= number
    if made == number or family or (not suffix and made <= number):
        return arch
    accepted.refuse("arch", arch, f"what runs the module's .target {target}")


def _parts(target: str) -> tuple[int, str]:
    found = re.match(r"sm_(\d+)([af]?)", target)
    return (int(found[1]), found[2]) if found else (0, "")
