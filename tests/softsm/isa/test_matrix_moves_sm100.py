"""The 8-bit shapes of ldmatrix and stmatrix (sm_100), and what is rejected. Only the emulator is tested, not a GPU."""

import numpy as np
import ptx_texts as kn
import pytest
from test_matrix_moves import ldmatrix_kernel

from softsm.engine.launch import load
from softsm.errors import Fault, Unsupported


def launch(ptx, *arrays):
    load(ptx).launch(1, 32, list(arrays))


@pytest.mark.parametrize("count", [1, 2])
def test_ldmatrix_16x16_bytes(count):
    source = np.random.default_rng(0).integers(0, 256, 1024, dtype=np.uint8)
    name = f"ldmatrix.sync.aligned.m16n16.x{count}.trans.shared.b8"
    out = np.zeros(32 * 2 * count, np.uint32)
    launch(ldmatrix_kernel(name, 2 * count, 32, "sm_100a", "8.6"), source, out)
    for t in range(32):
        for i in range(2 * count):
            for e in range(4):
                row, column = 16 * (i // 2) + 4 * (t % 4) + e, t // 4 + 8 * (i % 2)
                assert out[t * 2 * count + i] >> 8 * e & 0xFF == source[row * 32 + column]


@pytest.mark.parametrize(("source_format", "bits", "shift"), [("b4x16_p64", 4, 2), ("b6x16_p32", 6, 0)])
def test_ldmatrix_widens_small_elements(source_format, bits, shift):
    source = np.random.default_rng(0).integers(0, 256, 1024, dtype=np.uint8)
    name = f"ldmatrix.sync.aligned.m8n16.x4.shared.b8x16.{source_format}"
    out = np.zeros(128, np.uint32)
    launch(ldmatrix_kernel(name, 4, 32, "sm_100a", "8.6"), source, out)
    for t in range(32):
        for i in range(4):
            row = int.from_bytes(source[(8 * i + t // 4) * 32 :][:16].tobytes(), "little")
            for e in range(4):
                code = row >> bits * (4 * (t % 4) + e) & ((1 << bits) - 1)
                assert out[t * 4 + i] >> 8 * e & 0xFF == code << shift


def test_stmatrix_bytes():
    values = np.arange(64, dtype=np.uint32) * 0x01030507 + 9
    body = (
        kn.fill_shared("%rd2", 256, 32) + kn.thread_pointer("%rd1", 2, "%rd4") + kn.load_words("%rd4", ["%r8", "%r9"])
    )
    body += "mad.lo.u32 %r5, %r0, 16, %r1;\nstmatrix.sync.aligned.m16n8.x2.trans.shared.b8 [%r5], {%r8, %r9};\n"
    body += kn.dump_shared("%rd3", 256, 32)
    out = np.zeros(256, np.uint8)
    ptx = kn.text(body, ["values", "zeros", "out"], shared=512, target="sm_100a", version="8.6")
    launch(ptx, values, np.zeros(64, np.uint32), out)
    want = np.zeros((16, 16), np.uint8)
    for t in range(32):
        for i in range(2):
            for e in range(4):
                want[8 * i + 2 * (t % 4) + e % 2, t // 4 + 8 * (e // 2)] = int(values[2 * t + i]) >> 8 * e & 0xFF
    np.testing.assert_array_equal(out.reshape(16, 16), want)


@pytest.mark.parametrize(
    ("count", "pitch", "words"), [(1, 24, "not a multiple of 16"), (4, 48, "ldmatrix of 16 bytes")]
)
def test_row_addresses_are_checked(count, pitch, words):
    ptx = ldmatrix_kernel(f"ldmatrix.sync.aligned.m8n8.x{count}.shared.b16", count, pitch)
    with pytest.raises(Fault, match=words):
        launch(ptx, np.zeros(1024, np.uint8), np.zeros(32 * count, np.uint32))


@pytest.mark.parametrize(
    "name",
    [
        "ldmatrix.sync.aligned.m16n16.x1.shared.b8",
        "ldmatrix.sync.aligned.m8n8.x1.shared.b8",
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16.evict",
    ],
)
def test_unknown_forms_are_refused(name):
    with pytest.raises(Unsupported):
        load(ldmatrix_kernel(name, 1, 32))
