"""`dsv4 demo`: the main job on this machine, whatever it has, with every result compared with the oracle."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
import typer
from rich.markup import escape
from rich.table import Table

from dsv4 import dispatch, suites
from dsv4.suites import Case, Result, Where
from dsv4.suites.fmha_cases import dense, paged, varlen, with_sink
from dsv4.suites.v4_cases import batch, step

from . import show


@dataclass(frozen=True)
class Section:
    """A table of the demo: what it shows, on which backend, and the cases that it runs."""

    title: str
    where: Where
    cases: list[Case]


def demo(
    seed: Annotated[int | None, typer.Option(help="repeat a run; without it inputs are fresh")] = None,
) -> None:
    """Each kind of DeepSeek-V4 layer and the FMHA shapes on the best backend here, compared with the fp64 oracle."""
    seed = secrets.randbits(31) if seed is None else seed
    out = show.console()
    where, note = best()
    out.print(
        f"[bold]dsv4[/] on {machine(where)}, seed {seed}" + (f"\n[dim]{escape(note)}[/]" if note else "")
    )
    results = []
    for section in sections(where):
        ran = show.run_with_progress(section.cases, section.where, seed, section.title)
        out.print(table(section, ran))
        results += ran
    for note in missing():
        out.print(f"[dim]{escape(note)}[/]")
    raise typer.Exit(show.closing_line(results))


def best() -> tuple[Where, str]:
    """The best backend here, and what keeps a better one from being it."""
    where = Where("auto").resolve()
    if where.backend == "cpu":
        if not torch.cuda.is_available():
            return where, ""
        return where, "This GPU is neither Hopper (9.0) nor datacentre Blackwell (10.0): using the CPU."
    try:
        for operation in ("fmha", "v4"):
            dispatch.kernel_module(operation, torch.cuda.get_device_capability())
    except RuntimeError as why:
        return Where("cpu"), f"Using the CPU: {why}"
    return where, ""


def machine(where: Where) -> str:
    if where.backend == "cuda":
        return f"{torch.cuda.get_device_name()} ({where.arch})"
    return f"the CPU ({torch.get_num_threads()} threads)"


def sections(where: Where) -> list[Section]:
    found = [
        Section("Fused multi-head attention", where, fmha_cases()),
        Section("DeepSeek-V4 layers (64 heads, head dim 512)", where, v4_cases()),
    ]
    if emulator_reason() is None:
        match = ("d64-t4-s256", "d128-t4-s256", "d256-t4-s256", "d512-t4-s256")
        cases = [case for case in suites.seeds() if case.name in match]
        found.append(Section("Blackwell kernel in softsm", Where("softsm", "sm_100a"), cases))
    return found


def emulator_reason() -> str | None:
    """Why the Blackwell kernel cannot run in softsm here; None if it can."""
    try:
        Where("softsm", "sm_100a").resolve()
        dispatch.kernel_module("fmha", (10, 0))
    except (RuntimeError, ImportError) as why:
        return str(why)
    return None


def missing() -> list[str]:
    reason = emulator_reason()
    return [] if reason is None else [f"Not shown, the Blackwell kernel in softsm: {reason}"]


def fmha_cases() -> list[Case]:
    bf16 = torch.bfloat16

    def case(name: str, head_dim: int, maker: Callable, **options) -> Case:
        return Case("demo", name, partial(maker, d=head_dim, dtype=bf16, **options), head_dim)

    prefill = {"t": 384, "s": 384, "heads": 8, "kv_heads": 2}
    decode = {"t": 1, "s": 2048, "heads": 64, "kv_heads": 1}
    found = [
        case(f"causal prefill, 384 tokens, 8 heads on 2, head dim {d}", d, dense, size=prefill, causal=True)
        for d in (64, 128, 256, 512)
    ]
    return found + [
        case("decode, 2048 keys, 64 heads on 1, head dim 512", 512, dense, size=decode, causal=True),
        case("window 128 and sink, 8 heads on 1", 128, with_sink, sink="random", window=(127, 0),
             size={"t": 300, "s": 900, "heads": 8, "kv_heads": 1}),
        case("varlen, five sequences, one empty", 128, varlen, causal=True, heads=8,
             lengths=[(1, 700), (200, 200), (0, 30), (64, 320), (3, 3)]),
        case("paged, three sequences, pages of 64", 128, paged, page=64, lengths=[900, 64, 333], heads=8),
    ]  # fmt: skip


def v4_cases() -> list[Case]:
    names = {"swa": "window only", "csa": "window + top-k of ratio 4", "hca": "window + all of ratio 128"}
    found = []
    for kind, name in names.items():
        # The chunk ends past 128, where the window starts to move and the first ratio-128 row is there.
        prefill = partial(step, kind=kind, start=96, count=48, heads=64, topk=512)
        found.append(Case("demo", f"{kind.upper()}, {name}: prefill, tokens 96 to 143", prefill))
        draft = partial(
            step, kind=kind, start=4093, count=4, heads=64, topk=512, store="fp8", table=kind == "hca"
        )
        found.append(Case("demo", f"{kind.upper()}: 4 new tokens after 4093, FP8 rows", draft))
    mixed = [(1, 1), (300, 2), (127, 3), (900, 4)]
    steps = partial(batch, kind="hca", steps=mixed, heads=64)
    return [*found, Case("demo", "HCA: four requests with 1 to 4 new tokens", steps)]


def table(section: Section, results: list[Result]) -> Table:
    found = Table(title=f"{section.title}, on {section.where}", title_justify="left")
    found.add_column("what")
    for name in ("time", "error", "allowed", ""):
        found.add_column(name, justify="right")
    for result in results:
        norm = next((check for check in result.checks if check.name == "norm"), None)
        time = f"{result.seconds * 1e3:.1f} ms"
        if norm is None:
            found.add_row(escape(result.case.name), time, "-", "-", show.mark(result.ok))
        else:
            found.add_row(
                escape(result.case.name),
                time,
                show.number(norm.value),
                show.number(norm.bound),
                show.mark(result.ok),
            )
        if not result.ok:
            found.add_row(f"  [red]{escape(result.why())}[/]")
    return found
