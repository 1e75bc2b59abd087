"""wgmma (sm_90a): shared-memory operands, registers in use, groups."""

import numpy as np
import pytest
from ruling import findings, holds

from softsm.museum import text as t

SHARED = ".shared .align 1024 .b8 a[2048]; .shared .align 1024 .b8 b[256];"
OUT = [np.zeros(128, np.uint32)]
FENCE, COMMIT, WAIT = (f"wgmma.{x}.sync.aligned" for x in ("fence", "commit_group", "wait_group"))
ZERO = "".join(f"mov.f32 %f{i}, 0f00000000;\n" for i in range(4))
PRODUCT = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %rd10, %rd11, 1, 1, 1, 0, 0;\n"
DESCRIBE = t.descriptor("%rd10", "a", blackwell=False) + t.descriptor("%rd11", "b", blackwell=False)
FILL = t.fill("a", 2048) + t.fill("b", 256)
PUBLISH = "fence.proxy.async;\nbar.sync 0;\n"
USE = t.out("%f0")


def when(keep, text):
    return text if keep else ""


def whole(body):
    return t.kernel(DESCRIBE + body, "out", shared=SHARED, target="sm_90a", version="8.6")


def group(fence=True):
    return when(fence, FENCE + ";\n") + PRODUCT + COMMIT + ";\n"


def test_operands_written_by_ordinary_stores_require_proxy_fence():
    def make(keep):
        return whole(
            ZERO + FILL + when(keep, "fence.proxy.async;\n") + "bar.sync 0;\n" + group() + WAIT + " 0;\n" + USE
        )

    holds(make, args=OUT)
    holds(make, args=OUT, strict=False)


def test_a_product_begins_when_the_four_warps_have_come_to_it():
    """Each writes a part of A and B, and fences it; no barrier. An H200 reads them so (test_hardware.py)."""

    def make(keep):
        return whole(ZERO + FILL + when(keep, "fence.proxy.async;\n") + group() + WAIT + " 0;\n" + USE)

    holds(make, args=OUT, strict=False)
    assert set(findings(make(True), OUT).codes()) == {"race"}


def test_a_product_is_not_behind_what_a_warp_of_its_group_does_afterwards():
    def make(keep):
        again = t.only("warp 0", "st.shared.u32 [b], 0;\nfence.proxy.async;\n")
        first = "fence.proxy.async;\n" + when(keep, again) + group() + when(not keep, again)
        return whole(ZERO + FILL + first + WAIT + " 0;\n" + USE)

    holds(make, args=OUT, strict=False)


def test_a_product_is_not_behind_another_warpgroup():
    def make(keep):
        fill = t.only("warp 4", "st.shared.u32 [b], 0;\nfence.proxy.async;\n") + when(keep, "bar.sync 0;\n")
        first = "setp.lt.u32 %p5, %r0, 128;\n" + t.only("%p5", FILL) + "fence.proxy.async;\nbar.sync 0;\n" + fill
        return whole(ZERO + first + t.only("%p5", group() + WAIT + " 0;\n" + USE))

    holds(make, args=OUT, strict=False, block=160)


def test_overwriting_an_operand_requires_wait_group():
    def make(keep):
        late = when(not keep, WAIT + " 0;\n")
        return whole(
            ZERO + FILL + PUBLISH + group() + when(keep, WAIT + " 0;\nbar.sync 0;\n") + t.fill("b", 256, 0) + late
        )

    removed = holds(make, args=OUT)
    assert all("wgmma.mma_async" in str(d) and "commit_group" not in str(d) for d in removed), str(removed)


def test_other_warps_may_overwrite_an_operand_after_a_barrier():
    """wait_group of each warp says that the products are over; that the others are past it takes a barrier."""

    def make(keep):
        return whole(
            ZERO
            + FILL
            + PUBLISH
            + group()
            + WAIT
            + (" 0" if keep else " 1")
            + ";\nbar.sync 0;\n"
            + t.fill("b", 256, 0)
            + WAIT
            + " 0;\n"
        )

    holds(make, args=OUT)


def test_using_the_accumulator_requires_wait_group():
    def make(keep):
        return whole(
            ZERO + FILL + PUBLISH + group() + when(keep, WAIT + " 0;\n") + USE + when(not keep, WAIT + " 0;\n")
        )

    holds(make, args=OUT, code="wgmma-registers")
    holds(make, args=OUT, code="wgmma-registers", strict=False)


def test_a_wait_in_a_loop_leaves_as_many_groups_as_it_says():
    """The use stands above the product in the text, and behind it in the loop."""

    def make(keep):
        loop = "mov.u32 %r50, 0;\nbra NEXT;\nTOP:\nadd.f32 %f9, %f9, %f0;\nadd.u32 %r50, %r50, 1;\n"
        loop += "setp.eq.u32 %p5, %r50, 3;\n@%p5 bra END;\nNEXT:\n" + group() + WAIT + f" {0 if keep else 1};\n"
        return whole(ZERO + "mov.f32 %f9, %f0;\n" + FILL + PUBLISH + loop + "bra TOP;\nEND:\n" + WAIT + " 0;\n" + USE)

    for strict in (True, False):
        holds(make, args=OUT, code="wgmma-registers", strict=strict)


def test_copies_of_the_accumulator_count_at_the_strict_level_only():
    """Triton copies accumulators before the wait; what is computed from them, or overwritten, is another matter."""

    def early(text):
        return whole(ZERO + FILL + PUBLISH + group() + text + WAIT + " 0;\n" + USE)

    for copy in ("mov.b32 %f120, %f0;\n", "mov.b32 {%h1, %h2}, %f0;\n"):
        assert not findings(early(copy), OUT, strict=False)
        assert "wgmma-registers" in findings(early(copy), OUT).codes()
    for use in (
        "add.f32 %f120, %f0, %f0;\n",
        "mov.b32 %f0, 0f00000000;\n",
        "mov.b32 {%h1, %h2}, %f0;\nadd.s16 %h1, %h1, %h1;\n",
    ):
        assert "wgmma-registers" in findings(early(use), OUT, strict=False).codes()


@pytest.mark.parametrize("loop", [False, True], ids=["behind", "in a loop"])
def test_reading_a_in_registers_counts_at_the_strict_level_only(loop):
    """Triton 3.6 and FlashMLA store A while it is multiplied, and no GPU has given another value. A write is a race."""
    product = PRODUCT.replace("%rd10", "{%r40, %r41, %r42, %r43}").replace("1, 0, 0;", "1, 0;")
    ones = "".join(f"mov.u32 %r4{i}, 0x3f803f80;\n" for i in range(4))

    def early(use):
        body = FENCE + ";\n" + product + COMMIT + ";\n"
        if loop:  # the use stands above the product in the text
            body = "mov.u32 %r50, 0;\nbra NEXT;\nTOP:\n" + use + "add.u32 %r50, %r50, 1;\nNEXT:\n" + body
            body += "setp.lt.u32 %p5, %r50, 1;\n@%p5 bra TOP;\n"
        else:
            body += use
        return whole(ones + ZERO + FILL + PUBLISH + body + WAIT + " 0;\n" + USE)

    read, write = "add.u32 %r60, %r40, 1;\n", "add.u32 %r41, %r41, 1;\n"
    assert "A registers" in str(findings(early(read), OUT))
    assert not findings(early(read), OUT, strict=False)
    for use in (write, read + write):
        assert "are overwritten" in str(findings(early(use), OUT, strict=False))
    used = findings(early(read + "add.f32 %f120, %f0, %f0;\n"), OUT, strict=False)
    assert "accumulator registers" in str(used)


def test_writing_the_accumulator_before_a_product_requires_wgmma_fence():
    holds(
        lambda keep: whole(FILL + PUBLISH + ZERO + group(keep) + WAIT + " 0;\n" + USE), args=OUT, code="wgmma-registers"
    )


def test_constants_that_a_compiler_sinks_below_the_fence_count_at_the_strict_level_only():
    copied = "mov.f32 %f0, 0f00000000;\n" + "".join(f"mov.f32 %f{i}, %f0;\n" for i in range(1, 4))
    for sunk in (ZERO, copied):
        text = whole(FILL + PUBLISH + FENCE + ";\n" + sunk + PRODUCT + COMMIT + ";\n" + WAIT + " 0;\n" + USE)
        assert not findings(text, OUT, strict=False)
        assert findings(text, OUT).codes() == ["wgmma-registers"]
    changed = text.replace("mov.f32 %f3, %f0;", "add.f32 %f3, %f0, %f0;")
    assert findings(changed, OUT, strict=False).codes() == ["wgmma-registers"]


def test_products_on_one_accumulator_need_no_fence_between_them():
    body = FILL + PUBLISH + ZERO + FENCE + ";\n" + PRODUCT + PRODUCT + COMMIT + ";\n" + WAIT + " 0;\n" + USE
    holds(lambda keep: whole(body if keep else body.replace(FENCE + ";\n", "")), args=OUT, code="wgmma-registers")


def test_overwriting_the_far_half_of_b_of_a_sparse_product_requires_wait_group():
    """With K = 32 a row of B has 64 bytes, and the last 32 belong to the operand too."""
    describe = DESCRIBE.replace(t.descriptor("%rd11", "b", blackwell=False), "")
    describe += t.descriptor("%rd11", "b", lbo=128, sbo=512, blackwell=False)
    product = "mov.u32 %r60, 0x44444444;\n" + FENCE + ";\nwgmma.mma_async.sp.sync.aligned.m64n8k32.f32.bf16.bf16 "
    product += "{%f0, %f1, %f2, %f3}, %rd10, %rd11, %r60, 0, 1, 1, 1, 0, 0;\n" + COMMIT + ";\n"
    shared = SHARED.replace("b[256]", "b[512]")
    last = t.fill("b", 128, 0).replace("mov.u32 %r90, b;", "mov.u32 %r90, b;\nadd.u32 %r90, %r90, 384;")

    def make(keep):
        body = describe + ZERO + t.fill("a", 2048) + t.fill("b", 512) + PUBLISH + product
        body += when(keep, WAIT + " 0;\nbar.sync 0;\n") + last + when(not keep, WAIT + " 0;\n")
        return t.kernel(body, "out", shared=shared, target="sm_90a", version="8.6")

    holds(make, args=OUT)
