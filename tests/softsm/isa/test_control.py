"""Control flow: divergent loops, nested branches, brx.idx, calls, exits; special registers; moves of parts; hints."""

import numpy as np
import pytest
from launching import ptx, run, scratch, store, words

import softsm
import softsm.engine.launch as engine
from softsm.errors import Deadlock, Fault

LANES = np.arange(32)


def steps_of_collatz(n):
    steps = 0
    while n > 1:
        n = 3 * n + 1 if n % 2 else n // 2
        steps += 1
    return steps


def test_lanes_leave_a_loop_at_different_times():
    body = """add.u32 %r2, %r1, 1;
mov.u32 %r3, 0;
LOOP:
setp.le.u32 %p2, %r2, 1;
@%p2 bra DONE;
and.b32 %r4, %r2, 1;
setp.eq.u32 %p3, %r4, 0;
@%p3 bra EVEN;
mad.lo.u32 %r2, %r2, 3, 1;
bra NEXT;
EVEN:
shr.u32 %r2, %r2, 1;
NEXT:
add.u32 %r3, %r3, 1;
bra LOOP;
DONE:
"""
    got = run(ptx(body + store("%r3")), [words(64)], block=64)
    np.testing.assert_array_equal(got, [steps_of_collatz(i + 1) for i in range(64)])


def test_nested_branches_meet_again():
    """Depth-first through four levels of two-way branches; afterwards all lanes vote together."""
    body = "mov.u32 %r3, 0;\n"
    for level in range(4):
        body += f"shr.u32 %r4, %r1, {level};\nand.b32 %r4, %r4, 1;\nsetp.eq.u32 %p2, %r4, 0;\n@%p2 bra S{level};\n"
        body += f"mad.lo.u32 %r3, %r3, 10, {level + 1};\nbra M{level};\n"
        body += f"S{level}:\nmul.lo.u32 %r3, %r3, 10;\nM{level}:\n"
    tail = "setp.eq.u32 %p3, %r1, %r1;\nvote.sync.ballot.b32 %r5, %p3, -1;\nadd.u32 %r6, %r1, 32;\n"
    got = run(ptx(body + tail + store("%r3") + store("%r5", "%r6")), [words(64)])
    wanted = []
    for lane in range(32):
        value = 0
        for level in range(4):
            value = 10 * value + (level + 1 if lane >> level & 1 else 0)
        wanted.append(value)
    np.testing.assert_array_equal(got[:32], wanted)
    assert (got[32:] == 0xFFFFFFFF).all()


def test_indexed_branch():
    body = """and.b32 %r2, %r1, 3;
mov.u32 %r3, 0;
ts: .branchtargets A, B, C, A;
brx.idx %r2, ts;
A:
add.u32 %r3, %r3, 1;
B:
add.u32 %r3, %r3, 10;
C:
add.u32 %r3, %r3, 100;
"""
    got = run(ptx(body + store("%r3")), [words(32)])
    np.testing.assert_array_equal(got, np.array([111, 110, 100, 111])[LANES % 4])


FUNCTIONS = """.func (.param .b32 result) sum(.param .b32 x, .param .b64 y)
{
.reg .b32 %a<4>; .reg .b64 %b; .reg .pred %q;
ld.param.u32 %a1, [x];
ld.param.u64 %b, [y];
cvt.u32.u64 %a2, %b;
setp.gt.u32 %q, %a1, 20;
@%q bra BIG;
add.u32 %a3, %a1, %a2;
st.param.b32 [result], %a3;
ret;
BIG:
mul.lo.u32 %a3, %a1, %a2;
st.param.b32 [result], %a3;
ret;
}
.func (.reg .b32 %out) twice(.reg .b32 %in)
{
.reg .b32 %t;
{
.param .b32 r0; .param .b32 p0; .param .b64 p1;
.reg .b64 %w;
cvt.u64.u32 %w, %in;
st.param.b32 [p0], %in;
st.param.b64 [p1], %w;
call (r0), sum, (p0, p1);
ld.param.b32 %out, [r0];
}
ret;
}
"""


def test_functions_call_functions():
    """Parameters are in memory and in registers; lanes return from different places; half the lanes do not call."""
    body = """mov.u32 %r5, 7;
setp.lt.u32 %p2, %r1, 30;
@!%p2 bra OVER;
call (%r5), twice, (%r1);
OVER:
"""
    text = ptx(body + store("%r5")).replace(".visible .entry", FUNCTIONS + ".visible .entry")
    wanted = np.where(LANES > 20, LANES * LANES, 2 * LANES)
    wanted[30:] = 7
    np.testing.assert_array_equal(run(text, [words(32)]), wanted)


def test_lanes_exit_one_by_one():
    body = (
        """mov.u32 %r2, 0;
LOOP:
setp.eq.u32 %p2, %r1, %r2;
@%p2 exit;
add.u32 %r2, %r2, 1;
"""
        + store("%r2")
        + "setp.lt.u32 %p3, %r2, 40;\n@%p3 bra LOOP;\n"
    )
    np.testing.assert_array_equal(run(ptx(body), [words(32, 0)]), LANES)


def test_a_false_guard_changes_nothing():
    body = """mov.u32 %r3, 5;
setp.lt.u32 %p2, %r1, 10;
@%p2 add.u32 %r3, %r3, %r1;
@!%p2 mov.u32 %r3, 77;
@%p2 setp.gt.u32 %p3, %r1, 4;
@!%p2 setp.eq.u32 %p3, %r1, 12;
selp.u32 %r4, 1000, 0, %p3;
add.u32 %r3, %r3, %r4;
"""
    first = np.where(LANES < 10, 5 + LANES, 77)
    extra = np.where(LANES < 10, LANES > 4, LANES == 12) * 1000
    np.testing.assert_array_equal(run(ptx(body + store("%r3")), [words(32)]), first + extra)


SPECIAL = ["laneid", "ntid.x", "ntid.y", "ntid.z", "tid.x", "tid.y", "ctaid.x", "ctaid.y", "nctaid.x", "nctaid.z",
           "lanemask_eq", "lanemask_lt", "lanemask_le", "lanemask_gt", "lanemask_ge", "cluster_ctarank",
           "cluster_nctarank", "cluster_ctaid.x", "cluster_nctaid.x", "clusterid.x", "nclusterid.x",
           "is_explicit_cluster", "dynamic_smem_size"]  # fmt: skip


@pytest.mark.parametrize("cluster", [1, 2])
def test_special_registers(cluster):
    """Two CTAs of 64 threads; %is_explicit_cluster is a predicate."""
    count = len(SPECIAL)
    body = f"mov.u32 %r2, %ctaid.x;\nmad.lo.u32 %r2, %r2, 64, %r1;\nmul.lo.u32 %r2, %r2, {count};\n"
    for name in SPECIAL:
        if name.startswith("is_"):
            body += f"mov.pred %p2, %{name};\nselp.u32 %r3, 1, 0, %p2;\n"
        else:
            body += f"mov.u32 %r3, %{name};\n"
        body += store("%r3", "%r2") + "add.u32 %r2, %r2, 1;\n"
    got = run(ptx(body), [words(128 * count)], grid=2, block=64, cluster=cluster).reshape(2, 64, count)
    tid = np.arange(64)
    lane, ones = tid % 32, (1 << 32) - 1
    for cta in range(2):
        rank = cta if cluster == 2 else 0
        wanted = {"laneid": lane, "ntid.x": 64, "ntid.y": 1, "ntid.z": 1, "tid.x": tid, "tid.y": 0, "ctaid.x": cta,
                  "ctaid.y": 0, "nctaid.x": 2, "nctaid.z": 1, "lanemask_eq": 1 << lane, "lanemask_lt": (1 << lane) - 1,
                  "lanemask_le": (2 << lane) - 1, "lanemask_gt": ones & ~((2 << lane) - 1),
                  "lanemask_ge": ones & ~((1 << lane) - 1), "cluster_ctarank": rank, "cluster_nctarank": cluster,
                  "cluster_ctaid.x": rank, "cluster_nctaid.x": cluster, "clusterid.x": cta // cluster,
                  "nclusterid.x": 2 // cluster, "is_explicit_cluster": int(cluster > 1),
                  "dynamic_smem_size": 0}  # fmt: skip
        for k, name in enumerate(SPECIAL):
            np.testing.assert_array_equal(got[cta, :, k], wanted[name] + 0 * tid, err_msg=name)


def test_clocks_move_forward():
    body = """mov.u64 %rd4, %clock64;
mov.u32 %r3, %clock;
mov.u64 %rd5, %globaltimer;
nanosleep.u32 2000;
mov.u64 %rd6, %clock64;
mov.u64 %rd7, %globaltimer;
setp.gt.u64 %p2, %rd6, %rd4;
setp.ge.u64 %p3, %rd7, %rd5;
selp.u32 %r4, 1, 0, %p2;
selp.u32 %r5, 2, 0, %p3;
or.b32 %r4, %r4, %r5;
"""
    np.testing.assert_array_equal(run(ptx(body + store("%r4")), [words(32)]), 3)


def test_parts_of_words():
    """mov packs and unpacks: two and four parts, parts that are not wanted."""
    body = """mov.b32 {%rs1, %rs2}, %r1;
add.u16 %rs1, %rs1, 3;
mov.b32 %r2, {%rs2, %rs1};
mov.b64 %rd4, {%r1, %r2};
mov.b64 {%rs0, %rs1, %rs2, %rs3}, %rd4;
mov.b64 %rd5, {%rs3, %rs2, %rs1, %rs0};
mov.b64 {_, %r3}, %rd5;
mov.b64 {%r4, _}, %rd5;
mov.b32 {_, %rs1}, %r3;
cvt.u32.u16 %r5, %rs1;
shl.b32 %r10, %r1, 2;
"""
    for i, r in enumerate((2, 3, 4, 5)):
        body += f"add.u32 %r11, %r10, {i};\n" + store(f"%r{r}", "%r11")
    got = run(ptx(body, version="8.2"), [words(128)]).reshape(32, 4)
    packed = (LANES + 3) << 16
    np.testing.assert_array_equal(got, np.stack([packed, LANES << 16, LANES + 3, LANES], 1))


@pytest.mark.parametrize("form", ["nanosleep.u32 20;", "prefetch.global.L2 [%rd2];", "prefetch.global.L1 [%rd2];",
                                  "prefetchu.L1 [%rd3];", "applypriority.global.L2::evict_normal [%rd2], 128;",
                                  "prefetch.global.L2::evict_last [%rd2];", "pmevent 1;", "membar.gl;",
                                  "prefetch.global.L2::evict_normal [%rd2];"])  # fmt: skip
def test_hints_change_nothing(form):
    body = "cvta.global.u64 %rd3, %rd2;\n" + form + "\n"
    np.testing.assert_array_equal(run(ptx(body + store("%r1"), "out src"), [words(32), scratch(256)]), LANES)


def moving(given, taken, directives):
    """A warpgroup gives registers back, and another takes them."""
    body = f"""setp.lt.u32 %p2, %r1, 128;
@%p2 bra FEW;
setmaxnreg.inc.sync.aligned.u32 {taken};
bra DONE;
FEW:
setmaxnreg.dec.sync.aligned.u32 {given};
setmaxnreg.inc.sync.aligned.u32 {given + 8};
setmaxnreg.dec.sync.aligned.u32 {given};
DONE:
bar.sync 0;
"""
    return ptx(body + store("%r1"), directives=directives)


@pytest.mark.parametrize("directives", [".maxntid 256 .maxnreg 88", ".maxntid 256 .minnctapersm 2", ".maxntid 256"])
def test_registers_move_between_warpgroups(directives):
    given = 24 if "88" in directives else 104  # 65,536 registers for 512 threads: 128 each
    np.testing.assert_array_equal(run(moving(given, 144, directives), [words(256)], block=256), np.arange(256))


def test_registers_that_were_given_back_may_be_gone():
    """The second group may take all of them before the first asks for 8 again; on an H200 this kernel hangs."""
    with pytest.raises(Deadlock, match="registers for setmaxnreg.inc to 32"):
        engine.load(moving(24, 152, ".maxntid 256 .maxnreg 88")).launch(1, 256, [words(256)])


@pytest.mark.parametrize("directives", [".maxntid 256 .maxnreg 88", ".maxntid 256 .minnctapersm 2"])
def test_registers_that_nobody_gives_back_are_waited_for(directives):
    given = 32 if "88" in directives else 112
    with pytest.raises(Deadlock, match="registers for setmaxnreg.inc to 152"):
        engine.load(moving(given, 152, directives)).launch(1, 256, [words(256)])
    few = moving(given, 136, directives)
    np.testing.assert_array_equal(run(few, [words(256)], block=256), np.arange(256))


OTHER = "setmaxnreg.dec.sync.aligned.u32 40;"


@pytest.mark.parametrize("directives", [".maxntid 256 .maxnreg 88", ".maxntid 256"])
@pytest.mark.parametrize("early", [True, False], ids=["early", "late"])
@pytest.mark.parametrize(("some", "others"), [(128, ""), (32, ""), (32, OTHER)])
def test_a_warpgroup_asks_for_registers_together(some, others, early, directives):
    """`some` threads give registers back; `others` is what the rest executes, before them or when they have ended."""
    wait = ("bar.arrive 1, 256;\n", "bar.sync 1, 256;\n")
    body = f"setp.lt.u32 %p2, %r1, {some};\n@%p2 bra SOME;\n{wait[early]}{others}\nbra DONE;\n"
    body += f"SOME:\nsetmaxnreg.dec.sync.aligned.u32 24;\n{wait[1 - early]}DONE:\n"
    kernel = engine.load(ptx(body + store("%r1"), directives=directives))
    if some == 128:
        kernel.launch(1, 256, [words(256)])
        return
    if others:  # published kernels give each warp its number
        for strict in (False, True):
            with softsm.checking(strict=strict) as report:
                kernel.launch(1, 256, [words(256)])
            found, silent = (report.diagnostics, report.warnings)[:: 1 if strict else -1]
            assert {d.code for d in found} == {"warpgroup"} and not silent
            assert "with one number: warp" in found[0].message and ".dec 40" in str(found[0])
            assert all("setmaxnreg" in d.parties[0].instruction for d in found), found  # not again where a warp ends
        return
    with pytest.raises(Fault, match="setmaxnreg needs all four warps.* none") as caught:
        kernel.launch(1, 256, [words(256)])
    assert caught.value.code == "warpgroup"


@pytest.mark.parametrize("form", ["trap;", "brkpt;"])
def test_traps_stop_the_launch(form):
    with pytest.raises(Fault, match=form[:-1]) as caught:
        engine.load(ptx("@%p1 " + form + "\n" + store("%r1"))).launch(1, 32, [words(32)])
    assert caught.value.code == "trap"
