"""mma.sp.sync against a plain matrix product of the expanded operand, for every shape, type and selector."""

import layouts
import numpy as np
import ptx_texts as kn
import pytest
from mma_registers import accumulator_registers, left_registers, right_registers

CASES = [(name, k, selector, d) for name, d in (("f16", "f32"), ("f16", "f16"), ("bf16", "f32"))
         for k, selectors in ((16, 4), (32, 2)) for selector in range(selectors)]  # fmt: skip
PAIRS = [(i, j) for i in range(4) for j in range(i + 1, 4)]


def drawn(rng, k):
    """[16, k/4, 2] positions, ascending."""
    return np.array(PAIRS)[rng.integers(0, 6, (16, k // 4))]


def metadata_words(places, k, selector, rng):
    """uint32 [32]: what the threads that count say, and noise for the others."""
    words = rng.integers(0, 1 << 32, 32, dtype=np.uint32)
    for g in range(8):
        for half in range(k // 16):
            word = 0
            for side in range(2):
                for j in range(4):
                    first, second = places[g + 8 * side, 4 * half + j]
                    word |= (int(first) | int(second) << 2) << 16 * side + 4 * j
            words[4 * g + (selector if k == 16 else 2 * selector + half)] = word
    return words


def kernel(name, selector, a_regs, b_regs, c_regs):
    a, b = kn.names(8, a_regs), kn.names(8 + a_regs, b_regs)
    c, d = kn.names(24, c_regs), kn.names(32, c_regs)
    body = ""
    for i, regs in enumerate((a, b, c, ["%r40"]), 1):
        body += kn.thread_pointer(f"%rd{i}", len(regs), f"%rd{i + 8}") + kn.load_words(f"%rd{i + 8}", regs)
    body += f"{name} {kn.braces(d)}, {kn.braces(a)}, {kn.braces(b)}, {kn.braces(c)}, %r40, {selector};\n"
    body += kn.thread_pointer("%rd5", c_regs, "%rd13") + kn.store_words("%rd13", d)
    return kn.text(body, ["a", "b", "c", "e", "d"], version="8.5")


def operands(name, k, selector, d, seed=0):
    rng = np.random.default_rng(seed)
    given, b = layouts.values(rng, (16, k // 2), name), layouts.values(rng, (8, k), name)
    places = drawn(rng, k)
    dense = np.zeros((16, k // 4, 4), np.float32)
    np.put_along_axis(dense, places, given.reshape(16, k // 4, 2), 2)
    c = rng.choice(layouts.CHOICES, (16, 8))
    kind = np.float16 if d == "f16" else np.float32
    inputs = [left_registers(given, name), right_registers(b, name), accumulator_registers(c, kind)]
    inputs.append(metadata_words(places, k, selector, rng).reshape(32, 1))
    return inputs, accumulator_registers(dense.reshape(16, k) @ b.T + c, kind)


@pytest.mark.parametrize("variant", ["sp", "sp::ordered_metadata"])
def test_sparse_products(variant):
    for name, k, selector, d in CASES:
        inputs, want = operands(name, k, selector, d)
        text = f"mma.{variant}.sync.aligned.m16n8k{k}.row.col.{d}.{name}.{name}.{d}"
        words = want.shape[1] * want.itemsize // 4
        ptx = kernel(text, selector, inputs[0].shape[1], inputs[1].shape[1], words)
        kn.check(text, ptx, inputs, [np.zeros_like(want)], [want])


@pytest.mark.parametrize(("instruction", "why"), [
    ("mma.sp.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%r1,%r2,%r3,%r4}, {%r1}, {%r1}, {%r1,%r2,%r3,%r4}, %r9, 0;",
     "no such combination"),
    ("mma.sp.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r1,%r2,%r3,%r4}, {%r1,%r2}, {%r1,%r2}, {%r1,%r2,%r3,%r4}, "
     "%r9, 4;", "selector"),
    ("mma.sp.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 {%r1,%r2,%r3,%r4}, {%r1,%r2,%r3,%r4}, {%r1,%r2,%r3,%r4}, "
     "{%r1,%r2,%r3,%r4}, %r9, 2;", "selector"),
])  # fmt: skip
def test_what_does_not_exist_is_refused(instruction, why):
    import softsm
    from softsm.errors import Unsupported

    with pytest.raises(Unsupported, match=why):
        softsm.load(kn.text(instruction, [], version="8.5"))


def test_one_place_named_twice_is_a_fault():
    import softsm
    from softsm.errors import Fault

    inputs, want = operands("f16", 16, 0, "f32")
    inputs[3][::4] = 0x55555555  # both positions are 1
    text = "mma.sp.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
    with pytest.raises(Fault, match="metadata"):
        softsm.load(kernel(text, 0, 2, 2, 4)).launch(1, 32, [*inputs, np.zeros_like(want)])
