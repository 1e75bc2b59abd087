"""`dsv4 support` generates from the code which backend runs what; the table in the README is its output.

Each feature is a small problem, built by the same functions as a user's call. A kernel package answers for itself
through its `supports(problem)`; without such a module the cell is "not yet".
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from dsv4.caches.kv import Fp8Cache
from dsv4.fmha import problem
from dsv4.fmha.backward import FmhaBackward
from dsv4.runtime import checks
from dsv4.v4 import problem as v4_problem
from dsv4.v4.backward import V4Backward
from dsv4_command import usage

BEGIN = "<!-- support matrix: made by `dsv4 support --write README.md` -->"
END = "<!-- end of support matrix -->"
SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Column:
    """A backend: its title, and the kernel package, or None for the CPU path."""

    title: str
    package: str | None


COLUMNS = (
    Column("CPU", None),
    Column("Hopper, sm_90a", "sm90"),
    Column("Blackwell, sm_100a: proven in emulation, never run on silicon", "sm100"),
)


@cache
def module(column: Column, operation: str, backward: bool) -> Any | None:
    name = f"dsv4.{operation}.{'backward_cpu' if backward else 'cpu'}"
    if column.package is not None:
        name = f"dsv4.{operation}.kernels.{column.package}.{'backward' if backward else 'entry'}"
    return importlib.import_module(name) if importlib.util.find_spec(name) else None


def answer(column: Column, one: Any) -> bool | None:
    """Return whether this backend runs this problem; None: it has no such operation yet."""
    found = module(column, one.operation, one.backward)
    if found is None:
        return None
    if column.package is None:
        return True  # the CPU path runs whatever passed validation
    if one.q.dtype not in checks.LOW_PRECISION:
        return False  # dispatch rejects it
    return found.supports(one) is None


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def dense(d: int = 128, heads: int = 4, kv_heads: int = 4, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    k, v = (zeros(1, 9, kv_heads, d, dtype=dtype) for _ in "kv")
    return ready(problem.dense(zeros(1, 5, heads, d, dtype=dtype), k, v, **options))


def strided() -> Any:
    q, k, v = (zeros(1, 4, n, 128).transpose(1, 2) for n in (5, 9, 9))
    return ready(problem.dense(q, k, v))


def same() -> Any:
    k = zeros(1, 9, 1, 512)
    return ready(problem.dense(zeros(1, 5, 4, 512), k, k))


def varlen() -> Any:
    k, v = (zeros(9, 4, 128) for _ in "kv")
    return ready(problem.varlen(zeros(5, 4, 128), k, v, int32(0, 2, 5), int32(0, 4, 9)))


def paged(page: int, gap: int = 0) -> Any:
    k, v = (zeros(3, page + gap, 1, 128)[:, :page] for _ in "kv")
    return ready(problem.paged(zeros(1, 2, 4, 128), k, v, int32(2, 0)[None], int32(page + 1)))


def v4(
    fp8: bool = False,
    heads: int = 64,
    how: str = "window",
    rope: bool = False,
    sink: bool = True,
    dtype: torch.dtype = torch.bfloat16,
) -> Any:
    pool = Fp8Cache.empty(2, 64) if fp8 else zeros(2, 64, 512, dtype=dtype)
    options: dict[str, Any] = {"sink": torch.zeros(heads)} if sink else {}
    if how == "list":
        options.update(compressed=pool, compressed_indices=int32(3, -1)[None])
    elif how == "table":
        options.update(compressed=pool, compressed_block_table=int32(1)[None], compressed_lengths=int32(7))
    if rope:
        options["inverse_rope"] = (torch.zeros(8, 64), int32(5))
    return ready(v4_problem.build(zeros(1, heads, 512, dtype=dtype), pool, int32(0, 1, 2)[None], **options))


def v4_gradients() -> list[Any]:
    kinds = itertools.product(("window", "list", "table"), checks.LOW_PRECISION)
    return [gradients(v4(how=how, rope=True, dtype=dtype)) for how, dtype in kinds]


def ready(one: Any) -> Any:
    """Return the problem as a backend gets it: with its outputs."""
    return replace(one, out=torch.zeros_like(one.q), lse=torch.zeros(one.lse_shape))


def gradients(p: Any) -> Any:
    """Return the request for all gradients of a problem."""
    dsink = torch.zeros(p.q_heads if p.operation == "fmha" else p.q.shape[1])
    if p.operation == "fmha":
        return FmhaBackward(p, p.out, None, p.q, p.k, p.v, dsink if p.sink is not None else None)
    return V4Backward(p, p.out, None, p.q, p.window, p.compressed, dsink)


def gradients_of(d: int) -> list[Any]:
    options: list[dict[str, Any]] = [{}, {"causal": True, "sink": torch.zeros(4)}, {"window": (7, 2), "kv_heads": 2}]
    return [gradients(dense(d, dtype=dtype, **one)) for dtype in checks.LOW_PRECISION for one in options]


# A feature counts when every one of its problems runs.
FEATURES: list[tuple[str, Callable[[], list[Any]]]] = [
    ("causal", lambda: [dense(causal=True)]),
    ("window (left, right)", lambda: [dense(window=(127, 3))]),
    ("sink", lambda: [dense(sink=torch.zeros(4))]),
    ("GQA and MQA", lambda: [dense(heads=6, kv_heads=n) for n in (2, 1)]),
    ("strided inputs", lambda: [strided()]),
    ("k and v one tensor", lambda: [same()]),
    ("varlen", lambda: [varlen()]),
    ("paged, power-of-two pages", lambda: [paged(n) for n in (8, 64, 256)]),
    ("paged, any page size and stride", lambda: [paged(1), paged(12, gap=1)]),
    ("V4 window-only layer", lambda: [v4()]),
    ("V4 CSA: list of compressed rows", lambda: [v4(how="list")]),
    ("V4 HCA: block table of compressed rows", lambda: [v4(how="table")]),
    ("V4 in fp16", lambda: [v4(how=how, dtype=torch.float16) for how in ("window", "list", "table")]),
    ("V4 with FP8 rows of 584 bytes", lambda: [v4(fp8=True, how="list")]),
    ("V4 with 1 to 128 heads", lambda: [v4(heads=n) for n in (1, 3, 16, 64, 128)]),
    ("V4 with inverse RoPE in the epilogue", lambda: [v4(rope=True)]),
    ("gradients, head dim 64", lambda: gradients_of(64)),
    ("gradients, head dim 128", lambda: gradients_of(128)),
    ("gradients, head dim 256", lambda: gradients_of(256)),
    ("gradients, head dim 512", lambda: gradients_of(512)),
    ("gradients, varlen", lambda: [gradients(varlen())]),
    ("gradients, V4", v4_gradients),
]


def cell(answers: list[bool | None]) -> str:
    if None in answers:
        return "not yet"
    return "yes" if all(answers) else "no"


def matrix() -> str:
    """Return the table as Markdown."""
    lines = ["| | " + " | ".join(column.title for column in COLUMNS) + " |", "|---" * (1 + len(COLUMNS)) + "|"]
    for d in checks.HEAD_DIMS:
        cells = []
        for column in COLUMNS:
            answers = {dtype: answer(column, dense(d, dtype=dtype)) for dtype in SHORT}
            if None in answers.values():
                cells.append("not yet")
            else:
                cells.append(", ".join(SHORT[dtype] for dtype, yes in answers.items() if yes) or "no")
        lines.append(f"| head dim {d} | " + " | ".join(cells) + " |")
    for name, make in FEATURES:
        lines.append(
            f"| {name} | " + " | ".join(cell([answer(column, one) for one in make()]) for column in COLUMNS) + " |"
        )
    return "\n".join(lines)


def replaced(text: str) -> str:
    """Return `text` with the matrix of today between the two marks."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"the file must contain the marks {BEGIN!r} and {END!r} once each")
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n\n{matrix()}\n\n{END}{rest.split(END)[1]}"


def support(write: Path | None) -> None:
    if write is None:
        print(matrix())
        return
    try:
        text = replaced(write.read_text())
    except ValueError as why:
        usage.refuse(f"{write}: {why}")
    write.write_text(text)
    print(f"wrote the support matrix into {write}")
