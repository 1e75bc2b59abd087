"""`dsv4 demo` does the main job on this machine, whatever it has, and compares every result with the oracle."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dsv4 import suites
from dsv4.runtime import dispatch
from dsv4.suites import Case, Result, Where
from dsv4.suites.fmha_cases import dense, paged, varlen, with_sink
from dsv4.suites.v4_cases import batch, step
from dsv4.suites.v4_layer_cases import layer

from . import show


@dataclass(frozen=True)
class Section:
    """A table of the demo: what it shows, where and why not somewhere better, and the cases that it runs."""

    title: str
    where: Where
    note: str
    cases: list[Case]


def demo(seed: int | None) -> None:
    seed = secrets.randbits(31) if seed is None else seed
    out = show.console()
    out.print(f"[bold]dsv4[/] on {machine()}, seed {seed}")
    results = []
    for section in sections():
        if section.where.backend == "softsm":
            results += emulated(out, section, seed)
            continue
        if section.where.backend == "cuda":  # the times below are without compilation
            show.run_with_progress(section.cases, section.where, seed, f"compiling: {section.title}")
        ran = show.run_with_progress(section.cases, section.where, seed, section.title)
        out.print(table(section, ran))
        if section.note:
            out.print(f"[dim]{escape(section.note)}[/]")
        results += ran
    reason = emulator_reason()
    if reason is not None:
        out.print(f"[dim]Not shown, the Blackwell kernel in softsm: {escape(reason)}[/]")
    raise typer.Exit(show.closing_line(results))


def emulated(out: Console, section: Section, seed: int) -> list[Result]:
    """Run the kernel in softsm: every asynchronous operation completes as late as it may, races are looked for, work is
    counted."""
    import softsm

    with softsm.counting() as activity, softsm.checking(order="latest") as report:
        ran = show.run_with_progress(section.cases, section.where, seed, section.title)
    out.print(table(section, ran))
    out.print(roles_table(activity))
    if report:
        out.print(f"[bold red]{len(report)} findings of the checker:[/]\n{escape(str(report))}", soft_wrap=True)
        return [replace(result, error=result.error or "softsm found a race") for result in ran]
    out.print(
        f"No race, no uninitialised read found in {report.launches} launches; copies and products completed as "
        "late as they may."
    )
    return ran


def roles_table(activity: Any) -> Table:
    """Return a table of who did what, over all CTAs of the cases above."""
    found = Table(title="Who did what in the Blackwell kernel", title_justify="left")
    for name in ("role", "warps", "instructions", "TMA loads", "products", "TMEM loads", "TMEM stores"):
        found.add_column(name, justify="left" if name == "role" else "right")
    for name, role in sorted(activity.roles.items(), key=lambda item: item[0]):
        if name == "-":
            continue  # warps that fill up a warpgroup, and other small kernels
        cells = [_amount(role.operations.get(kind)) for kind in ("TMA load", "tcgen05.mma", "tcgen05.ld", "tcgen05.st")]
        found.add_row(name.removesuffix("_role"), str(role.warps), f"{role.instructions:,}", *cells)
    return found


def _amount(amount: Any | None) -> str:
    if amount is None or not amount.count:
        return "-"
    return f"{amount.count:,}" + (f" ({amount.bytes / 1024:,.0f} KiB)" if amount.bytes else "")


def machine() -> str:
    threads = torch.get_num_threads()
    cpu = f"a CPU ({threads} thread{'s' * (threads > 1)})"
    return f"{torch.cuda.get_device_name()} and {cpu}" if torch.cuda.is_available() else cpu


def sections() -> list[Section]:
    found = [
        Section("Fused multi-head attention", *best("fmha"), fmha_cases()),
        Section("DeepSeek-V4 attention, head dim 512", *best("v4"), v4_cases()),
    ]
    if emulator_reason() is None:
        where = Where("softsm", "sm_100a")
        found.append(Section("Blackwell FMHA kernel, compiled and run in softsm", where, "", blackwell_cases()))
    return found


def best(operation: str) -> tuple[Where, str]:
    """Return the best backend for this operation here, and what keeps a better one from being it."""
    if not torch.cuda.is_available():
        return Where("cpu"), ""
    try:
        dispatch.kernel_module(operation, dispatch.capability_of())
    except RuntimeError as why:
        return Where("cpu"), f"On the CPU, not on the GPU: {why}"
    return Where("cuda").resolve(), ""


def blackwell_cases() -> list[Case]:
    """Return one case of the suite `seeds` per head dim."""
    cases = [case for case in suites.seeds() if case.name.endswith("-t4-s256")]
    return [
        replace(case, suite="demo", name=f"4 queries, 256 keys, 8 heads on 1, head dim {case.head_dim}")
        for case in cases
    ]


def emulator_reason() -> str | None:
    """Return why the Blackwell kernel cannot run in softsm here; None if it can."""
    try:
        Where("softsm", "sm_100a").resolve()
        dispatch.kernel_module("fmha", (10, 0))
    except (RuntimeError, ImportError) as why:
        return str(why)
    return None


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
    """Return a whole layer of each kind, prefill and then drafts; decode at the sizes of V4-Flash; a mixed batch."""
    names = {"swa": "window only", "csa": "window + top-k of ratio 4", "hca": "window + all of ratio 128"}
    found = []
    for kind, name in names.items():
        # 120 + 1 + 2 + 3 + 4 tokens end past 128: the window moves on and the first ratio-128 row is there.
        whole = partial(layer, kind=kind, steps=[120, 1, 2, 3, 4], heads=16)
        found.append(Case("demo", f"{kind.upper()} layer, {name}: 120 tokens, then 1, 2, 3, 4", whole))
    for kind in names:
        draft = partial(step, kind=kind, start=4093, count=4, heads=64, topk=512, store="fp8", table=kind == "hca")
        found.append(Case("demo", f"{kind.upper()} decode: 4 tokens after 4093, 64 heads, FP8 rows", draft))
    mixed = partial(batch, kind="hca", steps=[(1, 1), (300, 2), (127, 3), (900, 4)], heads=64)
    return [*found, Case("demo", "HCA decode: four requests with 1 to 4 tokens, 64 heads, FP8 rows", mixed)]


def table(section: Section, results: list[Result]) -> Table:
    found = Table(title=f"{section.title}, on {section.where}", title_justify="left")
    found.add_column("what")
    emulated = section.where.backend == "softsm"
    for name in ("time with compilation" if emulated else "time", "error", "allowed", ""):
        found.add_column(name, justify="right")
    for result in results:
        norm = next((check for check in result.checks if check.name == "norm"), None)
        time = f"{result.seconds * 1e3:.1f} ms"
        if norm is None:
            found.add_row(escape(result.case.name), time, "-", "-", show.mark(result.ok))
        else:
            found.add_row(
                escape(result.case.name), time, show.number(norm.value), show.number(norm.bound), show.mark(result.ok)
            )
        if not result.ok:
            found.add_row(f"  [red]{escape(result.why())}[/]")
    return found
