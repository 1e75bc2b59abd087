"""What machine instructions cost in a run."""

import numpy as np
import pytest

from softsm.timing_model import costs, machine, sass
from softsm.timing_model.accesses import Access
from softsm.timing_model.parameters import GPUS


def test_spills_go_to_l2_and_come_from_there_if_l1_does_not_hold_them() -> None:
    def one(op: str) -> sass.Sass:
        return sass.Sass(index=0, opcode=op, text="", line=1, guarded=False)

    code = sass.Code([one("LDL.64"), one("STL"), one("FADD")], [range(3)], 255, 4096)
    held, lost = (costs.costs_of(code, GPUS["h200"], {}, spilled=share) for share in (0.0, 0.5))
    units, extra = held.values[:3, machine.UNITS].tolist(), held.values[:3, machine.EXTRA].tolist()
    assert (units, extra) == ([0, 128, 0], [0, 0, 0])
    assert lost.values[:3, machine.UNITS].tolist() == [256, 128, 0]  # of a load that misses; of every store
    assert lost.values[0, machine.EXTRA] == 0.5


def test_shuffles_take_the_crossbar_of_shared_memory() -> None:
    code = sass.Code([sass.Sass(index=0, opcode="SHFL.BFLY", text="", line=1, guarded=False)], [range(1)], 32, 0)
    made = costs.costs_of(code, GPUS["h200"], {})
    assert (made.ints[0, machine.KIND], made.values[0, machine.UNITS]) == (machine.SHARED, 1)


def test_warps_without_the_predicate_bring_nothing() -> None:
    """Two of eight warps have lanes that load: all eight come to the instruction, or six leave before it."""
    access = {1: Access(looks=2, ran=2, units=32, lines=8, missed=32, missing=2, bytes=1024, space="load")}
    for guarded in (True, False):
        code = sass.Code([sass.Sass(index=0, opcode="LDG.E.128", text="", line=1, guarded=guarded)], [range(1)], 32, 0)
        made = costs.costs_of(code, GPUS["h200"], access, executed=np.array([8, 0]))
        assert made.values[0, machine.UNITS] == 128


def test_copies_of_an_unrolled_load_fetch_by_turns() -> None:
    """A load of which one in eight fetches a sector: its copies are counted together, pieces of a wide one apart."""

    def first(width: int, often: int) -> list[float]:
        access = {1: Access(looks=8, ran=8, units=8, lines=8, missed=1, missing=1, bytes=8 * 32 * width, space="load")}
        loads = [sass.Sass(index=n, opcode="LDG.E", text="", line=1, guarded=False) for n in range(often)]
        code = sass.Code(loads, [range(often)], 32, 0)
        return costs.costs_of(code, GPUS["h200"], access).values[:often, machine.FIRST].tolist()

    assert first(4, 4) == [0, 0, 0, 0]
    assert first(8, 4) == [0, 1, 0, 1]


def test_a_load_takes_its_conflicts() -> None:
    load = sass.Sass(index=0, opcode="LDG.E", text="", line=1, guarded=False)
    found = Access(looks=2, ran=2, wavefronts=32, lines=64, units=64, bytes=256, space="load")
    made = costs.costs_of(sass.Code([load], [range(1)], 32, 0), GPUS["h200"], {1: found})
    assert made.values[0, machine.LSU_CYCLES] == 16


def test_a_second_pass_over_a_row_does_not_wait_for_the_first() -> None:
    """Its lines were asked for, but too long ago to be on their way."""
    code = sass.Code([sass.Sass(index=0, opcode="LDG.E", text="", line=1, guarded=False)], [range(1)], 32, 0)

    def later(**counts: int) -> float:
        access = {1: Access(looks=8, ran=8, units=32, lines=8, bytes=1024, space="load", later=8, **counts)}
        return costs.costs_of(code, GPUS["h200"], access).values[0, machine.LATER]

    assert later(missed=32, missing=8) == 1  # other parts of lines that were asked for lately
    assert later(missed=32, missing=16) == 0.5
    assert later(distant=32, missing=8, again=8) == 0


def test_copies_of_less_than_16_bytes_go_through_l1() -> None:
    """Measured: a cp.async of 4 or 8 bytes a lane takes 5.4 cycles more than one of 16 bytes that passes L1 by."""
    made = [sass.Sass(n, op, "[R1], desc[UR4][R2.64]", 1, False) for n, op in enumerate(("LDGSTS.E", "LDGSTS.E.64"))]
    made.append(sass.Sass(2, "LDGSTS.E.BYPASS.128", "[R1], desc[UR4][R2.64]", 1, False))
    found = costs.fixed_costs(sass.Code(made, [range(3)], 32, 0), GPUS["h200"])
    assert found.values[:3, machine.UNITS].tolist() == [5.4, 5.4, 0]


# Two independent instructions, and the cycles that ptxas leaves between them.
PAIRS = {
    "mad.lo.s32 {}, {}, %r1, %r2; fma.rn.f32 {}, {}, %f1, %f2;": ("IMAD", "FFMA", 2),
    "fma.rn.f16x2 {}, {}, %r1, %r2; mad.lo.s32 {}, {}, %r1, %r2;": ("HFMA2", "IMAD", 2),
    "add.s32 {}, {}, 77; xor.b32 {}, {}, %r1;": ("VIADD", "LOP3", 1),
    "cvt.rn.bf16x2.f32 {}, {}, %f1; xor.b32 {}, {}, %r1;": ("F2FP", "LOP3", 2),
    "max.f16x2 {}, {}, %r1; xor.b32 {}, {}, %r1;": ("HMNMX2", "LOP3", 2),
    "ex2.approx.ftz.f32 {}, {}; cvt.rpi.f32.f32 {}, {};": ("MUFU", "FRND", 8),
}
CHAINS = """
.version 8.3 .target sm_90a .address_size 64
.visible .entry k(.param .u64 x)
{{
  .reg .b32 %r<4>, %f<4>, %c<16>; .reg .b64 %d<2>;
  ld.param.u64 %d1, [x]; mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; cvt.rn.f32.u32 %f1, %r1; cvt.rn.f32.u32 %f2, %r2;
{0} st.global.b32 [%d1], %c0; ret;
}}"""


@pytest.mark.compile
@pytest.mark.parametrize("pair", PAIRS)
def test_instructions_share_the_pipes_that_ptxas_assumes(pair: str) -> None:
    """Chains of these instructions: where neighbours do not depend on each other, only the pipe keeps them apart."""
    pytest.importorskip("triton")
    first, second, cycles = PAIRS[pair]
    begin = "".join(f"  add.u32 %c{c}, %r1, {c + 1};\n" for c in range(16))
    turn = "".join(pair.format(*(f"%c{c}" for c in (n, n, n + 1, n + 1))) + "\n" for n in range(0, 16, 2))
    end = "".join(f"  xor.b32 %c0, %c0, %c{c};\n" for c in range(1, 16))
    made = sass.code_of(CHAINS.format(begin + 3 * turn + end), "sm_90a").instructions
    both = [(a, b) for a, b in zip(made, made[1:]) if ".MMA" not in a.opcode + b.opcode]  # HFMA2 has a second pipe
    apart = [a.stall for a, b in both if a.opcode.startswith(first) and b.opcode.startswith(second)]
    assert min(apart) == cycles
    assert (costs.place_of(first) == costs.place_of(second)) == (cycles > 1)


def test_wide_products_take_the_pipe_twice_as_long() -> None:
    """ptxas lets four cycles pass behind IMAD.WIDE, two behind IMAD and VIADD."""
    made = [sass.Sass(n, op, "", 1, False) for n, op in enumerate(("IMAD.WIDE", "IMAD.MOV.U32", "VIADD", "FFMA"))]
    found = costs.fixed_costs(sass.Code(made, [range(4)], 32, 0), GPUS["h200"])
    assert found.values[:4, machine.INTERVAL].tolist() == [4, 2, 2, 1.02]
    assert len(set(found.ints[:4, machine.PIPE_OF].tolist())) == 1


@pytest.mark.parametrize(
    ("lines", "sectors", "parts"),
    [
        (32, 32, 32),  # a line for each lane
        (4, 16, 4),  # every fourth word
        (1, 4, 0),  # a whole line
        (1, 1, 1),  # one word for all lanes
    ],
)
def test_l2_takes_parts_of_lines_one_by_one(lines: int, sectors: int, parts: int) -> None:
    """Measured: 2.46 stores/ns of 32 words at random in 8 MB are 79 parts of lines/ns, and whole lines 34."""
    gpu = GPUS["h200"]
    store = sass.Sass(index=0, opcode="STG.E", text="", line=1, guarded=False)
    found = Access(looks=2, ran=2, units=2 * sectors, lines=2 * lines, bytes=256, space="store")
    made = costs.costs_of(sass.Code([store], [range(1)], 32, 0), gpu, {1: found})
    assert made.values[0, machine.UNITS] / gpu["hbm.write"] == pytest.approx(parts / 79 if parts else 128 / 4400)
    assert made.values[0, machine.EXTRA] == (parts > 2)
