"""tcgen05 in PTX, under every order of completion: allocation, ld, st, cp, shift, mma, commit, pairs of CTAs; and the
diagnostics. Only the emulator is tested, not a GPU."""

import layouts
import numpy as np
import pytest
from launching import ORDERS, run
from tensor_kernels import COMMIT, WAIT, kernel, launch, names, words_in, words_out

from softsm.engine.launch import load
from softsm.errors import Deadlock, Fault, Unsupported
from softsm.isa import instruction_descriptor as idesc
from softsm.memory import tensor_memory as tm

# ---- ld and st ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", list(tm.REGISTERS))
@pytest.mark.parametrize("packed", [False, True])
def test_store_32x32b_load_any_shape(shape, packed):
    """What a 32x32b store put there, every load shape finds by its own map."""
    repeat = 2 if shape == "16x256b" else 4
    count = tm.REGISTERS[shape] * repeat
    width = tm.span(shape, repeat, packed)
    split = ", 40" if shape == "16x32bx2" else ""
    body = words_in(64) + f"tcgen05.st.sync.aligned.32x32b.x64.b32 [%r9], {names(100, 64)};\n"
    body += "tcgen05.wait::st.sync.aligned;\n"
    pack = ".pack::16b" if packed else ""
    body += f"tcgen05.ld.sync.aligned.{shape}.x{repeat}{pack}.b32 {names(200, count)}, [%r9 + 8]{split};\n"
    body += "tcgen05.wait::ld.sync.aligned;\n" + words_out(count, 200)
    data = np.random.default_rng(0).integers(0, 1 << 32, (128, 64), dtype=np.uint32)
    out = run(kernel(body), [data, np.zeros((128, count), np.uint32)], block=128)[1]
    assert width + 8 <= 64
    columns, lanes = tm.register_map(shape, repeat)
    for t in range(128):
        for r in range(count):
            lane = t // 32 * 32 + lanes[r, t % 32]
            column = 8 + columns[r, t % 32] * (2 if packed else 1) + (40 if shape == "16x32bx2" and t % 32 >= 16 else 0)
            want = int(data[lane, column])
            if packed:
                want = want & 0xFFFF | (int(data[lane, column + 1]) & 0xFFFF) << 16
            assert out[t, r] == want


def test_loaded_registers_may_be_used_before_the_wait():
    """A true dependence is honoured; only the order to later writes of tensor memory needs wait::ld."""
    body = words_in(8) + f"tcgen05.st.sync.aligned.32x32b.x8.b32 [%r9], {names(100, 8)};\n"
    body += f"tcgen05.ld.sync.aligned.32x32b.x8.b32 {names(200, 8)}, [%r9];\n"  # st -> ld of one warp keep their order
    body += "".join(f"add.u32 %r{200 + i}, %r{200 + i}, 5;\n" for i in range(8))
    body += f"tcgen05.st.sync.aligned.32x32b.x8.b32 [%r9], {names(200, 8)};\n"
    body += f"tcgen05.ld.sync.aligned.32x32b.x8.b32 {names(220, 8)}, [%r9];\n" + words_out(8, 220)
    body += "tcgen05.wait::ld.sync.aligned;\n"
    data = np.arange(1024, dtype=np.uint32).reshape(128, 8)
    out = run(kernel(body), [data, np.zeros_like(data)], block=128)[1]
    np.testing.assert_array_equal(out, data + 5)


def test_an_address_without_lanes_means_those_of_the_warp():
    body = words_in(8) + f"tcgen05.st.sync.aligned.32x32b.x8.b32 [%r8], {names(100, 8)};\n"
    body += "tcgen05.wait::st.sync.aligned;\n"
    body += f"tcgen05.ld.sync.aligned.32x32b.x4.b32 {names(200, 4)}, [%r8];\n"
    body += f"tcgen05.ld.sync.aligned.16x64b.x4.b32 {names(204, 4)}, [%r9];\n"
    body += "tcgen05.wait::ld.sync.aligned;\n"
    data = np.arange(1024, dtype=np.uint32).reshape(128, 8)
    out = run(kernel(body + words_out(8, 200)), [data, np.zeros_like(data)], block=128)[1]
    np.testing.assert_array_equal(out[:, :4], data[:, :4])
    np.testing.assert_array_equal(
        np.sort(out[:, 4:].reshape(4, -1)), np.sort(data.reshape(4, 32, 8)[:, :16].reshape(4, -1))
    )


def test_a_late_load_sees_what_was_written_after_it():
    """Under 'latest' a load without wait::ld reads what another warp stores afterwards: the bug shows."""
    other = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r9], {%r12};\ntcgen05.wait::st.sync.aligned;\n"
    body = "mov.u32 %r11, 1;\nmov.u32 %r12, 2;\ntcgen05.st.sync.aligned.32x32b.x1.b32 [%r9], {%r11};\n"
    body += "tcgen05.wait::st.sync.aligned;\nbar.sync 0;\nsetp.ge.u32 %p5, %r0, 128;\n@%p5 bra OTHER;\n"
    body += "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r13}, [%r9];\nbar.sync 0;\nbar.sync 0;\nbra JOIN;\n"
    body += f"OTHER: bar.sync 0;\n{other}bar.sync 0;\nbra DONE;\nJOIN:\n" + words_out(1, 13) + "DONE:\n"
    text = kernel(body)
    for order, want in (("eager", 1), ("latest", 2)):
        out = np.zeros(256, np.uint32)
        load(text).launch(1, 256, [np.zeros(4, np.uint32), out], order=order)
        assert (out[:128] == want).all()


def mma_image(m, n, k, seed=0):
    rng = np.random.default_rng(seed)
    a, b = layouts.values(rng, (m, k), "bf16"), layouts.values(rng, (n, k), "bf16")
    image = np.zeros((m + n) * 128, np.uint8)
    layouts.place(image, a, "bf16", layouts.SW128, True, 0)
    layouts.place(image, b, "bf16", layouts.SW128, True, m * 128)
    return a, b, image


def mma_steps(m, n, a_operand, kind="f16"):
    """Four products of k = 16 into the columns at %r8, by thread 0; then commit."""
    text = f"mov.u32 %r20, {idesc.encode('f16', m, n, 'bf16', 'bf16')};\n"
    for i in range(4):
        a_desc = layouts.descriptor(32 * i, 0, 1024, layouts.SW128, True)
        b_desc = layouts.descriptor(m * 128 + 32 * i, 0, 1024, layouts.SW128, True)
        text += f"add.s64 %rd7, %rd3, {a_desc};\nadd.s64 %rd8, %rd3, {b_desc};\nsetp.ne.u32 %p6, {i}, 0;\n"
        text += f"tcgen05.mma.cta_group::1.kind::{kind} [ %r8 + 0 ], {a_operand.format(8 * i)}, %rd8, %r20, %p6;\n"
    return text


@pytest.mark.parametrize(("m", "n"), [(128, 64), (64, 32)])
def test_products_from_shared_memory(m, n):
    a, b, image = mma_image(m, n, 64)
    body = "@!%p1 bra ISSUED;\n" + mma_steps(m, n, "%rd7") + COMMIT + "ISSUED:\n" + WAIT.format(n=0, parity=0)
    body += f"tcgen05.ld.sync.aligned.32x32b.x{n}.b32 {names(100, n)}, [%r9];\ntcgen05.wait::ld.sync.aligned;\n"
    body += words_out(n, 100)
    text = kernel(body, size=image.size, words=image.size // 4)
    out = run(text, [image, np.zeros((128, n), np.float32)], block=128)[1]
    lanes = [i if m == 128 else 32 * (i // 16) + i % 16 for i in range(m)]
    np.testing.assert_array_equal(out[lanes], a @ b.T)


def test_products_with_a_in_tensor_memory():
    a, b, image = mma_image(128, 64, 64)
    packed = np.ascontiguousarray(layouts.bits(a, "bf16").reshape(128, -1)).view(np.uint32)  # [128, 32]
    both = np.concatenate([image.view(np.uint32), packed.reshape(-1)])
    body = f"add.s64 %rd1, %rd1, {image.size};\n" + words_in(32)
    body += f"tcgen05.st.sync.aligned.32x32b.x32.b32 [%r9 + 64], {names(100, 32)};\ntcgen05.wait::st.sync.aligned;\n"
    body += "tcgen05.fence::before_thread_sync;\nbar.sync 0;\ntcgen05.fence::after_thread_sync;\n"
    body += "add.u32 %r21, %r8, 64;\n@!%p1 bra ISSUED;\n" + mma_steps(128, 64, "[ %r21 + {} ]") + COMMIT
    body += "ISSUED:\n" + WAIT.format(n=0, parity=0)
    body += f"tcgen05.ld.sync.aligned.32x32b.x64.b32 {names(200, 64)}, [%r9];\ntcgen05.wait::ld.sync.aligned;\n"
    body += words_out(64, 200)
    text = kernel(body, size=image.size, words=image.size // 4)
    out = run(text, [both, np.zeros((128, 64), np.float32)], block=128)[1]
    np.testing.assert_array_equal(out, a @ b.T)


def test_a_pair_of_ctas():
    """cta_group::2: the pair allocates together, the even CTA multiplies for both, the commit reaches both barriers."""
    m, n = 256, 64
    rng = np.random.default_rng(5)
    a, b = layouts.values(rng, (m, 16), "bf16"), layouts.values(rng, (n, 16), "bf16")
    images = []
    for c in range(2):
        image = np.zeros(128 * 128 + 32 * 128, np.uint8)
        layouts.place(image, a[128 * c : 128 * c + 128], "bf16", layouts.SW128, True, 0)
        layouts.place(image, b[32 * c : 32 * c + 32], "bf16", layouts.SW128, True, 128 * 128)
        images.append(image)
    size = images[0].size
    rank = f"mov.u32 %r30, %cluster_ctarank;\nmul.wide.u32 %rd9, %r30, {size};\nadd.s64 %rd1, %rd1, %rd9;\n"
    rank += f"mul.wide.u32 %rd9, %r30, {128 * n * 4};\nadd.s64 %rd2, %rd2, %rd9;\n"
    a_desc = layouts.descriptor(0, 0, 1024, layouts.SW128, True)
    b_desc = layouts.descriptor(128 * 128, 0, 1024, layouts.SW128, True)
    sync = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"
    body = sync + "setp.eq.u32 %p5, %r30, 0;\nand.pred %p5, %p5, %p1;\n@!%p5 bra ISSUED;\n"
    body += f"add.s64 %rd7, %rd3, {a_desc};\nadd.s64 %rd8, %rd3, {b_desc};\nsetp.ne.u32 %p6, 0, 0;\n"
    body += f"mov.u32 %r20, {idesc.encode('f16', m, n, 'bf16', 'bf16')};\nmov.u16 %rs1, 3;\n"
    body += "tcgen05.mma.cta_group::2.kind::f16 [ %r8 + 0 ], %rd7, %rd8, %r20, %p6;\n"
    body += "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r2], %rs1;\n"
    body += "ISSUED:\n" + WAIT.format(n=0, parity=0)
    body += f"tcgen05.ld.sync.aligned.32x32b.x{n}.b32 {names(100, n)}, [%r9];\ntcgen05.wait::ld.sync.aligned;\n"
    body += words_out(n, 100) + sync
    text = kernel(body, size=size, words=size // 4, group=2, columns=64)
    text = text.replace("mov.u32 %r0, %tid.x;", "mov.u32 %r0, %tid.x;\n" + rank)
    out = run(text, [np.concatenate(images), np.zeros((m, n), np.float32)], grid=2, cluster=2, block=128)[1]
    np.testing.assert_array_equal(out, a @ b.T)


def test_every_thread_that_reaches_it_issues_a_product():
    """Without elect.sync all 32 threads of the warp multiply: D is 32 times too large."""
    a, b, image = mma_image(128, 64, 64)
    steps = mma_steps(128, 64, "%rd7").replace("setp.ne.u32 %p6, 0, 0", "setp.eq.u32 %p6, 0, 0")
    body = "".join(f"mov.u32 %r{100 + i}, 0;\n" for i in range(64))
    body += f"tcgen05.st.sync.aligned.32x32b.x64.b32 [%r9], {names(100, 64)};\n"
    body += "tcgen05.wait::st.sync.aligned;\nbar.sync 0;\n"
    body += "@!%p2 bra ISSUED;\n" + steps + "@%p1 " + COMMIT + "ISSUED:\n" + WAIT.format(n=0, parity=0)
    body += "bar.sync 0;\n"
    body += f"tcgen05.ld.sync.aligned.32x32b.x64.b32 {names(100, 64)}, [%r9];\ntcgen05.wait::ld.sync.aligned;\n"
    text = kernel(body + words_out(64, 100), size=image.size, words=image.size // 4)
    out = run(text, [image, np.zeros((128, 64), np.float32)], block=128, orders=ORDERS[:1])[1]
    np.testing.assert_array_equal(out, 32 * (a @ b.T))


def one_product(instruction, m, n, image, *, load="32x32b.x32", count=32, before=""):
    """One mma by thread 0 between two loads of the same columns; returns what the second load saw."""
    body = words_in(count) if not before else before
    body += f"tcgen05.st.sync.aligned.{load}.b32 [%r9], {names(100, count)};\ntcgen05.wait::st.sync.aligned;\n"
    body += "tcgen05.fence::before_thread_sync;\nbar.sync 0;\ntcgen05.fence::after_thread_sync;\n@!%p1 bra ISSUED;\n"
    a_desc = layouts.descriptor(0, 0, 1024, layouts.SW128, True)
    b_desc = layouts.descriptor(m * 128, 0, 1024, layouts.SW128, True)
    body += f"add.s64 %rd7, %rd3, {a_desc};\nadd.s64 %rd8, %rd3, {b_desc};\nsetp.eq.u32 %p6, 0, 0;\n"
    body += f"mov.u32 %r20, {idesc.encode('f16', m, n, 'bf16', 'bf16')};\n{instruction}\n{COMMIT}ISSUED:\n"
    body += WAIT.format(n=0, parity=0)
    body += f"tcgen05.ld.sync.aligned.{load}.b32 {names(100, count)}, [%r9];\ntcgen05.wait::ld.sync.aligned;\n"
    text = kernel(body + words_out(count), size=image.size, words=image.size // 4)
    return run(text, [image, np.zeros((128, count), np.float32)], block=128)[1]


def fill(value, count):
    bits = int(np.float32(value).view(np.uint32))
    return "".join(f"mov.u32 %r{100 + i}, {bits};\n" for i in range(count))


def test_scale_input_d():
    a, b, image = mma_image(128, 32, 16)
    text = "tcgen05.mma.cta_group::1.kind::f16 [%r8], %rd7, %rd8, %r20, %p6, 3;"
    out = one_product(text, 128, 32, image, before=fill(16, 32))
    np.testing.assert_array_equal(out, a @ b.T + 2)


def test_disabled_output_lanes():
    a, b, image = mma_image(128, 32, 16)
    text = "mov.u32 %r30, 0xFFFF;\nmov.u32 %r31, 0;\nmov.u32 %r32, 0x80000000;\nmov.u32 %r33, -1;\n"
    text += "tcgen05.mma.cta_group::1.kind::f16 [%r8], %rd7, %rd8, %r20, {%r30, %r31, %r32, %r33}, %p6;"
    out = one_product(text, 128, 32, image, before=fill(16, 32))
    want = a @ b.T + 16
    want[:16] = want[95] = want[96:] = 16
    np.testing.assert_array_equal(out, want)


def test_weight_stationary_form():
    """With M = 32 the four quarters of D's columns lie in the four lane quarters."""
    a, b, image = mma_image(32, 128, 16)
    text = "tcgen05.mma.ws.cta_group::1.kind::f16.collector::b1::fill [%r8], %rd7, %rd8, %r20, %p6;"
    out = one_product(text, 32, 128, image, before=fill(0, 32))
    want = (a @ b.T).reshape(32, 4, 32).transpose(1, 0, 2).reshape(128, 32)
    np.testing.assert_array_equal(out, want)


def test_zero_column_mask():
    """.ws can treat columns of B as zero: here every fourth one, and it starts reading B two columns later."""
    rng = np.random.default_rng(8)
    a, b = layouts.values(rng, (128, 16), "bf16"), layouts.values(rng, (66, 16), "bf16")
    image = np.zeros((128 + 72) * 128, np.uint8)
    layouts.place(image, a, "bf16", layouts.SW128, True, 0)
    layouts.place(image, b, "bf16", layouts.SW128, True, 128 * 128)
    mask = 1 << 39 | 0 << 40 | 2 << 48 | 2 << 56  # runs of three used columns, then one zero; shifted by two
    text = f"mov.u64 %rd10, {mask};\ntcgen05.mma.ws.cta_group::1.kind::f16 [%r8], %rd7, %rd8, %r20, %p6, %rd10;"
    out = one_product(text, 128, 64, image, load="32x32b.x64", count=64, before=fill(1, 64))
    shifted = b[2:66].copy()
    shifted[3::4] = 0
    np.testing.assert_array_equal(out, a @ shifted.T + 1)


def test_a_product_nobody_waited_for_is_late():
    """mma -> ld is not an ordered pair: without commit and wait, 'latest' reads the old D."""
    a, b, image = mma_image(128, 64, 64)
    zero = "".join(f"mov.u32 %r{100 + i}, 0;\n" for i in range(64))
    zero += f"tcgen05.st.sync.aligned.32x32b.x64.b32 [%r9], {names(100, 64)};\n"
    zero += "tcgen05.wait::st.sync.aligned;\nbar.sync 0;\n"
    body = zero + "@!%p1 bra ISSUED;\n" + mma_steps(128, 64, "%rd7") + "ISSUED:\nbar.sync 0;\n"
    body += f"tcgen05.ld.sync.aligned.32x32b.x64.b32 {names(100, 64)}, [%r9];\ntcgen05.wait::ld.sync.aligned;\n"
    text = kernel(body + words_out(64, 100), size=image.size, words=image.size // 4)
    for order, want in (("eager", a @ b.T), ("latest", np.zeros((128, 64)))):
        out = np.zeros((128, 64), np.float32)
        load(text).launch(1, 128, [image, out], order=order)
        np.testing.assert_array_equal(out, want)


# ---- allocation ---------------------------------------------------------------------------------------------------


def test_ctas_on_one_sm_wait_for_columns():
    """Four CTAs share one SM and allocate 256 columns each: two run at a time."""
    body = "mov.u32 %r10, %ctaid.x;\nadd.u32 %r11, %r10, 3;\n@!%p1 bra END;\nmul.wide.u32 %rd9, %r10, 4;\n"
    body += "add.s64 %rd9, %rd2, %rd9;\nst.global.u32 [%rd9], %r11;\nEND:\n"
    text = kernel(body, columns=256)
    out = np.zeros(4, np.uint32)
    load(text).launch(4, 128, [np.zeros(4, np.uint32), out], sms=1)
    np.testing.assert_array_equal(out, np.arange(4) + 3)


def faults(code, body, words, **options):
    with pytest.raises(Fault, match=words) as error:
        launch(kernel(body, **options), np.zeros(4096, np.uint32), np.zeros(4096, np.uint32))
    assert error.value.code == code
    assert "line" in str(error.value)


LD = "tcgen05.ld.sync.aligned.{} {}, [{}];\ntcgen05.wait::ld.sync.aligned;\n"


def test_misuse_has_a_name():
    faults("lane-ownership", LD.format("32x32b.x1.b32", "{%r20}", "%r8 + 0x200000"), "may access lanes .* only")
    faults("tmem-lane", LD.format("16x64b.x1.b32", "{%r20}", "%r9 + 524288"), "must start at one of")
    faults("tmem-unallocated", LD.format("32x32b.x1.b32", "{%r20}", "%r9 + 128"), "column 128, which is not allocated")
    faults("tmem-bounds", LD.format("32x32b.x2.b32", "{%r20, %r21}", "%r9 + 511"), "there are 512")
    faults("misaligned", LD.format("16x256b.x1.b32", names(20, 4), "%r9 + 1"), "multiple of 4")
    faults("misaligned", LD.format("16x64b.x1.b32", "{%r20}", "%r9 + 3"), "multiple of 2")
    faults("tmem-address", "add.u32 %r9, %r9, %r0;\n" + LD.format("32x32b.x1.b32", "{%r20}", "%r9"), "different")
    faults("tmem-leak", "", "add tcgen05.dealloc", free=False)
    second = "@!%p2 bra B;\ntcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3], 32;\nB:\n"
    permit = "@!%p2 bra A;\ntcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;\nA:\n"
    faults("tmem-relinquished", permit + second, "after tcgen05.relinquish_alloc_permit")
    wrong = "@!%p2 bra B;\nadd.u32 %r20, %r8, 32;\ntcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 128;\nB:\n"
    faults("tmem-dealloc", wrong, "no tcgen05.alloc returned")
    faults("tmem-dealloc", wrong.replace("%r8, 32", "%r8, 0").replace(", 128", ", 64"), "128 were allocated")
    size = "@!%p2 bra B;\nmov.u32 %r20, 48;\ntcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3], %r20;\nB:\n"
    faults("tmem-granularity", size, "48 columns")
    mixed = "@!%p2 bra B;\ntcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;\nB:\n"
    faults("tmem-cta-group", mixed, "used cta_group::1 before")


def test_operands_of_products_are_checked():
    start = "@!%p1 bra ISSUED;\n"
    steps = mma_steps(128, 64, "%rd7")
    faults("descriptor", start + steps + "ISSUED:\n", "operand A, descriptor .* covers shared addresses", size=8192)
    old = steps.replace("add.s64 %rd8, %rd3, ", "add.s64 %rd8, %rd3, -70368744177664;\nadd.s64 %rd8, %rd8, ")
    faults("descriptor", start + old + "ISSUED:\n", "bits 46-48", size=32768)
    good, wrong = (str(idesc.encode("f16", m, 64, "bf16", "bf16")) for m in (128, 48))
    bad = steps.replace(good, wrong)
    faults("idesc", start + bad + "ISSUED:\n", "accepts M 64 or 128", size=32768)
    beyond = steps.replace("[ %r8 + 0 ]", "[ %r8 + 100 ]")
    faults("tmem-unallocated", start + beyond + "ISSUED:\n", "D of tcgen05.mma", size=32768)
    lane = steps.replace("[ %r8 + 0 ]", "[ %r8 + 1048576 ]")
    faults("tmem-lane", start + lane + "ISSUED:\n", "accepts lane 0", size=32768)


def test_waiting_for_columns_forever_is_a_deadlock():
    more = "@!%p2 bra B;\ntcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3], 512;\nB:\n"
    with pytest.raises(Deadlock, match="512 columns of tensor memory .held: 0..127 by CTA"):
        launch(kernel(more), np.zeros(4, np.uint32), np.zeros(4, np.uint32))


def test_a_missing_commit_is_a_deadlock():
    body = "@!%p1 bra ISSUED;\n" + mma_steps(128, 64, "%rd7") + "ISSUED:\n" + WAIT.format(n=0, parity=0)
    with pytest.raises(Deadlock, match=r"wait at PTX line .*\n *for phase 0 .parity 0. of mbarrier bar"):
        launch(kernel(body, size=32768), np.zeros(4, np.uint32), np.zeros(4, np.uint32))


@pytest.mark.parametrize(
    "name",
    [
        "tcgen05.mma.cta_group::1.kind::f16.ashift [%r8], %rd7, %rd8, %r20, %p6",
        "tcgen05.mma.cta_group::1.kind::f16.ashift.collector::a::use [%r8], [%r9], %rd8, %r20, %p6",
        "tcgen05.mma.cta_group::1.kind::mxf4 [%r8], %rd7, %rd8, %r20, %p6",
        "tcgen05.ld.red.sync.aligned.32x32b.x2.min.u32 {%r20, %r21}, %r22, [%r9]",
        "tcgen05.cp.cta_group::1.64x128b [%r8], %rd7",
        "tcgen05.frobnicate.cta_group::1 [%r8]",
        "tcgen05.ld.sync.aligned.16x256b.x64.b32 {%r20}, [%r9]",
    ],
)
def test_what_has_no_meaning_is_refused_when_loaded(name):
    with pytest.raises(Unsupported):
        load(kernel(name + ";\n"))


def test_tensor_memory_needs_blackwell():
    with pytest.raises(Unsupported, match="sm_100a"):
        load(kernel("").replace("sm_100a", "sm_90a"))
