"""tcgen05.cp and shift in PTX, under every order of completion, and which pairs of tcgen05 operations are in order."""

import layouts
import numpy as np
import pytest
from launching import run
from tensor_kernels import COMMIT, WAIT, kernel, names, words_out

from softsm.isa.tensor_copy import Footprint, pipelined
from softsm.memory import tensor_memory as tm


@pytest.mark.parametrize(
    ("shape", "multicast"),
    [("128x256b", ""), ("128x128b", ""), ("4x256b", ""), ("64x128b", ".warpx2::02_13"), ("64x128b", ".warpx2::01_23"),
     ("32x128b", ".warpx4")],
)  # fmt: skip
def test_copies_from_shared_memory(shape, multicast):
    rows, chunks = tm.COPY_SHAPES[shape]
    data = np.random.default_rng(1).integers(0, 256, (rows, 16 * chunks), dtype=np.uint8)
    image = np.zeros(4096, np.uint8)
    for r in range(rows):
        for c in range(chunks):  # core matrices: 8 rows of 16 bytes; chunks 2048 apart, groups of rows 128
            image[c * 2048 + r // 8 * 128 + r % 8 * 16 :][:16] = data[r, 16 * c : 16 * c + 16]
    desc = layouts.descriptor(0, 2048, 128, layouts.NONE, True)
    body = "mov.u32 %r10, 0;\n" + "".join(f"mov.u32 %r{100 + i}, 7;\n" for i in range(8))
    body += f"tcgen05.st.sync.aligned.32x32b.x8.b32 [%r9], {names(100, 8)};\ntcgen05.wait::st.sync.aligned;\n"
    body += "tcgen05.fence::before_thread_sync;\nbar.sync 0;\ntcgen05.fence::after_thread_sync;\n"
    body += f"@!%p1 bra ISSUED;\nadd.s64 %rd7, %rd3, {desc};\n"
    body += f"tcgen05.cp.cta_group::1.{shape}{multicast} [%r8], %rd7;\n{COMMIT}ISSUED:\n" + WAIT.format(n=0, parity=0)
    body += f"tcgen05.ld.sync.aligned.32x32b.x8.b32 {names(200, 8)}, [%r9];\ntcgen05.wait::ld.sync.aligned;\n"
    body += words_out(8, 200)
    text = kernel(body, size=4096, words=1024)
    out = run(text, [image, np.zeros((128, 8), np.uint32)], block=128)[1]
    want = np.full((512, 128), 7, np.uint32)
    tm.copy_in(want, data, shape, multicast[1:], 0, 0)
    np.testing.assert_array_equal(out, want[:8].T)


@pytest.mark.parametrize(("source", "bits", "shift"), [("b4x16_p64", 4, 2), ("b6x16_p32", 6, 0)])
def test_copies_widen_small_elements(source, bits, shift):
    image = np.random.default_rng(2).integers(0, 256, 2048, dtype=np.uint8)
    desc = layouts.descriptor(0, 2048, 128, layouts.NONE, True)
    body = f"@!%p1 bra ISSUED;\nadd.s64 %rd7, %rd3, {desc};\n"
    body += f"tcgen05.cp.cta_group::1.128x128b.b8x16.{source} [%r8], %rd7;\n{COMMIT}ISSUED:\n" + WAIT.format(
        n=0, parity=0
    )
    body += f"tcgen05.ld.sync.aligned.32x32b.x4.b32 {names(200, 4)}, [%r9];\ntcgen05.wait::ld.sync.aligned;\n"
    body += words_out(4, 200)
    out = run(kernel(body, size=2048, words=512), [image, np.zeros((128, 4), np.uint32)], block=128)[1]
    for lane in range(128):
        row = int.from_bytes(image[lane * 16 : lane * 16 + 16].tobytes(), "little")
        want = [(row >> bits * e & ((1 << bits) - 1)) << shift for e in range(16)]
        assert out[lane].view(np.uint8).tolist() == want


def test_shift_follows_the_copy():
    """mbarrier completion covers copy and shift; they touch the same columns, so the program waits in between."""
    image = np.arange(1024, dtype=np.uint32)
    desc = layouts.descriptor(0, 2048, 128, layouts.NONE, True)
    body = f"@!%p1 bra A;\nadd.s64 %rd7, %rd3, {desc};\ntcgen05.cp.cta_group::1.128x256b [%r8], %rd7;\n{COMMIT}A:\n"
    body += WAIT.format(n=0, parity=0) + "bar.sync 0;\n@!%p1 bra B;\nadd.u32 %r10, %r8, 0x200000;\n"
    body += f"tcgen05.shift.cta_group::1.down [%r10];\n{COMMIT}B:\n" + WAIT.format(n=1, parity=1)
    body += f"tcgen05.ld.sync.aligned.32x32b.x8.b32 {names(200, 8)}, [%r9];\ntcgen05.wait::ld.sync.aligned;\n"
    body += words_out(8, 200)
    out = run(kernel(body, size=4096, words=1024), [image, np.zeros((128, 8), np.uint32)], block=128)[1]
    want = image.reshape(2, 128, 4).transpose(1, 0, 2).reshape(128, 8).copy()
    want[32:63] = want[33:64].copy()
    np.testing.assert_array_equal(out, want)


def footprint(what, accumulator=(), reads=(), writes=()):
    return Footprint(what, accumulator, reads, writes)


ONE, OTHER = (0, 0, 128, 64, False), (0, 64, 128, 64, False)


@pytest.mark.parametrize(
    ("old", "new", "ordered"),
    [
        (footprint("mma", ONE), footprint("mma", ONE), True),  # same accumulator and shape
        (footprint("mma", ONE), footprint("mma", OTHER), False),
        (footprint("mma", ONE), footprint("mma", (0, 0, 64, 64, False)), False),  # same address, another shape
        (footprint("mma", ONE, ((64, 72),)), footprint("mma", OTHER), True),  # reads A, then D is written
        (footprint("mma", ONE), footprint("mma", OTHER, ((0, 8),)), False),  # D is written, then read as A
        (footprint("cp", (), (), ((64, 68),)), footprint("mma", ONE, ((64, 68),)), True),
        (footprint("cp", (), (), ((96, 100),)), footprint("mma", ONE, ((64, 68),)), False),
        (footprint("cp.4x256b", (), (), ((96, 104),)), footprint("mma", ONE), True),
        (footprint("shift", (), (), ((64, 72),)), footprint("mma", ONE), True),
        (footprint("shift", (), (), ((64, 72),)), footprint("cp.4x256b"), True),
        (footprint("shift", (), (), ((64, 72),)), footprint("cp"), False),
        (footprint("mma", ONE, ((64, 72),)), footprint("cp"), True),
        (footprint("mma", ONE), footprint("cp"), False),
        (footprint("mma", ONE, ((64, 72),)), footprint("shift"), True),
        (footprint("cp"), footprint("cp"), False),
    ],
)
def test_pipelined_pairs(old, new, ordered):
    """The pairs PTX 9.4 orders within one warp; all others are unordered."""
    assert pipelined(old, new) == ordered
