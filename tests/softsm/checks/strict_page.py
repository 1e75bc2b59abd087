"""Writes docs/strict.md: what the strict level says about the Triton programs of tests/triton and the kernels here.

    python tests/softsm/checks/strict_page.py              # all of it, some minutes
    python tests/softsm/checks/strict_page.py -k matmul    # further arguments go to pytest; the page is printed only
"""

from __future__ import annotations

import os
import re
import sys
from collections import defaultdict
from pathlib import Path

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import pytest
import torch
import triton

import softsm
from softsm.checks.checking import checking

HERE = Path(__file__).resolve().parents[3]
PAGE = HERE / "docs" / "strict.md"
TARGETS = ("sm_90a", "sm_100a")
HEAD = f"""# What the strict level says

Written by `python tests/softsm/checks/strict_page.py` with Triton {triton.__version__}.

Strict takes PTX 9.4 to the letter; at the default level all of these programs are silent. The findings mean the
compiler's output, not the source: Triton relies on `bar.sync` and mbarrier waits where PTX also asks for
`tcgen05.fence`, on `bar.sync` alone to show an mbarrier to the copy engine, on register dependencies behind
`tcgen05.ld`, and writes over mbarriers that are done without `mbarrier.inval`.

## Exhibits of the museum that the default level does not name

| exhibit | level | why |
|---|---|---|
| 11 | values | the program is legal and computes something else: only a comparison with a reference shows it |
| 12 | values | as 11; `softsm explain tcgen05.ld.16x256b` draws which row each lane holds |
| 13 | values | as 12 |
| 14 | strict | a box outside its tensor is legal and brings zeros, which programs that mask the tile count on |
| 27 | strict | programs make NaN in rows that are masked as a whole and replace it later: there it is no mistake |
| 29 | values | as 12 |

1, 2, 7 and 18 need `softsm.expect_mma`, at either level: PTX does not say which element was meant. 8 is named by it,
and without it at the strict level, as 14.

## The counts below

The numbers count programs; `-` is none. A pair of instructions stands for the two parties of a finding.
"""
NOISE = re.compile(r"mbarrier [^ ]+( \(0x[0-9a-f]+\))?( of CTA rank \d+)?|0x[0-9a-f]+|\(\d+, \d+, \d+\)|%?[a-z]*\d+")


def kind(diagnostic) -> tuple[str, str, str]:
    """(code, what without names and numbers, the instructions of both parties)."""
    text = NOISE.sub("#", diagnostic.message).replace("# #", "#")
    instructions = [re.sub(r"^@!?%\w+\s+", "", p.instruction).split(" ")[0] for p in diagnostic.parties]
    names = [x.rstrip(";").split(".")[: 3 if ".bulk" in x else 2] for x in instructions]
    return diagnostic.code, text, ", ".join(".".join(name) for name in names)


class Collector:
    """A pytest plugin: every test under the strict checkers, its findings counted."""

    def __init__(self) -> None:
        self.found: dict[tuple, dict[str, set]] = defaultdict(lambda: defaultdict(set))
        self.ran: dict[str, set] = defaultdict(set)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        with checking(strict=True) as report:
            result = yield
        if report.launches:
            self.count(item.nodeid, target_of(item.name), report)
        return result

    def count(self, name: str, target: str, report) -> None:
        self.ran[target].add(name)
        for diagnostic in report:
            if not diagnostic.raised:
                self.found[kind(diagnostic)][target].add(name)

    def table(self) -> str:
        lines = [f"| code | what | instructions | {' | '.join(TARGETS)} |", "|---|---|---|---|---|"]
        for key, targets in sorted(self.found.items()):
            counts = " | ".join(str(len(targets[t])) if targets[t] else "-" for t in TARGETS)
            lines.append(f"| `{key[0]}` | {key[1]} | `{key[2]}` | {counts} |")
        total = " | ".join(str(len(self.ran[t])) for t in TARGETS)
        return "\n".join([*lines, f"| | programs | | {total} |", ""])


def target_of(name: str) -> str:
    return "sm_90a" if "sm_90a" in name or "sm90" in name else "sm_100a" if "sm_100a" in name else active()


def active() -> str:
    return softsm.active_arch() or "sm_100a"


def kernels(collector: Collector) -> None:
    """FMHA of every head dim, on both targets."""
    import dsv4

    for target in TARGETS:
        for head_dim in (64, 128, 256, 512):
            q, k, v = (torch.randn(1, n, 1, head_dim).bfloat16() for n in (16, 256, 256))
            with softsm.use(target), checking(strict=True) as report:
                dsv4.fmha(q, k, v, deterministic=True, backend="softsm")
            collector.count(f"fmha {head_dim}", target, report)


def main(arguments: list[str]) -> int:
    programs, own = Collector(), Collector()
    status = pytest.main(["-q", "-p", "no:cacheprovider", str(HERE / "tests" / "triton"), *arguments], [programs])
    if not arguments:
        kernels(own)
    page = HEAD + "\n## Triton programs (`tests/triton`)\n\n" + programs.table()
    page += "\n## FMHA kernels (head dims 64, 128, 256 and 512)\n\n" + own.table()
    if arguments:
        print(page)
    else:
        PAGE.write_text(page)
    return int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
