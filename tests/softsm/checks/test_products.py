"""The operand tap and expectations: what products read, by tile and step, and what a report shows of it."""

import numpy as np
import pytest

import softsm
from softsm.museum import attention, operands, tiles
from softsm.museum import text as t
from softsm.museum.exhibits import Program, on_boundary
from softsm.museum.tiles import ROWS, D


def bound(a, b) -> float:
    """Exact products of 16-bit numbers; each of their sums is rounded or cut to fp32."""
    a, b = (np.abs(x.astype(np.float32)) for x in (a, b))
    return a.shape[1] * 2.0**-23 * float((a @ b.T).max())


def launch(program: Program, *, order="latest", expect=None, **checks):
    arrays = [on_boundary(a) if isinstance(a, np.ndarray) else a for a in program.args]
    given = [a(arrays) if callable(a) else a for a in arrays]
    with softsm.checking(order=order, tap=True, **checks) as report:
        if expect is not None:
            expect()
        softsm.load(program.text).launch(program.grid, program.block, given, cluster=program.cluster)
    return report


@pytest.mark.parametrize("order", ["eager", "latest"])
def test_the_tap_keeps_operands_and_results_by_tile_and_step(order):
    report = launch(operands.two_tiles([0, ROWS]), order=order)
    q, k = operands.Q.astype(np.float32), operands.K.astype(np.float32)
    found = report.tap.mma
    assert [(m.tile, m.step) for m in found] == [(tile, step) for tile in range(2) for step in range(4)]
    for m in found:
        rows, part = slice(m.tile * ROWS, (m.tile + 1) * ROWS), slice(16 * m.step, 16 * m.step + 16)
        np.testing.assert_array_equal(m.a, q[:, part])
        np.testing.assert_array_equal(m.b, k[rows, part])
        np.testing.assert_allclose(m.d, q[:, : part.stop] @ k[rows, : part.stop].T, rtol=0, atol=bound(q, k))
    assert not report


def test_an_expectation_says_which_element_was_read_instead():
    k = operands.K.reshape(2, ROWS, D)
    report = launch(operands.two_tiles([0, 3]), expect=lambda: softsm.expect_mma("qk", a=operands.Q, b=k, column=0))
    first = next(iter(report))
    assert first.code == "operand"
    assert "qk: element (0, 0) of B in tile 1, step 0" in first.message and "it is B[0, 3, 0]" in first.message
    assert "coordinates (0, 3)" in first.parties[1].what  # of the TMA load that brought it


def test_other_accumulators_are_not_compared():
    wrong = np.zeros((2, ROWS, D), np.float32)
    assert not launch(operands.two_tiles([0, ROWS]), expect=lambda: softsm.expect_mma("qk", b=wrong, column=32))


def test_a_of_tensor_memory_is_tapped():
    report = launch(attention.p_not_awaited(""))
    (m,) = report.tap.mma
    assert m.a.shape == (128, 16) and (m.a == 1).all() and (m.d == 16).all()


def test_mma_sync_is_tapped():
    """One warp runs two steps of m16n8k16 on one accumulator, then a new tile; operands and results are compared."""
    a, b = tiles.draw(3, 16, 16), tiles.draw(4, 8, 16)
    # thread t holds rows t / 4 and t / 4 + 8 of A, columns 2 (t % 4) and + 8, and row t / 4 of B likewise
    place = "shr.u32 %r20, %r0, 2;\nand.b32 %r21, %r0, 3;\nshl.b32 %r20, %r20, 5;\nshl.b32 %r21, %r21, 2;\n"
    place += "add.u32 %r22, %r20, %r21;\ncvt.u64.u32 %rd20, %r22;\nadd.s64 %rd21, %rd1, %rd20;\n"
    place += "add.s64 %rd22, %rd2, %rd20;\n"
    loads = "".join(f"ld.global.b32 %r{30 + i}, [%rd21+{at}];\n" for i, at in enumerate((0, 256, 16, 272)))
    loads += "ld.global.b32 %r34, [%rd22];\nld.global.b32 %r35, [%rd22+16];\n"
    zero = "".join(f"mov.f32 %f{i}, 0f00000000;\n" for i in range(4))
    step = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f0, %f1, %f2, %f3}, {%r30, %r31, %r32, %r33}, "
    step += "{%r34, %r35}, {%f0, %f1, %f2, %f3};\n"
    text = t.kernel(place + loads + zero + step + step + zero + step, "a b", target="sm_90a", version="8.6")
    report = launch(Program(text, [a, b], block=32))
    whole = a.astype(np.float32) @ b.astype(np.float32).T
    assert [(m.tile, m.step) for m in report.tap.mma] == [(0, 0), (0, 1), (1, 0)]
    for m, times in zip(report.tap.mma, (1, 2, 1)):
        np.testing.assert_array_equal(m.a, a.astype(np.float32))
        np.testing.assert_array_equal(m.b, b.astype(np.float32))
        np.testing.assert_allclose(m.d, times * whole, rtol=0, atol=times * bound(a, b))


def test_wgmma_is_tapped():
    a, b = tiles.draw(1, 64, 16), tiles.draw(2, 8, 16)
    zero = "".join(f"mov.f32 %f{i}, 0f00000000;\n" for i in range(4))
    move = "mul.wide.u32 %rd20, %r0, 16;\nadd.s64 %rd21, %rd1, %rd20;\n"
    move += "ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd21];\n"
    # 16-byte chunk c of A is (row c / 2, half c % 2): core matrices of 8 rows, LBO 128, SBO 256
    place = (
        "shr.u32 %r20, %r0, 1;\nand.b32 %r21, %r0, 1;\nshr.u32 %r22, %r20, 3;\nand.b32 %r23, %r20, "
        "7;\nshl.b32 %r22, %r22, 8;\n"
        "shl.b32 %r21, %r21, 7;\nshl.b32 %r23, %r23, 4;\nadd.u32 %r24, %r21, %r22;\nadd.u32 %r24, %r24, %r23;\n"
    )
    put = "mov.u32 %r25, at;\nadd.u32 %r25, %r25, %r24;\nst.shared.v4.b32 [%r25], {%r10, %r11, %r12, %r13};\n"
    small = "setp.lt.u32 %p4, %r0, 16;\n" + t.only("%p4", (move + put).replace("%rd1,", "%rd2,").replace("at;", "bt;"))
    text = place + move + put + small + "fence.proxy.async;\nbar.sync 0;\n" + zero
    text += t.descriptor("%rd10", "at", blackwell=False) + t.descriptor("%rd11", "bt", blackwell=False)
    text += (
        "wgmma.fence.sync.aligned;\nwgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, "
        "%f2, %f3}, %rd10, %rd11, "
        "1, 1, 1, 0, 0;\nwgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n"
    )
    shared = ".shared .align 1024 .b8 at[2048]; .shared .align 1024 .b8 bt[256];"
    report = launch(Program(t.kernel(text, "a b", shared=shared, target="sm_90a", version="8.6"), [a, b]), strict=True)
    (m,) = report.tap.mma
    np.testing.assert_array_equal(m.a, a.astype(np.float32))
    np.testing.assert_array_equal(m.b, b.astype(np.float32))
    np.testing.assert_allclose(m.d, a.astype(np.float32) @ b.astype(np.float32).T, rtol=0, atol=bound(a, b))
    assert not report


def test_expect_mma_belongs_inside_checking():
    with pytest.raises(ValueError, match="inside"):
        softsm.expect_mma("qk", b=np.zeros((8, 16)))
    with softsm.checking(), pytest.raises(ValueError, match="2 to 4"):
        softsm.expect_mma("qk", b=np.zeros(8))
