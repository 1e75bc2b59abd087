"""Arithmetic that does not exist is refused while the kernel is loaded, by name and line; nothing is skipped."""

import pytest

import softsm
from softsm.errors import PtxError, Unsupported

TEXT = """.version 8.6
.target {target}
.address_size 64
.visible .entry k()
{{
  .reg .b16 %h<4>; .reg .b32 %r<4>; .reg .b64 %rd<4>; .reg .pred %p<4>;
  {instruction}
  ret;
}}"""

REFUSED = [
    "add.rnx.f32 %r1, %r2, %r3;", "add.sat.u32 %r1, %r2, %r3;", "add.ftz.f64 %rd1, %rd2, %rd3;",
    "add.rn.rz.f32 %r1, %r2, %r3;", "mul.s32 %r1, %r2, %r3;", "mul.wide.s64 %rd1, %rd2, %rd3;",
    "mad.lo.sat.s32 %r1, %r2, %r3, %r1;", "fma.f32 %r1, %r2, %r3, %r1;",
    "fma.rn.sat.f64 %rd1, %rd2, %rd3, %rd1;", "div.f32 %r1, %r2, %r3;", "div.approx.f64 %rd1, %rd2, %rd3;",
    "sqrt.f32 %r1, %r2;", "ex2.f32 %r1, %r2;", "tanh.approx.ftz.f32 %r1, %r2;", "sin.f32 %r1, %r2;",
    "min.relu.u32 %r1, %r2, %r3;", "min.xorsign.f32 %r1, %r2, %r3;", "max.NaN.f64 %rd1, %rd2, %rd3;",
    "popc.b16 %r1, %h1;", "bfe.b32 %r1, %r2, 1, 2;", "shl.u32 %r1, %r2, 3;", "shf.l.b32 %r1, %r2, %r3, 1;",
    "prmt.b32.abc %r1, %r2, %r3, 0;", "lop3.b64 %rd1, %rd2, %rd3, %rd1, 1;", "setp.lt.b32 %p1, %r1, %r2;",
    "setp.lo.s32 %p1, %r1, %r2;", "setp.lt.ftz.s32 %p1, %r1, %r2;", "setp.foo.f32 %p1, %r1, %r2;",
    "setp.hi.f32 %p1, %r1, %r2;", "selp.f16 %h1, %h2, %h3, %p1;", "slct.u32.u32 %r1, %r2, %r3, %r1;",
    "set.lt.f64.f32 %rd1, %r1, %r2;", "cvt.s32.f32 %r1, %r2;", "cvt.rn.s32.f32 %r1, %r2;",
    "cvt.f32.s32 %r1, %r2;", "cvt.f16.f32 %h1, %r1;", "cvt.rn.f32.f32 %r1, %r2;", "cvt.rni.f16.f32 %h1, %r1;",
    "cvt.rn.u32.u64 %r1, %rd1;", "cvt.ftz.s32.s64 %r1, %rd1;", "cvt.rn.relu.f32.f64 %r1, %rd1;",
    "cvt.rm.bf16x2.f32 %r1, %r2, %r3;", "cvt.rn.e4m3x2.f32 %h1, %r1, %r2;",
    "cvt.rz.satfinite.e4m3x2.f32 %h1, %r1, %r2;", "cvt.rn.bf16x2.e4m3x2 %r1, %h1;", "cvt.rzi.s8.bf16 %h1, %h2;",
    "cvt.pack.u16.s32 %r1, %r2, %r3;", "mov.u8 %h1, %h2;", "mov.v2.b32 %r1, %r2;", "mov.u32 {%h1, %h2}, %r1;",
    "cvta.texture.u64 %rd1, %rd2;", "add.ftz.bf16 %h1, %h2, %h3;", "ex2.approx.bf16 %h1, %h2;",
    "fma.f16 %h1, %h2, %h3, %h1;", "fma.rn.oob.f16 %h1, %h2, %h3, %h1;", "neg.ftz.bf16x2 %r1, %r2;",
    "testp.zero.f32 %p1, %r1;", "copysign.f16 %h1, %h2, %h3;", "dp4a.u32 %r1, %r2, %r3, %r1;",
    "bmsk.b32 %r1, %r2, %r3;", "addc.u16 %h1, %h2, %h3;", "mul24.wide.u32 %rd1, %r1, %r2;",
    "rcp.approx.f64 %rd1, %rd2;",
]


@pytest.mark.parametrize("instruction", REFUSED)
def test_what_does_not_exist_is_refused(instruction):
    with pytest.raises(Unsupported) as error:
        softsm.load(TEXT.format(instruction=instruction, target="sm_90a"))
    name = instruction.split()[0]
    assert name in str(error.value) and "line 7" in str(error.value)


@pytest.mark.parametrize("instruction", [
    "add.f32x2 %rd1, %rd2, %rd3;", "min.f32 %r1, %r2, %r3, %r1;", "cvt.rn.satfinite.e2m3x2.f32 %h1, %r1, %r2;",
    "cvt.rz.ue8m0x2.f32 %h1, %r1, %r2;", "add.f32.f16 %r1, %h1, %r2;", "cvt.rs.bf16x2.f32 %r1, %r2, %r3, %r1;",
])
def test_blackwell_forms_need_its_target(instruction):
    with pytest.raises(Unsupported, match="needs .target sm_100"):
        softsm.load(TEXT.format(instruction=instruction, target="sm_90a"))
    softsm.load(TEXT.format(instruction=instruction, target="sm_100a"))


@pytest.mark.parametrize("instruction, message", [
    ("add.s32 %r1, %r2;", "takes 3 operands, got 2"),
    ("add.s32 %rd1, %r2, %r3;", "expected a register of at most 32 bits"),
    ("add.s64 %rd1, %r2, %rd3;", "expected a 64-bit register"),
    ("selp.b32 %r1, %r2, %r3, %r1;", "expected a predicate"),
    ("lop3.b32 %r1, %r2, %r3, %r1, 300;", "immLut"),
    ("lop3.or.b32 %r1, %r2, %r3, %r1, 3, %p1;", "d|p"),
    ("cvt.u32.u64 %h1, %rd1;", "16 bits"),
])
def test_operands_of_the_wrong_kind(instruction, message):
    with pytest.raises(PtxError) as error:
        softsm.load(TEXT.format(instruction=instruction, target="sm_90a"))
    assert message in str(error.value)
