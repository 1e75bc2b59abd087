"""Exhibits about tensor memory: alignment, types, lanes, mixing operand kinds, work in flight."""

from __future__ import annotations

import numpy as np

from softsm.museum import text as t
from softsm.museum.exhibits import Program, exhibit

SHARED = """.shared .align 1024 .b8 a[4096]; .shared .align 1024 .b8 b[256]; .shared .align 8 .b64 bar;
.shared .align 8 .b64 bar2;
.shared .align 4 .b32 place;"""
ONES = (
    t.init("bar", "bar2")
    + t.alloc(64)
    + t.fill("a", 4096)
    + t.fill("b", 256)
    + "fence.proxy.async;\nbar.sync 0;\n"
    + t.descriptor("%rd10", "a")
    + t.descriptor("%rd11", "b")
    + t.lanes_of_warp("%r4")
    + "add.u32 %r5, %r4, 32;\n"
    + "add.u32 %r6, %r3, 32;\n"
)
STORED = t.WAIT_ST + t.BEFORE + "bar.sync 0;\n" + t.AFTER


def whole(body: str, want: float | None = None, block: int = 128, end: str | None = None) -> Program:
    """Makes a program on tiles of ones; %r10 of each thread is its result."""
    end = t.dealloc(64) if end is None else end
    right = None if want is None else lambda arrays: bool((arrays[0] == want).all())
    return Program(
        t.kernel(ONES + body + end, "out", shared=SHARED), [np.zeros(block, np.float32)], block=block, right=right
    )


def read(barrier: str = "bar", parity: int = 0) -> str:
    return t.wait(barrier, parity) + t.AFTER + t.load("%r4", 10, 8) + t.WAIT_LD + t.out("%r10")


@exhibit(3, "tcgen05.st 16x256b at column +1", "misaligned")
def column_plus_one(bug: str) -> Program:
    put = "".join(f"mov.b32 %r{10 + i}, {t.ONES};\n" for i in range(4))
    place = f"add.u32 %r7, %r4, {1 if bug else 4};\n"
    return whole(put + place + f"tcgen05.st.sync.aligned.16x256b.x1.b32 [%r7], {t.names(10, 4)};\n" + t.WAIT_ST)


@exhibit(4, "TS product whose A was stored as fp32: 8 where 16 was expected", "type")
def stored_as_fp32(bug: str) -> Program:
    if bug:
        put = "".join(f"mov.f32 %f{i}, 0f3F800000;\nmov.b32 %r{10 + i}, %f{i};\n" for i in range(8))
    else:
        one = "mov.f32 %f0, 0f3F800000;\ncvt.rn.bf16x2.f32 %r9, %f0, %f0;\n"
        put = one + "".join(f"mov.b32 %r{10 + i}, %r9;\n" for i in range(8))
    use = t.only("%p0", t.mma("%r3", "[%r6]", "%rd11", t.idesc()) + t.commit("bar"))
    return whole(put + t.store("%r5", 10, 8) + STORED + use + read(), 16.0)


@exhibit(5, "SS product after a TS product; with the first A descriptor wrong", "descriptor")
def mixed_products(bug: str) -> Program:
    """Mixing is legal. The SS product is the first to use a descriptor of A, which was built for sm_90."""
    put = "".join(f"mov.b32 %r{10 + i}, {t.ONES};\n" for i in range(8))
    first = t.only("%p0", t.mma("%r3", "[%r6]", "%rd11", t.idesc()) + t.commit("bar"))
    second = t.descriptor("%rd12", "a", blackwell=not bug)
    second += t.only("%p0", t.mma("%r3", "%rd12", "%rd11", t.idesc(), 1) + t.commit("bar2"))
    return whole(
        put + t.store("%r5", 10, 8) + STORED + first + t.wait("bar", 0) + t.AFTER + second + read("bar2"), 32.0
    )


@exhibit(6, "tensor memory freed, and the kernel ended, while a product is in flight", "in-flight")
def freed_in_flight(bug: str) -> Program:
    start = t.only("%p0", t.mma("%r3", "%rd10", "%rd11", t.idesc()) + t.commit("bar"))
    return whole(start + ("" if bug else t.wait("bar", 0) + t.AFTER))


@exhibit(17, "PV reads P at column 0, where S is, instead of column 32", "type")
def p_where_s_is(bug: str) -> Program:
    scores = t.only("%p0", t.mma("%r3", "%rd10", "%rd11", t.idesc()) + t.commit("bar"))
    softmax = t.wait("bar", 0) + t.AFTER + t.load("%r4", 10, 8) + t.WAIT_LD
    softmax += "".join(f"mov.b32 %f{i}, %r{10 + i};\nmul.f32 %f{i}, %f{i}, 0f3D800000;\n" for i in range(8))
    softmax += "".join(f"cvt.rn.bf16x2.f32 %r{20 + i}, %f{i}, %f{i};\n" for i in range(8))
    softmax += t.store("%r5", 20, 8) + STORED
    p = "%r3" if bug else "%r6"
    values = "add.u32 %r7, %r3, 16;\n" + t.only("%p0", t.mma("%r7", f"[{p}]", "%rd11", t.idesc()) + t.commit("bar2"))
    last = "add.u32 %r4, %r4, 16;\n" + read("bar2")
    return whole(scores + softmax + values + last, 16.0)


@exhibit(24, "a warp reads the lanes of another warp's quarter", "lane-ownership")
def foreign_lanes(bug: str) -> Program:
    """Warps 0 to 3 run the product, warps 4 to 7 the epilogue. A warp's quarter is its number modulo 4, not its number
    minus 4 plus one."""
    start = t.only("%p0", t.mma("%r3", "%rd10", "%rd11", t.idesc()) + t.commit("bar"))
    quarter = "add.u32 %r20, %r1, 1;\nand.b32 %r20, %r20, 3;\n" if bug else "and.b32 %r20, %r1, 3;\n"
    epilogue = quarter + "shl.b32 %r20, %r20, 21;\nadd.u32 %r20, %r3, %r20;\n" + t.wait("bar", 0) + t.AFTER
    epilogue += t.load("%r20", 10, 8) + t.WAIT_LD + t.out("%r10")
    body = start + "setp.ge.u32 %p4, %r0, 128;\n" + t.only("%p4", epilogue)
    program = whole(body, block=256)
    program.right = lambda arrays: bool((arrays[0][128:] == 16.0).all())
    return program
