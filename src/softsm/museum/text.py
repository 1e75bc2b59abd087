"""Builds small PTX kernels as text, for the exhibits of the museum and the tests of the rules.

A kernel made by `kernel` has %r0 = thread, %r1 = warp, %r2 = lane, %p0 = (thread 0), 64-bit parameters in
%rd1, %rd2, ...
(a name ending in '!' is a 128-byte tensor map: its address). Registers from %r10, %rd10, %p4 and %f0 on are free; the
snippets below use %r90-%r99, %rd30-%rd39 and %p10-%p11 for themselves.
"""

from __future__ import annotations

import itertools
import struct

_labels = itertools.count()
ONES = 0x3F803F80  # two bf16 ones


def kernel(
    body: str,
    params: str = "",
    *,
    shared: str = "",
    target: str = "sm_100a",
    version: str = "8.8",
    directives: str = "",
) -> str:
    declared, loads = [], []
    for i, name in enumerate(params.split(), 1):
        if name.endswith("!"):
            declared.append(f".param .align 128 .b8 {name[:-1]}[128]")
            loads.append(f"mov.b64 %rd{i}, {name[:-1]};\ncvta.param.u64 %rd{i}, %rd{i};")
        else:
            declared.append(f".param .u64 {name}")
            loads.append(f"ld.param.u64 %rd{i}, [{name}];\ncvta.to.global.u64 %rd{i}, %rd{i};")
    return "\n".join(
        (
            f".version {version}",
            f".target {target}",
            ".address_size 64",
            f".visible .entry k({', '.join(declared)}) {directives}",
            "{",
            ".reg .b32 %r<200>; .reg .b64 %rd<40>; .reg .pred %p<12>; .reg .f32 %f<140>; .reg .b16 %h<8>;",
            shared,
            *loads,
            "mov.u32 %r0, %tid.x;",
            "shr.u32 %r1, %r0, 5;",
            "and.b32 %r2, %r0, 31;",
            "setp.eq.u32 %p0, %r0, 0;",
            body,
            "ret;",
            "}",
            "",
        )
    )


def names(first: int, count: int, prefix: str = "%r") -> str:
    return "{" + ", ".join(f"{prefix}{first + i}" for i in range(count)) + "}"


def only(condition: str, body: str) -> str:
    """Guards the body: other threads jump over it. condition: '%p0', or 'warp 3', 'thread 32'."""
    label = f"SKIP{next(_labels)}"
    test = ""
    if condition.startswith(("warp", "thread")):
        what, number = condition.split()
        test = f"setp.eq.u32 %p10, {'%r1' if what == 'warp' else '%r0'}, {number};\n"
        condition = "%p10"
    return f"{test}@!{condition} bra {label};\n{body}\n{label}:\n"


def wait(barrier: str, parity: str | int, suffix: str = "") -> str:
    """Spins until the phase of that parity has completed."""
    label = f"WAIT{next(_labels)}"
    return (
        f"{label}:\nmbarrier.try_wait.parity{suffix}.shared::cta.b64 %p11, [{barrier}], {parity};\n"
        f"@!%p11 bra {label};\n"
    )


def init(*barriers: tuple[str, int] | str, fence: bool = True) -> str:
    """Thread 0 initialises the mbarriers (name, count) and makes them visible; all threads wait."""
    pairs = [b if isinstance(b, tuple) else (b, 1) for b in barriers]
    lines = [f"@%p0 mbarrier.init.shared::cta.b64 [{name}], {count};" for name, count in pairs]
    if fence:
        lines.append("@%p0 fence.mbarrier_init.release.cluster;")
    return "\n".join([*lines, "bar.sync 0;\n"])


def alloc(columns: int, to: str = "%r3") -> str:
    """Warp 0 allocates columns of tensor memory; every thread gets their address in `to`."""
    request = f"tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [place], {columns};"
    return only("warp 0", request) + f"bar.sync 0;\nld.shared.u32 {to}, [place];\n"


def dealloc(columns: int, address: str = "%r3", sync: bool = True) -> str:
    free = f"tcgen05.dealloc.cta_group::1.sync.aligned.b32 {address}, {columns};"
    return ("bar.sync 0;\n" if sync else "") + only("warp 0", free)


def fill(name: str, size: int, word: int = ONES, threads: int = 128) -> str:
    """The first threads fill a shared array with one word, 16 bytes at a time."""
    lines = [f"mov.u32 %r90, {name};", "shl.b32 %r91, %r0, 4;", "add.u32 %r90, %r90, %r91;", f"mov.b32 %r92, {word};"]
    for at in range(0, size, 16 * threads):
        lines += [
            f"setp.lt.u32 %p10, %r0, {min(threads, (size - at) // 16)};",
            f"@%p10 st.shared.v4.b32 [%r90+{at}], {{%r92, %r92, %r92, %r92}};",
        ]
    return "\n".join(lines) + "\n"


def descriptor(
    to: str, name: str, lbo: int = 128, sbo: int = 256, swizzle: int = 0, offset: int = 0, blackwell: bool = True
) -> str:
    """Writes the matrix descriptor of a shared array to a 64-bit register."""
    fixed = (lbo >> 4) << 16 | (sbo >> 4) << 32 | (1 << 46 if blackwell else 0) | swizzle << 61
    fixed = fixed - (1 << 64) if fixed >> 63 else fixed
    return (
        f"mov.u32 %r90, {name};\nadd.u32 %r90, %r90, {offset};\nshr.u32 %r90, %r90, 4;\nand.b32 %r90, %r90, 0x3fff;\n"
        f"cvt.u64.u32 %rd30, %r90;\nor.b64 {to}, %rd30, {fixed};\n"
    )


def idesc(m: int = 128, n: int = 8, *, kind: str = "bf16", b_mn: bool = False) -> int:
    """Returns the instruction descriptor of kind::f16 (bf16 -> f32)."""
    code = {"f16": 0, "bf16": 1}[kind]
    return 1 << 4 | code << 7 | code << 10 | (n >> 3) << 17 | (m >> 4) << 24 | (1 << 16 if b_mn else 0)


def mma(d: str, a: str, b: str, what: int, add: int = 0, group: int = 1) -> str:
    """Issues tcgen05.mma kind::f16 in every thread that reaches it; `a` in brackets lies in tensor memory."""
    return (
        f"setp.ne.u32 %p11, {add}, 0;\nmov.u32 %r90, {what};\n"
        f"tcgen05.mma.cta_group::{group}.kind::f16 [{d}], {a}, {b}, %r90, %p11;\n"
    )


def commit(barrier: str, group: int = 1) -> str:
    return (
        f"mov.u32 %r90, {barrier};\n"
        f"tcgen05.commit.cta_group::{group}.mbarrier::arrive::one.shared::cluster.b64 [%r90];\n"
    )


BEFORE, AFTER = "tcgen05.fence::before_thread_sync;\n", "tcgen05.fence::after_thread_sync;\n"
WAIT_LD, WAIT_ST = "tcgen05.wait::ld.sync.aligned;\n", "tcgen05.wait::st.sync.aligned;\n"


def lanes_of_warp(to: str, column: int = 0, base: str = "%r3") -> str:
    """Computes the address of the warp's own lanes at a column."""
    quarter = "and.b32 %r91, %r1, 3;\nshl.b32 %r91, %r91, 21;\n"
    return quarter + f"add.u32 {to}, {base}, %r91;\nadd.u32 {to}, {to}, {column};\n"


def load(address: str, first: int, count: int) -> str:
    return f"tcgen05.ld.sync.aligned.32x32b.x{count}.b32 {names(first, count)}, [{address}];\n"


def store(address: str, first: int, count: int) -> str:
    return f"tcgen05.st.sync.aligned.32x32b.x{count}.b32 [{address}], {names(first, count)};\n"


def out(value: str, base: str = "%rd1", index: str = "%r0", step: int = 4, offset: int = 0) -> str:
    """Stores a 32-bit value to base[index]."""
    return (
        f"mul.wide.u32 %rd31, {index}, {step};\nadd.s64 %rd31, {base}, %rd31;\n"
        f"st.global.b32 [%rd31+{offset}], {value};\n"
    )


def tma_load(target: str, tensor: str, coordinates: str, barrier: str) -> str:
    return (
        "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes "
        f"[{target}], [{tensor}, {{{coordinates}}}], [{barrier}];\n"
    )


def expect(barrier: str, size: int | str) -> str:
    return f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [{barrier}], {size};\n"


def arrive(barrier: str, suffix: str = "") -> str:
    return f"mbarrier.arrive{suffix}.shared::cta.b64 _, [{barrier}];\n"


def f32(value: float) -> str:
    """Returns a float literal of PTX."""
    return "0f" + struct.pack(">f", value).hex().upper()
