"""Arithmetic that does not exist is rejected while the kernel is loaded, by name and line; nothing is skipped."""

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
    "add.rnx.f32 %r1, %r2, %r3;",
    "add.sat.u32 %r1, %r2, %r3;",
    "add.ftz.f64 %rd1, %rd2, %rd3;",
    "add.rn.rz.f32 %r1, %r2, %r3;",
    "mul.s32 %r1, %r2, %r3;",
    "mul.wide.s64 %rd1, %rd2, %rd3;",
    "mad.lo.sat.s32 %r1, %r2, %r3, %r1;",
    "fma.f32 %r1, %r2, %r3, %r1;",
    "fma.rn.sat.f64 %rd1, %rd2, %rd3, %rd1;",
    "div.f32 %r1, %r2, %r3;",
    "div.approx.f64 %rd1, %rd2, %rd3;",
    "sqrt.f32 %r1, %r2;",
    "ex2.f32 %r1, %r2;",
    "tanh.approx.ftz.f32 %r1, %r2;",
    "sin.f32 %r1, %r2;",
    "min.relu.u32 %r1, %r2, %r3;",
    "min.xorsign.f32 %r1, %r2, %r3;",
    "max.NaN.f64 %rd1, %rd2, %rd3;",
    "popc.b16 %r1, %h1;",
    "bfe.b32 %r1, %r2, 1, 2;",
    "shl.u32 %r1, %r2, 3;",
    "shf.l.b32 %r1, %r2, %r3, 1;",
    "prmt.b32.abc %r1, %r2, %r3, 0;",
    "lop3.b64 %rd1, %rd2, %rd3, %rd1, 1;",
    "setp.lt.b32 %p1, %r1, %r2;",
    "setp.lo.s32 %p1, %r1, %r2;",
    "setp.lt.ftz.s32 %p1, %r1, %r2;",
    "setp.foo.f32 %p1, %r1, %r2;",
    "setp.hi.f32 %p1, %r1, %r2;",
    "selp.f16 %h1, %h2, %h3, %p1;",
    "slct.u32.u32 %r1, %r2, %r3, %r1;",
    "set.lt.f64.f32 %rd1, %r1, %r2;",
    "cvt.s32.f32 %r1, %r2;",
    "cvt.rn.s32.f32 %r1, %r2;",
    "cvt.f32.s32 %r1, %r2;",
    "cvt.f16.f32 %h1, %r1;",
    "cvt.rn.f32.f32 %r1, %r2;",
    "cvt.rni.f16.f32 %h1, %r1;",
    "cvt.rn.u32.u64 %r1, %rd1;",
    "cvt.ftz.s32.s64 %r1, %rd1;",
    "cvt.rn.relu.f32.f64 %r1, %rd1;",
    "cvt.rm.bf16x2.f32 %r1, %r2, %r3;",
    "cvt.rn.e4m3x2.f32 %h1, %r1, %r2;",
    "cvt.rz.satfinite.e4m3x2.f32 %h1, %r1, %r2;",
    "cvt.rn.bf16x2.e4m3x2 %r1, %h1;",
    "cvt.rzi.s8.bf16 %h1, %h2;",
    "cvt.pack.u16.s32 %r1, %r2, %r3;",
    "mov.u8 %h1, %h2;",
    "mov.v2.b32 %r1, %r2;",
    "mov.u32 {%h1, %h2}, %r1;",
    "cvta.texture.u64 %rd1, %rd2;",
    "add.ftz.bf16 %h1, %h2, %h3;",
    "ex2.approx.bf16 %h1, %h2;",
    "fma.f16 %h1, %h2, %h3, %h1;",
    "fma.rn.oob.sat.f16 %h1, %h2, %h3, %h1;",
    "neg.ftz.bf16x2 %r1, %r2;",
    "testp.zero.f32 %p1, %r1;",
    "copysign.f16 %h1, %h2, %h3;",
    "dp4a.u32 %r1, %r2, %r3, %r1;",
    "bmsk.b32 %r1, %r2, %r3;",
    "addc.u16 %h1, %h2, %h3;",
    "mul24.wide.u32 %rd1, %r1, %r2;",
    "rcp.approx.f64 %rd1, %rd2;",
]


TX = "mbarrier::complete_tx::bytes"
REFUSED_MEMORY = [
    "mbarrier.arrive.acquire.cta.b64 _, [%rd1];",
    "mbarrier.arrive.release.b64 _, [%rd1];",
    "mbarrier.arrive.cluster.b64 _, [%rd1];",
    "mbarrier.try_wait.release.cta.b64 %p1, [%rd1], %rd2;",
    "mbarrier.test_wait.parity.b64 %p1, [%rd1], 0, 100;",
    "mbarrier.expect_tx.release.cta.b64 [%rd1], 16;",
    "mbarrier.init.relaxed.cta.b64 [%rd1], 1;",
    "mbarrier.arrive.noComplete.release.cluster.b64 %rd2, [%rd1], 1;",
    "bar.sync.aligned 1;",
    "fence.acquire.sync_restrict::shared::cta.cluster;",
    "fence.acq_rel.gpu %r1;",
    "fence.proxy.tensormap::generic.acquire.gpu [%rd1], 64;",
    f"cp.async.bulk.tensor.1d.shared::cta.global.{TX}.multicast::cluster [%r1], [%rd1, {{%r2}}], [%r3], %h1;",
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.s64 [%rd1], [%r1], 16;",
    f"red.async.relaxed.cluster.shared::cluster.{TX}.and.b64 [%r1], %rd1, [%r2];",
    "cvt.rs.e2m1x4.f32 %h1, {%r1, %r2, %r3, %r1}, %r2;",
    "cvt.rn.satfinite.e4m3x4.f32 %r1, {%r1, %r2, %r3, %r1}, %r2;",
    "ld.shared.v4.b64 {%rd0, %rd1, %rd2, %rd3}, [%r1];",
    "ld.global.v2.b128 {%rd0, %rd1}, [%rd2];",
]


@pytest.mark.parametrize("instruction", REFUSED + REFUSED_MEMORY)
def test_what_does_not_exist_is_refused(instruction):
    with pytest.raises(Unsupported) as error:
        softsm.load(TEXT.format(instruction=instruction, target="sm_90a"))
    name = instruction.split()[0]
    assert name in str(error.value) and "line 7" in str(error.value)


@pytest.mark.parametrize(
    "instruction",
    [
        "add.f32x2 %rd1, %rd2, %rd3;",
        "min.f32 %r1, %r2, %r3, %r1;",
        "cvt.rn.satfinite.e2m3x2.f32 %h1, %r1, %r2;",
        "cvt.rz.ue8m0x2.f32 %h1, %r1, %r2;",
        "add.f32.f16 %r1, %h1, %r2;",
        "cvt.rs.bf16x2.f32 %r1, %r2, %r3, %r1;",
        "cvt.rs.satfinite.e4m3x4.f32 %r1, {%r1, %r2, %r3, %r1}, %r2;",
        f"cp.async.bulk.tensor.1d.shared::cluster.global.{TX}.cta_group::1 [%r1], [%rd1, {{%r2}}], [%r3];",
        "cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group "
        "[%rd1, {%r1, %r2, %r3, %r1, %r2}], [%r0];",
        "cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%rd1], [%r1], 16, %h1;",
        f"clusterlaunchcontrol.try_cancel.async.shared::cta.{TX}.b128 [%r1], [%r2];",
        "ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r1, %r2}, [%r3];",
        "stmatrix.sync.aligned.m16n8.x1.trans.shared.b8 [%r3], {%r1};",
        "tensormap.replace.tile.swizzle_atomicity.global.b1024.b32 [%rd1], 1;",
        "ld.global.v4.b64 {%rd0, %rd1, %rd2, %rd3}, [%rd1];",
    ],
)
def test_blackwell_forms_need_its_target(instruction):
    with pytest.raises(Unsupported, match="needs .target sm_100"):
        softsm.load(TEXT.format(instruction=instruction, target="sm_90a"))
    softsm.load(TEXT.format(instruction=instruction, target="sm_100a"))


@pytest.mark.parametrize(
    "instruction, message",
    [
        ("add.s32 %r1, %r2;", "needs 3 operands, got 2"),
        ("add.s32 %rd1, %r2, %r3;", "expected a register of at most 32 bits"),
        ("add.s64 %rd1, %r2, %rd3;", "expected a 64-bit register"),
        ("selp.b32 %r1, %r2, %r3, %r1;", "expected a predicate"),
        ("lop3.b32 %r1, %r2, %r3, %r1, 300;", "immLut"),
        ("lop3.or.b32 %r1, %r2, %r3, %r1, 3, %p1;", "d|p"),
        ("cvt.u32.u64 %h1, %rd1;", "16 bits"),
    ],
)
def test_operands_of_the_wrong_kind(instruction, message):
    with pytest.raises(PtxError) as error:
        softsm.load(TEXT.format(instruction=instruction, target="sm_90a"))
    assert message in str(error.value)


@pytest.mark.parametrize(
    "instruction", ["add.rn.f32x2 %rd1, %rd2, 0;", "fma.rn.f32x2 %rd1, %rd2, %rd2, 4575657222473777152;"]
)
def test_pairs_of_f32_come_in_registers(instruction):
    """ptxas: Arguments mismatch."""
    with pytest.raises(Unsupported, match="f32x2.*needs registers"):
        softsm.load(TEXT.format(instruction=instruction, target="sm_100a"))
