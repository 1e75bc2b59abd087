"""Exhibits from attention kernels: P and O between softmax and the products, rescaling, rows and fragments."""

from __future__ import annotations

import math

import numpy as np

from softsm.museum import text as t
from softsm.museum.exhibits import WRONG_VALUES, Program, exhibit
from softsm.museum.tensor import ONES, SHARED, whole

WORKERS = SHARED + ".shared .align 8 .b64 p_ready;"


@exhibit(9, "the product does not wait for softmax to store P", "race")
def p_not_awaited(bug: str) -> Program:
    """Warps 0 to 3 store P and arrive; warp 4 runs the product that reads P."""
    put = "".join(f"mov.b32 %r{10 + i}, {t.ONES};\n" for i in range(8))
    softmax = put + t.store("%r5", 10, 8) + t.WAIT_ST + t.BEFORE + t.arrive("p_ready")
    start = (
        ("" if bug else t.wait("p_ready", 0) + t.AFTER) + t.mma("%r3", "[%r6]", "%rd11", t.idesc()) + t.commit("bar")
    )
    body = t.init(("p_ready", 128)) + ONES + "setp.lt.u32 %p4, %r0, 128;\n" + t.only("%p4", softmax)
    body += (
        t.only("thread 128", start)
        + t.wait("bar", 0)
        + t.AFTER
        + t.only("%p4", t.load("%r4", 20, 8) + t.WAIT_LD + t.out("%r20"))
    )
    return Program(
        t.kernel(body + t.dealloc(64), "out", shared=WORKERS),
        [np.zeros(160, np.float32)],
        block=160,
        right=lambda arrays: bool(bug) or bool((arrays[0][:128] == 16.0).all()),
    )


@exhibit(10, "softmax rescales O while the last PV product may still write it", "race")
def rescale_too_early(bug: str) -> Program:
    first = t.only("%p0", t.mma("%r3", "%rd10", "%rd11", t.idesc()) + t.commit("bar")) + t.wait("bar", 0) + t.AFTER
    second = t.only("%p0", t.mma("%r3", "%rd10", "%rd11", t.idesc(), 1) + t.commit("bar2"))
    done = t.wait("bar2", 0) + t.AFTER
    scale = t.load("%r4", 10, 8) + t.WAIT_LD
    scale += "".join(
        f"mov.b32 %f{i}, %r{10 + i};\nmul.f32 %f{i}, %f{i}, 0f3F000000;\nmov.b32 %r{10 + i}, %f{i};\n" for i in range(8)
    )
    scale += t.store("%r4", 10, 8) + t.WAIT_ST
    end = t.load("%r4", 20, 8) + t.WAIT_LD + t.out("%r20")
    program = whole(
        first + "bar.sync 0;\n" + second + ("" if bug else done) + scale + (done if bug else "") + end, 16.0
    )
    program.right = None if bug else program.right
    return program


KEYS, TILE, SCALE = 16, 8, 0.125 * math.log2(math.e)


@exhibit(
    11,
    "O rescaled by exp2 of maxima that are scaled already, or not at all after the first tile",
    scaled_twice=(WRONG_VALUES,),
    not_rescaled=(WRONG_VALUES,),
)
def rescaling(bug: str) -> Program:
    """One row per thread, two tiles of eight keys, one column of V. m is kept scaled, so alpha is ex2(m_old - m_new).
    not_rescaled: the kernel rescales the row sum but not O."""
    lines = [
        "mov.f32 %f0, 0fFF800000;",
        "mov.f32 %f1, 0f00000000;",
        "mov.f32 %f2, 0f00000000;",
        f"mul.wide.u32 %rd20, %r0, {4 * KEYS};",
        "add.s64 %rd20, %rd1, %rd20;",
    ]
    for tile in range(KEYS // TILE):
        for j in range(TILE):
            lines += [
                f"ld.global.f32 %f{10 + j}, [%rd20+{4 * (tile * TILE + j)}];",
                f"mul.f32 %f{10 + j}, %f{10 + j}, {t.f32(SCALE)};",
            ]
        lines += ["mov.f32 %f3, %f0;"] + [f"max.f32 %f3, %f3, %f{10 + j};" for j in range(TILE)]
        lines += ["sub.f32 %f4, %f0, %f3;"]
        lines += [f"mul.f32 %f4, %f4, {t.f32(SCALE)};"] if bug == "scaled_twice" else []
        lines += ["ex2.approx.f32 %f4, %f4;", "mul.f32 %f1, %f1, %f4;"]
        lines += [] if bug == "not_rescaled" else ["mul.f32 %f2, %f2, %f4;"]
        lines += ["mov.f32 %f0, %f3;"]
        for j in range(TILE):
            lines += [
                f"sub.f32 %f5, %f{10 + j}, %f3;",
                "ex2.approx.f32 %f5, %f5;",
                "add.f32 %f1, %f1, %f5;",
                f"ld.global.f32 %f6, [%rd2+{4 * (tile * TILE + j)}];",
                "fma.rn.f32 %f2, %f5, %f6, %f2;",
            ]
    lines += ["div.rn.f32 %f2, %f2, %f1;", t.out("%f2", "%rd3")]
    rng = np.random.default_rng(3)
    s, v = rng.normal(size=(128, KEYS)).astype(np.float32) * 20, rng.normal(size=KEYS).astype(np.float32)
    p = np.exp((s - s.max(1, keepdims=True)) * 0.125)
    want = (p @ v) / p.sum(1)
    return Program(
        t.kernel("\n".join(lines), "s v out", target="sm_90a", version="8.6"),
        [s, v, np.zeros(128, np.float32)],
        right=lambda arrays: bool(np.allclose(arrays[2], want, rtol=1e-4, atol=1e-5)),
    )


FRAGMENT = "tcgen05.ld.sync.aligned.16x256b.x1.b32 {%r10, %r11, %r12, %r13}, [%r3];\n" + t.WAIT_LD
FLOATS = "".join(f"mov.b32 %f{10 + i}, %r{10 + i};\n" for i in range(4))


def over_four_lanes(register: str, operation: str = "max") -> str:
    """Reduces (maximum or sum) over the four lanes that share a row."""
    return "".join(
        f"mov.b32 %r30, {register};\nshfl.sync.bfly.b32 %r31, %r30, {x}, 31, -1;\nmov.b32 %f30, %r31;\n"
        f"{operation}.f32 {register}, {register}, %f30;\n"
        for x in (1, 2)
    )


def fragments(compute: str, right, columns: int = 8, draw=lambda x: x) -> Program:
    """One warp copies 16 rows of scores from global to tensor memory (32x32b), then runs `compute`, which leaves its
    result for row t in %f0 of lane t (t < 16)."""
    put = f"mul.wide.u32 %rd20, %r0, {4 * columns};\nadd.s64 %rd20, %rd1, %rd20;\n"
    put += "".join(f"ld.global.b32 %r{100 + i}, [%rd20+{4 * i}];\n" for i in range(columns))
    put += t.store("%r3", 100, columns) + t.WAIT_ST
    end = "setp.lt.u32 %p4, %r0, 16;\n" + t.only("%p4", t.out("%f0", "%rd2"))
    text = t.kernel(t.alloc(32) + put + compute + end + t.dealloc(32), "s out", shared=SHARED)
    s = draw(np.random.default_rng(5).normal(size=(32, columns))).astype(np.float32)
    want = right(s[:16])
    return Program(
        text,
        [s, np.zeros(32, np.float32)],
        block=32,
        right=lambda arrays: bool(np.allclose(arrays[1][:16], want, rtol=1e-6)),
    )


# Row t of 16 is in lane 4 * (t % 8), low registers for t < 8, high ones above.
TO_ROWS = (
    "and.b32 %r40, %r0, 7;\nshl.b32 %r40, %r40, 2;\nmov.b32 %r41, %f2;\nmov.b32 %r42, %f3;\n"
    "shfl.sync.idx.b32 %r43, %r41, %r40, 31, -1;\nshfl.sync.idx.b32 %r44, %r42, %r40, 31, -1;\n"
    "setp.lt.u32 %p5, %r0, 8;\nselp.b32 %r45, %r43, %r44, %p5;\nmov.b32 %f1, %r45;\n"
)
PER_ROW = FRAGMENT + FLOATS + "max.f32 %f2, %f10, %f11;\nmax.f32 %f3, %f12, %f13;\n"


@exhibit(12, "row maximum taken over the whole fragment instead of per row", WRONG_VALUES)
def whole_fragment(bug: str) -> Program:
    compute = PER_ROW + ("max.f32 %f2, %f2, %f3;\nmov.f32 %f3, %f2;\n" if bug else "")
    compute += over_four_lanes("%f2") + over_four_lanes("%f3") + TO_ROWS + "mov.f32 %f0, %f1;\n"
    return fragments(compute, lambda s: s.max(1))


@exhibit(29, "packed f32x2 sum of a row without the lanes that share it: several times too small", WRONG_VALUES)
def packed_row_sum(bug: str) -> Program:
    """With 16x256b.x4, four lanes share a row of 32 columns, eight each. Packed additions sum what a lane holds; the
    bug uses that as the sum of the row."""
    count = 16
    compute = f"tcgen05.ld.sync.aligned.16x256b.x4.b32 {t.names(50, count)}, [%r3];\n" + t.WAIT_LD
    for half, (total, first) in enumerate((("%f2", 50), ("%f3", 52))):
        compute += "".join(f"mov.b64 %rd{10 + i}, {{%r{first + 4 * i}, %r{first + 4 * i + 1}}};\n" for i in range(4))
        compute += "".join(f"add.rn.f32x2 %rd10, %rd10, %rd{i};\n" for i in (11, 12, 13))
        compute += f"mov.b64 {{%f{20 + half}, %f{22 + half}}}, %rd10;\nadd.f32 {total}, %f{20 + half}, %f{22 + half};\n"
        compute += "" if bug else over_four_lanes(total, "add")
    return fragments(compute + TO_ROWS + "mov.f32 %f0, %f1;\n", lambda p: p.sum(1), columns=32, draw=np.exp2)


@exhibit(13, "rows of the QK fragment used as rows of the PV fragment", WRONG_VALUES)
def rows_of_another_fragment(bug: str) -> Program:
    """The maximum of row t/4 is in lane t; O is read with row t in lane t. The bug multiplies the two lane by lane."""
    compute = PER_ROW + over_four_lanes("%f2") + over_four_lanes("%f3") + ("mov.f32 %f1, %f2;\n" if bug else TO_ROWS)
    compute += t.load("%r3", 50, 1) + t.WAIT_LD + "mov.b32 %f5, %r50;\nmul.f32 %f0, %f5, %f1;\n"
    return fragments(compute, lambda s: s.max(1) * s[:, 0])
