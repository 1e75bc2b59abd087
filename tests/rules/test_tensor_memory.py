"""Order of tcgen05 operations (PTX 9.4): each test is the smallest kernel with one synchronisation that can be
left out."""

import numpy as np
import pytest
from ruling import findings, holds

import softsm
from softsm.museum import text as t

SHARED = """.shared .align 1024 .b8 a[4096]; .shared .align 1024 .b8 b[256]; .shared .align 8 .b64 bar;
.shared .align 8 .b64 bar2;
.shared .align 4 .b32 place;"""
PUBLISH = "fence.proxy.async;\nbar.sync 0;\n"
START = (
    t.init("bar", "bar2")
    + t.alloc(64)
    + t.fill("a", 4096)
    + t.fill("b", 256)
    + PUBLISH
    + t.descriptor("%rd10", "a")
    + t.descriptor("%rd11", "b")
    + t.lanes_of_warp("%r4")
)
MMA = t.mma("%r3", "%rd10", "%rd11", t.idesc())
OUT = [np.zeros(128, np.uint32)]


def when(keep, text):
    return text if keep else ""


def whole(body, end=None):
    """An address in %r3 and tiles of ones; tensor memory is freed at the end."""
    end = t.dealloc(64) if end is None else end
    return t.kernel(START + body + end, "out", shared=SHARED)


def product(barrier="bar", extra=""):
    return t.only("thread 0", MMA + extra + t.commit(barrier))


# -- completion of products --------------------------------------------------------------------------------------------


def test_load_after_product_requires_commit_and_wait():
    def make(keep):
        read = when(keep, t.wait("bar", 0) + t.AFTER) + t.load("%r4", 10, 8) + t.WAIT_LD + t.out("%r10")
        last = when(not keep, t.wait("bar", 0) + t.AFTER)
        return whole(product() + read + last)

    holds(make, args=OUT, also=("uninitialised",))
    holds(make, args=OUT, strict=False, also=("uninitialised",))


def test_load_after_product_requires_fence_after_the_wait():
    def make(keep):
        return whole(product() + t.wait("bar", 0) + when(keep, t.AFTER) + t.load("%r4", 10, 8) + t.WAIT_LD)

    holds(make, args=OUT)
    assert not findings(make(False), OUT, strict=False)


def test_commit_covers_the_products_of_its_own_thread_only():
    def make(keep):
        body = t.only("thread 0", MMA) + t.only("thread 0" if keep else "thread 1", t.commit("bar"))
        return whole(body + t.wait("bar", 0) + t.AFTER + t.load("%r4", 10, 8) + t.WAIT_LD)

    holds(make, args=OUT, also=("in-flight",))
    holds(make, args=OUT, strict=False, also=("in-flight",))


@pytest.mark.parametrize("order", ("eager", "latest", "random"))
def test_products_and_commits_are_issued_by_one_lane(order):
    """32 commits arrive at a barrier that counts one, some of them when the CTA has ended."""

    def make(keep):
        body = t.only("thread 0" if keep else "warp 0", MMA + t.commit("bar"))
        return whole(body + t.wait("bar", 0) + t.AFTER + t.load("%r4", 10, 8) + t.WAIT_LD + t.out("%r10"))

    assert not findings(make(True), OUT, strict=False, order=order)
    assert findings(make(False), OUT, strict=False, order=order)


def test_commits_of_one_thread_arrive_in_order_at_the_default_level():
    """DeepGEMM's indexer asks by parity for a phase of one stage behind its wait for another: with the arrivals in
    another order, that answers for the phase before."""
    ask = "mbarrier.test_wait.parity.shared::cta.b64 %p5, [bar], 0;\nselp.u32 %r20, 1, 0, %p5;\n"
    both = t.only("thread 0", MMA + t.commit("bar") + t.commit("bar2"))
    last = t.only("thread 32", t.wait("bar2", 0) + ask + t.out("%r20", index="0"))
    text = whole(both + last + t.wait("bar", 0) + t.AFTER)

    def answers(strict):
        found = set()
        for seed in range(8):
            out = np.zeros(128, np.uint32)
            with softsm.checking(order="random", seed=seed, strict=strict):
                softsm.load(text).launch(1, 128, [out])
            found.add(int(out[0]))
        return found

    assert answers(strict=False) == {1}
    assert answers(strict=True) == {0, 1}


def test_commit_of_another_warp_covers_nothing():
    def make(keep):
        body = t.only("thread 0", MMA) + "bar.sync 0;\n" + t.only("thread 0" if keep else "thread 64", t.commit("bar"))
        return whole(body + t.wait("bar", 0) + t.AFTER + t.load("%r4", 10, 8) + t.WAIT_LD)

    holds(make, args=OUT, also=("in-flight",))


@pytest.mark.parametrize(("code", "used"), [(5, 8), (4, 12)], ids=["e2m1", "e3m2"])
def test_padding_of_narrow_operands_need_not_be_written(code, used):
    """Elements of 4 and 6 bits fill the first 8 or 12 of 16 bytes. make(False) leaves out 4 of those as well."""

    def make(keep):
        shape = 1 << 4 | code << 7 | 0 << 10 | (8 >> 3) << 17 | (128 >> 4) << 24
        fill = "mov.u32 %r90, a;\nshl.b32 %r91, %r0, 4;\nadd.u32 %r90, %r90, %r91;\n" + "".join(
            f"st.shared.b32 [%r90+{row + at}], 0;\n" for row in (0, 2048) for at in range(0, used - 4 * (not keep), 4)
        )
        start = START.replace(t.fill("a", 4096), fill)
        mma = t.mma("%r3", "%rd10", "%rd11", shape).replace("kind::f16", "kind::f8f6f4")
        body = t.only("thread 0", mma + t.commit("bar")) + t.wait("bar", 0)
        return t.kernel(start + body + t.dealloc(64), "out", shared=SHARED)

    for strict in (True, False):
        holds(make, args=OUT, code="uninitialised", strict=strict)


# -- reuse of the accumulator ------------------------------------------------------------------------------------------


def again(between):
    """Product, read by all warps, `between`, the next product over the same cells."""
    read = t.wait("bar", 0) + t.AFTER + t.load("%r4", 10, 8)
    return whole(product() + read + between + product("bar2") + t.wait("bar2", 0) + t.AFTER)


def test_product_after_load_requires_wait_ld():
    holds(
        lambda keep: again(when(keep, t.WAIT_LD) + t.BEFORE + "bar.sync 0;\n" + t.AFTER), args=OUT, also=("in-flight",)
    )


def test_product_after_load_requires_fence_before_the_barrier():
    holds(lambda keep: again(t.WAIT_LD + when(keep, t.BEFORE) + "bar.sync 0;\n" + t.AFTER), args=OUT)


def test_product_after_load_requires_fence_after_the_barrier():
    holds(lambda keep: again(t.WAIT_LD + t.BEFORE + "bar.sync 0;\n" + when(keep, t.AFTER)), args=OUT)


def test_product_after_load_of_other_warps_requires_a_barrier():
    def make(keep):
        return again(t.WAIT_LD + t.BEFORE + when(keep, "bar.sync 0;\n") + t.AFTER)

    holds(make, args=OUT)
    holds(make, args=OUT, strict=False)


USED, COPIED = "add.u32 %r50, %r12, 1;\n", "mov.b32 %r50, %r12;\n"
BRANCH = "setp.eq.u32 %p5, %r1, 1;\n@%p5 bra ONE;\n{}bra OVER;\nONE:\n{}OVER:\n"
FILED = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r5], {%r12};\n" + t.WAIT_ST


@pytest.mark.parametrize(
    ("use", "complete"),
    [
        (USED, True),
        ("@%p0 " + USED, True),  # its lanes wait whether they execute it or not
        (COPIED + "add.u32 %r51, %r50, 1;\n", True),
        ("mov.b64 %rd12, {%r12, %r13};\nmov.b64 {%r50, %r51}, %rd12;\nadd.u32 %r52, %r51, 1;\n", True),
        (BRANCH.format(USED, "add.u32 %r50, %r13, 2;\n"), True),  # in both branches
        ("mov.u32 %r60, 0;\nLOOP:\nadd.u32 %r60, %r60, 1;\nsetp.lt.u32 %p5, %r60, 2;\n@%p5 bra LOOP;\n" + USED, True),
        ("add.u32 %r5, %r4, 8;\n" + FILED, True),
        (COPIED, False),
        ("mov.u32 %r12, 1;\n" + USED, False),  # another value by then
        (BRANCH.format(USED, ""), False),
        ("", False),
    ],
)
def test_a_load_is_complete_when_a_register_of_it_is_used(use, complete):
    """This is true of hardware. PTX, and the strict level, require wait::ld."""
    text = again(use + "bar.sync 0;\n")
    for order in ("eager", "latest"):
        found = findings(text, OUT, strict=False, order=order)
        assert set(found.codes()) == (set() if complete else {"race", "in-flight"}), found
        assert "race" in findings(text, OUT, order=order).codes()


def test_a_use_completes_the_load_that_wrote_the_register_and_no_other():
    def make(keep):
        other = t.load("%r4", 20, 4) + ("add.u32 %r51, %r20, 1;\n" if keep else "")
        return again(other + USED + "bar.sync 0;\n")

    holds(make, args=OUT, strict=False, also=("in-flight",))


@pytest.mark.parametrize("missing", ["before", "after"])
def test_default_level_needs_no_tensor_fences(missing):
    fences = (t.BEFORE if missing != "before" else "") + "bar.sync 0;\n" + (t.AFTER if missing != "after" else "")
    assert not findings(again(t.WAIT_LD + fences), OUT, strict=False)


# -- operand A in tensor memory ----------------------------------------------------------------------------------------


def stored(between):
    """All warps store packed ones to columns 32..39; the product reads them as A."""
    put = "".join(f"mov.b32 %r{10 + i}, {t.ONES};\n" for i in range(8)) + "add.u32 %r5, %r4, 32;\n"
    use = "add.u32 %r6, %r3, 32;\n" + t.mma("%r3", "[%r6]", "%rd11", t.idesc()) + t.commit("bar")
    return whole(put + t.store("%r5", 10, 8) + between + t.only("thread 0", use) + t.wait("bar", 0) + t.AFTER)


def test_product_after_store_requires_wait_st():
    def make(keep):
        return stored(when(keep, t.WAIT_ST) + t.BEFORE + "bar.sync 0;\n" + t.AFTER)

    holds(make, args=OUT, also=("in-flight", "nan"))
    holds(make, args=OUT, strict=False, also=("in-flight", "nan"))


def test_product_after_store_requires_a_barrier():
    def make(keep):
        return stored(t.WAIT_ST + t.BEFORE + when(keep, "bar.sync 0;\n") + t.AFTER)

    holds(make, args=OUT, also=("uninitialised",))


def test_product_after_store_requires_fence_before_the_barrier():
    holds(lambda keep: stored(t.WAIT_ST + when(keep, t.BEFORE) + "bar.sync 0;\n" + t.AFTER), args=OUT)


def test_product_after_store_requires_fence_after_the_barrier():
    holds(lambda keep: stored(t.WAIT_ST + t.BEFORE + "bar.sync 0;\n" + when(keep, t.AFTER)), args=OUT)


def test_a_product_does_not_add_to_packed_values():
    """This happens if P overwrites S, and the next S = Q K^T accumulates."""

    def make(keep):
        put = "mov.f32 %f0, 0f3F800000;\n"
        convert = "mov.f32 %f9, %f0;\nmov.b32 %rX, %f9;\n" if keep else "cvt.rn.bf16x2.f32 %rX, %f0, %f0;\n"
        put += "".join(convert.replace("%rX", f"%r{10 + i}") for i in range(8))
        use = t.mma("%r3", "%rd10", "%rd11", t.idesc(), add=1) + t.commit("bar")
        between = t.WAIT_ST + t.BEFORE + "bar.sync 0;\n" + t.AFTER
        return whole(put + t.store("%r4", 10, 8) + between + t.only("thread 0", use) + t.wait("bar", 0) + t.AFTER)

    for strict in (True, False):
        holds(make, args=OUT, code="type", strict=strict)


# -- pairs kept in order without help, within one warp -----------------------------------------------------------------


def test_products_on_one_accumulator_stay_in_order_within_a_warp():
    second = t.mma("%r3", "%rd10", "%rd11", t.idesc(), 1)

    def make(keep):
        body = t.only("thread 0", MMA + t.commit("bar2")) + "bar.sync 0;\n" + t.AFTER
        body += t.only("thread 0" if keep else "thread 32", second + t.commit("bar"))
        return whole(body + t.wait("bar2", 0) + t.wait("bar", 0) + t.AFTER)

    holds(make, args=OUT)


def test_products_of_different_shape_are_not_ordered():
    def make(keep):
        second = t.mma("%r3", "%rd10", "%rd11", t.idesc(m=128 if keep else 64))
        return whole(product("bar", second) + t.wait("bar", 0) + t.AFTER)

    holds(make, args=OUT)


def test_product_reading_what_another_product_wrote_requires_a_wait():
    def make(keep):
        first = t.only(
            "thread 0", "add.u32 %r6, %r3, 32;\n" + t.mma("%r6", "%rd10", "%rd11", t.idesc()) + t.commit("bar2")
        )
        gap = when(keep, t.wait("bar2", 0) + t.AFTER)
        second = t.only("thread 0", t.mma("%r3", "[%r6]", "%rd11", t.idesc()) + t.commit("bar"))
        return whole(first + gap + second + t.wait("bar", 0) + t.wait("bar2", 0) + t.AFTER)

    for order in ("eager", "latest"):  # it is also a mix of types, which is another matter
        assert "race" not in findings(make(True), OUT, order=order).codes()
        assert "race" in findings(make(False), OUT, order=order).codes()


def test_store_then_load_stay_in_order_within_a_warp():
    put = "".join(f"mov.b32 %r{10 + i}, 7;\n" for i in range(8))
    body = put + t.store("%r4", 10, 8) + t.load("%r4", 20, 8) + t.WAIT_LD + t.WAIT_ST + t.out("%r20")
    for order in ("eager", "latest"):
        assert not findings(whole(body), OUT, order=order)


def test_load_by_another_warp_of_the_same_lanes_requires_wait_st():
    def make(keep):
        put = "".join(f"mov.b32 %r{10 + i}, 7;\n" for i in range(8))
        body = t.only("warp 0", put + t.store("%r4", 10, 8) + when(keep, t.WAIT_ST) + t.BEFORE)
        body += "bar.sync 0;\n" + t.AFTER + t.only("warp 4", t.load("%r4", 20, 8) + t.WAIT_LD)
        return whole(body)

    holds(make, block=160, args=[np.zeros(160, np.uint32)], also=("in-flight",))


@pytest.mark.parametrize("silent", (4, 8, 12, 16))
def test_no_load_of_many_is_forgotten(silent):
    """Warps 4 to 16 load cells of lanes 0 to 31 and arrive; warp 0 waits for all, or all but one, and overwrites."""
    put = "".join(f"mov.b32 %r{10 + i}, 7;\n" for i in range(8)) + t.store("%r4", 10, 8) + t.WAIT_ST + t.BEFORE
    one = "setp.eq.u32 %p5, %r2, 0;\n"

    def make(keep):
        body = t.init(("bar", 4 - (not keep))) + t.alloc(64) + t.lanes_of_warp("%r4") + one
        body += t.only("warp 0", put) + "bar.sync 0;\n" + t.AFTER
        for warp in (4, 8, 12, 16):
            arrive = t.BEFORE + "@%p5 " + t.arrive("bar") if keep or warp != silent else ""
            body += t.only(f"warp {warp}", t.load("%r4", 20, 8) + t.WAIT_LD + arrive)
        body += t.only("warp 0", t.wait("bar", 0) + t.AFTER + put)
        return t.kernel(body + t.dealloc(64), "out", shared=SHARED)

    holds(make, block=544, args=[np.zeros(544, np.uint32)])
    holds(make, block=544, args=[np.zeros(544, np.uint32)], strict=False)


def test_a_load_behind_which_products_read_is_not_forgotten():
    """Warp 4 loads A; three products read it; warp 0 overwrites it behind those, or behind the load as well."""

    def make(keep):
        put = (
            "".join(f"mov.b32 %r{10 + i}, {t.ONES};\n" for i in range(8)) + t.store("%r7", 10, 8) + t.WAIT_ST + t.BEFORE
        )
        body = "add.u32 %r6, %r3, 32;\nadd.u32 %r7, %r4, 32;\nsetp.eq.u32 %p5, %r2, 0;\n"
        body += "setp.lt.u32 %p6, %r1, 4;\n" + t.only("%p6", put) + "bar.sync 0;\n" + t.AFTER
        body += t.only("warp 4", t.load("%r7", 20, 8) + t.WAIT_LD + t.BEFORE + "@%p5 " + t.arrive("bar2"))
        body += "bar.sync 1, 160;\n" if keep else ""
        product = t.mma("%r3", "[%r6]", "%rd11", t.idesc())
        body += t.only("thread 0", product * 3 + t.commit("bar")) + t.wait("bar", 0)
        body += t.AFTER + t.only("warp 0", put)
        return whole(body + t.wait("bar2", 0))

    holds(make, block=160, args=[np.zeros(160, np.uint32)], strict=False)


def test_copy_then_product_stay_in_order_within_a_warp():
    """tcgen05.cp brings A into tensor memory; the product of the same warp reads it, that of another may not."""

    def make(keep):
        copy = "add.u32 %r6, %r3, 32;\ntcgen05.cp.cta_group::1.128x256b [%r6], %rd10;\n"
        use = "add.u32 %r6, %r3, 32;\n" + t.mma("%r3", "[%r6]", "%rd11", t.idesc()) + t.commit("bar")
        first = t.only("thread 0", copy + t.commit("bar2")) + "bar.sync 0;\n" + t.AFTER
        return whole(
            first + t.only("thread 0" if keep else "thread 32", use) + t.wait("bar2", 0) + t.wait("bar", 0) + t.AFTER
        )

    holds(make, args=OUT)


def test_a_copied_accumulator_is_in_order_by_default():
    """PTX 9.4 lists the order of a copy and a product for A and scale factors; Triton copies accumulators too."""
    copy = "".join(f"add.u32 %r6, %r3, {c};\ntcgen05.cp.cta_group::1.128x256b [%r6], %rd10;\n" for c in range(0, 16, 8))
    add = t.mma("%r3", "%rd10", "%rd11", t.idesc(), add=1)

    def make(keep):
        wait = t.commit("bar2") + t.wait("bar2", 0) + t.AFTER
        return whole(t.only("thread 0", copy + when(keep, wait) + add + t.commit("bar")) + t.wait("bar", 0) + t.AFTER)

    holds(make, args=OUT)
    for order in ("eager", "latest", "random"):
        assert not findings(make(False), OUT, strict=False, order=order)


def test_copies_around_a_product_that_reads_them_are_in_order():
    """cp, mma, cp into the same columns: the product between them keeps the copies apart."""

    def make(keep):
        copy = "add.u32 %r6, %r3, 32;\ntcgen05.cp.cta_group::1.128x256b [%r6], %rd10;\n"
        use = t.mma("%r3", "[%r6]", "%rd11", t.idesc())
        body = copy + when(keep, use) + copy + when(not keep, use) + t.commit("bar")
        return whole(t.only("thread 0", body) + t.wait("bar", 0) + t.AFTER)

    holds(make, args=OUT)
    holds(make, args=OUT, strict=False)


def test_a_product_that_reads_a_part_keeps_whole_copies_apart_by_default():
    """DeepGEMM's FP8 x FP4 mega MoE copies scales of 128 rows, multiplies by 16 of them, and copies the next ones."""

    def copy(column):
        return f"add.u32 %r6, %r3, {column};\ntcgen05.cp.cta_group::1.128x256b [%r6], %rd10;\n"

    def make(keep):
        use = "add.u32 %r6, %r3, 36;\n" + t.mma("%r3", "[%r6]", "%rd11", t.idesc())
        body = copy(32) + copy(40) + when(keep, use) + copy(32) + when(not keep, use) + t.commit("bar")
        return whole(t.only("thread 0", body) + t.wait("bar", 0) + t.AFTER)

    holds(make, args=OUT, strict=False)
    assert findings(make(True), OUT, strict=True)  # PTX does not say so


# -- shared memory operands --------------------------------------------------------------------------------------------


def test_product_after_ordinary_store_requires_proxy_fence():
    def make(keep):
        body = t.fill("a", 4096) + when(keep, "fence.proxy.async;\n") + "bar.sync 0;\n"
        return whole(body + product() + t.wait("bar", 0) + t.AFTER)

    holds(make, args=OUT)
    holds(make, args=OUT, strict=False)


def test_product_after_ordinary_store_requires_a_barrier():
    def make(keep):
        body = t.fill("a", 4096) + "fence.proxy.async;\n" + when(keep, "bar.sync 0;\n")
        return whole(body + product() + t.wait("bar", 0) + t.AFTER)

    holds(make, args=OUT)


def test_overwriting_an_operand_requires_the_products_completion():
    def make(keep):
        late = when(not keep, t.wait("bar", 0) + t.AFTER)
        return whole(product() + when(keep, t.wait("bar", 0) + t.AFTER) + t.fill("b", 256, 0) + late)

    holds(make, args=OUT)
    holds(make, args=OUT, strict=False)


def test_bytes_between_the_rows_of_an_operand_are_free():
    """A swizzled product reads 32 bytes of each 128-byte row: writing the others meanwhile is not a race."""
    shared = SHARED.replace("a[4096]", "a[16384]")
    body = t.init("bar", "bar2") + t.alloc(64) + t.fill("a", 16384) + t.fill("b", 256) + PUBLISH
    body += t.descriptor("%rd10", "a", lbo=16, sbo=1024, swizzle=2) + t.descriptor("%rd11", "b") + product()
    body += "shl.b32 %r10, %r0, 7;\nmov.u32 %r11, a;\nadd.u32 %r11, %r11, %r10;\nand.b32 %r12, %r0, 7;\n"
    body += "xor.b32 %r12, %r12, CHUNK;\nshl.b32 %r12, %r12, 4;\nadd.u32 %r11, %r11, %r12;\n"
    body += "st.shared.b32 [%r11], %r0;\n"
    body += t.wait("bar", 0) + t.AFTER + t.dealloc(64)
    beside = t.kernel(body.replace("CHUNK", "2"), "out", shared=shared)  # chunk 2 of k is not read
    inside = t.kernel(body.replace("CHUNK", "1"), "out", shared=shared)
    for order in ("eager", "latest"):
        assert not findings(beside, OUT, order=order)
        assert set(findings(inside, OUT, order=order).codes()) == {"race"}


# -- allocation --------------------------------------------------------------------------------------------------------


def test_other_warps_read_the_allocated_address_after_a_barrier():
    def make(keep):
        ask = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [place], 32;\n"
        body = t.only("warp 0", ask) + when(keep, "bar.sync 0;\n") + "ld.shared.u32 %r3, [place];\n"
        return t.kernel(body + "bar.sync 0;\nld.shared.u32 %r3, [place];\n" + t.dealloc(32), "out", shared=SHARED)

    holds(make, args=OUT)


def test_a_pair_allocates_behind_a_barrier_of_the_cluster():
    meet = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"
    ask = "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [place], 32;\n"
    free = "ld.shared.u32 %r3, [place];\ntcgen05.dealloc.cta_group::2.sync.aligned.b32 %r3, 32;\n"

    def make(keep):
        body = when(keep, meet) + t.only("warp 0", ask) + meet + t.only("warp 0", free) + meet
        return t.kernel(body, "out", shared=SHARED)

    holds(make, args=OUT, code="peer-start", grid=2, cluster=2)
    found = findings(make(False), OUT, strict=False, grid=2, cluster=2)
    assert not found and [d.code for d in found.warnings] == ["peer-start"]


def test_dealloc_requires_the_products_completion():
    def make(keep):
        return whole(product() + when(keep, t.wait("bar", 0) + t.AFTER))

    holds(make, args=OUT, code="in-flight")
    holds(make, args=OUT, code="in-flight", strict=False)


def test_dealloc_requires_the_loads_of_other_warps_to_be_over():
    def make(keep):
        read = t.wait("bar", 0) + t.AFTER + t.load("%r4", 10, 8) + t.WAIT_LD + t.BEFORE
        return whole(product() + read, end=t.dealloc(64, sync=keep))

    holds(make, args=OUT, code=("in-flight", "tmem-unallocated"))


def test_an_address_without_lanes_means_those_of_the_warp():
    """Hardware ignores the bits of the warp, and kernels leave them out; wrong ones are a mistake at either level."""
    wait = product() + t.wait("bar", 0) + t.AFTER

    def make(address):
        return whole(wait + t.load(address, 10, 8) + t.WAIT_LD + t.out("%r10"))

    for order in ("eager", "latest"):
        assert not findings(make("%r3"), OUT, strict=False, order=order)
        assert findings(make("%r3"), OUT, order=order).codes() == ["lane-ownership"]
        assert findings(make("%r3 + 0x200000"), OUT, strict=False, order=order).codes() == ["lane-ownership"]


def test_reading_cells_that_nobody_wrote():
    def make(keep):
        body = when(keep, product()) + when(keep, t.wait("bar", 0) + t.AFTER)
        return whole(body + t.load("%r4", 10, 8) + t.WAIT_LD)

    holds(make, args=OUT, code="uninitialised")


# -- registers of a load ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use", ["add.u32 %r30, %r10, 1;\n", "mov.b32 %f0, %r10;\n"])
def test_use_of_loaded_registers_requires_wait_ld(use):
    read = t.wait("bar", 0) + t.AFTER + t.load("%r4", 10, 8)

    def make(keep):
        return whole(product() + read + when(keep, t.WAIT_LD) + use + when(not keep, t.WAIT_LD))

    holds(make, args=OUT)
    assert not findings(make(False), OUT, strict=False)  # Triton's output does this
