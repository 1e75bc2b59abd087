"""Loads from shared memory inside blocks, and blocks that turn by themselves: as the interpreter does it."""

import numpy as np
import pytest

import softsm
from softsm.engine import blocks, dispatch
from softsm.engine.options import options as launch_options
from softsm.errors import Fault, StepBudget

# %r14 is the address of a lane's word, %r15 that of the buffer; %r9 goes to x at the end.
HEAD = """
.version 8.0 .target sm_90 .address_size 64
.visible .entry k(.param .u64 x, .param .u32 n)
{
  .reg .b32 %r<32>; .reg .b64 %rd<4>; .reg .pred %p<4>; .shared .align 16 .b8 s[49152];
  ld.param.u64 %rd1, [x]; ld.param.u32 %r1, [n]; mov.u32 %r2, %tid.x; mov.u32 %r3, 0; mov.u32 %r9, 0;
  mul.wide.u32 %rd2, %r2, 4; add.u64 %rd3, %rd1, %rd2; ld.global.u32 %r10, [%rd3]; mov.u32 %r15, s;
  shl.b32 %r13, %r2, 2; add.u32 %r14, %r15, %r13; mov.u32 %r16, 0; mov.u32 %r17, %r14; mov.u32 %r18, %r1;
  st.shared.u32 [%r14], %r10; st.shared.u32 [%r14+128], %r13; st.shared.u32 [%r14+256], %r2;
  mul.lo.u32 %r11, %r2, 5; add.u32 %r11, %r11, 1; and.b32 %r11, %r11, 31; shl.b32 %r11, %r11, 2;
  add.u32 %r12, %r15, %r11; st.shared.u32 [%r14+384], %r12; st.shared.u32 [%r14+512], %r12; bar.sync 0;
"""
TAIL = """
  add.u32 %r3, %r3, 1; setp.lt.u32 %p1, %r3, %r18; @%p1 bra LOOP;
  st.global.u32 [%rd3], %r9; ret;
}"""
SUM = "xor.b32 %r9, %r9, %r4; mul.lo.u32 %r9, %r9, 3; add.u32 %r9, %r9, %r3;"
# name: (before the loop, in the loop before SUM, records of the block)
BODIES = {
    "in a row": ("", "ld.shared.u32 %r4, [%r14+128];", 6),
    "scattered": ("", "ld.shared.u32 %r4, [%r12];", 6),
    "one word for all": ("", "ld.shared.u32 %r4, [%r15+4];", 6),
    "pairs and fours": ("shl.b32 %r20, %r2, 3; add.u32 %r20, %r20, %r15; shl.b32 %r21, %r2, 4;"
                        "add.u32 %r21, %r21, %r15;",
                        "ld.shared.v2.u32 {%r5, %r6}, [%r20]; ld.shared.v4.u32 {%r4, %r22, %r23, %r24}, [%r21];"
                        "add.u32 %r4, %r4, %r5; xor.b32 %r9, %r9, %r6; add.u32 %r9, %r9, %r22; xor.b32 %r9, %r9, %r23;"
                        "sub.u32 %r9, %r9, %r24;", 12),
    "scattered fours": ("shl.b32 %r21, %r11, 2; add.u32 %r21, %r21, %r15;",
                        "ld.shared.v4.u32 {%r4, %r22, %r23, %r24}, [%r21]; add.u32 %r9, %r9, %r22;"
                        "xor.b32 %r9, %r9, %r23; sub.u32 %r9, %r9, %r24;", 9),
    "an address that moves": ("", "ld.shared.u32 %r4, [%r17]; add.u32 %r16, %r16, 132; and.b32 %r16, %r16, 508;"
                              "add.u32 %r17, %r16, %r14;", 9),
    "an address made in the block": ("", "xor.b32 %r16, %r16, 256; add.u32 %r5, %r16, %r14; mov.u32 %r6, %r5;"
                                     "ld.shared.u32 %r4, [%r5];", 6),
    "a chain of addresses": ("add.u32 %r12, %r14, 384;", "ld.shared.u32 %r4, [%r12]; add.u32 %r12, %r4, 384;", 7),
    "into its own address": ("add.u32 %r12, %r14, 384;", "ld.shared.u32 %r12, [%r12]; add.u32 %r12, %r12, 384;"
                             "mov.u32 %r4, %r12;", 8),
    "two of one address": ("", "ld.shared.u32 %r4, [%r14]; ld.shared.u32 %r5, [%r14+256]; add.u32 %r4, %r4, %r5;", 8),
    "lanes that leave one by one": ("add.u32 %r18, %r1, %r2;", "ld.shared.u32 %r4, [%r12];", 6),
}  # fmt: skip


def interpreted(monkeypatch) -> None:
    monkeypatch.setattr(blocks, "find", lambda *_: [])


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("threads", [32, 64])
def test_loads_give_what_the_interpreter_gives(body, threads, monkeypatch):
    before, inside, length = BODIES[body]
    text = HEAD + before + "\nLOOP:\n" + inside + SUM + TAIL
    results, steps = [], []
    for kind in ("blocks", "interpreter"):
        if kind == "interpreter":
            interpreted(monkeypatch)
        kernel = softsm.load(text + f"// {kind} {threads}")
        for _ in range(2):  # the block is compiled in the first launch
            x = np.arange(7, 7 + threads, dtype=np.uint32) * np.uint32(0x9E3779B1)
            steps.append(kernel.launch(1, threads, [x, dispatch.HOT + 50]).steps)
            results.append(x.tobytes())
        compiled = [kernel.blocks.found[i][1] for i in np.flatnonzero(kernel.blocks.table[:, 0])]
        assert (length in compiled) == (kind == "blocks"), compiled
    assert len(set(results)) == 1 and len(set(steps)) == 1


def outcome(kernel, n: int, **options) -> tuple[str, bytes]:
    x = np.arange(32, dtype=np.uint32)
    with pytest.raises((Fault, StepBudget)) as caught, launch_options(**options):
        kernel.launch(1, 32, [x, n])
    return str(caught.value), x.tobytes()


# Each goes wrong behind the turn in which the block is compiled.
WRONG = {
    "out of bounds": "ld.shared.u32 %r4, [%r14]; add.u32 %r14, %r14, 4;",
    "misaligned": f"ld.shared.v2.u32 {{%r4, %r5}}, [%r17]; setp.eq.u32 %p2, %r3, {dispatch.HOT + 70};"
    "mov.u32 %r17, %r15; @%p2 add.u32 %r17, %r17, 4;",
}

EXPECTED = {"out of bounds": "load by lane 31 of 4 bytes", "misaligned": "it must be a multiple of 8"}


@pytest.mark.parametrize("body", WRONG)
def test_a_load_that_goes_wrong_is_told_alike(body, monkeypatch):
    told = []
    for kind in ("blocks", "interpreter"):
        if kind == "interpreter":
            interpreted(monkeypatch)
        before = "mov.u32 %r17, %r15;\nLOOP:\n"
        kernel = softsm.load(HEAD + before + WRONG[body] + SUM + TAIL + f"// {kind}")
        told.append(outcome(kernel, 1 << 20))
        assert bool(kernel.blocks.table[:, 0].any()) == (kind == "blocks")
    assert told[0] == told[1] and EXPECTED[body] in told[0][0]


def test_a_block_that_turns_forever_ends_with_the_budget(monkeypatch):
    told = []
    for kind in ("blocks", "interpreter"):
        if kind == "interpreter":
            interpreted(monkeypatch)
        turn = "ld.shared.u32 %r4, [%r14];" + SUM + "and.b32 %r5, %r9, 0; add.u32 %r14, %r14, %r5; bra LOOP;\n}"
        kernel = softsm.load(HEAD + "\nLOOP:\n" + turn + f"// {kind}")
        told.append(outcome(kernel, 0, budget=dispatch.HOT * 7 + 12345))
        assert bool(kernel.blocks.table[:, 0].any()) == (kind == "blocks")
    assert told[0] == told[1] and "budget" in told[0][0]


SPIN = """
.version 8.0 .target sm_90 .address_size 64
.visible .entry k(.param .u64 x, .param .u32 n)
{
  .reg .b32 %r<32>; .reg .b64 %rd<4>; .reg .pred %p<4>; .shared .align 16 .b8 s[16];
  ld.param.u64 %rd1, [x]; ld.param.u32 %r1, [n]; mov.u32 %r2, %tid.x; mov.u32 %r3, 0; mov.u32 %r4, 0;
  mul.wide.u32 %rd2, %r2, 4; add.u64 %rd3, %rd1, %rd2; mov.u32 %r15, s; st.shared.u32 [%r15], %r3; bar.sync 0;
  setp.lt.u32 %p2, %r2, 32; @%p2 bra COUNT;
SPIN:
  ld.volatile.shared.u32 %r5, [%r15]; add.u32 %r4, %r4, 1; setp.eq.u32 %p1, %r5, 0; @%p1 bra SPIN;
  st.global.u32 [%rd3], %r5; ret;
COUNT:
  add.u32 %r3, %r3, 1; xor.b32 %r6, %r3, %r2; add.u32 %r4, %r4, %r6; setp.lt.u32 %p1, %r3, %r1; @%p1 bra COUNT;
  st.volatile.shared.u32 [%r15], %r3; st.global.u32 [%rd3], %r4; ret;
}"""


@pytest.mark.parametrize("order", ["eager", "latest", "random"])
def test_a_block_that_spins_lets_the_other_warp_go_on(order):
    n = 8 * dispatch.HOT
    kernel = softsm.load(SPIN)
    x = np.zeros(64, np.uint32)
    with launch_options(order=order):
        kernel.launch(1, 64, [x, n])
    assert (x[32:] == n).all() and x[0] == np.arange(1, n + 1, dtype=np.uint64).sum() & 0xFFFFFFFF
    assert np.count_nonzero(kernel.blocks.table[:, 0]) == 2  # both loops


def test_where_races_are_checked_loads_stay_outside():
    program = softsm.load(HEAD + "\nLOOP:\nld.shared.u32 %r4, [%r14+128];" + SUM + TAIL).program
    (at,) = blocks.plain_loads(program)
    holds = [
        any(first <= at < first + length for first, length in blocks.Blocks(program, checking).found)
        for checking in (False, True)
    ]
    assert holds == [True, False]
