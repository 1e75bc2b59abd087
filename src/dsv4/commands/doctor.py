"""`dsv4 doctor`: what this machine can run, and why it cannot run the rest."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.markup import escape
from rich.table import Table

from dsv4 import suites
from dsv4.runtime import dispatch
from dsv4.suites import Where

from . import show

EXTRAS = {"transformers": "dsv4[hf]", "matplotlib": "dsv4[plot]", "perfetto": "softsm[trace]"}
# switch of a plug-in -> the engine's list of plug-ins that it loads
PLUGINS = {"DSV4_VLLM": "VLLM_PLUGINS", "DSV4_SGLANG": "SGLANG_PLUGINS"}
TRIALS = (("seeds", "d64-t4-s128"), ("v4", "csa-t128"))  # suite, case
SETTINGS = (
    "SOFTSM", "DSV4_AOT", "DSV4_CHECK", "DSV4_VLLM", "DSV4_VLLM_PARTS", "DSV4_SGLANG",
    "DSV4_SGLANG_PARTS", "VLLM_PLUGINS", "SGLANG_PLUGINS", "TRITON_CACHE_DIR", "TRITON_INTERPRET",
    "CUDA_VISIBLE_DEVICES",
)  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """`ok`: True = works, False = asked to work here and does not, None = not here, and that is no fault."""

    what: str
    found: str
    ok: bool | None
    why: str = ""


def doctor(
    run: Annotated[bool, typer.Option("--run", help="also run small cases in softsm (compiles kernels)")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of tables")] = False,
) -> None:
    """Say what this machine can run, and why it cannot run the rest.

    Exit status 1 if something that should work does not."""
    groups = {"Software": list(software()), "Device": list(device()), "Backends": list(backends(run))}
    findings = [finding for group in groups.values() for finding in group]
    if as_json:
        print(json.dumps({name: [asdict(f) for f in group] for name, group in groups.items()}, indent=1))
    else:
        out = show.console()
        for name, group in groups.items():
            out.print(table(name, group))
    raise typer.Exit(1 if any(finding.ok is False for finding in findings) else 0)


def table(title: str, findings: list[Finding]) -> Table:
    words = {True: "[green]yes[/]", False: "[bold red]BROKEN[/]", None: "[yellow]no[/]"}
    result = Table(title=title, title_justify="left", show_header=False)
    for finding in findings:
        result.add_row(finding.what, words[finding.ok], escape(finding.found), f"[dim]{escape(finding.why)}[/]")
    return result


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def software() -> Iterator[Finding]:
    yield Finding("python", platform.python_version(), True, f"{platform.system()} {platform.machine()}")
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build: no GPU even if there is one"
    yield Finding("torch", torch.__version__, True, f"{build}; threads: {torch.get_num_threads()}")
    yield triton()
    for package in ("numba", "ml_dtypes"):
        found = version(package)
        yield Finding(package, found or "not installed", True if found else None, "" if found else "softsm needs it")
    for package, extra in EXTRAS.items():
        found = version(package)
        yield Finding(package, found or "not installed", True if found else None, f"optional: {extra}")
    for name in SETTINGS:
        if name in os.environ:
            yield setting(name)


def setting(name: str) -> Finding:
    """An engine that does not load the plug-in cannot say that its switch has no effect."""
    value, listed = os.environ[name], os.environ.get(PLUGINS.get(name, ""))
    everything = listed is None or (listed == "" and name == "DSV4_SGLANG")  # vLLM reads an empty list as none at all
    if value == "1" and not everything and "dsv4" not in (listed or "").split(","):
        return Finding(name, value, False, f"no effect: {PLUGINS[name]} leaves dsv4 out; add it there")
    return Finding(name, value, True, "set in the environment")


def triton() -> Finding:
    found = dispatch.triton_version()
    if found is None:
        return Finding("triton", "not installed", False, "kernels, compiling and softsm need it")
    text = importlib.import_module("triton").__version__
    can = [arch for _, arch, oldest in dispatch.ARCHITECTURES.values() if found >= oldest]
    cannot = [
        f"{arch} needs triton >= {'.'.join(map(str, oldest))}"
        for _, arch, oldest in dispatch.ARCHITECTURES.values()
        if found < oldest
    ]
    return Finding("triton", text, bool(can), "; ".join([f"compiles for {', '.join(can) or 'nothing here'}", *cannot]))


def device() -> Iterator[Finding]:
    yield Finding("cpu", platform.processor() or platform.machine(), True, f"{os.cpu_count()} cores")
    yield ptxas()
    if not torch.cuda.is_available():
        why = "torch is a CPU build" if torch.version.cuda is None else "no device, or no driver that suits this torch"
        yield Finding("gpu", "none that torch sees", None, why)
        return
    for index in range(torch.cuda.device_count()):
        name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        entry = dispatch.ARCHITECTURES.get(capability)
        why = f"kernels of {entry[1]}" if entry else "no kernels for this compute capability; backend cpu still works"
        yield Finding(f"gpu {index}", f"{name}, {capability[0]}.{capability[1]}", True if entry else None, why)


def ptxas() -> Finding:
    """The assembler that turns PTX into a cubin; Triton's wheel has its own."""
    try:
        bundled = Path(importlib.import_module("triton").__file__ or "").parent / "backends/nvidia/bin/ptxas"
    except ImportError:
        bundled = Path("-")
    if bundled.exists():
        return Finding("ptxas", "in the Triton wheel", True, "kernels can be compiled here, GPU or not")
    found = shutil.which("ptxas")
    return Finding("ptxas", "on PATH" if found else "none", True if found else None, "" if found else "no cubins here")


def backends(run: bool) -> Iterator[Finding]:
    yield trial("cpu", Where("cpu"), True)
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if capability is None:
        yield Finding("cuda", "not here", None, "no GPU")
    else:
        yield kernels("cuda", Where("cuda"), capability, run=True)
    for capability, (_, arch, _) in dispatch.ARCHITECTURES.items():
        yield kernels(f"softsm {arch}", Where("softsm", arch), capability, run)


def kernels(what: str, where: Where, capability: tuple[int, int], run: bool) -> Finding:
    try:
        where = where.resolve()
        for operation in dispatch.OPERATIONS:
            dispatch.kernel_module(operation, capability)
    except (RuntimeError, ImportError) as why:  # both say in words what is missing
        return Finding(what, "not here", None, str(why))
    return trial(what, where, run)


def trial(what: str, where: Where, run: bool) -> Finding:
    """A small case of each operation for real: a claim that has not been tried is worth little."""
    if not run:
        return Finding(what, "available", True, "not tried; dsv4 doctor --run does")
    said = []
    for suite, match in TRIALS:
        case = suites.select(suite, match=match)[0]
        result = suites.run_case(case, where.resolve(), seed=0)
        if not result.ok:
            return Finding(what, "fails", False, f"{case}: {result.why()}")
        said.append(f"{case}: error {show.number(result.value('norm'))}")
    return Finding(what, "works", True, ", ".join(said))
