"""Mutated tensor-core instructions: whatever the text or the operands' values, only named errors."""

import random
import re

import numpy as np
import pytest
from tensor_kernels import COMMIT, WAIT, kernel, names
from test_matrix_moves import ldmatrix_kernel
from test_mma import kernel as mma_kernel
from test_tensor_memory import mma_steps
from test_wgmma_groups import COMMIT as GROUP
from test_wgmma_groups import D0, product, tiles, wait
from test_wgmma_groups import kernel as wgmma_kernel

from softsm.engine.launch import load
from softsm.errors import PtxError, SoftsmError

BODY = f"""tcgen05.st.sync.aligned.32x32b.x4.b32 [%r9], {names(100, 4)};
tcgen05.wait::st.sync.aligned;
tcgen05.ld.sync.aligned.16x32bx2.x2.b32 {names(104, 2)}, [%r9], 8;
tcgen05.ld.sync.aligned.16x256b.x1.pack::16b.b32 {names(104, 4)}, [%r9];
tcgen05.wait::ld.sync.aligned;
@!%p1 bra ISSUED;
add.s64 %rd7, %rd3, {1 << 46 | 8 << 32 | 128 << 16};
tcgen05.cp.cta_group::1.32x128b.warpx4 [%r8], %rd7;
tcgen05.cp.cta_group::1.128x128b.b8x16.b4x16_p64 [%r8 + 4], %rd7;
tcgen05.shift.cta_group::1.down [%r8];
{mma_steps(128, 64, "%rd7")}
{COMMIT}ISSUED:
{WAIT.format(n=0, parity=0)}"""

TEXTS = {
    "tcgen05": kernel(BODY, size=32768),
    "wgmma": wgmma_kernel(product(D0) + GROUP + wait(0), *tiles()[3:]),
    "mma": mma_kernel("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", 4, 2, 4, 4),
    "ldmatrix": ldmatrix_kernel("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", 4, 32),
}


def mutate(line, rng):
    """Change one thing in an instruction: a modifier or an operand dropped, doubled, swapped or replaced."""
    guard, _, rest = re.match(r"(@!?%p\d+ )?()(.*);$", line).groups()
    name, _, operands = rest.partition(" ")
    parts = name.split(".")
    items = re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s][^,]*", operands)
    choice = rng.randrange(8)
    if choice == 0 and len(parts) > 1:
        del parts[rng.randrange(1, len(parts))]
    elif choice == 1:
        parts.insert(
            rng.randrange(1, len(parts) + 1), rng.choice(["f16", "x4", "cta_group::2", "sp", "b32", "sync", "k8"])
        )
    elif choice == 2 and len(parts) > 2:
        i, j = rng.sample(range(1, len(parts)), 2)
        parts[i], parts[j] = parts[j], parts[i]
    elif choice == 3 and items:
        del items[rng.randrange(len(items))]
    elif choice == 4 and items:
        items.insert(rng.randrange(len(items)), rng.choice(items))
    elif choice == 5 and items:
        items[rng.randrange(len(items))] = rng.choice(
            ["%r0", "%rd1", "%p1", "{%r0, %r1}", "[%r0]", "7", "-1", "0f3F800000"]
        )
    elif choice == 6 and len(items) > 1:
        i, j = rng.sample(range(len(items)), 2)
        items[i], items[j] = items[j], items[i]
    else:
        numbers = list(re.finditer(r"(?<![%\w.])\d+", operands))
        if numbers:
            n = rng.choice(numbers)
            value = rng.choice([0, 1, 3, 17, 255, 511, 65536, (1 << 31) - 1, 1 << 40])
            return f"{guard or ''}{name} {operands[: n.start()]}{value}{operands[n.end() :]};"
    return f"{guard or ''}{'.'.join(parts)} {', '.join(items)};"


@pytest.mark.parametrize("kind", list(TEXTS))
def test_mutated_instructions_give_named_errors(kind):
    rng = random.Random(7)
    lines = TEXTS[kind].split("\n")
    pattern = r"^(@!?%p\d+ )?(tcgen05|wgmma|mma|ldmatrix)\..*;$"
    targets = [i for i, line in enumerate(lines) if re.match(pattern, line)]
    outcomes = {"refused": 0, "fault": 0, "ran": 0}
    for _ in range(120):
        i = rng.choice(targets)
        text = "\n".join([*lines[:i], mutate(lines[i], rng), *lines[i + 1 :]])
        try:
            program = load.__wrapped__(text)
        except PtxError:
            outcomes["refused"] += 1
            continue
        arrays = [np.zeros(65536, np.uint8) for _ in program.function.params]
        try:
            program.launch(1, 128 if kind in ("tcgen05", "wgmma") else 32, arrays, budget=200_000)
            outcomes["ran"] += 1
        except SoftsmError:
            outcomes["fault"] += 1
    assert sum(outcomes.values()) == 120
    assert outcomes["refused"] > 30


@pytest.mark.parametrize("seed", range(3))
def test_random_operand_values_give_faults(seed):
    """Descriptors, instruction descriptors and addresses of any value."""
    rng = random.Random(seed)
    for _ in range(25):
        body = f"@!%p1 bra ISSUED;\nmov.u64 %rd7, {rng.getrandbits(63)};\nmov.u64 %rd8, {rng.getrandbits(63)};\n"
        address = rng.choice([0, 64, 500, 1 << 20, rng.getrandbits(31)])
        body += f"mov.u32 %r20, {rng.getrandbits(31)};\nmov.u32 %r21, {address};\n"
        body += rng.choice([
            "tcgen05.mma.cta_group::1.kind::f16 [%r21], %rd7, %rd8, %r20, 1;\n",
            "tcgen05.mma.cta_group::1.kind::i8 [%r21], [%r20], %rd8, %r20, 0;\n",
            "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16 [%r8], %rd7, %rd8, %r20, [%r21], [%r20], 1;\n",
            "tcgen05.cp.cta_group::1.128x256b [%r21], %rd7;\n",
            "tcgen05.shift.cta_group::1.down [%r21];\n",
            "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r21];\n",
        ]) + "ISSUED:\nbar.sync 0;\n"  # fmt: skip
        try:
            load.__wrapped__(kernel(body)).launch(1, 128, [np.zeros(4, np.uint32), np.zeros(4, np.uint32)])
        except SoftsmError:
            pass
