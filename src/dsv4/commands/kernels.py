"""`dsv4 kernels`: what the compiled Blackwell kernels cost; docs/kernels.md is its output."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from dsv4.fmha import problem
from dsv4.runtime import calls, checks, dispatch
from dsv4.runtime.program import Launch

from . import show
from .variants import v4_small

DIMS = checks.HEAD_DIMS
OPERATIONS = ("fmha", "v4")
KV_LOADS = ("rows", "pages", "cp_async")  # how keys are read: see dsv4/fmha/kernels/loads.py
PATHS = [(64, True), (128, True), (256, True), (256, False), (512, False)]  # head dim, P through tensor memory
COLUMNS = (
    "threads | registers | by role | shared memory, bytes | tensor memory, columns | stack, bytes | spills, bytes | "
    "spills in main loops | instructions"
)
HEAD = """\
# What the Blackwell kernels cost

`dsv4 kernels --write docs/kernels.md` generates this page on any machine; the compiler and the assembler are part of
Triton. None of these kernels has run on a Blackwell GPU; [timing.md](timing.md) has the times that softsm's model
predicts.

The kernels are in `src/dsv4/fmha/kernels/sm100` and `src/dsv4/v4/kernels/sm100`. For FMHA they are `forward.py`,
`forward_persistent.py` for CTAs that loop over work tiles and `forward_pair.py` for pairs of CTAs; for V4 attention
`sparse.py` and `sparse_pair.py`. Gradients are computed by `backward_keys.py`, `backward_tiles.py`,
`backward_scores.py` and `backward_products.py` (FMHA) and `backward_sparse.py` (V4). Each file begins with the roles,
the memory maps and the barriers; for pairs of CTAs they are also in `pair_roles.py`.
"""

FIGURES = """\
P goes through tensor memory or shared memory. Keys: `rows` are dense and varlen tensors, loaded by TMA; `pages` are
pages of 64 rows, by TMA; `cp_async` are other pages, by cp.async; `loop` is dense tensors, by TMA, for CTAs that
loop over work tiles; `pair` is dense tensors, by TMA, for a pair of CTAs, with the figures of each CTA. Registers: the
number at launch, then what `setmaxnreg` sets in the roles and while they idle. Spills: bytes stored / loaded, as the
assembler counts them. Spills in main loops: instructions, counted in the SASS.

If the base or the strides of K or V are not multiples of 16 bytes, none of the three ways can read it: the tensor
is copied once per call, on the device, before the kernel. If k is v and one query tile is in flight (head dims 256
and 512, `rows` and `pages`), a tile is loaded once for both products.
"""

V4 = """\
V4 attention: 64 heads at a time in one CTA, 128 in a pair of CTAs, with the figures of each CTA. Rows: `bf16` is
loaded by TMA gather; `odd pages` (rows that are not equally spaced) by cp.async; `fp8` goes through registers; in
`mixed` the window is an Fp8Cache and the compressed rows are plain, by cp.async. Named: how the compressed rows are
given: not at all (window only), by a list, or by a block table.
"""
FMHA_CONCLUSION = """
At head dims 64 and 128 two query tiles are in flight, so the softmax of one overlaps with the products of the
other. At 256 and 512 the scores of the next keys are computed during the softmax of the current ones. A pair of
CTAs (head dim 512, dense, 128 rows or more) uses the full rate of the tensor cores, and each CTA loads and reads
only half of K and V: 2944 cycles for 128 keys, where one CTA needs 5504. The row in the table is for each of the
two CTAs.
"""
V4_BUDGET = """\
V4 attention, a block of rows for 64 heads of a query: what one CTA does, alone or as one of a pair. L2: the bytes
loaded from it. Device memory: the bytes if no row is found in L2 and a pair reads a row once.
"""
V4_CONCLUSION = """\
A pair needs 2944 cycles for 128 keys where one CTA needs 4480; both are bound by shared memory. In a pair the
tensor cores run at their full rate, and Q is read once for twice as many keys. It does not load fewer bytes from
L2. The right operand of a pair's product is split in halves, K by rows and V by columns, so each CTA needs half of
a block as K and half as V, and an FP8 row is converted as often as in one CTA.

With keys instead of heads as the rows of the products (S and O transposed), the tensor core would run at its full
rate in one CTA too, but shared memory would still need 2112 cycles for 64 keys: blocks of 128 keys read Q half as
often, and each of the four tiles of O reads P."""
BACKWARD_BUDGET = """\
Gradients, one step: a tile of rows by keys. At head dims 64 and 128 a CTA owns keys (dK, dV) and adds dQ to a sum in
memory; the limit is shared memory, through which dS and dQ go. Where the order of additions must not change there are
two launches: each CTA of the first owns keys (dK, dV), each CTA of the second owns queries (dQ). At 256 and 512, P and
dS go to memory and a second kernel has the other products, because accumulators of 128 rows would fill tensor memory.
There shared memory is the limit: every operand is read once for 128 rows or keys; a pair of CTAs would halve that. V4's
products have 64 rows, so the tensor core runs at half its rate; V4 also adds 128 KiB of fp32 to memory for each block
of 64 rows.
"""
V4_VARIANTS = (
    (64, "bf16", "window only"), (64, "bf16", "list"), (64, "bf16", "table"), (64, "odd pages", "list"),
    (64, "fp8", "window only"), (64, "fp8", "list"), (64, "fp8", "table"), (64, "mixed", "list"),
    (128, "bf16", "window only"), (128, "bf16", "list"), (128, "bf16", "table"), (128, "fp8", "window only"),
    (128, "fp8", "list"), (128, "fp8", "table"),
)  # fmt: skip


def kernels(
    arch: str, head_dim: list[int] | None, kv_load: list[str] | None, operation: list[str] | None, write: Path | None
) -> None:
    operations, ways, dims = operation or OPERATIONS, kv_load or KV_LOADS, head_dim or DIMS
    console = show.console()
    rows, v4_rows = [], []
    for d, p_tmem in PATHS if "fmha" in operations else ():
        for how in ways:
            # A separate warp reads pages, and the P path makes no difference to it, so one path is enough.
            if d in dims and (how == "rows" or p_tmem == (d < 512)):
                line = variant_line(d, p_tmem, how)
                console.print(line, soft_wrap=True, markup=False)
                rows.append(line)
        if d in dims and "rows" in ways and d <= 128:
            rows.append(variant_line(d, None, "loop"))
            console.print(rows[-1], soft_wrap=True, markup=False)
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
        write.write_text(page + predicted_section(write))


PREDICTED = "\n## Predicted times\n"  # benchmarks/timing.py writes this section


def predicted_section(path: Path) -> str:
    """Return the part of the page about the model's times, which is kept when the rest is written again."""
    text = path.read_text() if path.exists() else ""
    return text[text.index(PREDICTED) :] if PREDICTED in text else ""


def launch_of(head_dim: int, p_tmem: bool | None, how: str, dtype: torch.dtype = torch.bfloat16) -> Launch:
    """Return the launch that a call would make; nothing runs."""
    target = dispatch.compile_target("sm_100a")
    q = torch.empty(1, 256 * (target.num_sms if how == "loop" else 1), 1, head_dim, dtype=dtype)
    if how in ("rows", "pair", "loop"):
        k = torch.empty(1, 256, 1, head_dim, dtype=dtype)
        p = problem.dense(q, k, torch.empty_like(k))
    else:
        k = torch.empty(2, 64 if how == "pages" else 12, 1, head_dim, dtype=dtype)
        table = torch.zeros(1, 4, dtype=torch.int32)
        p = problem.paged(q, k, torch.empty_like(k), table, torch.zeros(1, dtype=torch.int32))
    p = replace(p, out=torch.empty_like(q), lse=torch.empty(p.lse_shape), num_splits=1)
    return calls.launches_of(p, target, **({} if p_tmem is None else {"p_tmem": p_tmem}))[0]


def v4_launch_of(heads: int, rows: str, named: str) -> Launch:
    """Return the same of V4 attention."""
    return calls.launches_of(v4_small(rows, named, heads=heads), dispatch.compile_target("sm_100a"))[0]


def v4_line(heads: int, rows: str, named: str) -> str:
    return f"| {heads} | {rows} | {named} | {compiled_columns(v4_launch_of(heads, rows, named))} |"


def compiled_columns(launch: Launch) -> str:
    from dsv4.kernels.figures import figures
    from dsv4.runtime import aot

    compiled = aot.compile_kernel(launch.kernel, launch.arguments, launch.constants, capability=100)
    f = figures(compiled, "sm_100a")
    regs = " ".join(str(n) for n in f.setmaxnreg)
    return (
        f"{f.threads} | {f.registers} | {regs} | {f.shared} | {f.tensor_memory} | {f.stack} | "
        f"{f.spill_stores} / {f.spill_loads} | {f.loop_spills} | {f.instructions}"
    )


def variant_line(head_dim: int, p_tmem: bool | None, how: str) -> str:
    path = "tensor" if p_tmem or how == "loop" else "shared"
    return f"| {head_dim} | {path} | {how} | {compiled_columns(launch_of(head_dim, p_tmem, how))} |"


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
    from dsv4.fmha.kernels.sm100 import budget

    text = (budget.__doc__ or "").split("\n", 2)[2].strip()
    yield f"## Budget of one main-loop iteration\n\n{text}\n"
    yield (
        "| head dim | P | rows x keys | MMAs | tensor cycles | exponentials | exp cycles | shared memory, bytes | "
        "its cycles | tensor memory, bytes | bottleneck | tensor core busy at best |"
    )
    yield "|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---|---:|"
    budgets = [(d, "tensor" if p_tmem else "shared", budget.budget(d, p_tmem)) for d, p_tmem in PATHS]
    for d, path, b in [*budgets, (512, "shared, pair", budget.pair_budget())]:
        yield (
            f"| {d} | {path} | {b.rows} x {b.keys} | {b.mma} | {b.tensor_cycles} | "
            f"{b.exponentials} | {b.exp_cycles} | {b.shared_bytes} | {b.shared_cycles} | {b.tensor_memory_bytes} | "
            f"{b.bottleneck} | {b.tensor_share:.0%} |"
        )
    yield ""
    yield FMHA_CONCLUSION
    yield V4_BUDGET
    yield (
        "| CTAs | rows | keys | MMAs | tensor cycles | exp cycles | shared memory, bytes | its cycles | L2, bytes | "
        "device memory, bytes | its cycles |"
    )
    yield "|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    for ctas in (1, 2):
        for rows in ("bf16", "fp8"):
            c = budget.sparse(rows, ctas)
            yield (
                f"| {c.ctas} | {rows} | {c.keys} | {c.mma} | {c.tensor_cycles} | {c.exp_cycles} | "
                f"{c.shared_bytes} | {c.shared_cycles} | {c.l2_bytes} | {c.device_bytes} | "
                f"{c.device_cycles} |"
            )
    yield f"\n{V4_CONCLUSION}\n"
    yield BACKWARD_BUDGET
    yield (
        "| kernel | rows x keys | products | tensor cycles | exp cycles | shared memory, bytes | its cycles | "
        "tensor core busy at best |"
    )
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    for g in budget.backward_budgets():
        yield (
            f"| {g.kernel} | {g.rows} x {g.keys} | {g.products} | {g.tensor_cycles} | {g.exp_cycles} | "
            f"{g.shared_bytes} | {g.shared_cycles} | {g.tensor_share:.0%} |"
        )
