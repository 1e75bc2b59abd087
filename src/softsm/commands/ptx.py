"""Runs a kernel of a PTX file, with arguments made here, for `softsm run`, `check`, `trace` and `time`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from softsm import accepted
from softsm.arguments import Value, parse_argument
from softsm.commands.options import RunOptions
from softsm.doors.ptx import PtxKernel, load_ptx
from softsm.memory.map_argument import TensorMapArgument


@dataclass
class PtxFile:
    """A command line; softsm/arguments.py describes the arguments."""

    options: RunOptions
    arguments: list[str]
    arch: str
    save: list[str]

    def launch(self, *, sms: int, order: str, seed: int, quiet: bool = False) -> None:
        """Makes the arguments, launches the kernel, prints what changed and writes what is to be saved."""
        options = self.options
        kernel = load_ptx(options.file, options.entry, arch=self.arch)
        values = self.values(kernel, seed)
        targets = [self.target(text, kernel, values) for text in self.save]
        required = accepted.sides("reqntid", kernel.kernel.function.directives.get("reqntid", 32))
        before = [array.copy() if array is not None else None for array in map(array_of, values)]
        shape = (dims(options.grid, "grid"), dims(options.block, "block") if options.block else required)
        launch = kernel[(*shape, dims(options.cluster, "cluster")) if options.cluster else shape]
        launch(*values, shared=options.shared, sms=sms, order=order, seed=seed)
        if not quiet:
            Console().print(self.table(kernel, before, values))
        for array, path in targets:
            try:
                np.save(path, array)
            except OSError as problem:
                raise ValueError(f"save: got {path}; accepted: a file to write to ({problem.strerror})") from None

    def values(self, kernel: PtxKernel, seed: int) -> list[Value]:
        names = kernel.parameters
        made: list[Value] = []
        if len(self.arguments) != len(names):
            listed = ", ".join(f"{p.name} .{p.type}" for p in kernel.kernel.function.params)
            raise ValueError(f"args: got {len(self.arguments)}, {kernel.name} accepts {len(names)} ({listed})")
        for i, (text, name) in enumerate(zip(self.arguments, names)):
            try:
                made.append(parse_argument(text, seed + i, made))
            except ValueError as problem:
                raise ValueError(f"argument {i} ({name}){str(problem).removeprefix('argument')}") from None
        return made

    def target(self, text: str, kernel: PtxKernel, values: list[Value]) -> tuple[np.ndarray, str]:
        which, equals, path = text.partition("=")
        names = kernel.parameters
        at = int(which) if which.isdigit() else names.index(which) if which in names else len(values)
        array = array_of(values[at]) if at < len(values) else None
        if not equals or array is None:
            listed = ", ".join(f"{i} ({n})" for i, (n, v) in enumerate(zip(names, values)) if array_of(v) is not None)
            raise ValueError(f"save: got {text!r}; accepted: N=file.npy with an array for N: {listed or 'none'}")
        return array, path

    def table(self, kernel: PtxKernel, before: list, values: list[Value]) -> Table:
        table = Table("parameter", "argument", "changed", "first values")
        for name, text, old, new in zip(kernel.parameters, self.arguments, before, values):
            array = array_of(new)
            changed = str(int((bits(old) != bits(array)).sum())) if array is not None else ""
            first = np.asarray(new if array is None else array).reshape(-1)[:8]
            table.add_row(name, text, changed, ", ".join(map(shown, first)))
        return table


def shown(value: np.generic) -> str:
    return str(value) if isinstance(value, np.integer) else f"{float(value):g}"


def array_of(value: Value) -> np.ndarray | None:
    """Returns the array that an argument gives the kernel."""
    if isinstance(value, TensorMapArgument):
        return value.array
    return value if isinstance(value, np.ndarray) else None


def bits(array: np.ndarray) -> np.ndarray:
    """Returns one row of bytes per element, so that NaNs compare too."""
    return np.ascontiguousarray(array).reshape(-1).view(f"V{array.dtype.itemsize}")


def dims(text: str, name: str) -> tuple[int, ...]:
    try:
        return tuple(int(n) for n in text.replace("x", ",").split(","))
    except ValueError:
        raise ValueError(f"{name}: got {text!r}; accepted: up to three numbers such as 4,1,1") from None
