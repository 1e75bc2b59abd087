"""tcgen05.mma.sp and .ashift as instructions: operands, what is rejected, and what the checkers see. What products
compute is compared in test_tcgen05_product.py."""

import layouts
import numpy as np
import pytest
import tensor_kernels as tk
from layouts import SW128
from sparse_matrices import drawn, put_metadata

import softsm
from softsm.errors import Fault, Unsupported
from softsm.isa import instruction_descriptor as idesc

SIZE, B_AT, N = 32768, 16384, 32
NAME = "tcgen05.mma{ws}.sp.cta_group::1.kind::f16"
WAIT_ST = "tcgen05.wait::st.sync.aligned;\n"


def operands(selector=0, seed=0, m=128, n=N, places=(range(128),)):
    """(in: shared memory and each thread's two metadata words, D as it must be); `places`: lanes of the rows of D."""
    rng = np.random.default_rng(seed)
    given, codes, a = drawn(rng, m, 32, "bf16")
    b = layouts.values(rng, (n, 32), "bf16")
    image = np.zeros(SIZE + 1024, np.uint8)
    layouts.place(image, given, "bf16", SW128, True, 0)
    layouts.place(image, b, "bf16", SW128, True, B_AT)
    cells = rng.integers(0, 1 << 32, (2, 128), dtype=np.uint32)
    for lanes in places:
        put_metadata(cells, codes, selector, lanes)
    image[SIZE:] = np.ascontiguousarray(cells.T).view(np.uint8).reshape(-1)
    return image.view(np.uint32), a @ b.T


def kernel(*, selector=0, column=64, lane=0, sparse=True, b_at=B_AT, b_mode=SW128, wait=WAIT_ST, before_free="",
           m=128, n=N, ws="", d_lane=0, poison=False):  # fmt: skip
    """D in columns 0 to 31, metadata stored to columns 64 and 65 by their threads."""
    a_desc = layouts.descriptor(0, 0, 1024, SW128, True)
    b_desc = layouts.descriptor(b_at, 0, 1024, b_mode, True)
    value = idesc.encode("f16", m, n, "bf16", "bf16", sparse=sparse, selector=selector)
    body = f"mul.wide.u32 %rd5, %r0, 8;\nadd.s64 %rd5, %rd1, %rd5;\nld.global.u32 %r100, [%rd5+{SIZE}];\n"
    body += f"ld.global.u32 %r101, [%rd5+{SIZE + 4}];\n"
    if poison:  # what D must not keep
        body += "mov.u32 %r102, 0x7fc0beef;\n"
        body += f"tcgen05.st.sync.aligned.32x32b.x{N}.b32 [%r9], {{{', '.join(['%r102'] * N)}}};\n"
    body += "tcgen05.st.sync.aligned.32x32b.x2.b32 [%r9+64], {%r100, %r101};\n" + wait
    body += "tcgen05.fence::before_thread_sync;\nbar.sync 0;\n@!%p1 bra STARTED;\ntcgen05.fence::after_thread_sync;\n"
    body += f"add.s64 %rd11, %rd3, {a_desc};\nadd.s64 %rd12, %rd3, {b_desc};\nsetp.ne.u32 %p5, 0, 0;\n"
    body += f"add.u32 %r20, %r8, {column | lane << 16};\nmov.u32 %r21, {value};\nadd.u32 %r22, %r8, {d_lane << 16};\n"
    body += f"{NAME.format(ws=ws)} [%r22], %rd11, %rd12, [%r20], %r21, %p5;\n{tk.COMMIT}STARTED:\n" + before_free
    body += tk.WAIT.format(n=0, parity=0)
    body += f"tcgen05.ld.sync.aligned.32x32b.x{N}.b32 {tk.names(140, N)}, [%r9];\ntcgen05.wait::ld.sync.aligned;\n"
    return tk.kernel(body + tk.words_out(N, 140) + wait, size=SIZE, words=SIZE // 4, columns=128)


def launched(text, image, **options):
    out = np.zeros((128, N), np.float32)
    tk.launch(text, image, out, **options)
    return out


@pytest.mark.parametrize("selector", [0, 1])
def test_a_sparse_product(selector):
    image, want = operands(selector)
    for order in ("eager", "latest"):
        with softsm.checking(order=order) as report:
            out = launched(kernel(selector=selector), image)
        assert not report, str(report)
        np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize(("m", "n", "ws", "d_lane"), [(64, 32, "", 16), (128, 64, ".ws", 0), (32, 128, ".ws", 0)])
def test_sparse_products_in_other_lanes(m, n, ws, d_lane):
    """64 rows in the upper half of each lane quarter; weight-stationary ones, 32 rows in four parts."""
    parts = 128 // m if ws else 1
    places = [[part * m + i if ws else 32 * (i // 16) + i % 16 + d_lane for i in range(m)] for part in range(parts)]
    image, want = operands(1, 0, m, n, places)
    text = kernel(selector=1, m=m, n=n, ws=ws, d_lane=d_lane, lane=d_lane, poison=True)
    for order in ("eager", "latest"):
        with softsm.checking(order=order) as report:
            out = launched(text, image)
        assert not report, str(report)
        for part, lanes in enumerate(places):
            wide = min(n // parts, N)
            np.testing.assert_array_equal(out[lanes, :wide], want[:, n // parts * part :][:, :wide])
        others = sorted(set(range(128)) - set(sum(places, [])))
        assert (out.view(np.uint32)[others] == 0x7FC0BEEF).all()


def test_metadata_are_an_operand_that_races():
    """Without wait::st the product may read columns 64 and 65 before the stores arrive; overwriting them before the
    commit has been seen is a race, and so it is for the far half of B's rows."""
    image, _ = operands()
    overwrite = "@%p2 tcgen05.st.sync.aligned.32x32b.x1.b32 [%r9+64], {%r100};\n" + WAIT_ST
    far = "@%p1 st.shared.u32 [%r1+16432], %r0;\n"  # byte 48 of the first row of B
    texts = [kernel(wait=""), kernel(before_free=overwrite), kernel(before_free=far)]
    for text in texts:
        with softsm.checking(order="latest") as report:
            try:
                launched(text, image)
            except Fault:  # nothing but noise was there yet
                pass
        assert "race" in report.codes(), str(report)


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ({"sparse": False}, "idesc", "bit 2 asks for a dense product, the instruction is sparse"),
        ({"selector": 2}, "idesc", "sparsity selector 2"),
        ({"column": 65}, "metadata", "begin at an even column"),
        ({"lane": 16}, "tmem-lane", "metadata at lane 16 and D at lane 0"),
        ({"m": 64, "d_lane": 16}, "tmem-lane", "metadata at lane 0 and D at lane 16"),
        ({"ws": ".ws", "n": 256}, "idesc", "N 64, 128"),
        ({"column": 128}, "tmem", "reads tensor memory"),
        ({"b_at": B_AT + 96}, "descriptor", "64 bytes of k from byte 96"),
        ({"b_mode": layouts.SW32}, "descriptor", "64 bytes of k from byte 0 of a row of 32"),
    ],
)
def test_operands_that_cannot_be_meant(options, code, words):
    image, _ = operands()
    with pytest.raises(Fault, match=words) as error:
        launched(kernel(**options), image)
    assert error.value.code.startswith(code)


def test_a_dense_product_with_a_sparse_descriptor():
    image, _ = operands()
    text = kernel().replace("mma.sp.", "mma.").replace("[%r20], %r21", "%r21")
    with pytest.raises(Fault, match="bit 2 asks for a sparse product, the instruction is dense"):
        launched(text, image)


def shifting_kernel(first, m=128, early=False):
    """A in columns 64 to 71, `first` its product to columns 0 to 31, then plain products of A, to columns 32 to 63 and
    added to columns 0 to 31. A is read when all is complete, or early."""
    b_desc = layouts.descriptor(0, 0, 1024, SW128, True)
    body = f"mul.wide.u32 %rd5, %r0, 32;\nadd.s64 %rd5, %rd1, %rd5;\nadd.s64 %rd5, %rd5, {B_AT};\n"
    body += "".join(f"ld.global.u32 %r{100 + i}, [%rd5+{4 * i}];\n" for i in range(8))
    body += f"tcgen05.st.sync.aligned.32x32b.x8.b32 [%r9+64], {tk.names(100, 8)};\n{WAIT_ST}"
    body += "tcgen05.fence::before_thread_sync;\nbar.sync 0;\n@!%p1 bra STARTED;\ntcgen05.fence::after_thread_sync;\n"
    body += f"add.s64 %rd12, %rd3, {b_desc};\nsetp.ne.u32 %p5, 0, 0;\nadd.u32 %r20, %r8, 64;\nadd.u32 %r22, %r8, 32;\n"
    body += f"mov.u32 %r21, {idesc.encode('f16', m, N, 'bf16', 'bf16')};\n{first} [%r8], [%r20], %rd12, %r21, %p5;\n"
    body += "tcgen05.mma.cta_group::1.kind::f16 [%r22], [%r20], %rd12, %r21, %p5;\nsetp.eq.u32 %p6, 0, 0;\n"
    body += f"tcgen05.mma.cta_group::1.kind::f16 [%r8], [%r20], %rd12, %r21, %p6;\n{tk.COMMIT}STARTED:\n"
    wait = tk.WAIT.format(n=0, parity=0)
    load_a = f"tcgen05.ld.sync.aligned.32x32b.x8.b32 {tk.names(200 + 2 * N, 8)}, [%r9+64];\n"
    body += load_a + wait if early else wait + load_a
    body += f"tcgen05.ld.sync.aligned.32x32b.x{2 * N}.b32 {tk.names(200, 2 * N)}, [%r9];\n"
    body += "tcgen05.wait::ld.sync.aligned;\n" + tk.words_out(2 * N + 8, 200)
    return tk.kernel(body, size=B_AT, words=B_AT // 4, columns=128)


def shifting_operands():
    rng = np.random.default_rng(5)
    a, b = (layouts.values(rng, (rows, 16), "bf16") for rows in (128, N))
    image = np.zeros(B_AT + 4096, np.uint8)
    layouts.place(image, b, "bf16", SW128, True, 0)
    image[B_AT:] = layouts.bits(a, "bf16").reshape(-1)
    shifted = np.concatenate([np.concatenate([a[i + 1 : i + 32], a[i + 31 : i + 32]]) for i in range(0, 128, 32)])
    return image.view(np.uint32), np.concatenate([(a + shifted) @ b.T, shifted @ b.T], 1), shifted


def test_a_product_with_ashift_shifts_a_for_those_that_follow():
    """Each lane of a quarter takes what the next one holds, the last keeps its own; the product sees A as it was."""
    image, want, shifted = shifting_operands()
    text = shifting_kernel("tcgen05.mma.cta_group::1.kind::f16.ashift.collector::a::lastuse")
    for order in ("eager", "latest"):
        out = np.full((128, 2 * N + 8), np.nan, np.float32)
        with softsm.checking(order=order) as report:
            tk.launch(text, image, out)
        assert not report, str(report)
        np.testing.assert_array_equal(out[:, : 2 * N], want)
        left = np.ascontiguousarray(out[:, 2 * N :]).view(np.uint8)
        np.testing.assert_array_equal(left, layouts.bits(shifted, "bf16").reshape(128, 32))


def test_who_reads_a_while_it_is_shifted_races():
    image, *_ = shifting_operands()
    for suffix, raced in (("", False), (".ashift", True)):
        with softsm.checking(order="latest") as report:
            text = shifting_kernel("tcgen05.mma.cta_group::1.kind::f16" + suffix, early=True)
            tk.launch(text, image, np.zeros((128, 2 * N + 8), np.float32))
        assert ("race" in report.codes()) == raced, str(report)


def test_64_rows_are_not_shifted():
    image, *_ = shifting_operands()
    with pytest.raises(Fault, match="M = 64 with .ashift"):
        tk.launch(shifting_kernel("tcgen05.mma.cta_group::1.kind::f16.ashift", 64), image, np.zeros(4, np.float32))


@pytest.mark.parametrize(("instruction", "why"), [
    ("tcgen05.mma.ws.sp.cta_group::2.kind::f16 [%r1], %rd1, %rd2, [%r2], %r3, %p1;", ".ws exists for cta_group::1"),
    ("tcgen05.mma.sp.cta_group::1.kind::mxf4 [%r1], %rd1, %rd2, [%r2], %r3, [%r4], [%r5], %p1;", "needs .block_scale"),
    ("tcgen05.mma.sp.cta_group::1.kind::f16.ashift [%r1], [%r5], %rd2, [%r2], %r3, %p1;", "whether metadata"),
])  # fmt: skip
def test_what_is_refused(instruction, why):
    with pytest.raises(Unsupported, match=why):
        softsm.load(tk.kernel(instruction))
