"""The gate of a refactoring: is the machine code still the same?

    python benchmarks/sass.py -o before.json                       (at the commit before)
    python benchmarks/sass.py --like before.json -o after.json     (at the commit after: the same variants)
    python benchmarks/sass.py --compare before.json after.json

Of each kernel it compiles as many variants as it takes to meet every value of every compile-time constant and every
type of every argument once (`variants.representative`): for sm_90a, and with Triton 3.9 for sm_100a too. To use another
Triton put it first in PYTHONPATH. No GPU is needed.

A variant's label is where `dsv4 compile` finds it: the part of the work, and its number there. So it survives renamed
kernels, constants and parameters. What is compared, from strict to lax:

ptx      PTX without debug information and the kernel's name. Equal PTX is equal SASS, so ptxas runs once for each.
sass     SASS without addresses and targets of branches. What lies in the constant bank is compared without its offset,
         since parameters that become members of a struct may move; so are immediates that add up to the address of a
         tensor map there.
opcodes  The sequence of opcodes: the same program, other registers.
figures  Registers, bytes of stack, spills (STL, LDL) and instructions; how often each opcode occurs in PTX and SASS.
         ptxas orders, unrolls and copies differently for the slightest change: equal counts in PTX with equal registers
         and spills are what a change that moves lines can reach.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")

PARAMETER = re.compile(r"c\[0x0\]\[(0x[0-9a-f]+|[^\]]*)\]")
OPCODE = re.compile(r"^(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")


def labelled(arch: str) -> dict[str, tuple]:
    """All variants that `dsv4 compile` knows: label -> launch, each once."""
    from dsv4.commands import variants
    from dsv4.runtime import aot
    from dsv4.runtime.checks import HEAD_DIMS

    found, known = {}, set()
    for kinds, sizes in variants.EVERYTHING:
        for part in variants.wanted(kinds, HEAD_DIMS, variants.DTYPES):
            names = {}
            for x in variants.launches(part, sizes, arch):
                names.setdefault(aot.variant_of(x, arch), x)
            for number, (name, x) in enumerate(names.items()):
                if name not in known:
                    known.add(name)
                    found[f"{arch} {' '.join(map(str, part))} page {sizes.page_size} #{number}"] = x
    return found


def to_ptx(launch, capability: int) -> tuple[str, dict]:
    """triton.compile up to PTX -> it, and what the compiler says of it."""
    from triton._C.libtriton import ir

    from dsv4.runtime import aot

    source, backend, options = aot.source_of(launch.kernel, launch.arguments, launch.constants, capability)
    options = backend.parse_options(options.__dict__)
    metadata = {"target": backend.target, **options.__dict__}
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options)
    module = source.make_ir(backend.target, options, functions, backend.get_module_map(), context)
    stages: dict = {}
    backend.add_stages(stages, options, source.language)
    for stage, compile_stage in stages.items():
        if stage == "cubin":
            break
        module = compile_stage(module, metadata)
    metadata["assemble"] = stages["cubin"]
    return module, metadata


def measured(label: str, launch, texts: Path | None) -> dict:
    import triton
    from triton.runtime.cache import get_cache_manager

    capability = 90 if label.startswith("sm_90a") else 100
    ptx, metadata = to_ptx(launch, capability)
    plain = ptx.replace(metadata["name"], "kernel")
    plain = re.sub(r"//.*", "", plain[: plain.find(".section")] if ".section" in plain else plain)
    digest = hash_of(plain)
    kept = get_cache_manager(hash_of(f"sass 2 {triton.__version__} {metadata['name']} {digest}"))
    known = kept.get_file("sass.json")
    if known is None:
        sass, usage = disassembled(metadata["assemble"](ptx, metadata))
        known = kept.put(json.dumps([sass, usage]), "sass.json", binary=False)
    sass, usage = json.loads(Path(known).read_text())
    lines = normalised(sass)
    opcodes = [m[1] for line in lines if (m := OPCODE.match(line))]
    if texts is not None:
        texts.mkdir(parents=True, exist_ok=True)
        (texts / (re.sub(r"\W+", "-", label) + ".sass")).write_text("\n".join(lines) + "\n")
        (texts / (re.sub(r"\W+", "-", label) + ".ptx")).write_text(plain)
    return {
        "kernel": launch.kernel.__name__,
        "constants": launch.constants,
        "ptx": digest,
        "sass": hash_of("\n".join(lines)),
        "opcodes": hash_of(" ".join(opcodes)),
        "registers": number(r"REG:(\d+)", usage),
        "stack": number(r"STACK:(\d+)", usage),
        "shared": metadata["shared"],
        "spills": sum(x.split(".")[0] in ("STL", "LDL") for x in opcodes),
        "instructions": len(opcodes),
        "counts": dict(sorted(Counter(x.split(".")[0] for x in opcodes).items())),
        "ptx_counts": dict(sorted(Counter(re.findall(r"^\s+(?:@!?%\w+\s+)?([a-z][\w.:]*)\s", plain, re.M)).items())),
    }


def disassembled(cubin: bytes) -> tuple[str, str]:
    """(SASS, resource usage)"""
    from dsv4.kernels.figures import tool

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool("cuobjdump"), "-sass", "-res-usage", file.name]
        both = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return both, next(line for line in both.splitlines() if "REG:" in line)


def normalised(sass: str) -> list[str]:
    from dsv4.kernels.figures import instructions

    lines, in_bank = [], False
    for _, text in instructions(sass):
        # A tensor map's generic address: c[0x0][0x208] or so, and its offset as an immediate in the instructions after.
        found = PARAMETER.search(text)
        in_bank = in_bank or (found is not None and "UL" in text and ".64" in text)
        text = re.sub(r"\bBRA(.*?) 0x[0-9a-f]+", r"BRA\1", PARAMETER.sub("c[0x0][]", text))
        if in_bank and re.match(r"(@\S+ )?U?IADD3(\.64)? ", text):
            text = re.sub(r"0x[0-9a-f]+", "0x", text)
        lines.append(re.sub(r"\s+", " ", text))
    while lines and (lines[-1] == "NOP" or lines[-1].startswith("BRA")):
        lines.pop()
    return lines


def hash_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found[1]) if found else 0


FIGURES = "registers", "stack", "shared", "spills", "instructions"


def differences(before: dict[str, dict], after: dict[str, dict]) -> list[str]:
    """One line for each variant that is not the same."""
    lines = []
    for label, old in before.items():
        new = after.get(label)
        if new is None:
            continue
        if new["ptx"] != old["ptx"] and new["sass"] != old["sass"]:
            changed = [f"{name} {old[name]} -> {new[name]}" for name in FIGURES if new[name] != old[name]]
            kind = "same opcodes" if new["opcodes"] == old["opcodes"] else "other code"
            ptx, sass = (moved(old[name], new[name]) for name in ("ptx_counts", "counts"))
            figures = ", ".join(changed) or "equal figures"
            lines.append(f"{label}: {new['kernel']}: {kind}; {figures}; PTX: {ptx}; SASS: {sass}")
    return lines


def moved(before: dict[str, int], after: dict[str, int]) -> str:
    counts = Counter(after)
    counts.subtract(before)
    return ", ".join(f"{name} {count:+d}" for name, count in sorted(counts.items()) if count) or "equal counts"


def main(
    output: Annotated[Path | None, typer.Option("-o", help="Where the figures go, as JSON.")] = None,
    like: Annotated[Path | None, typer.Option(help="Take the variants of this file, not a new choice.")] = None,
    kernel: Annotated[str, typer.Option(help="Only kernels whose names match this regular expression.")] = "",
    texts: Annotated[Path | None, typer.Option(help="Keep PTX and SASS here.")] = None,
    compare: Annotated[tuple[Path, Path] | None, typer.Option(help="List what differs between two files.")] = None,
) -> None:
    if compare is not None:
        before, after = (json.loads(path.read_text())["variants"] for path in compare)
        lines = differences(before, after)
        both = before.keys() & after.keys()
        same = sum(before[x]["ptx"] == after[x]["ptx"] for x in both)
        print(
            *lines,
            f"{len(both)} variants: {same} with equal PTX, {len(both) - same - len(lines)} with equal SASS, "
            f"{len(lines)} different; {len(before) - len(both)} only in the first file",
            sep="\n",
        )
        raise typer.Exit(bool(lines))
    import triton

    from dsv4.commands import variants
    from dsv4.kernels.compat import TRITON_VERSION

    chosen = {}
    wanted = None if like is None else json.loads(like.read_text())["variants"]
    for arch in ("sm_90a", "sm_100a")[: 2 if TRITON_VERSION >= (3, 9) else 1]:
        found = labelled(arch)
        if wanted is None:
            few = {id(x) for x in variants.representative(found.values(), every_size=True)}
            chosen |= {label: x for label, x in found.items() if id(x) in few}
        else:
            chosen |= {label: x for label, x in found.items() if label in wanted}
    chosen = {label: x for label, x in chosen.items() if re.search(kernel, x.kernel.__name__)}
    results = {}
    for label, x in chosen.items():
        results[label] = measured(label, x, texts)
        print(f"{len(results)}/{len(chosen)} {label}: {x.kernel.__name__}", file=sys.stderr, flush=True)
    text = json.dumps({"triton": triton.__version__, "variants": results}, indent=1, sort_keys=True, default=str) + "\n"
    print(text) if output is None else output.write_text(text)


if __name__ == "__main__":
    typer.run(main)
