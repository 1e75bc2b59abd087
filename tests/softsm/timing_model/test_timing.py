"""softsm.timing(): predictions of small kernels whose limits are known."""

import numpy as np
import pytest

import softsm
from softsm.timing_model import blocks, costs, lower, model, parameters, report, sass, validated

pytest.importorskip("triton")  # its wheel holds ptxas and nvdisasm

STREAM = """
.version 8.3 .target sm_90a .address_size 64
.visible .entry k(.param .u64 x, .param .u32 n)
.reqntid 256, 1, 1
{
  .reg .b32 %r<8>, %f<8>; .reg .b64 %d<8>; .reg .pred %p<4>;
  ld.param.u64 %d1, [x]; ld.param.u32 %r3, [n]; mov.u32 %r1, %tid.x; mov.u32 %r2, 0; cvt.rn.f32.u32 %f1, %r1;
  mov.b32 %f2, 0x3f000000; mov.b32 %f3, 0x3f800000;
LOOP:
%BODY%
  add.u32 %r2, %r2, 1; setp.lt.u32 %p1, %r2, %r3; @%p1 bra LOOP;
  mul.wide.u32 %d2, %r1, 4; add.u64 %d2, %d2, %d1; st.global.b32 [%d2], %f1; ret;
}"""


def predicted(body: str, rounds: int = 50, grid: int = 132, threads: int = 256):
    x = np.zeros(1024, np.float32)
    with softsm.timing("h200") as timer:
        source = STREAM.replace("%BODY%", body).replace("reqntid 256", f"reqntid {threads}")
        softsm.load(source).launch(grid, threads, [x, rounds])
    return timer.predictions[0]


def test_a_chain_of_dependent_instructions_takes_their_latencies() -> None:
    p = predicted("  ex2.approx.ftz.f32 %f1, %f1;\n" * 16)
    chain = 50 * 16 * parameters.GPUS["h200"]["latency.mufu"]
    assert chain < p.cycles < 1.25 * chain
    assert p.clock == pytest.approx(1.98)


@pytest.mark.compile
def test_the_pipe_limits_independent_instructions() -> None:
    body = "".join(
        f"  ex2.approx.ftz.f32 %f{4 + i % 4}, %f1; add.f32 %f1, %f1, %f{4 + (i + 1) % 4};\n" for i in range(16)
    )
    slow, none = predicted(body), predicted("")
    # two warps on a scheduler, 16 of these each, eight cycles of the pipe each
    assert slow.cycles - none.cycles > 50 * 2 * 16 * 8 * 0.95


@pytest.mark.compile
def test_a_load_waits_until_l2_has_taken_parts_of_lines() -> None:
    """Each lane reads and writes a line of its own, as in a recursive filter; a store is between two loads."""

    def cycles_of_a_turn(apart: int) -> float:
        place = f"  add.u32 %r4, %r1, %r5;\n  mul.wide.u32 %d3, %r4, {apart};\n  add.u64 %d3, %d3, %d1;\n"
        body = f"{place}  ld.global.b32 %r5, [%d3];\n  st.global.b32 [%d3+64], %r5;\n  mov.b32 %f1, %r5;\n"
        return predicted(body, 100, threads=32).cycles / 100

    taken = 132 * 32 / parameters.GPUS["h200"]["l2.parts"] * 1.98  # by L2: a store of each of 132 warps
    assert cycles_of_a_turn(4) < taken < cycles_of_a_turn(128) - 34


def test_twice_the_work_takes_twice_the_time_and_a_second_wave_too() -> None:
    body = "  ex2.approx.ftz.f32 %f1, %f1;\n" * 16
    one, two = predicted(body, 100), predicted(body, 200)
    assert two.cycles / one.cycles == pytest.approx(2, rel=0.1)
    many = predicted(body, 100, grid=132 * 8 * 3)
    assert many.waves == pytest.approx(3) and many.cycles > 2.5 * one.cycles


def test_many_waves_of_a_full_pipe_take_what_the_pipe_needs() -> None:
    """Some of the CTAs that share a pipe get ahead of the others: how long those took says nothing of the rest."""
    body = "".join(f"  max.f32 %f{4 + i % 4}, %f1, %f{4 + (i + 1) % 4};\n" for i in range(32))
    body += "  min.f32 %f1, %f4, %f5;\n"
    p = predicted(body, 100, grid=132 * 8 * 7)
    assert 0.9 < p.busy["alu"] <= 1.0, p.busy


def test_words_say_gpu_clock_band_and_what_waits() -> None:
    p = predicted("  ex2.approx.ftz.f32 %f1, %f1;\n" * 16)
    text = report.text(p)
    assert " on H200: " in text and " us predicted (" in text and "at 1.98 GHz" in text
    assert "warps: MUFU waits for an operand at PTX line " in text and "132 CTAs of 256 threads" in text
    assert "one wave" in text and "bound by exp " in text
    assert report.as_dict(p)["us_low"] < p.us < report.as_dict(p)["us_high"]


def test_every_parameter_has_bounds_and_a_source() -> None:
    for gpu in parameters.GPUS.values():
        for name, p in gpu.values.items():
            assert p.low <= p.value <= p.high and p.source and p.unit and p.confidence in "ABCD", name


def test_a_gpu_of_another_architecture_is_refused() -> None:
    with pytest.raises(ValueError, match="gpu: got b200, which runs sm_100a; the program was compiled for sm_90a"):
        parameters.gpu_for("b200", "sm_90a")


def test_a_timing_run_emulates_the_ctas_it_looks_at_and_each_of_their_instructions_once() -> None:
    """Counted in instructions of PTX; the seconds that a trace and a replay need are in docs/timing.md."""
    body = "  ex2.approx.ftz.f32 %f1, %f1;\n" * 16
    with softsm.counting() as plain:
        softsm.load(STREAM.replace("%BODY%", body)).launch(1, 256, [np.zeros(1024, np.float32), 50])
    one = sum(role.instructions for role in plain.roles.values())
    with softsm.counting() as timed:
        p = predicted(body, 50, grid=132 * 100)
    assert p.trace is not None and len(p.trace.clusters) == 3
    assert sum(role.instructions for role in timed.roles.values()) == 3 * one


def test_warps_of_small_ctas_are_spread_over_the_schedulers() -> None:
    """Four CTAs of one warp each on a multiprocessor take no longer than one."""
    text = STREAM.replace("%BODY%", "  fma.rn.f32 %f1, %f1, %f2, %f3;\n" * 64).replace("256, 1, 1", "32, 1, 1")
    cycles = {}
    for grid in (132, 4 * 132):
        with softsm.timing("h200") as timer:
            softsm.load(text).launch(grid, 32, [np.zeros(1024, np.float32), 50])
        cycles[grid] = timer.predictions[0].cycles
    assert cycles[4 * 132] < 1.1 * cycles[132]


def test_what_does_not_change_between_launches_is_made_once(monkeypatch) -> None:
    """Counted, since seconds depend on the machine: disassembly, blocks, costs and ways of the second launch are those
    of the first, and a CTA that leaves device memory idle is replayed once."""
    made: list[str] = []

    def counted(place, name: str) -> None:
        plain = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *a, **k: made.append(name) or plain(*a, **k))

    for place, name in ((sass, "disassemble"), (blocks, "blocks_of"), (blocks, "Instructions"), (costs, "fixed_costs"),
                        (lower.Lowering, "_path"), (model.Model, "replay")):  # fmt: skip
        counted(place, name)
    kernel = softsm.load(STREAM.replace("%BODY%", "  ex2.approx.ftz.f32 %f1, %f1;\n" * 7))
    sass.code_of.cache_clear()
    blocks._known.pop(kernel, None)
    for launch in range(2):
        with softsm.timing("h200"):
            kernel.launch(1, 256, [np.zeros(1024, np.float32), 50])
        if launch == 0:
            assert sorted(set(made)) == ["Instructions", "_path", "blocks_of", "disassemble", "fixed_costs", "replay"]
            assert made.count("_path") == 1  # eight warps go one way
            made.clear()
    assert made == ["replay"]


@pytest.mark.parametrize("threads", [32, 128])
def test_a_warp_with_a_scheduler_of_its_own_goes_ahead_and_takes_as_long(threads) -> None:
    """Others notice nothing of what it does by itself; who of two comes first at the same time may differ."""
    body = """  ex2.approx.ftz.f32 %f1, %f1; fma.rn.f32 %f2, %f1, %f1, %f2; bar.sync 0;
  mul.wide.u32 %d2, %r1, 4; add.u64 %d2, %d2, %d1; ld.global.b32 %f3, [%d2]; add.rn.f32 %f1, %f1, %f3;"""
    text = STREAM.replace("%BODY%", body).replace("256, 1, 1", f"{threads}, 1, 1")
    with softsm.timing("h200") as timer:
        softsm.load(text).launch(1, threads, [np.zeros(128, np.float32), 100])
    found = timer.predictions[0]
    again = model.Model(found.trace, found.gpu)
    again.costs.products = True  # with products none goes ahead
    other = again.predict()
    assert found.cycles == pytest.approx(other.cycles, rel=1e-3)
    assert found.run.issued.tolist() == other.run.issued.tolist()
    assert found.run.stalls.sum() == pytest.approx(other.run.stalls.sum(), rel=0.01)


TAKING = """
.version 8.6 .target sm_100a .address_size 64
.visible .entry taking(.param .u64 p_x)
.reqntid 32, 1, 1
{
  .shared .align 8 .b8 bar[8]; .shared .align 16 .b8 answer[16];
  .reg .b32 %r<8>; .reg .b64 %d<4>; .reg .b128 %answer; .reg .pred %p<4>;
  ld.param.u64 %d1, [p_x]; mov.u32 %r1, %tid.x; setp.eq.u32 %p1, %r1, 0; mov.u32 %r2, bar; mov.u32 %r3, answer;
  mov.u32 %r4, %ctaid.x; mov.u32 %r5, 0;
  @%p1 mbarrier.init.shared::cta.b64 [%r2], 1;
  bar.sync 0;
LOOP:
  mul.wide.u32 %d2, %r4, 4; add.s64 %d2, %d2, %d1;
  @%p1 st.global.u32 [%d2], 1;
  @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 16;
  @%p1 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r3], [%r2];
W:
  mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], %r5;
  @!%p2 bra W;
  ld.shared.b128 %answer, [%r3];
  xor.b32 %r5, %r5, 1;
  bar.sync 0;
  clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p3, %answer;
  @!%p3 bra DONE;
  clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r4, %answer;
  bra LOOP;
DONE:
  ret;
}"""


@pytest.mark.compile
def test_ctas_that_take_over_others_stand_for_them() -> None:
    """With cluster launch control those that find room do the work of all: more of it takes longer, without others."""

    def cycles(grid: int) -> float:
        x = np.zeros(grid, np.uint32)
        with softsm.timing("b200") as timer:
            softsm.load(TAKING).launch(grid, 32, [x])
        (p,) = timer.predictions
        assert p.ctas <= 32 * 148 and p.waves <= 1
        return p.cycles

    one, many = cycles(148), cycles(32 * 148 * 20)
    assert many > 5 * one


@pytest.mark.compile
def test_warps_fetch_in_the_same_turns() -> None:
    """If one load in eight of a warp fetches its sectors, as with a scale for each block, those of all warps are in the
    same turn: a barrier in the loop waits for them once, not eight times."""

    def cycles(stride: int) -> float:
        x = np.zeros(1 << 20, np.float32)
        body = f"  mul.lo.u32 %r5, %r2, {stride}; mad.lo.u32 %r5, %r1, 32, %r5; cvt.u64.u32 %d3, %r5;\n"
        body += "  add.u64 %d3, %d3, %d1; ld.global.b32 %f4, [%d3]; bar.sync 0; add.f32 %f1, %f1, %f4;\n"
        with softsm.timing("h200") as timer:
            softsm.load(STREAM.replace("%BODY%", body)).launch(132, 256, [x, 64])
        return timer.predictions[0].cycles

    every, eighth = cycles(8192), cycles(4)
    assert eighth < 0.3 * every


RED = "  red.relaxed.gpu.global.add.f32 [%d2], %f1;\n"
READ = """  mad.lo.u32 %r5, %r2, 33792, %r4; mul.wide.u32 %d3, %r5, 16; add.u64 %d3, %d3, %d4;
  ld.global.v4.b32 {%f4, %f5, %f6, %f7}, [%d3]; add.f32 %f1, %f1, %f4; add.f32 %f2, %f5, %f6; add.f32 %f1, %f1, %f7;
"""


@pytest.mark.compile
def test_reads_wait_behind_atomics_at_few_lines() -> None:
    """The same atomics and reads take longer together than each alone if the atomics go to few slices of L2."""
    source = STREAM.replace(
        "LOOP:",
        "  mov.u32 %r4, %ctaid.x; mad.lo.u32 %r4, %r4, 256, %r1; ld.param.u64 %d4, [y];\n"
        "  mul.wide.u32 %d2, %r1, 4; add.u64 %d2, %d2, %d1;\nLOOP:",
        1,
    )
    source = source.replace(".param .u32 n)", ".param .u32 n, .param .u64 y)")

    def us(body: str) -> float:
        x, y = np.zeros(1024, np.float32), np.zeros(132 * 256 * 4 * 32, np.float32)
        with softsm.timing("h200") as timer:
            softsm.load(source.replace("%BODY%", body)).launch(132, 256, [x, 32, y])
        return timer.predictions[0].body_us

    atomics, reads, both = us(RED), us(READ), us(READ + RED)
    assert both > 1.1 * max(atomics, reads)


def test_spills_beside_much_shared_memory_have_little_l1() -> None:
    """A product with 132 KB of shared memory and 36 KB of spills takes twice as long as with 124 KB of L1."""
    from softsm.timing_model.model import spill_room

    assert spill_room(40 << 10, 216 << 10) == 216 << 10
    assert spill_room(132 << 10, 124 << 10) == 28 << 10


@pytest.mark.compile
def test_loops_longer_than_the_instruction_cache_are_fetched_again() -> None:
    """Eight warps issue one instruction in two cycles in a loop of 4200, one in 1.25 with 2600 (3072: 1.5 measured)."""
    start = "".join(f"  add.f32 %f{n}, %f1, 0f3F80000{n};\n" for n in (4, 5, 6, 7))  # all alike they would be one
    turn = "".join(f"  fma.rn.f32 %f{n}, %f1, %f{n}, %f1;\n" for n in (4, 5, 6, 7))
    end = "".join(f"  add.f32 %f1, %f1, %f{n};\n" for n in (4, 5, 6, 7))

    def each(count: int) -> float:
        return predicted(start + turn * (count // 4) + end, 8).cycles / count

    assert each(4200) > 1.5 * each(1300)
    assert 1.1 < each(2600) / each(1300) < 1.3


@pytest.mark.parametrize(("issue", "high"), [(30.0, 1.2), (70.0, 1.6)])
def test_much_work_beside_products_is_a_reason_to_doubt(issue, high) -> None:
    found = predicted("  add.f32 %f1, %f1, %f2;")
    found.roofline |= {"issue": issue, "tensor core": 30.0, "L2": 0.0}
    found.body_us = found.us = 100.0
    found.bound, found.trace = "issue", None
    assert validated.band(found)[1] == pytest.approx(high)


@pytest.mark.compile
@pytest.mark.parametrize("swapped, sectors", [(False, 16), (True, 32)])
def test_copies_of_half_a_sector_ask_for_it_twice(swapped: bool, sectors: int) -> None:
    """Eight lanes of 16 bytes go together: the first eight may have the first halves of sectors, the next the others.
    Counted on an H200 (ncu, products with weights of int4)."""
    lane = (
        "and.b32 %r2, %r1, 7; shl.b32 %r2, %r2, 1; shr.u32 %r3, %r1, 3; and.b32 %r4, %r3, 1; add.u32 %r2, %r2, %r4; "
        "shr.u32 %r3, %r3, 1; shl.b32 %r3, %r3, 4; add.u32 %r2, %r2, %r3;"
    )
    ptx = f"""
.version 8.3 .target sm_90a .address_size 64
.visible .entry k(.param .u64 x) .reqntid 32, 1, 1
{{
  .reg .b32 %r<8>; .reg .b64 %d<8>; .shared .align 16 .b8 data[512];
  ld.param.u64 %d1, [x]; mov.u32 %r1, %tid.x; mov.u32 %r2, %r1; {lane if swapped else ""}
  mul.wide.u32 %d2, %r2, 16; add.u64 %d2, %d2, %d1; mov.u32 %r5, data; shl.b32 %r6, %r1, 4; add.u32 %r5, %r5, %r6;
  cp.async.cg.shared.global [%r5], [%d2], 16; cp.async.wait_all; ret;
}}"""
    with softsm.timing("h200") as timer:
        softsm.load(ptx).launch(1, 32, [np.zeros(1024, np.float32)])
    assert sum(s.asked for s in timer.predictions[0].sources) == 32 * sectors
