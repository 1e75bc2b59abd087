"""Between the lanes of a warp: shuffles, votes, matches, reductions, elections; each against a loop over lanes."""

import numpy as np
import pytest
from launching import ptx, run, store, words

LANES = np.arange(32)
RNG = np.random.default_rng(11)


def load(register="%r3", source="%rd2"):
    return f"mul.wide.u32 %rd10, %r1, 4;\nadd.s64 %rd10, {source}, %rd10;\nld.global.u32 {register}, [%rd10];\n"


def shuffled(mode, values, b, c):
    """(value, inside) per lane, as the PTX ISA's pseudo-code has it."""
    out, inside = [], []
    for lane in range(32):
        segment, clamp = c >> 8 & 31, c & 31
        most = (lane & segment) | (clamp & ~segment)
        least = lane & segment
        amount = int(b[lane]) & 31
        j = {"up": lane - amount, "down": lane + amount, "bfly": lane ^ amount}.get(mode, least | (amount & ~segment))
        ok = j >= most if mode == "up" else j <= most
        out.append(values[j if ok else lane])
        inside.append(int(ok))
    return out, inside


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("c", [0x1F, 0, 0x181F, 0x1C07, 0x1000, 0x0F, 0x1003, 0x1F1F])
def test_shuffle(mode, c):
    values = RNG.integers(0, 1 << 32, 32, dtype=np.uint32)
    amounts = RNG.integers(0, 40, 32, dtype=np.uint32)
    body = load("%r3", "%rd2") + load("%r4", "%rd3")
    body += f"shfl.sync.{mode}.b32 %r5|%p2, %r3, %r4, {c}, -1;\nselp.u32 %r6, 1, 0, %p2;\nadd.u32 %r7, %r1, 32;\n"
    got = run(ptx(body + store("%r5") + store("%r6", "%r7"), "out a b"), [words(64), values, amounts])[0]
    value, inside = shuffled(mode, values, amounts, c)
    np.testing.assert_array_equal(got[32:], inside)
    np.testing.assert_array_equal(got[:32], value)


def test_shuffle_within_half_a_warp():
    """Two groups of lanes, each with its own membermask, in different branches."""
    body = """setp.lt.u32 %p2, %r1, 16;
@%p2 bra LOW;
shfl.sync.bfly.b32 %r3, %r1, 5, 31, 0xffff0000;
bra DONE;
LOW:
shfl.sync.idx.b32 %r3, %r1, 3, 31, 0x0000ffff;
DONE:
"""
    got = run(ptx(body + store("%r3")), [words(32)])
    np.testing.assert_array_equal(got, np.where(LANES < 16, 3, LANES ^ 5))


@pytest.mark.parametrize("pattern", [0, 0xFFFFFFFF, 0x80000001, 0xF0F0, 0xFFFF0000])
def test_votes(pattern):
    """All lanes take part, or the lower half alone."""
    body = f"""mov.u32 %r3, {pattern};
shr.u32 %r3, %r3, %r1;
and.b32 %r3, %r3, 1;
setp.ne.u32 %p2, %r3, 0;
vote.sync.any.pred %p3, %p2, -1;
vote.sync.all.pred %p4, %p2, -1;
vote.sync.uni.pred %p5, %p2, -1;
vote.sync.ballot.b32 %r4, %p2, -1;
vote.sync.ballot.b32 %r8, !%p2, -1;
selp.u32 %r5, 1, 0, %p3;
selp.u32 %r6, 2, 0, %p4;
selp.u32 %r7, 4, 0, %p5;
or.b32 %r5, %r5, %r6;
or.b32 %r5, %r5, %r7;
mov.u32 %r9, 0;
setp.ge.u32 %p6, %r1, 16;
@%p6 bra OVER;
vote.sync.ballot.b32 %r9, %p2, 0xffff;
vote.sync.all.pred %p4, %p2, 0xffff;
selp.u32 %r6, 8, 0, %p4;
or.b32 %r5, %r5, %r6;
OVER:
shl.b32 %r10, %r1, 2;
"""
    for i, r in enumerate((4, 5, 8, 9)):
        body += f"add.u32 %r11, %r10, {i};\n" + store(f"%r{r}", "%r11")
    got = run(ptx(body), [words(128)]).reshape(32, 4)
    on = pattern >> LANES & 1
    flags = int(on.any()) | 2 * int(on.all()) | 4 * int(len(set(on)) == 1)
    assert (got[:, 0] == pattern).all() and (got[:, 2] == pattern ^ 0xFFFFFFFF).all()
    assert (got[16:, 1] == flags).all() and (got[:16, 1] == flags + 8 * int(on[:16].all())).all()
    assert (got[:16, 3] == pattern & 0xFFFF).all() and not got[16:, 3].any()


@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("kinds", [1, 3, 32])
def test_match(width, kinds):
    values = RNG.integers(0, 1 << 32, kinds, dtype=np.uint32)[np.arange(32) % kinds]
    body = load() + "mov.u32 %r9, 0;\nmov.b64 %rd4, {%r9, %r3};\n"
    source = "%rd4" if width == 64 else "%r3"
    body += f"match.any.sync.b{width} %r4, {source}, -1;\nmatch.all.sync.b{width} %r5|%p2, {source}, -1;\n"
    body += "selp.u32 %r6, 1, 0, %p2;\nadd.u32 %r7, %r1, 32;\nadd.u32 %r8, %r1, 64;\n"
    text = ptx(body + store("%r4") + store("%r5", "%r7") + store("%r6", "%r8"), "out a")
    got = run(text, [words(96), values])[0].reshape(3, 32)
    same = [sum(1 << j for j in range(32) if values[j] == values[i]) for i in range(32)]
    np.testing.assert_array_equal(got[0], same)
    assert (got[1] == (0xFFFFFFFF if kinds == 1 else 0)).all() and (got[2] == int(kinds == 1)).all()


REDUCTIONS = {
    "add.u32": np.sum, "add.s32": np.sum, "min.u32": np.min, "max.u32": np.max, "min.s32": np.min, "max.s32": np.max,
    "and.b32": np.bitwise_and.reduce, "or.b32": np.bitwise_or.reduce, "xor.b32": np.bitwise_xor.reduce,
}  # fmt: skip


@pytest.mark.parametrize("form", REDUCTIONS)
def test_reduction(form):
    """Over the whole warp, and in two branches over the even and the odd lanes."""
    values = RNG.integers(0, 1 << 32, 32, dtype=np.uint32)
    body = load() + f"redux.sync.{form} %r4, %r3, -1;\nand.b32 %r5, %r1, 1;\nsetp.eq.u32 %p2, %r5, 0;\n"
    body += f"@%p2 bra EVEN;\nredux.sync.{form} %r6, %r3, 0xaaaaaaaa;\nbra DONE;\n"
    body += f"EVEN:\nredux.sync.{form} %r6, %r3, 0x55555555;\nDONE:\nadd.u32 %r7, %r1, 32;\n"
    got = run(ptx(body + store("%r4") + store("%r6", "%r7"), "out a"), [words(64), values])[0]
    typed = values.view(np.int32) if form.endswith("s32") else values

    def whole(x):
        return int(REDUCTIONS[form](x.astype(np.int64))) & 0xFFFFFFFF

    assert (got[:32] == whole(typed)).all()
    np.testing.assert_array_equal(got[32:], np.where(LANES % 2, whole(typed[1::2]), whole(typed[::2])))


@pytest.mark.parametrize("tile", [1, 4, 16])
def test_tiles_of_a_warp_in_one_instruction(tile):
    """All lanes execute it together, each tile with a membermask of its own, as tiles of cooperative groups do."""
    values = RNG.integers(-3, 3, 32).astype(np.int32)
    body = load() + f"and.b32 %r4, %r1, {32 - tile};\nmov.u32 %r5, {(1 << tile) - 1};\nshl.b32 %r5, %r5, %r4;\n"
    body += """setp.gt.s32 %p2, %r3, 0;
vote.sync.ballot.b32 %r6, %p2, %r5;
vote.sync.any.pred %p3, %p2, %r5;
vote.sync.all.pred %p4, %p2, %r5;
vote.sync.uni.pred %p5, %p2, %r5;
selp.u32 %r7, 1, 0, %p3;
selp.u32 %r8, 2, 0, %p4;
or.b32 %r7, %r7, %r8;
selp.u32 %r8, 4, 0, %p5;
or.b32 %r7, %r7, %r8;
redux.sync.add.s32 %r8, %r3, %r5;
redux.sync.min.s32 %r9, %r3, %r5;
match.any.sync.b32 %r10, %r3, %r5;
match.all.sync.b32 %r11|%p6, %r3, %r5;
elect.sync %r12|%p7, %r5;
selp.u32 %r13, 100, 0, %p7;
add.u32 %r12, %r12, %r13;
shl.b32 %r20, %r1, 3;
"""
    for i, r in enumerate((6, 7, 8, 9, 10, 11, 12)):
        body += f"add.u32 %r21, %r20, {i};\n" + store(f"%r{r}", "%r21")
    got = run(ptx(body, "out a"), [words(256), values.view(np.uint32)])[0].reshape(32, 8).astype(np.int64)
    for lane in LANES:
        ours = range(lane // tile * tile, lane // tile * tile + tile)
        mask, yes = sum(1 << i for i in ours), sum(1 << i for i in ours if values[i] > 0)
        part = values[ours.start : ours.stop]
        same = sum(1 << i for i in ours if values[i] == values[lane])
        flags = int(yes != 0) | 2 * int(yes == mask) | 4 * int(yes in (0, mask))
        elected = ours.start + 100 * int(lane == ours.start)
        expected = [yes, flags, part.sum(), part.min(), same, mask if same == mask else 0, elected]
        np.testing.assert_array_equal(got[lane, :7], [int(x) & 0xFFFFFFFF for x in expected], f"lane {lane}")


def test_float_reductions_of_even_and_odd_lanes_in_one_instruction():
    values = RNG.normal(size=32).astype(np.float32)
    values[7] = np.nan
    body = load() + "and.b32 %r4, %r1, 1;\nmov.u32 %r5, 0x55555555;\nshl.b32 %r5, %r5, %r4;\n"
    body += "redux.sync.min.f32 %r8, %r3, %r5;\nredux.sync.max.abs.NaN.f32 %r9, %r3, %r5;\nadd.u32 %r7, %r1, 32;\n"
    body += store("%r8") + store("%r9", "%r7")
    got = run(ptx(body, "out a"), [words(64), values.view(np.uint32)])[0].view(np.float32)
    least = [np.nanmin(values[i % 2 :: 2]) for i in LANES]
    most = [np.nan if i % 2 else np.abs(values[::2]).max() for i in LANES]
    np.testing.assert_array_equal(got, [*least, *most])


def test_election_and_active_lanes():
    """One lane of the membermask is elected and all learn which: the lowest. Which lanes are active together is the
    compiler's affair; within a branch of single lanes it is that lane."""
    body = """elect.sync %r3|%p2, 0xffffffff;
selp.u32 %r4, 1, 0, %p2;
setp.ge.u32 %p3, %r1, 8;
mov.u32 %r5, 0;
mov.u32 %r6, 0;
@!%p3 bra OVER;
elect.sync %r5|%p4, 0xffffff00;
selp.u32 %r6, 1, 0, %p4;
OVER:
mov.u32 %r7, 0;
@!%p1 bra DONE;
activemask.b32 %r7;
DONE:
mul.lo.u32 %r10, %r1, 5;
"""
    for i, r in enumerate((3, 4, 5, 6, 7)):
        body += f"add.u32 %r11, %r10, {i};\n" + store(f"%r{r}", "%r11")
    got = run(ptx(body), [words(160)]).reshape(32, 5)
    assert (got[:, 0] == 0).all()
    np.testing.assert_array_equal(got[:, 1], LANES == 0)
    np.testing.assert_array_equal(got[:, 2], np.where(LANES >= 8, 8, 0))
    np.testing.assert_array_equal(got[:, 3], LANES == 8)
    np.testing.assert_array_equal(got[:, 4], LANES == 0)


def test_warp_barrier_orders_shared_memory():
    body = """mov.u32 %r2, data;
mad.lo.u32 %r3, %r1, 4, %r2;
st.shared.u32 [%r3], %r1;
bar.warp.sync 0xffffffff;
xor.b32 %r4, %r1, 9;
mad.lo.u32 %r4, %r4, 4, %r2;
ld.shared.u32 %r5, [%r4];
"""
    got = run(ptx(body + store("%r5"), shared=".shared .align 4 .b8 data[128];"), [words(32)])
    np.testing.assert_array_equal(got, LANES ^ 9)
