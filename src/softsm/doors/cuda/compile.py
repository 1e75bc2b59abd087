"""A CUDA C++ program through clang: its kernels as PTX, its host side as a library with softsm's runtime.

clang needs no CUDA toolkit here: without one, the headers of include/ serve (what they lack is a compile error). With
CUDA_HOME, or --cuda-path among the flags, those of the toolkit are used.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from softsm.doors.cuda import sources
from softsm.engine.cache import cache_folder
from softsm.errors import SoftsmError

HERE = Path(__file__).parent
OLDEST = 20  # the first clang with sm_100a
SDK = "12.8"  # the interface between compiler and runtime
COMMON = (
    *("-x", "cuda", "-std=c++20", "-gline-tables-only", "-Wno-unknown-cuda-version"),
    *("-Xclang", f"-target-sdk-version={SDK}"),
)
# CUDA code expects that all is inlined: a lambda that is a function of its own keeps what it captures in local memory,
# and accumulators of wgmma would be stored there before they are complete.
DEVICE = ("--cuda-device-only", "-O3", "-S", "-mllvm", "-inline-threshold=20000")
HOST = ("--cuda-host-only", "-O1", "-fPIC", "-c")
RUNTIME = ("host.cpp", "graphs.cpp")  # the second is included in the first
LINK = ("-shared", "-Wl,-z,defs", "-Wl,-Bsymbolic", "-Wl,--wrap=exit", "-Wl,--wrap=abort")
IR = ("-x", "ir", "--target=nvptx64-nvidia-cuda", "-nocudalib", "-O3", "-S", "-Xclang", "-disable-llvm-passes")
CLUSTER_HEADERS = ("host_defines.h", "cuda_runtime.h", "softsm_toolkit.h")  # headers that define __cluster_dims__
OWN_HEADERS = (
    "softsm's own headers were used, which have no more than the essentials: with CUDA_HOME=folder of a CUDA toolkit "
    "(or --clang-flags --cuda-path=folder) the toolkit's serve"
)
PTX_FEATURE = {"sm_90a": "+ptx80", "sm_100a": "+ptx86", "sm_103a": "+ptx88"}


class CompileError(SoftsmError):
    """clang's own messages."""


@dataclass(frozen=True)
class Program:
    """A compiled program: the text of its kernels and the library with softsm_main."""

    ptx: str
    library: Path


def find_clang() -> str:
    """Returns the newest clang++ of this machine, or the one that SOFTSM_CLANG names."""
    named = os.environ.get("SOFTSM_CLANG")
    names = [named] if named else [*(f"clang++-{n}" for n in range(40, OLDEST - 1, -1)), "clang++"]
    for name in names:
        found = shutil.which(name)
        if found and version_of(found) >= OLDEST:
            return found
    raise CompileError(
        f"no clang {OLDEST} or newer was found ({'SOFTSM_CLANG=' + named if named else 'clang++ on the PATH'}); a CUDA "
        "C++ program needs it: for example `apt install clang-22`, or SOFTSM_CLANG=path of clang++"
    )


def version_of(clang: str) -> int:
    said = subprocess.run([clang, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"version (\d+)", said)
    return int(found[1]) if found else 0


def headers(flags: Sequence[str]) -> list[str]:
    """Returns the flags for a toolkit's headers, or for softsm's own."""
    toolkit = ["-idirafter", str(HERE / "toolkit"), "-include", "softsm_toolkit.h"]  # what it lacks
    if any(flag.startswith("--cuda-path") for flag in flags):
        return toolkit
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home and (Path(home) / "include" / "cuda_runtime.h").is_file():
        return [f"--cuda-path={home}", *toolkit]
    return ["-nocudainc", "-nocudalib", "-I", str(HERE / "include"), "-include", "cuda_runtime.h"]


def compiled(file: Path, arch: str, flags: Sequence[str] = ()) -> Program:
    """Compile, or find what was compiled of the same text, in the same folders, with the same flags."""
    common, used, folder = looked_up(file, arch, flags, HOST)
    if not (folder / "program.o").is_file():
        build(common, file, arch, folder, used)
    library = (
        folder / f"program-{digest(b''.join((HERE / x).read_bytes() for x in RUNTIME) + repr(LINK).encode())[:8]}.so"
    )
    if not library.is_file():
        link(common, folder, library)
    return Program((folder / "kernels.ptx").read_text(), library)


def kernels(file: Path, arch: str, flags: Sequence[str] = ()) -> str:
    """Returns the PTX of a file's kernels, as `compiled` does, without a host side."""
    common, used, folder = looked_up(file, arch, flags, ())
    if not (folder / "kernels.ptx").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:
            at = Path(made)
            device_text([*common, *sources.corrected(used, at)], file, arch, used, at, at / "kernels.ptx")
            os.replace(at / "kernels.ptx", folder / "kernels.ptx")
    return (folder / "kernels.ptx").read_text()


def looked_up(file: Path, arch: str, flags: Sequence[str], host: Sequence[str]) -> tuple[list[str], list[Path], Path]:
    """Returns (the common part of clang's commands, all files that are included, where their results are kept)."""
    clang = find_clang()
    common = [clang, *COMMON, f"--cuda-gpu-arch={arch}", *headers(flags), *sources.macros(arch), *flags]
    said = run([*common, "--cuda-host-only" if host else "--cuda-device-only", "-M", str(file)])
    used = sorted({Path(word) for word in said.replace("\\\n", " ").split(":", 1)[1].split()})
    facts = [
        *(*common, *DEVICE, *host),
        *map(str, sources.rules(used).values()),
        *(f"{path.resolve()} {digest(path.read_bytes())}" for path in used),
    ]
    return common, used, cache_folder() / "cuda" / digest("\n".join(facts).encode())


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def build(common: list[str], file: Path, arch: str, folder: Path, used: Sequence[Path]) -> None:
    """Compiles the program by clang, without the runtime, to kernels.ptx and program.o."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        at, whole = Path(made), Path(made) / "whole"
        whole.mkdir()
        common = [*common, *sources.corrected(used, at)]
        device_text(common, file, arch, used, at, whole / "kernels.ptx")
        # The runtime gets PTX as text, with an end, where a fat binary would be.
        (at / "embedded").write_bytes((whole / "kernels.ptx").read_bytes() + b"\0")
        embed = ["-Xclang", "-fcuda-include-gpubinary", "-Xclang", str(at / "embedded")]
        run([*common, *HOST, *embed, str(file), "-o", str(whole / "program.o")])
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(whole, folder)


def device_text(common: list[str], file: Path, arch: str, used: Sequence[Path], at: Path, ptx: Path) -> None:
    """Compiles the kernels to PTX. at: a folder for what lies between."""
    known = PTX_FEATURE.get(arch)
    feature = ["-Xclang", "-target-feature", "-Xclang", known] if known else []
    device = [*common, *DEVICE, *feature, str(file), "-o"]
    if any(b"__cluster_dims__(" in path.read_bytes() for path in used if path.name not in CLUSTER_HEADERS):
        clustered(device, [common[0], *IR, f"-march={arch}", *feature], at, ptx)
    else:
        run([*device, str(ptx)])


def clustered(device: list[str], back_end: list[str], at: Path, ptx: Path) -> None:
    """Restores __cluster_dims__, which clang 22 drops. softsm's headers make it an annotation, which is in LLVM's
    text, not in PTX; there the directive is written after the kernel's parameters."""
    text = run([*device, "-", "-emit-llvm"])
    dims = cluster_dims(text)
    (at / "kernels.ll").write_text(re.sub(r"^@llvm\.global\.annotations = .*\n", "", text, flags=re.M))
    made = run([*back_end, str(at / "kernels.ll"), "-o", "-"])
    for name, sides in dims.items():
        directive = rf"\1\n.explicitcluster\n.reqnctapercluster {', '.join(sides)}"
        made = re.sub(rf"(\.entry {re.escape(name)}\([^)]*\))", directive, made)
    ptx.write_text(made)


def cluster_dims(text: str) -> dict[str, list[str]]:
    """Returns the cluster dimensions of each kernel that has the annotation."""
    constants = dict(re.findall(r'^(@[\w.]+) = .*constant (.*), section "llvm.metadata"', text, re.M))
    listed = re.search(r"^@llvm\.global\.annotations = .*", text, re.M)
    entry = r"\{ ptr @([\w.$]+), ptr (@[\w.]+), ptr @[\w.]+, i32 \d+, ptr (@[\w.]+) \}"
    return {
        name: re.findall(r"i\d+ (\d+)", constants[args])
        for name, label, args in re.findall(entry, listed[0] if listed else "")
        if "softsm_cluster" in constants[label]
    }


def link(common: list[str], folder: Path, library: Path) -> None:
    """Links with the runtime, which may change, or lack a function, while the program stays what it is."""
    with tempfile.TemporaryDirectory(dir=folder) as made:
        host, linked = Path(made) / "host.o", Path(made) / "program.so"
        run([*common, *HOST, "-Wno-main", str(HERE / "host.cpp"), "-o", str(host)])
        run([common[0], *LINK, str(folder / "program.o"), str(host), "-o", str(linked)])
        os.replace(linked, library)


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        missing = sorted(set(re.findall(r"undefined reference to `(\w+)", done.stderr)))
        if missing:
            raise CompileError(f"softsm's CUDA runtime has no {', '.join(missing)}")
        why = f"\n{OWN_HEADERS}" if "-nocudainc" in command else ""
        raise CompileError(f"clang failed:\n{done.stderr.rstrip()}{why}")
    return done.stdout
