"""ldmatrix, stmatrix, movmatrix: what thread t gets, written out element by element."""

import numpy as np
import ptx_texts as kn


def ldmatrix_kernel(instruction, count, pitch, target="sm_90a", version=None):
    regs = kn.names(8, count)
    return kn.text(
        kn.fill_shared("%rd1", 1024, 32)
        + f"mad.lo.u32 %r5, %r0, {pitch}, %r1;\n{instruction} {kn.braces(regs)}, [%r5];\n"
        + kn.thread_pointer("%rd2", count, "%rd3")
        + kn.store_words("%rd3", regs),
        ["source", "out"],
        shared=1024,
        target=target,
        version=version,
    )


def test_ldmatrix():
    source = np.arange(512, dtype=np.uint16) * 7  # 32 rows of 16 elements, the left 8 of each are read
    for count in (1, 2, 4):
        for trans in (False, True):
            want = np.zeros((32, count), np.uint32)
            for t in range(32):
                for i in range(count):
                    for e in range(2):
                        r, c = t // 4, 2 * (t % 4) + e
                        if trans:
                            r, c = c, r
                        want[t, i] |= int(source[(8 * i + r) * 16 + c]) << 16 * e
            name = f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' if trans else ''}.shared.b16"
            kn.check(name, ldmatrix_kernel(name, count, 32), [source], [np.zeros_like(want)], [want])


def test_ldmatrix_into_the_register_that_names_the_rows():
    source = np.arange(512, dtype=np.uint16) * 7
    name = "ldmatrix.sync.aligned.m8n8.x1.shared.b16"
    body = kn.fill_shared("%rd1", 1024, 32) + f"mad.lo.u32 %r5, %r0, 32, %r1;\n{name} {{%r5}}, [%r5];\n"
    body += kn.thread_pointer("%rd2", 1, "%rd3") + kn.store_words("%rd3", ["%r5"])
    want = source.view(np.uint32).reshape(32, 8)[:8, :4].reshape(32, 1).copy()
    ptx = kn.text(body, ["source", "out"], shared=1024)
    kn.check(name, ptx, [source], [np.zeros_like(want)], [want])


def test_stmatrix():
    for count in (1, 2, 4):
        for trans in (False, True):
            values = np.arange(32 * count, dtype=np.uint32).reshape(32, count) * 65539 + 7
            want = np.zeros((32, 8), np.uint16)
            for t in range(32):
                for i in range(count):
                    for e in range(2):
                        r, c = t // 4, 2 * (t % 4) + e
                        if trans:
                            r, c = c, r
                        want[8 * i + r, c] = int(values[t, i]) >> 16 * e & 0xFFFF
            regs = kn.names(8, count)
            name = f"stmatrix.sync.aligned.m8n8.x{count}{'.trans' if trans else ''}.shared.b16"
            body = kn.fill_shared("%rd2", 512, 32) + kn.thread_pointer("%rd1", count, "%rd4")
            body += kn.load_words("%rd4", regs) + f"mad.lo.u32 %r5, %r0, 16, %r1;\n{name} [%r5], {kn.braces(regs)};\n"
            body += kn.dump_shared("%rd3", 512, 32)
            ptx = kn.text(body, ["values", "zeros", "out"], shared=512)
            zeros = np.zeros(128, np.uint32)
            kn.check(name, ptx, [values, zeros], [np.zeros_like(want)], [want])


def test_movmatrix():
    values = np.arange(32, dtype=np.uint32) * 65539 + 7
    name = "movmatrix.sync.aligned.m8n8.trans.b16"
    body = kn.thread_pointer("%rd1", 1, "%rd3") + kn.thread_pointer("%rd2", 1, "%rd4") + kn.load_words("%rd3", ["%r8"])
    body += f"{name} %r9, %r8;\n" + kn.store_words("%rd4", ["%r9"])
    want = np.ascontiguousarray(values.view(np.uint16).reshape(8, 8).T)
    kn.check(name, kn.text(body, ["values", "out"]), [values], [np.zeros(32, np.uint32)], [want])
