"""NVRTC, as far as programs need it that compile CUDA C++ while they run: cuda-bindings, cuda.core, TileLang.

clang compiles the text, with the headers that doors/cuda/compile.py chooses. What the program gets as PTX or as a cubin
is PTX, which functions.py loads.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from softsm.doors.cuda import compile as clang
from softsm.doors.driver import library
from softsm.engine.cache import cache_folder
from softsm.errors import SoftsmError

SONAMES = ("libnvrtc.so.12", "libnvrtc.so.13")
VERSION = (12, 8)
SUCCESS, INVALID_INPUT, INVALID_PROGRAM, INVALID_OPTION, COMPILATION = 0, 3, 4, 5, 6
NO_NAMES_AFTER, NO_NAMES_BEFORE, NAME_NOT_VALID, INTERNAL = 8, 9, 10, 11
ERRORS = {
    0: "SUCCESS", 1: "ERROR_OUT_OF_MEMORY", 2: "ERROR_PROGRAM_CREATION_FAILURE", 3: "ERROR_INVALID_INPUT",
    4: "ERROR_INVALID_PROGRAM", 5: "ERROR_INVALID_OPTION", 6: "ERROR_COMPILATION",
    7: "ERROR_BUILTIN_OPERATION_FAILURE", 8: "ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION",
    9: "ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION", 10: "ERROR_NAME_EXPRESSION_NOT_VALID", 11: "ERROR_INTERNAL_ERROR",
}  # fmt: skip
ARCHITECTURES = (75, 80, 86, 87, 89, 90, 100, 101, 103, 120)
TAIL = f"""
const char *nvrtcGetErrorString(int status) {{
    switch (status) {{
        {" ".join(f'case {n}: return "NVRTC_{name}";' for n, name in ERRORS.items())}
    }}
    return "NVRTC_ERROR unknown";
}}
"""
MARK = "softsm_name_expression_"  # of the variable whose initial value is the name that an expression has in PTX
# Functions without an attribute are the device's too. clang wants the host's own headers outside of that.
BEGIN, END = (f'_Pragma("clang force_cuda_host_device {x}")' for x in ("begin", "end"))
# Options that are passed on, or that are read here; the long and the short name of an option mean the same.
SAME = {
    "gpu-architecture": "arch", "include-path": "I", "define-macro": "D", "undefine-macro": "U",
    "pre-include": "include", "device-as-default-execution-space": "default-device",
}  # fmt: skip
PASSED = {"I": "-I", "D": "-D", "U": "-U", "include": "-include", "std": "-std="}
CHANGES = {
    "use_fast_math": ["-ffast-math"],
    "ftz=true": ["-fgpu-flush-denormals-to-zero"],
    "fmad=false": ["-ffp-contract=off"],
}
# What else NVRTC accepts is about speed, messages and files; it changes no result.
ACCEPTED = set(
    "pch create-pch use-pch pch-dir pch-messages instantiate-templates-in-pch no-cache lineinfo generate-line-info "
    "device-debug G dopt Ofast-compile ptxas-options Xptxas maxrregcount relocatable-device-code rdc device-c dc "
    "extensible-whole-program ewp dlink-time-opt dlto time split-compile fdevice-time-trace minimal restrict "
    "diag-error diag-suppress diag-warn disable-warnings w display-error-number err-no no-display-error-number "
    "no-err-no extra-device-vectorization modify-stack-limit optimization-info version-ident builtin-initializer-list "
    "builtin-move-forward no-source-include brief-diagnostics device-int128 device-float128 jump-table-density "
    "device-stack-protector fdevice-syntax-only ftz prec-div prec-sqrt fmad frandom-seed".split()
)
OF_NVCC = re.compile(r"O\d|W.*|expt-.*|extended-lambda")  # programs of TileLang have its flags
VALUES = {*PASSED, "arch", "maxrregcount", "ptxas-options", "Xptxas", "diag-error", "diag-suppress", "diag-warn"}

COMMENT_OR_STRING = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"'
INCLUDE, KERNEL = r"(?P<include>^[ \t]*\#[ \t]*include\b[^\n]*)\n", r"(?P<kernel>\b__global__\b[^{;]*[{;])"
TOKEN = re.compile("|".join((COMMENT_OR_STRING, INCLUDE, KERNEL)), re.M | re.S)


class UnknownOption(SoftsmError):
    """An option that NVRTC does not have."""


@dataclass
class Source:
    """One program: what was given, then what was made of it. Texts end with a zero byte."""

    text: str
    name: str
    headers: dict[str, str]
    expressions: list[str] = field(default_factory=list)
    ptx: bytes = b""
    log: bytes = b"\0"
    lowered: dict[str, ctypes.Array] = field(default_factory=dict)


def options_of(given: list[str], arch: str) -> tuple[str, list[str], bool]:
    """Returns (architecture, options of clang, whether functions without an attribute are of the device)."""
    flags: list[str] = []
    default_device = False
    words = iter(given)
    for word in words:
        name, equals, value = word.strip().lstrip("-").partition("=")
        name, space, rest = name.partition(" ")
        value = rest.strip() if space else value
        if name[:1] in "IDU" and len(name) > 1 and SAME.get(name, name) not in ACCEPTED:  # -DNAME=value
            name, value = name[0], name[1:] + equals + value
        name = SAME.get(name, name)
        if name in VALUES and not value:
            value = next(words, "")
        whole = f"{name}={value}" if value else name
        if name == "arch":
            number = re.sub(r"^(compute|sm|lto)_", "", value)
            arch = f"sm_{number}".replace("f", "a")
        elif name == "default-device":
            default_device = True
        elif whole in CHANGES:
            flags += CHANGES[whole]
        elif name == "I" and value.rstrip("/").endswith("cuda/std"):
            continue  # in place of the standard library, which clang has itself
        elif name in PASSED:
            flags += [f"{PASSED[name]}{value}"] if name != "include" else [PASSED[name], value]
        elif name not in ACCEPTED and not OF_NVCC.fullmatch(name):
            raise UnknownOption(f"nvrtc: error: unrecognized option {word} found")
    return arch, flags, default_device


def compile_source(source: Source, given: list[str], arch: str) -> None:
    """Compiles to PTX, and finds the names of the expressions there."""
    arch, flags, default_device = options_of(given, arch)
    lines = [f"__device__ auto {MARK}{n} = {expression_address(x)};" for n, x in enumerate(source.expressions)]
    body = for_device(source.text) if default_device else source.text
    text = "\n".join([f'#line 1 "{source.name}"', body, *lines, ""])
    parts = [text, *(x for pair in sorted(source.headers.items()) for x in pair)]
    folder = cache_folder() / "nvrtc" / clang.digest("\0".join(parts).encode())
    for name, content in source.headers.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "softsm_program.cu"
    file.write_text(text)
    number = re.sub(r"\D", "", arch)
    flags += [f"-D__CUDA_ARCH_LIST__={number}0", "-I", str(folder), "-fdebug-compilation-dir=."]
    ptx = clang.kernels(file, arch, flags)
    initial = re.compile(rf"^.*\b{MARK}(\d+) = (?:generic\()?([\w$]+)\)?;\n", re.M)
    source.lowered = {
        source.expressions[int(n)]: ctypes.create_string_buffer(name.encode()) for n, name in initial.findall(ptx)
    }
    source.ptx = initial.sub("", ptx).encode() + b"\0"


def for_device(text: str) -> str:
    """Returns the text with functions of the device where no attribute says otherwise; but not in what it includes, and
    not for kernels, where clang accepts no further attribute."""

    def outside(found: re.Match) -> str:
        if found["include"]:
            line = found.string.count("\n", 0, found.end()) + 1
            return f"{END}\n{found['include']}\n{BEGIN}\n#line {line}\n"
        return f"{END} {found['kernel']} {BEGIN}" if found["kernel"] else found[0]

    return f"{BEGIN} {TOKEN.sub(outside, text)}\n{END}"


def expression_address(expression: str) -> str:
    """Returns an expression for the address of what a name expression names."""
    expression = expression.strip()
    return expression if expression.startswith(("&", "(")) else f"&{expression}"


class Nvrtc:
    """The programs of one process. Methods called nvrtc... are the functions; a list has their arguments."""

    def __init__(self, arch: str, failed: Callable[[BaseException], None]):
        self.arch, self.failed = arch, failed
        self.sources: dict[int, Source] = {}
        self.made = 0

    def load(self) -> Callable[[], None]:
        """Loads the libraries; returns what ends that."""
        names = sorted(name for name in dir(self) if name.startswith("nvrtc"))
        text = library.source(names, TAIL)
        ends = [library.loaded(x, text, names, self.serve) for x in SONAMES if not library.is_another(x)]
        return library.all_of(ends)

    def serve(self, name: str, a: list[int]) -> int:
        """Serves a call of a library: no exception leaves it."""
        try:
            return getattr(self, name)(a)
        except KeyError:
            return INVALID_PROGRAM
        except BaseException as problem:
            self.failed(problem)
            return INTERNAL

    def of(self, handle: int) -> Source:
        return self.sources[handle]

    def nvrtcVersion(self, a: list[int]) -> int:
        return put(a[0], ctypes.c_int, VERSION[0]) or put(a[1], ctypes.c_int, VERSION[1])

    def nvrtcGetNumSupportedArchs(self, a: list[int]) -> int:
        return put(a[0], ctypes.c_int, len(ARCHITECTURES))

    def nvrtcGetSupportedArchs(self, a: list[int]) -> int:
        ctypes.memmove(a[0], (ctypes.c_int * len(ARCHITECTURES))(*ARCHITECTURES), 4 * len(ARCHITECTURES))
        return SUCCESS

    def nvrtcCreateProgram(self, a: list[int]) -> int:
        at, text, name, count, contents, names = a[:6]
        if not text:
            return INVALID_INPUT
        count &= 0xFFFFFFFF
        headers = dict(zip(texts(names, count), texts(contents, count), strict=True))
        self.made += 1
        self.sources[self.made] = Source(string(text), string(name) if name else "default_program", headers)
        return put(at, ctypes.c_uint64, self.made)

    def nvrtcDestroyProgram(self, a: list[int]) -> int:
        del self.sources[ctypes.c_uint64.from_address(a[0]).value]
        return put(a[0], ctypes.c_uint64, 0)

    def nvrtcAddNameExpression(self, a: list[int]) -> int:
        source = self.of(a[0])
        if source.ptx:
            return NO_NAMES_AFTER
        source.expressions.append(string(a[1]))
        return SUCCESS

    def nvrtcCompileProgram(self, a: list[int]) -> int:
        source = self.of(a[0])
        try:
            compile_source(source, texts(a[2], a[1] & 0xFFFFFFFF), self.arch)
        except UnknownOption as problem:
            source.log = f"{problem}\n".encode() + b"\0"
            return INVALID_OPTION
        except clang.CompileError as problem:
            print(f"softsm: {source.name}: {problem}", file=sys.stderr)  # many programs do not show the log
            source.log = f"{problem}\n".encode() + b"\0"
            return COMPILATION
        return SUCCESS

    def nvrtcGetPTXSize(self, a: list[int]) -> int:
        source = self.of(a[0])
        return put(a[1], ctypes.c_uint64, len(source.ptx)) if source.ptx else INVALID_PROGRAM

    def nvrtcGetPTX(self, a: list[int]) -> int:
        source = self.of(a[0])
        ctypes.memmove(a[1], source.ptx, len(source.ptx))
        return SUCCESS if source.ptx else INVALID_PROGRAM

    nvrtcGetCUBINSize, nvrtcGetCUBIN = nvrtcGetPTXSize, nvrtcGetPTX

    def nvrtcGetProgramLogSize(self, a: list[int]) -> int:
        return put(a[1], ctypes.c_uint64, len(self.of(a[0]).log))

    def nvrtcGetProgramLog(self, a: list[int]) -> int:
        source = self.of(a[0])
        ctypes.memmove(a[1], source.log, len(source.log))
        return SUCCESS

    def nvrtcGetLoweredName(self, a: list[int]) -> int:
        source, name = self.of(a[0]), string(a[1])
        if not source.ptx:
            return NO_NAMES_BEFORE
        if name not in source.lowered:
            return NAME_NOT_VALID
        return put(a[2], ctypes.c_uint64, ctypes.addressof(source.lowered[name]))


def put(at: int, form: Any, value: int) -> int:
    form.from_address(at).value = value
    return SUCCESS


def string(at: int) -> str:
    return ctypes.string_at(at).decode()


def texts(at: int, count: int) -> list[str]:
    """Returns the strings of an array of pointers."""
    return [string(x) for x in (ctypes.c_uint64 * count).from_address(at)] if count else []
