"""What each instruction costs in softsm: `python benchmarks/instructions.py [NAME ...]` prints ns per warp instruction.

CPU time of one core, best of three, the loop and the launch taken off. A plain register move is the price of dispatch.
"""

from __future__ import annotations

import time

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

import softsm

KERNEL = """
.version 8.6 .target sm_100a .address_size 64
.visible .entry k(.param .u64 x, .param .u32 n)
{{
  .reg .b16 %h<8>; .reg .b32 %r<32>, %f<32>, %s<4>; .reg .b64 %rd<24>; .reg .pred %p<8>;
  .shared .align 16 .b8 buffer[4096];
  ld.param.u64 %rd1, [x]; ld.param.u32 %r3, [n]; mov.u32 %r1, %tid.x; mov.u32 %r2, 0; mov.u32 %r4, 5; mov.u32 %r5, 77;
  mov.f32 %f1, 0f3F000000; mov.f32 %f2, 0f3E800000; mov.f32 %f3, 0f3F800000; setp.lt.u32 %p2, %r1, 16;
  mov.b64 %rd4, {{%f1, %f2}}; mov.b64 %rd5, {{%f3, %f2}}; cvt.u64.u32 %rd7, %r1; mov.b16 %h1, 0x3C00;
  mov.u32 %s1, buffer; shl.b32 %s2, %r1, 4; add.u32 %s2, %s1, %s2; shl.b32 %s3, %r1, 2; add.u32 %s1, %s1, %s3;
  mul.wide.u32 %rd12, %r1, 16; add.u64 %rd13, %rd1, %rd12; mul.wide.u32 %rd14, %r1, 4; add.u64 %rd15, %rd1, %rd14;
LOOP:
{body}
  add.u32 %r2, %r2, 1; setp.lt.u32 %p1, %r2, %r3; @%p1 bra LOOP;
  ret;
}}"""
INSTRUCTIONS = [
    "mov.b32 %r6, %r5;",
    "mov.b64 %rd9, %rd7;",
    "mov.b64 {%f8, %f9}, %rd4;",
    "mov.b64 %rd9, {%f1, %f2};",
    "add.s32 %r6, %r5, %r4;",
    "mad.lo.s32 %r6, %r5, %r4, %r1;",
    "add.s64 %rd9, %rd7, %rd5;",
    "mul.lo.s64 %rd9, %rd7, %rd5;",
    "mul.wide.s32 %rd9, %r5, %r4;",
    "div.s32 %r6, %r5, %r4;",
    "and.b32 %r6, %r5, %r4;",
    "shl.b32 %r6, %r5, 3;",
    "shl.b32 %r6, %r5, %r4;",
    "bfe.u32 %r6, %r5, 3, 4;",
    "prmt.b32 %r6, %r5, %r4, 0x3120;",
    "selp.b32 %r6, %r5, %r4, %p2;",
    "setp.lt.s32 %p3, %r5, %r4;",
    "and.pred %p3, %p2, %p1;",
    "add.f32 %f6, %f1, %f2;",
    "fma.rn.f32 %f6, %f1, %f2, %f3;",
    "fma.rn.ftz.f32 %f6, %f1, %f2, %f3;",
    "add.rz.f32 %f6, %f1, %f2;",
    "max.f32 %f6, %f1, %f2;",
    "ex2.approx.ftz.f32 %f6, %f1;",
    "lg2.approx.f32 %f6, %f1;",
    "rcp.approx.ftz.f32 %f6, %f1;",
    "div.full.f32 %f6, %f1, %f2;",
    "tanh.approx.f32 %f6, %f1;",
    "fma.rn.f32x2 %rd9, %rd4, %rd5, %rd4;",
    "add.f32x2 %rd9, %rd4, %rd5;",
    "add.f16x2 %r6, %r5, %r4;",
    "fma.rn.bf16x2 %r6, %r5, %r4, %r3;",
    "cvt.rn.bf16x2.f32 %r6, %f1, %f2;",
    "cvt.rn.f16x2.f32 %r6, %f1, %f2;",
    "cvt.f32.bf16 %f6, %h1;",
    "cvt.rn.f32.s32 %f6, %r5;",
    "cvt.rzi.s32.f32 %r6, %f1;",
    "cvt.rn.satfinite.e4m3x2.f32 %h2, %f1, %f2;",
    "@%p2 add.s32 %r6, %r5, %r4;",
    "@%p2 fma.rn.f32 %f6, %f1, %f2, %f3;",
    "shfl.sync.bfly.b32 %r6, %r5, 1, 31, -1;",
    "shfl.sync.idx.b32 %r6, %r5, %r4, 31, -1;",
    "redux.sync.max.f32 %f6, %f1, -1;",
    "ld.shared.b32 %r6, [%s1];",
    "ld.shared.b32 %r6, [%s2];",
    "ld.shared.v4.b32 {%r6, %r7, %r8, %r9}, [%s2];",
    "st.shared.v4.b32 [%s2], {%r6, %r7, %r8, %r9};",
    "ld.global.b32 %r6, [%rd15];",
    "ld.global.v4.b32 {%r6, %r7, %r8, %r9}, [%rd13];",
    "st.global.v4.b32 [%rd13], {%r6, %r7, %r8, %r9};",
]
COPIES, ROUNDS = 40, 4000


def cost(instruction: str) -> float:
    """ns of one execution."""
    x = np.zeros(4096, np.uint32)

    def seconds(body: str) -> float:
        kernel = softsm.load(KERNEL.format(body=body))
        best = float("inf")
        for _ in range(3):
            start = time.process_time()
            kernel.launch(1, 32, [x, ROUNDS])
            best = min(best, time.process_time() - start)
        return best

    return (seconds(instruction * COPIES) - seconds("")) / (ROUNDS * COPIES) * 1e9


def main(names: list[str] = typer.Argument(None, help="only instructions that begin so")) -> None:  # noqa: B008
    table = Table("instruction", "ns", title="softsm: one warp instruction, CPU time of one core")
    for instruction in INSTRUCTIONS:
        if not names or any(instruction.startswith(n) for n in names):
            table.add_row(instruction, f"{cost(instruction):.1f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
