"""Published kernels in softsm: `make test-field SOURCES=folder`.

The folder holds checkouts of the projects (PROJECTS, with their commits); nothing of them is part of this repository.
Kernels with a main() of their own run as they are; the others are called by the programs in tests/field, which compare
with fp64. Each is compiled by clang 20 or newer with the headers of a CUDA toolkit (CUDA_HOME) and checked in every
order of completion. Every finding has a judgement here (JUDGED); one without it, or a wrong result, is a failure.

    python tools/field.py folder                     all
    python tools/field.py folder --only prefill      those with this in their names
    python tools/field.py folder --write             also put their lines into docs/field.md
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "field.md"
BEGIN, END = "<!-- made by tools/field.py -->", "<!-- end -->"
PROJECTS = {
    "cutlass": ("https://github.com/NVIDIA/cutlass", "7107b0553"),
    "FlashMLA": ("https://github.com/deepseek-ai/FlashMLA", "9241ae3"),
    "DeepGEMM": ("https://github.com/deepseek-ai/DeepGEMM", "54e2261"),
    "ThunderKittens": ("https://github.com/HazyResearch/ThunderKittens", "0b55588d"),
}
CUTE = ("-I{cutlass}/include", "-I{cutlass}/tools/util/include", "-I{cutlass}/examples/common", "-DNDEBUG")
MLA = ("-I{FlashMLA}/csrc", "-I{FlashMLA}/csrc/sm90", "-I{FlashMLA}/csrc/kerutils/include", *CUTE)
GEMM = ("-I{DeepGEMM}/deep_gemm/include", *CUTE)
TK = ("-I{ThunderKittens}/include", "-I{ThunderKittens}/prototype", "-DNDEBUG", "-DKITTENS_BLACKWELL")


@dataclass(frozen=True)
class Kernel:
    name: str
    project: str
    file: str  # of the project; of tests/field where it has no folder
    flags: tuple[str, ...]
    arch: str = "sm_100a"
    arguments: tuple[str, ...] = ()
    sms: int = 4


def tutorial(file: str, *arguments: str, sms: int = 4) -> Kernel:
    path = f"examples/cute/tutorial/blackwell/{file}"
    return Kernel(f"CuTe tutorial {file}", "cutlass", path, CUTE, arguments=arguments, sms=sms)


def gemm(file: str, element: str, arch: str) -> Kernel:
    source = f'-DSOURCE="{{cutlass}}/examples/cute/tutorial/{file}"'
    return Kernel(
        f"CuTe tutorial {Path(file).name}", "cutlass", "cute_gemm.cu", (*CUTE, source, f"-DTYPE={element}"), arch
    )


def prefill(name: str, source: str, call: str, heads: int, dim: int, arch: str = "sm_100a") -> Kernel:
    what = (f"-DHEADS={heads}", f"-DDIM={dim}", f"-DKERNEL={call}", f'-DSOURCE="{source}/phase1.cuh"')
    return Kernel(f"sparse prefill, {name}, head dim {dim}", "FlashMLA", "flashmla_prefill.cu", (*MLA, *what), arch)


def decode(name: str, source: str, call: str, heads: int, arch: str = "sm_100a") -> Kernel:
    what = (f"-DHEADS={heads}", f"-DKERNEL={call}", f'-DSOURCE="{source}"')
    return Kernel(f"sparse decode, FP8 rows, {name}", "FlashMLA", "flashmla_decode.cu", (*MLA, *what), arch)


def lesson(level: int, size: int) -> Kernel:
    source = f'-DSOURCE="{{ThunderKittens}}/kernels/gemm/educational_b200/level_0{level}.cu"'
    name = f"GEMM for B200, level {level}"
    return Kernel(name, "ThunderKittens", "thunderkittens.cu", (*TK, source, f"-DSIZE={size}"), sms=8)


SPARSE = "sm100/prefill/sparse"
KERNELS = (
    tutorial("01_mma_sm100.cu", "512", "512", "128"),
    tutorial("02_mma_tma_sm100.cu", "512", "1024", "128"),
    tutorial("03_mma_tma_multicast_sm100.cu", "512", "1024", "128", sms=16),
    tutorial("04_mma_tma_2sm_sm100.cu", "512", "1024", "128", sms=16),
    tutorial("05_mma_tma_epi_sm100.cu", "512", "1024", "128", sms=16),
    gemm("hopper/wgmma_sm90.cu", "cute::half_t", "sm_90a"),
    gemm("hopper/wgmma_tma_sm90.cu", "cute::half_t", "sm_90a"),
    gemm("sgemm_1.cu", "float", "sm_90a"),
    gemm("sgemm_2.cu", "float", "sm_90a"),
    gemm("sgemm_sm80.cu", "float", "sm_90a"),
    *(
        prefill(f"{heads} heads", f"{SPARSE}/fwd/head{heads}", f"sm100::fwd::head{heads}::run_fwd_phase1_kernel<DIM>",
                heads, dim)
        for heads in (64, 128)
        for dim in (512, 576)
    ),
    prefill("128 heads, few rows", f"{SPARSE}/fwd_for_small_topk/head128",
            "sm100::fwd_for_small_topk::head128::run_fwd_for_small_topk_phase1_kernel<SparseAttnFwdMode::Prefill,DIM>",
            128, 512),
    decode("64 heads", "sm100/decode/head64/kernel.cuh",
           "sm100::decode::head64::run_flash_splitkv_mla_fp8_sparse_kernel<ModelType::MODEL1>", 64),
    *(
        prefill("64 heads, Hopper", "sm90/prefill/sparse", "sm90::fwd::run_fwd_phase1_kernel<DIM,false>", 64, dim,
                "sm_90a")
        for dim in (512, 576)
    ),
    *(
        decode(f"{heads} heads, Hopper", "sm90/decode/sparse_fp8/splitkv_mla.cuh",
               f"sm90::decode::sparse_fp8::run_flash_splitkv_mla_fp8_sparse_kernel<ModelType::MODEL1,{heads}>", heads,
               "sm_90a")
        for heads in (64, 128)
    ),
    Kernel("bf16 GEMM", "DeepGEMM", "deepgemm.cu", (*GEMM, "-DCTAS=1")),
    Kernel("bf16 GEMM, two CTAs", "DeepGEMM", "deepgemm.cu", (*GEMM, "-DCTAS=2")),
    Kernel("FP8 GEMM", "DeepGEMM", "deepgemm.cu", (*GEMM, "-DFP8", "-DCTAS=1")),
    Kernel("FP8 GEMM, two CTAs", "DeepGEMM", "deepgemm.cu", (*GEMM, "-DFP8", "-DCTAS=2")),
    Kernel("bf16 GEMM, Hopper", "DeepGEMM", "deepgemm.cu", (*GEMM, "-DHOPPER"), "sm_90a"),
    *(lesson(level, 128) for level in (2, 3, 4)),
    *(lesson(level, 256) for level in (5, 6)),
    *(lesson(level, 512) for level in (7, 8)),
)  # fmt: skip

RELAXED = (
    "true by PTX: the only order is `barrier.cluster.arrive.relaxed`. It is deliberate there, and works on silicon"
)
CLANG = (
    "real, of the compiler: clang keeps accumulators in local memory and stores them there behind each `wgmma`, before "
    "it is complete"
)
# (in the kernel's name, code of the finding, in the place of one of its parties): the judgement. "real" also excuses a
# wrong result.
JUDGED: dict[tuple[str, str, str], str] = {
    ("tutorial 01", "race", "01_mma_sm100.cu:289 against 01_mma_sm100.cu:274"): "true by PTX. The tile is written by "
    "ordinary stores and read by `tcgen05.mma`, with a barrier between them but no `fence.proxy.async`",
    (
        "tutorial 02",
        "deadlock",
        "",
    ): "real, rare on silicon. All warps wait by parity at lines 318 and 335, and nothing keeps warp 0 from ending two "
    "phases while another warp has not looked; that one waits for a phase that never comes",
    (
        "wgmma_tma_sm90.cu",
        "in-flight",
        "wgmma_tma_sm90.cu:17",
    ): "real where K has fewer tiles than the pipeline has stages, "
    "as here: the load of the last stage is issued and nobody waits for it before the CTA ends",
    (
        "wgmma_sm90.cu",
        "race",
        "wgmma_sm90.cu:270",
    ): "real by PTX. Each thread waits for its own `cp.async` alone, and no "
    "barrier or fence follows before `wgmma` reads the copies of all",
    (
        "level 6",
        "deadlock",
        "",
    ): "real, rare on silicon. Warps 1 to 3 wait for `inputs_arrived` by parity, and nothing keeps "
    "warp 0 from ending two phases while one of them has not looked",
    ("decode, FP8 rows, 64 heads", "race", "kernel.cuh:229 against kernel.cuh:309"): "real, exhibit 30 of the museum. "
    "It makes the result wrong here; one barrier before line 309 mends both",
    ("64 heads, Hopper, head dim", "wgmma-registers", "helpers.h"): CLANG,
    ("GEMM, two CTAs", "race", "_gemm"): RELAXED + " (address of the tensor memory)",
    ("GEMM, two CTAs", "in-flight", "_gemm"): RELAXED + " (`tcgen05.dealloc`)",
}


def command(kernel: Kernel, sources: Path) -> list[str]:
    places = {name: str(sources / name) for name in PROJECTS}
    file = ROOT / "tests" / "field" / kernel.file if "/" not in kernel.file else sources / kernel.project / kernel.file
    flags = " ".join(f"'{flag.format(**places)}'" for flag in kernel.flags)
    words = ["check", str(file), "--json", "--arch", kernel.arch, "--sms", str(kernel.sms), "--clang-flags", flags]
    return [sys.executable, "-m", "softsm", *words, *(["--", *kernel.arguments] if kernel.arguments else [])]


def place(finding: dict) -> str:
    """`phase1.cuh:229 against :309`"""
    found = [f"{Path(p['source']['file']).name}:{p['source']['line']}" for p in finding["parties"] if p["source"]]
    return " against ".join(dict.fromkeys(found))


def named(finding: dict) -> str:
    return f"`{finding['code']}` {place(finding)}".rstrip()


def judgement(kernel: Kernel, finding: dict) -> str:
    for (name, code, at), text in JUDGED.items():
        if name in kernel.name and code == finding["code"] and at in place(finding):
            return text
    return ""


def rows(kernels: list[Kernel], sources: Path) -> Iterator[tuple[str, str, bool]]:
    """The first cell and the whole line of the table for each, and whether it is as it should be."""
    for kernel in kernels:
        where, began = f"{kernel.project}: {kernel.name} ({kernel.arch})", time.monotonic()
        done = subprocess.run(command(kernel, sources), capture_output=True, text=True, check=False)
        seconds = time.monotonic() - began
        if "{" not in done.stdout:
            print(f"{kernel.name}: {done.stderr[-2000:]}", file=sys.stderr)
            yield where, f"| {where} | does not run | |", False
            continue
        report = json.loads(done.stdout[done.stdout.index("{\n") :])
        for failure in report["failures"]:
            print(f"{kernel.name}: {failure['text']}", file=sys.stderr)
        unjudged = [f for f in report["findings"] if not judgement(kernel, f)]
        for f in unjudged:
            print(f"{kernel.name}: no judgement of {f['code']} {place(f)}: {f['message']}", file=sys.stderr)
        alike: dict[str, list[str]] = {}
        for f in report["findings"]:
            alike.setdefault(judgement(kernel, f) or "NOT JUDGED", []).append(named(f))
        found = [f"{', '.join(dict.fromkeys(names))}: {text}" for text, names in alike.items()]
        notes = sorted({named(w) for w in report["warnings"]})
        found += [f"warning {note}" for note in notes]
        excused = any(judgement(kernel, f).startswith("real") for f in report["findings"])
        right = "right" if not report["failures"] else "wrong, by that" if excused else "wrong"
        if right == "right" and any(f["stopped"] for f in report["findings"]):
            ended = set(report["orders"]) - {x for f in report["findings"] if f["stopped"] for x in f["orders"]}
            right = "right where it ends" if ended else "does not end"
        print(f"{kernel.name}: {right}, {seconds:.0f} s", file=sys.stderr)
        line = f"| {where} | {right} | {'; '.join(found) or 'nothing'} |"
        yield where, line, (not report["failures"] or excused) and not unjudged


def commits(sources: Path) -> list[str]:
    """Projects that are missing, or at another commit."""
    wrong = []
    for name, (address, commit) in PROJECTS.items():
        ask = ["git", "-C", str(sources / name), "rev-parse", "HEAD"]
        head = subprocess.run(ask, capture_output=True, text=True, check=False).stdout
        if not head.startswith(commit):
            wrong.append(f"git clone {address} {sources / name} && git -C {sources / name} checkout {commit}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, help="folder with the checkouts")
    parser.add_argument("--only", default="", help="kernels with this in their names")
    parser.add_argument("--write", action="store_true", help="put the lines into docs/field.md")
    options = parser.parse_args()
    sources = options.sources.resolve()
    wrong = commits(sources)
    if wrong:
        sys.exit("SOURCES: these are missing, or at another commit:\n" + "\n".join(wrong))
    if not (Path(os.environ.get("CUDA_HOME", "")) / "include" / "cuda_runtime.h").is_file():
        sys.exit("CUDA_HOME: the headers of a CUDA toolkit are needed (tested: 12.8)")
    kernels = [x for x in KERNELS if options.only in f"{x.project} {x.name}"]
    known = dict(re.findall(r"^\| ([^|]+) (\|.*)$", PAGE.read_text(), re.M))
    well = True
    for where, line, ok in rows(kernels, sources):
        known[where], well = line.removeprefix(f"| {where} "), well and ok
        print(line, flush=True)
        if options.write:
            write(known)
    sys.exit(not well)


def write(known: dict[str, str]) -> None:
    """The table of docs/field.md: a kernel that did not run now keeps its line."""
    names = [f"{x.project}: {x.name} ({x.arch})" for x in KERNELS]
    lines = [f"| {name} {known[name]}" for name in names if name in known]
    table = "\n".join([BEGIN, "| kernel | result | found |", "|---|---|---|", *lines, END])
    PAGE.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: table, PAGE.read_text(), flags=re.DOTALL))


if __name__ == "__main__":
    main()
