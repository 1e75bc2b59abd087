"""wgmma's commit groups, under every order of completion, and what goes wrong. The emulator alone: most of these are
undefined behaviour on a device."""

from contextlib import nullcontext

import layouts
import numpy as np
import ptx_texts as kn
import pytest
from launching import run
from layouts import SW128
from test_wgmma import A_AT, B_AT, SIZE, d_registers

import softsm
from softsm.engine.launch import load
from softsm.errors import Deadlock, Fault, Unsupported

NAME = "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16"
COMMIT = "wgmma.commit_group.sync.aligned;\n"
D0, D1 = kn.names(32, 8), kn.names(40, 8)


def tiles(seed=0):
    rng = np.random.default_rng(seed)
    a, b = layouts.values(rng, (64, 16), "bf16"), layouts.values(rng, (16, 16), "bf16")
    image = np.zeros(SIZE, np.uint8)
    a_desc = layouts.descriptor(A_AT, *layouts.place(image, a, "bf16", SW128, True, A_AT), SW128, False)
    b_desc = layouts.descriptor(B_AT, *layouts.place(image, b, "bf16", SW128, True, B_AT), SW128, False)
    return a, b, image, a_desc, b_desc


def wait(pending):
    return f"wgmma.wait_group.sync.aligned {pending};\n"


def product(d, scale_d="%p2"):
    return f"{NAME} {kn.braces(d)}, %rd11, %rd12, {scale_d}, 1, 1, 0, 0;\n"


def kernel(body, a_desc, b_desc, count=16, halves=4):
    """%p2 is true, %p3 false; D0 and D1 start as zeros; `body` leaves its results in registers %r32 .. ."""
    text = kn.fill_shared("%rd1", SIZE, 128) + "".join(f"mov.u32 {r}, 0;\n" for r in D0 + D1)
    text += "cvt.u64.u32 %rd10, %r1;\nshr.u64 %rd10, %rd10, 4;\nand.b64 %rd10, %rd10, 0x3FFF;\n"
    text += f"add.s64 %rd11, %rd10, {a_desc};\nadd.s64 %rd12, %rd10, {b_desc};\n"
    text += "setp.eq.u32 %p2, 0, 0;\nsetp.ne.u32 %p3, 0, 0;\nwgmma.fence.sync.aligned;\n" + body
    text += kn.thread_pointer("%rd2", count, "%rd13") + kn.store_words("%rd13", kn.names(32, count))
    return kn.text(text, ["image", "out"], shared=SIZE, halves=halves)


def test_two_groups_in_flight():
    """wait_group 1 completes the older group, wait_group 0 the rest."""
    a, b, image, *descs = tiles()
    body = product(D0, "%p3") + product(D0) + COMMIT + product(D1, "%p3") + COMMIT + wait(1)
    body += "".join(f"add.f32 {r}, {r}, 0f40000000;\n" for r in D0) + wait(0)
    out = run(kernel(body, *descs), [image, np.zeros((128, 16), np.float32)], block=128)[1]
    want = a @ b.T
    np.testing.assert_array_equal(out[:, :8], d_registers(2 * want + 2, np.float32))
    np.testing.assert_array_equal(out[:, 8:], d_registers(want, np.float32))


def test_interleaved_accumulators():
    a, b, image, *descs = tiles(1)
    body = product(D0) + product(D1) + product(D0) + product(D1) + product(D0) + COMMIT + wait(0)
    out = run(kernel(body, *descs), [image, np.zeros((128, 16), np.float32)], block=128)[1]
    want = a @ b.T
    np.testing.assert_array_equal(out[:, :8], d_registers(3 * want, np.float32))
    np.testing.assert_array_equal(out[:, 8:], d_registers(2 * want, np.float32))


def test_an_accumulator_read_too_early_is_stale():
    """Without the wait, 'latest' still finds the old registers: the bug shows."""
    a, b, image, *descs = tiles(2)
    early = "".join(f"or.b32 %r{48 + i}, {r}, 0;\n" for i, r in enumerate(D0))
    body = product(D0) + COMMIT + "bar.sync 0;\n" + early + wait(0)
    body += "".join(f"mov.b32 {r}, %r{48 + i};\n" for i, r in enumerate(D1))
    text = kernel(body, *descs)
    want = d_registers(a @ b.T, np.float32)
    for order, seen in (("eager", want), ("latest", np.zeros_like(want))):
        out = np.zeros((128, 16), np.float32)
        load(text).launch(1, 128, [image, out], order=order)
        np.testing.assert_array_equal(out[:, :8], want)
        np.testing.assert_array_equal(out[:, 8:], seen)


def test_a_move_before_the_wait_gets_the_result():
    """Triton unpacks f16 accumulators between commit and wait; ptxas then waits for them. The warps come one by one, so
    the first ones move before the product can exist."""
    a, b, image, *descs = tiles(4)
    unpack = "".join(f"mov.b32 {{%rs{2 * i}, %rs{2 * i + 1}}}, {r};\n" for i, r in enumerate(D0))
    pack = "".join(f"mov.b32 {r}, {{%rs{2 * i}, %rs{2 * i + 1}}};\n" for i, r in enumerate(D1))
    for n, text in enumerate((unpack + wait(0) + pack, unpack + pack + wait(0))):
        whole = kernel(product(D0) + COMMIT + text, *descs, halves=16)
        out = run(whole, [image, np.zeros((128, 16), np.float32)], block=128)[1]
        np.testing.assert_array_equal(out[:, 8:], d_registers(a @ b.T, np.float32), err_msg=str(n))


def test_two_warpgroups_multiply_on_their_own():
    a, b, image, *descs = tiles(3)
    text = kernel(product(D0) + COMMIT + wait(0), *descs).replace("add.u32 %r2, %r2, 128", "add.u32 %r2, %r2, 256")
    out = run(text, [image, np.zeros((256, 16), np.float32)], block=256)[1]
    want = d_registers(a @ b.T, np.float32)
    np.testing.assert_array_equal(out[:128, :8], want)
    np.testing.assert_array_equal(out[128:, :8], want)


def launch(body, descs, block=128):
    load(kernel(body, *descs)).launch(1, block, [np.zeros(SIZE, np.uint8), np.zeros((128, 16), np.float32)])


def test_misuse_has_a_name():
    *_, a_desc, b_desc = tiles()
    whole = product(D0) + COMMIT + wait(0)
    with pytest.raises(Fault, match="needs four whole warps") as error:
        launch(whole, (a_desc, b_desc), block=96)
    assert error.value.code == "warpgroup"
    with pytest.raises(Fault, match="different descriptors") as error:
        launch("cvt.u64.u32 %rd14, %r0;\nadd.s64 %rd12, %rd12, %rd14;\n" + whole, (a_desc, b_desc))
    assert error.value.code == "wgmma-operands"
    with pytest.raises(Fault, match="execute different products") as error:
        launch(
            "and.b32 %r5, %r0, 96;\ncvt.u64.u32 %rd14, %r5;\nadd.s64 %rd12, %rd12, %rd14;\n" + whole, (a_desc, b_desc)
        )
    assert error.value.code == "wgmma-operands"
    with pytest.raises(Fault, match="outside the CTA's") as error:
        launch(whole, (a_desc, b_desc + (40000 >> 4)))
    assert error.value.code == "descriptor"
    some = "setp.lt.u32 %p4, %r0, 32;\n@%p4 bra SKIP;\n" + product(D0) + COMMIT + "SKIP:\n" + COMMIT + wait(0)
    with pytest.raises(Fault, match="different numbers"):
        launch(some, (a_desc, b_desc))


def test_a_warp_that_never_commits_is_waited_for():
    *_, a_desc, b_desc = tiles()
    body = "setp.lt.u32 %p4, %r0, 32;\n@%p4 bra SKIP;\n" + product(D0) + COMMIT + wait(0) + "SKIP:\n"
    with pytest.raises(Deadlock, match="the other warps of the warpgroup"):
        launch(body, (a_desc, b_desc))


@pytest.mark.parametrize("checked", [False, True])
def test_warps_may_end_before_the_others_commit(checked):
    """Nobody waits, and the first warp is gone when the last one commits: its registers are too."""
    *_, image, a_desc, b_desc = tiles()
    text = kernel(product(D0) + COMMIT, a_desc, b_desc)
    with softsm.checking() if checked else nullcontext() as report:
        load(text).launch(1, 128, [image, np.zeros((128, 16), np.float32)])
    assert not checked or "wgmma-registers" in report.codes()


@pytest.mark.parametrize(
    "name",
    [
        NAME.replace("n16", "n12"),
        NAME.replace("k16", "k32"),
        NAME.replace("f32.bf16", "f16.bf16"),
        NAME.replace("bf16.bf16", "bf16.f16"),
        NAME.replace("mma_async", "mma_async.sp"),
    ],
)
def test_unknown_shapes_are_refused(name):
    *_, a_desc, b_desc = tiles()
    with pytest.raises(Unsupported):
        load(kernel(product(D0).replace(NAME, name), a_desc, b_desc))


@pytest.mark.parametrize("seed", range(2))
def test_accumulators_used_before_the_wait(seed):
    """ptxas puts a wait there; Triton's `max_num_imprecise_acc` adds up partial products so, and commits behind it."""
    a, b, image, *descs = tiles(4 + seed)
    body = product(D0, "%p3") + "".join(f"add.f32 {x}, {x}, {r};\n" for x, r in zip(kn.names(50, 8), D0))
    body += product(D1, "%p3") + COMMIT * seed  # committed, or still open
    body += "".join(f"add.f32 {r}, {x}, {y};\n" for r, x, y in zip(D0, kn.names(50, 8), D1)) + COMMIT + wait(0)
    text = kernel("".join(f"mov.u32 {x}, 0;\n" for x in kn.names(50, 8)) + body, *descs)
    out = run(text, [image, np.zeros((128, 16), np.float32)], block=128, orders=[("eager", 0)])[1]
    np.testing.assert_array_equal(out[:, :8], d_registers(2 * (a @ b.T), np.float32))
