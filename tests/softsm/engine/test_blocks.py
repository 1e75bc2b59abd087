"""Straight-line code compiled as blocks: the same registers, steps and results as the interpreter's."""

import numpy as np
import pytest

import softsm
from softsm.engine import assemble, blocks, dispatch, translation
from softsm.engine import program as pg
from softsm.engine.launch import aligned

assemble.load_chapters()
ROWS, PREDICATES = 24, 8


def lane_local() -> list:
    hot, cold = dispatch.numbered()
    return [(n, m) for n, m in hot + cold if not m.exchange]


def random_code(part: list, rng: np.random.Generator) -> np.ndarray:
    """Each micro-operation once, on random rows, every third one guarded; then an exit."""
    records = []
    for i, (n, m) in enumerate(part):
        rows = [int(rng.integers(1, PREDICATES if kind == "p" else ROWS)) for kind in m.dst + m.srcs]
        if ".in." in m.name:  # shifts by a constant below the width
            rows[2] = 2 if m.srcs[1] in "qld" else 3
        rows[0] = max(rows[0], 1 if m.dst == "p" else 4)  # constants are never written
        guard = (int(rng.integers(1, PREDICATES)), pg.ALL * int(rng.integers(2))) if i % 3 == 0 else (0, 0)
        records.append([n, *rows, *[0] * (5 - len(rows)), *guard])
    return np.array([*records, [pg.OP_EXIT, 0, 0, 0, 0, 0, 0, 0]], np.uint32)


def program(code: np.ndarray) -> pg.Program:
    constants = {
        "constants_r": {3: 7},
        "constants_q": {2: 9},
        "constants_p": {},
        "branch_tables": [],
        "private": frozenset(),
    }
    made = pg.Program.__new__(pg.Program)
    for name, value in {"code": code, **constants}.items():
        setattr(made, name, value)
    return made


def registers(rng: np.random.Generator) -> tuple:
    """Return numbers of all sizes: small integers, floats near 1, any bits."""
    R, Q = aligned((ROWS, 32), np.uint32), aligned((ROWS, 32), np.uint64)
    R[:] = rng.integers(0, 1 << 32, R.shape, np.uint32)
    R[::2] = rng.standard_normal((ROWS // 2, 32)).astype(np.float32).view(np.uint32)
    R[1::4] = rng.integers(0, 64, (len(R[1::4]), 32))
    Q[:] = rng.integers(0, 1 << 63, Q.shape, np.uint64)
    Q[::2] = rng.standard_normal((ROWS // 2, 32)).view(np.uint64)
    R[3], Q[2] = 7, 9
    P = rng.integers(0, 1 << 32, PREDICATES, np.uint32)
    P[0] = pg.ALL
    return R, Q, P


def run(made: pg.Program, code: np.ndarray, table: np.ndarray, files: tuple) -> tuple:
    R, Q, P = files
    S = np.zeros(1, pg.WARP_STATE).view(np.int64)
    S[[pg.S_R, pg.S_Q, pg.S_P, pg.S_CODE, pg.S_BLOCKS]] = [x.ctypes.data for x in (R, Q, P, code, table)]
    return dispatch.runner(0)(S.ctypes.data, 0, pg.ALL, 1 << 30, 1 << 20, 0)


@pytest.mark.parametrize("part", range(6))
def test_every_micro_operation_alike(part, monkeypatch):
    width, _ = translation.vector_registers()
    number = part % 2 * 1000  # of registers: one vector per value, or two
    monkeypatch.setattr(translation, "vector_registers", lambda: (width, number))
    rng = np.random.default_rng(part)
    micros = lane_local()[part::6]
    code = random_code([micros[i] for i in rng.permutation(len(micros))], rng)
    made = program(code)
    dispatch.cold_operations().prepare(code)
    found = blocks.Blocks(made)
    assert found.found == [(0, len(code) - 1)]
    for seed in range(3):
        files = registers(np.random.default_rng(seed))
        mine = tuple(x.copy() for x in registers(np.random.default_rng(seed)))
        found.table[0, 0] = 0
        plain = run(made, found.code, found.table, files)
        assert found.table[0, 1] == seed + 1  # entered, and interpreted
        found.compile(0)
        assert run(made, found.code, found.table, mine) == plain == (pg.EXITED, len(code) - 1, 0, pg.ALL, len(code))
        for a, b, name in zip(files, mine, "RQP"):
            wrong = np.argwhere(a != b)
            assert not len(wrong), (name, wrong[:4], made.code[:, :2])


LOOP = """
.version 8.0 .target sm_90 .address_size 64
.visible .entry k(.param .u64 x, .param .u32 n)
{
  .reg .b32 %r<8>; .reg .f32 %f<4>; .reg .b64 %rd<4>; .reg .pred %p<4>;
  ld.param.u64 %rd1, [x]; ld.param.u32 %r1, [n]; mov.u32 %r2, %tid.x; mov.u32 %r3, 0; mov.u32 %r4, 0;
LOOP:
  add.u32 %r3, %r3, 1; and.b32 %r5, %r3, %r2; setp.eq.u32 %p1, %r5, 0; @%p1 add.u32 %r4, %r4, 3;
  @!%p1 xor.b32 %r4, %r4, %r3;
  setp.lt.u32 %p2, %r3, %r1; @%p2 bra LOOP;
  mul.wide.u32 %rd2, %r2, 4; add.u64 %rd3, %rd1, %rd2; st.global.u32 [%rd3], %r4; ret;
}"""


@pytest.mark.parametrize("threads", [32, 20, 64])
def test_a_hot_loop_gives_what_the_interpreter_gives(threads):
    n = dispatch.HOT + 50
    want, tid = np.zeros(threads, np.uint32), np.arange(threads, dtype=np.uint32)
    for i in range(1, n + 1):
        want = np.where(i & tid == 0, want + np.uint32(3), want ^ np.uint32(i))
    kernel = softsm.load(LOOP + f"// {threads}")
    steps = []
    for _ in range(2):  # the block is compiled in the first launch
        x = np.zeros(threads, np.uint32)
        steps.append(kernel.launch(1, threads, [x, n]).steps)
        assert np.array_equal(x, want)
    assert steps == [(9 + 7 * n) * -(-threads // 32)] * 2
    assert bool(kernel.blocks.table[:, 0].any()) == (threads % 32 == 0)  # part of a warp is interpreted


def test_blocks_end_where_something_jumps_to():
    code = np.zeros((12, 8), np.uint32)
    number = assemble.micro_numbers()["add.u32"]
    code[:10, 0] = number
    code[10] = [pg.OP_BRA, 0, 0, 0, 0, 4, 0, 0]
    made = program(code)
    assert blocks.Blocks(made).found == [(0, 4), (4, 6)]
    made.branch_tables = [[8]]
    assert blocks.Blocks(made).found == [(0, 4), (4, 4)]  # two records are not worth it


HEAD = """
.version 8.0 .target sm_90 .address_size 64
.visible .entry k(.param .u64 x, .param .u32 n)
{
  .reg .b32 %r<16>; .reg .f32 %f<16>; .reg .b64 %rd<4>; .reg .pred %p<4>; .shared .align 4 .b8 s[128];
  ld.param.u64 %rd1, [x]; ld.param.u32 %r1, [n]; mov.u32 %r2, %tid.x; mov.u32 %r3, 0;
  mul.wide.u32 %rd2, %r2, 4; add.u64 %rd3, %rd1, %rd2; ld.global.f32 %f1, [%rd3];
  shl.b32 %r13, %r2, 2; mov.u32 %r14, s; add.u32 %r14, %r14, %r13; mov.f32 %f2, %f1; mov.u32 %r9, 0;
LOOP:
"""
TAIL = """
  add.u32 %r3, %r3, 1; setp.lt.u32 %p1, %r3, %r1; @%p1 bra LOOP;
  st.global.u32 [%rd3], %r9; ret;
}"""
BODIES = {
    "NaNs": """mul.f32 %f3, %f1, %f2; sub.f32 %f4, %f3, %f3; max.f32 %f5, %f4, %f3; fma.rn.f32 %f6, %f4, %f1, %f5;
  add.f32 %f2, %f6, %f1; mov.b32 %r4, %f2; xor.b32 %r9, %r9, %r4; mov.b32 %r5, %f4; add.u32 %r9, %r9, %r5;""",
    "a guard": """add.f32 %f3, %f1, %f1; setp.gt.f32 %p2, %f3, 0f3F800000; @%p2 mul.f32 %f2, %f3, %f2; mov.b32 %r4, %f2;
  @!%p2 add.u32 %r9, %r9, %r4; min.f32 %f4, %f3, %f2; mov.b32 %r5, %f4; xor.b32 %r9, %r9, %r5;""",
    "behind a store": """add.u32 %r4, %r3, %r2; mul.lo.u32 %r5, %r4, 77; xor.b32 %r6, %r5, %r4;
  st.shared.u32 [%r14], %r6; add.u32 %r7, %r4, %r5; ld.shared.u32 %r8, [%r14]; xor.b32 %r9, %r9, %r7;
  add.u32 %r9, %r9, %r8; sub.u32 %r9, %r9, %r5;""",
    "a chain over the turns": """add.u32 %r4, %r9, %r3; setp.lt.u32 %p2, %r4, 4000000000; @%p2 xor.b32 %r10, %r4, %r2;
  add.u32 %r9, %r4, %r10; xor.b32 %r11, %r9, 5; shl.b32 %r12, %r11, 3;""",
}


@pytest.mark.parametrize("body", BODIES)
def test_what_nobody_reads_need_not_be_kept(body, monkeypatch):
    """Unread registers are not written and NaNs are made alike late: memory is as with the interpreter alone."""
    start = np.linspace(-3e38, 3e38, 32, dtype=np.float32)
    start[:4] = np.nan, np.inf, -np.inf, 0
    results, steps = [], []
    for kind in ("blocks", "interpreter"):
        if kind == "interpreter":
            monkeypatch.setattr(blocks, "find", lambda *_: [])
        kernel = softsm.load(HEAD + BODIES[body] + TAIL + f"// {kind}")
        x = start.copy()
        steps.append(kernel.launch(1, 32, [x, dispatch.HOT + 50]).steps)
        results.append(x.tobytes())
        assert bool(kernel.blocks.table[:, 0].any()) == (kind == "blocks")
    assert results[0] == results[1] and steps[0] == steps[1]
