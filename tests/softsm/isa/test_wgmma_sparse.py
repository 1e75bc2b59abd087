"""wgmma.mma_async.sp: A packed in shared memory or registers, metadata in registers, against the product of A as it is
meant. Values are small multiples of 1/2: every sum is exact, so results must agree bit for bit."""

import layouts
import numpy as np
import ptx_texts as kn
import pytest
from layouts import NONE, SW32, SW64, SW128
from sparse_matrices import drawn, register_words
from test_wgmma import a_registers, d_registers

A_AT, B_AT, SIZE = 0, 8192, 40960
K = {"f16": 32, "bf16": 32, "tf32": 16, "e4m3": 64, "e5m2": 64, "s8": 64, "u8": 64}
KINDS = {"f32": np.float32, "f16": np.float16, "s32": np.int32}


def kernel(name, words, a_desc, b_desc, *, from_registers, selector, immediates, after=""):
    d = kn.names(40, words)
    body = kn.fill_shared("%rd1", SIZE, 128)
    body += kn.thread_pointer("%rd3", words, "%rd8") + kn.load_words("%rd8", d)
    body += kn.thread_pointer("%rd2", 4, "%rd9") + kn.load_words("%rd9", kn.names(8, 4))
    body += kn.thread_pointer("%rd4", 1, "%rd9") + kn.load_words("%rd9", ["%r5"])
    body += "cvt.u64.u32 %rd10, %r1;\nshr.u64 %rd10, %rd10, 4;\nand.b64 %rd10, %rd10, 0x3FFF;\n"
    body += f"add.s64 %rd11, %rd10, {a_desc};\nadd.s64 %rd12, %rd10, {b_desc};\nsetp.eq.u32 %p1, 0, 0;\n"
    a = kn.braces(kn.names(8, 4)) if from_registers else "%rd11"
    body += f"wgmma.fence.sync.aligned;\n{name} {kn.braces(d)}, {a}, %rd12, %r5, {selector}, %p1{immediates};\n"
    body += after + "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n"
    body += kn.thread_pointer("%rd5", words, "%rd13") + kn.store_words("%rd13", d)
    return kn.text(body, ["image", "a", "c", "e", "d"], registers=48 + words, shared=SIZE)


def case(n, a_type, b_type, d_type="f32", *, a_mode=SW128, b_mode=SW128, a_k=True, b_k=True, from_registers=False,
         selector=0, signs=(1, 1), after="", seed=0, b_values=None):  # fmt: skip
    """(name, PTX, inputs, what D must be)."""
    rng = np.random.default_rng(seed)
    k = K[a_type]
    given, codes, a = drawn(rng, 64, k, a_type, shuffled=True)
    b = layouts.values(rng, (n, k), b_type) if b_values is None else b_values
    c = rng.integers(-8, 8, (64, n)).astype(np.float32)
    image = np.zeros(SIZE, np.uint8)
    a_desc = 0
    if not from_registers:
        a_desc = layouts.descriptor(A_AT, *layouts.place(image, given, a_type, a_mode, a_k, A_AT), a_mode, False)
    b_desc = layouts.descriptor(B_AT, *layouts.place(image, b, b_type, b_mode, b_k, B_AT), b_mode, False)
    immediates = "" if d_type == "s32" else f", {signs[0]}, {signs[1]}"
    if a_type in ("f16", "bf16"):
        immediates += ("" if from_registers else f", {int(not a_k)}") + f", {int(not b_k)}"
    name = f"wgmma.mma_async.sp.sync.aligned.m64n{n}k{k}.{d_type}.{a_type}.{b_type}"
    with np.errstate(invalid="ignore"):
        want = d_registers(signs[0] * signs[1] * (a @ b.T) + c, KINDS[d_type])
    before = d_registers(c, KINDS[d_type])
    words = before.shape[1] * before.itemsize // 4
    ptx = kernel(name, words, a_desc, b_desc, from_registers=from_registers, selector=selector, immediates=immediates,
                 after=after)  # fmt: skip
    metadata = np.concatenate([register_words(codes[16 * i : 16 * i + 16], selector, a_type, rng) for i in range(4)])
    a_regs = a_registers(given, a_type) if from_registers else np.zeros((128, 4), np.uint32)
    return name, ptx, [image, a_regs, before, metadata], want, (a, b, c, codes)


def run(*args, **options):
    name, ptx, inputs, want, _ = case(*args, **options)
    kn.check(name, ptx, inputs, [np.zeros_like(want)], [want], block=128)


@pytest.mark.parametrize(("a_type", "b_type", "d_type"), [
    ("f16", "f16", "f32"), ("f16", "f16", "f16"), ("bf16", "bf16", "f32"), ("tf32", "tf32", "f32"),
    ("e4m3", "e5m2", "f32"), ("e5m2", "e4m3", "f16"), ("s8", "u8", "s32"), ("u8", "u8", "s32"),
])  # fmt: skip
def test_types(a_type, b_type, d_type):
    for from_registers in (False, True):
        run(24, a_type, b_type, d_type, from_registers=from_registers)


def test_selectors():
    for name in ("bf16", "tf32"):
        run(16, name, name, selector=1)
        run(16, name, name, selector=1, from_registers=True)


def test_layouts():
    """A has 32 bytes of k in a row, B 64."""
    for mode in (NONE, SW32, SW64, SW128):
        run(32, "bf16", "bf16", a_mode=mode, b_mode=NONE)
    for mode in (SW64, SW128):
        run(40, "f16", "f16", b_mode=mode)
    for mode in (NONE, SW32, SW64, SW128):
        run(64, "f16", "f16", a_mode=mode, b_mode=mode, a_k=False, b_k=False)


def test_signs():
    run(16, "f16", "f16", signs=(-1, 1))


def test_metadata_are_read_with_the_instruction():
    """Their registers may be used again at once; wgmma.fence and wait_group are about D and A."""
    run(16, "bf16", "bf16", after="mov.u32 %r5, 0;\n")


def test_elements_of_b_that_meet_no_element_of_a_do_not_take_part():
    """An infinity and a NaN in B reach the rows whose metadata name their columns, and no others."""
    b = np.ones((16, 32), np.float32)
    b[2, 5], b[3, 9] = np.inf, np.nan
    name, ptx, inputs, _, (a, b, c, codes) = case(16, "bf16", "bf16", b_values=b)
    chosen = np.zeros((64, 32), bool)
    for chunk in range(8):
        for position in (codes[:, chunk] & 3, codes[:, chunk] >> 2):
            chosen[np.arange(64), 4 * chunk + position] = True
    want = np.zeros((64, 16), np.float32)
    with np.errstate(invalid="ignore"):
        for i in range(64):
            want[i] = c[i] + b[:, chosen[i]] @ a[i, chosen[i]]
    assert 0 < np.isnan(want[:, 3]).sum() < 64
    bits = d_registers(np.where(np.isnan(want), np.uint32(0x7FFFFFFF), want.view(np.uint32)), np.uint32)
    kn.check(f"{name} NaN", ptx, inputs, [np.zeros_like(bits)], [bits], block=128)


def test_wrong_metadata_are_a_fault():
    import softsm
    from softsm.errors import Fault

    _, ptx, inputs, want, _ = case(16, "e4m3", "e4m3")
    inputs[3][7] = 0xFFFFFFFF
    with pytest.raises(Fault, match="metadata"):
        softsm.load(ptx).launch(1, 128, [*inputs, np.zeros_like(want)])


@pytest.mark.parametrize(("mode", "start"), [(SW32, 0), (SW64, 32), (SW128, 96)])
def test_rows_of_b_must_hold_64_bytes(mode, start):
    import softsm
    from softsm.errors import Fault

    name, _, inputs, want, _ = case(16, "bf16", "bf16")
    b_desc = layouts.descriptor(B_AT + start, 0, 1024, mode, False)
    ptx = kernel(name, 8, layouts.descriptor(A_AT, 0, 1024, SW128, False), b_desc, from_registers=False, selector=0,
                 immediates=", 1, 1, 0, 0")  # fmt: skip
    with pytest.raises(Fault, match="64 bytes of k"):
        softsm.load(ptx).launch(1, 128, [*inputs, np.zeros_like(want)])


@pytest.mark.parametrize(("instruction", "why"), [
    ("wgmma.mma_async.sp.sync.aligned.m64n8k16.f32.f16.f16 {%r1,%r2,%r3,%r4}, %rd1, %rd2, %r9, 0, 1, 1, 1, 0, 0;",
     "no such combination"),
    ("wgmma.mma_async.sp.sync.aligned.m64n8k512.s32.b1.b1.and.popc {%r1,%r2,%r3,%r4}, %rd1, %rd2, %r9, 0, 1;",
     "no such combination"),
    ("wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16 {%r1,%r2,%r3,%r4}, %rd1, %rd2, %r9, 2, 1, 1, 1, 0, 0;",
     "selector is 0 or 1"),
    ("wgmma.mma_async.sp.sync.aligned.m64n8k64.s32.s8.s8 {%r1,%r2,%r3,%r4}, %rd1, %rd2, %r9, 1, 1;", "selector is 0"),
    ("wgmma.mma_async.sp.sync.aligned.m64n8k64.s32.s8.s8 {%r1,%r2,%r3,%r4}, %rd1, %rd2, %r9, %r8, 1;", "selector is 0"),
])  # fmt: skip
def test_what_does_not_exist_is_refused(instruction, why):
    import softsm
    from softsm.errors import Unsupported

    with pytest.raises(Unsupported, match=why):
        softsm.load(kn.text(instruction, [], version="8.5"))
