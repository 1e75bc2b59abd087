"""`dsv4 kernels`: what the compiled Blackwell kernels cost; docs/kernels.md is its output."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from dsv4.fmha import problem
from dsv4.runtime import calls, checks, dispatch
from dsv4.runtime.program import Launch

from . import show
from .variants import v4_small

DIMS = checks.HEAD_DIMS
WAYS = ("rows", "pages", "cells")  # how keys are read: see dsv4/kernels/shared/loads.py
PATHS = [(d, p_tmem) for d in DIMS for p_tmem in (True, False) if not (p_tmem and d == 512)]
COLUMNS = (
    "threads | registers | by role | shared memory, bytes | tensor memory, columns | stack, bytes | spills, bytes | "
    "spills in main loops | instructions"
)
HEAD = """\
# What the Blackwell kernels cost

Made by `dsv4 kernels --write docs/kernels.md`, on any machine: the compiler and the assembler come with Triton. The
kernels, in `src/dsv4/kernels/sm100`, are `forward.py` and, for pairs of CTAs, `forward_pair.py` (FMHA), `listed.py` and
`listed_pair.py` (V4 attention); their first pages, and that of `pair_roles.py`, have the roles, the memory maps and the
barriers. None of them has run on a Blackwell GPU;
[timing.md](timing.md) has the times that softsm's model predicts.
"""

FIGURES = """\
P: through tensor or shared memory. Keys: `rows` of dense and varlen tensors by TMA, `pages` of 64 rows by TMA, `cells`
of other pages by cp.async; `pair`: dense tensors, by TMA, for a pair of CTAs, whose figures are for each. Registers: at
launch, and what `setmaxnreg` makes of them in the roles and while they idle. Spills: bytes stored / loaded, as the
assembler counts them; those in main loops are instructions, counted in the SASS.

K or V whose base or strides are no multiples of 16 bytes can be read in none of the three ways: such a tensor is copied
once per call, on the device, before the kernel. Where k is v and one query tile is in flight (head dims 256 and 512,
`rows` and `pages`), a tile is loaded once for both products.
"""

V4 = """\
V4 attention, 64 heads at a time in one CTA, 128 in a pair of CTAs, whose figures are for each. Rows: `bf16` by TMA
gather; `odd pages` by cp.async, where rows are not equally far apart; `fp8` through registers; `mixed`: the window an
Fp8Cache, the compressed rows plain, by cp.async. Named: by no compressed list, a list, or a block table.
"""
FMHA_CONCLUSION = """
At head dims 64 and 128 two query tiles are in flight, so that the softmax of one runs under the products of the other;
at 256 and 512 the scores of the next keys are computed under the softmax of these. A pair of CTAs (head dim 512, dense,
128 rows or more) has the full rate of the tensor cores, and half of K and of V to bring and to read: 2944 cycles for
128 keys, where one CTA needs 5504. Its row is what each of the two does.
"""
V4_BUDGET = """\
V4 attention, a block of rows for 64 heads of a query: what one CTA does, alone or as one of a pair. L2: the bytes that
come from there. Device memory: where no row is found in L2, and a pair reads a row once.
"""
V4_CONCLUSION = """\
A pair needs 2944 cycles for 128 keys where one CTA needs 4480, both bound by shared memory: the tensor cores run at
their full rate, and Q is read once for twice as many keys. It does not take fewer bytes from L2: a product over a pair
has its right operand in halves, of K by rows and of V by columns, so that each CTA needs half of a block as K and half
as V, and an FP8 row is converted as often as by one CTA.

With keys instead of heads as the rows of the products (S and O transposed) the tensor core would run at its full rate
in one CTA too, but shared memory would still need 2112 cycles for 64 keys: blocks of 128 keys read Q half as often, and
each of the four tiles of O reads P."""
V4_VARIANTS = (
    (64, "bf16", "window only"), (64, "bf16", "list"), (64, "bf16", "table"), (64, "odd pages", "list"),
    (64, "fp8", "window only"), (64, "fp8", "list"), (64, "fp8", "table"), (64, "mixed", "list"),
    (128, "bf16", "window only"), (128, "bf16", "list"), (128, "bf16", "table"), (128, "fp8", "window only"),
    (128, "fp8", "list"), (128, "fp8", "table"),
)  # fmt: skip


def kernels(
    arch: Annotated[str, typer.Option(help="sm_100a")] = "sm_100a",
    head_dim: Annotated[list[int] | None, typer.Option(help="64, 128, 256, 512; default all")] = None,
    way: Annotated[list[str] | None, typer.Option(help="rows, pages, cells; default all")] = None,
    operation: Annotated[list[str] | None, typer.Option(help="fmha, v4; default both")] = None,
    write: Annotated[Path | None, typer.Option(help="write the page to this file")] = None,
) -> None:
    """Registers, memory and spills of every variant, and the instruction budget of its main loop."""
    show.chosen("--arch", [arch], ["sm_100a"])
    operations = show.chosen("--operation", operation, ("fmha", "v4"))
    ways, dims = show.chosen("--way", way, WAYS), show.chosen("--head-dim", head_dim, DIMS)
    console = show.console()
    rows, v4_rows = [], []
    for d, p_tmem in PATHS if "fmha" in operations else ():
        for how in ways:
            # Pages are read by a warp of their own: the P path makes no difference to it, so one is enough.
            if d in dims and (how == "rows" or p_tmem == (d < 512)):
                line = variant_line(d, p_tmem, how)
                console.print(line, soft_wrap=True, markup=False)
                rows.append(line)
    if "fmha" in operations and "rows" in ways and 512 in dims:
        rows.append(variant_line(512, None, "pair"))
        console.print(rows[-1], soft_wrap=True, markup=False)
    for variant in V4_VARIANTS if "v4" in operations else ():
        line = v4_line(*variant)
        console.print(line, soft_wrap=True, markup=False)
        v4_rows.append(line)
    page = "\n".join([HEAD, *figures_section(rows), "", *v4_section(v4_rows), "", *budget_section()]) + "\n"
    if write is None:
        console.print(page, soft_wrap=True, markup=False)
    else:
        write.write_text(page)


def launch_of(
    head_dim: int, p_tmem: bool | None, how: str, dtype: torch.dtype = torch.bfloat16
) -> Launch:
    """As a call would launch it; nothing runs."""
    q = torch.empty(1, 256, 1, head_dim, dtype=dtype)
    if how in ("rows", "pair"):
        k = torch.empty(1, 256, 1, head_dim, dtype=dtype)
        p = problem.dense(q, k, torch.empty_like(k))
    else:
        k = torch.empty(2, 64 if how == "pages" else 12, 1, head_dim, dtype=dtype)
        table = torch.zeros(1, 4, dtype=torch.int32)
        p = problem.paged(q, k, torch.empty_like(k), table, torch.zeros(1, dtype=torch.int32))
    p = replace(p, out=torch.empty_like(q), lse=torch.empty(p.lse_shape), num_splits=1)
    return calls.launches_of(p, dispatch.compile_target("sm_100a"), **({} if p_tmem is None else {"p_tmem": p_tmem}))[0]


def v4_launch_of(heads: int, rows: str, named: str) -> Launch:
    """The same of V4 attention."""
    return calls.launches_of(v4_small(rows, named, heads=heads), dispatch.compile_target("sm_100a"))[0]


def v4_line(heads: int, rows: str, named: str) -> str:
    return f"| {heads} | {rows} | {named} | {compiled_cells(v4_launch_of(heads, rows, named))} |"


def compiled_cells(launch: Launch) -> str:
    from dsv4.kernels.figures import figures
    from dsv4.runtime import aot

    started = time.perf_counter()
    compiled = aot.compile_kernel(launch.kernel, launch.arguments, launch.constants, capability=100)
    f = figures(compiled, "sm_100a", time.perf_counter() - started)
    regs = " ".join(str(n) for n in f.setmaxnreg)
    return (f"{f.threads} | {f.registers} | {regs} | {f.shared} | {f.tensor_memory} | {f.stack} | "
            f"{f.spill_stores} / {f.spill_loads} | {f.loop_spills} | {f.instructions}")  # fmt: skip


def variant_line(head_dim: int, p_tmem: bool | None, how: str) -> str:
    path = "tensor" if p_tmem else "shared"
    return f"| {head_dim} | {path} | {how} | {compiled_cells(launch_of(head_dim, p_tmem, how))} |"


def figures_section(rows: list[str]) -> Iterator[str]:
    import triton

    yield f"## Figures of the assembler\n\nbf16, sm_100a, Triton {triton.__version__}, its own ptxas with `-v`.\n"
    yield FIGURES
    yield f"| head dim | P | keys | {COLUMNS} |"
    yield "|---:|---|---|---:|---:|---|---:|---:|---:|---:|---:|---:|"
    yield from rows


def v4_section(rows: list[str]) -> Iterator[str]:
    yield V4
    yield f"| heads | rows | named | {COLUMNS} |"
    yield "|---:|---|---|---:|---:|---|---:|---:|---:|---:|---:|---:|"
    yield from rows


def budget_section() -> Iterator[str]:
    from dsv4.kernels.sm100 import budget

    text = (budget.__doc__ or "").split("\n", 2)[2].strip()
    yield f"## Budget of one main-loop iteration\n\n{text}\n"
    yield "| head dim | P | rows x keys | MMAs | tensor cycles | exponentials | exp cycles | shared memory, bytes | "\
        "its cycles | tensor memory, bytes | bottleneck | tensor core busy at best |"  # fmt: skip
    yield "|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---|---:|"
    budgets = [(d, "tensor" if p_tmem else "shared", budget.budget(d, p_tmem)) for d, p_tmem in PATHS]
    for d, path, b in [*budgets, (512, "shared, pair", budget.pair_budget())]:
        yield (f"| {d} | {path} | {b.rows} x {b.keys} | {b.mma} | {b.tensor_cycles} | "
               f"{b.exponentials} | {b.exp_cycles} | {b.shared_bytes} | {b.shared_cycles} | {b.tensor_memory_bytes} | "
               f"{b.bottleneck} | {b.tensor_share:.0%} |")  # fmt: skip
    yield ""
    yield FMHA_CONCLUSION
    yield V4_BUDGET
    yield "| CTAs | rows | keys | MMAs | tensor cycles | exp cycles | shared memory, bytes | its cycles | L2, bytes | "\
        "device memory, bytes | its cycles |"  # fmt: skip
    yield "|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    for ctas in (1, 2):
        for rows in ("bf16", "fp8"):
            c = budget.listed(rows, ctas)
            yield (f"| {c.ctas} | {rows} | {c.keys} | {c.mma} | {c.tensor_cycles} | {c.exp_cycles} | "
                   f"{c.shared_bytes} | {c.shared_cycles} | {c.l2_bytes} | {c.device_bytes} | "
                   f"{c.device_cycles} |")  # fmt: skip
    yield f"\n{V4_CONCLUSION}"
