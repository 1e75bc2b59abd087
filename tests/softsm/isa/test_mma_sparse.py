"""mma.sp.sync against a plain matrix product of the expanded operand, for every shape, type and selector."""

import layouts
import numpy as np
import ptx_texts as kn
import pytest
from mma_registers import accumulator_registers, left_registers, right_registers
from sparse_matrices import drawn, register_words

CASES = [
    *[(name, name, k, selector, d) for name, d in (("f16", "f32"), ("f16", "f16"), ("bf16", "f32"))
      for k, selectors in ((16, 4), (32, 2)) for selector in range(selectors)],
    *[("tf32", "tf32", 8, selector, "f32") for selector in range(4)],
    ("tf32", "tf32", 16, 0, "f32"), ("tf32", "tf32", 16, 1, "f32"),
    ("e4m3", "e5m2", 64, 0, "f32"), ("e5m2", "e5m2", 64, 0, "f32"),
    ("s8", "s8", 32, 0, "s32"), ("u8", "s8", 32, 1, "s32"),
    ("s8", "s8", 64, 0, "s32"), ("s8", "u8", 64, 0, "s32"), ("u8", "u8", 64, 0, "s32"),
    ("s4", "s4", 64, 0, "s32"), ("s4", "u4", 64, 1, "s32"), ("u4", "s4", 128, 0, "s32"), ("u4", "u4", 128, 0, "s32"),
]  # fmt: skip
KINDS = {"f16": np.float16, "f32": np.float32, "s32": np.int32}


def kernel(name, selector, a_regs, b_regs, c_regs):
    a, b = kn.names(8, a_regs), kn.names(8 + a_regs, b_regs)
    c, d = kn.names(24, c_regs), kn.names(32, c_regs)
    body = ""
    for i, regs in enumerate((a, b, c, ["%r40"]), 1):
        body += kn.thread_pointer(f"%rd{i}", len(regs), f"%rd{i + 8}") + kn.load_words(f"%rd{i + 8}", regs)
    body += f"{name} {kn.braces(d)}, {kn.braces(a)}, {kn.braces(b)}, {kn.braces(c)}, %r40, {selector};\n"
    body += kn.thread_pointer("%rd5", c_regs, "%rd13") + kn.store_words("%rd13", d)
    return kn.text(body, ["a", "b", "c", "e", "d"], version="8.5")


def operands(name, other, k, selector, d, seed=0, shuffled=False):
    rng = np.random.default_rng(seed)
    given, codes, dense = drawn(rng, 16, k, name, shuffled=shuffled)
    b = layouts.values(rng, (8, k), other)
    c = rng.integers(-9, 9, (16, 8)) if d == "s32" else rng.choice(layouts.CHOICES, (16, 8))
    inputs = [left_registers(given, name), right_registers(b, other), accumulator_registers(c, KINDS[d])]
    inputs.append(register_words(codes, selector, name, rng).reshape(32, 1))
    return inputs, accumulator_registers(dense @ b.T + c, KINDS[d])


def instruction(variant, name, other, k, d):
    return f"mma.{variant}.sync.aligned.m16n8k{k}.row.col.{d}.{name}.{other}.{d}"


@pytest.mark.parametrize("variant", ["sp", "sp::ordered_metadata"])
def test_sparse_products(variant):
    for name, other, k, selector, d in CASES:
        inputs, want = operands(name, other, k, selector, d, shuffled=variant == "sp")
        text = instruction(variant, name, other, k, d)
        words = want.shape[1] * want.itemsize // 4
        ptx = kernel(text, selector, inputs[0].shape[1], inputs[1].shape[1], words)
        kn.check(text, ptx, inputs, [np.full(want.shape, 99, want.dtype)], [want])


@pytest.mark.parametrize(("instruction", "why"), [
    ("mma.sp.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%r1,%r2,%r3,%r4}, {%r1}, {%r1}, {%r1,%r2,%r3,%r4}, %r9, 0;",
     "no such combination"),
    ("mma.sp.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r1,%r2,%r3,%r4}, {%r1,%r2}, {%r1,%r2}, {%r1,%r2,%r3,%r4}, "
     "%r9, 4;", "selector"),
    ("mma.sp.sync.aligned.m16n8k32.row.col.s32.s4.s4.s32 {%r1,%r2,%r3,%r4}, {%r1}, {%r1}, {%r1,%r2,%r3,%r4}, %r9, 0;",
     "no such combination"),
    ("mma.sp.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 {%r1,%r2,%r3,%r4}, {%r1,%r2,%r3,%r4}, {%r1,%r2,%r3,%r4}, "
     "{%r1,%r2,%r3,%r4}, %r9, 2;", "selector"),
    ("mma.sp.sync.aligned.m16n8k64.row.col.s32.s8.s8.s32 {%r1,%r2,%r3,%r4}, {%r1,%r2,%r3,%r4}, {%r1,%r2,%r3,%r4}, "
     "{%r1,%r2,%r3,%r4}, %r9, 1;", "selector is 0 for K = 64"),
    ("mma.sp.sync.aligned.m16n8k64.row.col.f16.e4m3.e4m3.f16 {%r1,%r2}, {%r1,%r2,%r3,%r4}, {%r1,%r2,%r3,%r4}, "
     "{%r1,%r2}, %r9, 0;", "no such combination"),
])  # fmt: skip
def test_what_does_not_exist_is_refused(instruction, why):
    import softsm
    from softsm.errors import Unsupported

    with pytest.raises(Unsupported, match=why):
        softsm.load(kn.text(instruction, [], version="8.5"))


@pytest.mark.parametrize(
    ("name", "k", "word", "variant"),
    [
        ("f16", 16, 0x55555555, "sp"),  # both positions are 1
        ("f16", 16, 0x11111111, "sp::ordered_metadata"),  # 1, then 0
        ("tf32", 16, 0x88888888, "sp"),
    ],
)
def test_metadata_without_a_meaning_are_a_fault(name, k, word, variant):
    import softsm
    from softsm.errors import Fault

    inputs, want = operands(name, name, k, 0, "f32")
    inputs[3][:] = word
    ptx = kernel(instruction(variant, name, name, k, "f32"), 0, inputs[0].shape[1], inputs[1].shape[1], 4)
    with pytest.raises(Fault, match="metadata"):
        softsm.load(ptx).launch(1, 32, [*inputs, np.zeros_like(want)])
