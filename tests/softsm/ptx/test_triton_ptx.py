"""What Triton's compiler emits for both targets, read completely: compared with a count that knows no grammar."""

from __future__ import annotations

import cProfile
import os
import pstats
import re
from collections import Counter

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from softsm.ptx import parse
from softsm.ptx.ast import Call, Instruction, Label


@triton.jit
def softmax_and_print(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n, other=-float("inf"))
    tl.device_assert(v < 1e30, "too large")
    e = tl.exp(v - tl.max(v, 0))
    tl.device_print("sum", tl.sum(e, 0))
    tl.store(y + i, e / tl.sum(e, 0), mask=i < n)


@triton.jit
def matmul(a, b, c, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    a_desc = tl.make_tensor_descriptor(a, [BM, K], [K, 1], [BM, BK])
    b_desc = tl.make_tensor_descriptor(b, [BN, K], [K, 1], [BN, BK])
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        acc = tl.dot(a_desc.load([0, k]), b_desc.load([0, k]).T, acc)
    m, n = tl.arange(0, BM), tl.arange(0, BN)
    tl.store(c + m[:, None] * BN + n[None, :], acc)


KERNELS = {
    "softmax": (softmax_and_print, {"x": "*fp32", "y": "*fp32", "n": "i32"}, {"BLOCK": 256}, {"debug": True}),
    "matmul": (matmul, {"a": "*fp16", "b": "*fp16", "c": "*fp32", "K": "i32"}, {"BM": 128, "BN": 16, "BK": 64}, {}),
}


@pytest.fixture(scope="module", params=[("softmax", 90), ("matmul", 90), ("matmul", 100)], ids=str)
def ptx(request):
    name, arch = request.param
    function, signature, constants, options = KERNELS[name]
    source = ASTSource(function, signature | dict.fromkeys(constants, "constexpr"), constants)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options).asm["ptx"]


def body_of(text: str) -> str:
    """Return the body of the entry, with comments, debug data and directives removed by brute force."""
    text = re.sub(r"//[^\n]*", "", text)
    text = text[text.index(".entry") :]
    text = text[text.index("{") :]
    depth = 0
    for i, c in enumerate(text):
        depth += (c == "{") - (c == "}")
        if depth == 0:
            return text[1:i]
    raise AssertionError("unbalanced")


def test_every_statement_is_read(ptx):
    (entry,) = [f for f in parse(ptx).functions.values() if f.entry]
    body = re.sub(r"^\s*\.loc[^\n]*$", "", body_of(ptx), flags=re.M)
    statements = [
        re.sub(r"^(\s*[{}])*\s*", "", s) for s in re.split(r";|^[\w$]+:(?!:)|\b[a-zA-Z]\w*:(?!:)", body, flags=re.M)
    ]
    statements = [
        s.strip() for s in statements if s.strip() and not s.strip().startswith(".") and s.strip() not in "{}"
    ]
    expected = Counter(re.sub(r"^@!?[\w%$]+\s+", "", s).split()[0] for s in statements)
    found = Counter(i.name for i in entry.body if isinstance(i, Instruction))
    assert found == expected


def test_labels_and_branches_agree(ptx):
    (entry,) = [f for f in parse(ptx).functions.values() if f.entry]
    labels = {item.name for item in entry.body if isinstance(item, Label)}
    for item in entry.body:
        if isinstance(item, Instruction) and item.opcode == "bra":
            assert item.operands[0].name in labels


def test_source_lines_lead_back_to_this_file(ptx):
    (entry,) = [f for f in parse(ptx).functions.values() if f.entry]
    located = [i.loc for i in entry.body if isinstance(i, Instruction) and i.loc]
    assert len(located) > len(entry.body) // 2
    roots = set()
    for loc in located:
        while loc.caller is not None:
            loc = loc.caller
        roots.add(os.path.basename(loc.file))
    # Triton 3.6 leaves some lines of its own library without the place they were inlined at
    assert "test_triton_ptx.py" in roots and roots <= {"test_triton_ptx.py", "standard.py"}


def test_calls_of_printf_and_assert():
    function, signature, constants, options = KERNELS["softmax"]
    source = ASTSource(function, signature | dict.fromkeys(constants, "constexpr"), constants)
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    module = parse(text)
    calls = [
        i.operands[0]
        for i in module.functions["softmax_and_print"].body
        if isinstance(i, Instruction) and i.opcode == "call"
    ]
    assert {c.callee.name for c in calls} == {"vprintf", "__assertfail"}
    assert all(isinstance(c, Call) for c in calls) and not module.functions["vprintf"].defined


def test_an_instruction_is_parsed_by_few_calls():
    """The size of a compiled attention kernel. Counted, not timed: these are 0.2 s."""
    lines = []
    for i in range(5000):
        lines.append(f"\tfma.rn.f32 \t%f{i % 900}, %f{i * 7 % 900}, %f{i * 3 % 900}, 0f3F800000;")
        lines.append(f"\tld.shared.v4.b32 \t{{%r{i % 800}, %r1, %r2, %r3}}, [%r{i % 800}+{i % 64 * 16}];")
    head = ".version 8.6\n.target sm_90a\n.visible .entry k()\n{\n.reg .f32 %f<900>; .reg .b32 %r<800>;\n"
    debug = ".section .debug_info\n{\n" + ".b8 1 // some data\n" * 10_000 + "}\n"
    text = head + "\n".join(lines) + "\nret;\n}\n" + debug
    profile = cProfile.Profile()
    profile.runcall(parse, text)
    assert pstats.Stats(profile).total_calls < 60 * len(lines)
