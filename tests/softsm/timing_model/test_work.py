"""What a grid asks of the engines, and what its first CTAs cost more than the others."""

from types import SimpleNamespace

import numpy as np
import pytest

import softsm
from softsm.timing_model.lower import LONG_CODE
from softsm.timing_model.parameters import GPUS
from softsm.timing_model.work import beside, crowd, fetched_again, issue_cycles, mma_cycles, occupancy, spilled_bytes

pytest.importorskip("triton")  # its wheel holds ptxas and nvdisasm

WORK = 800
KERNEL = """
.version 8.3 .target sm_90a .address_size 64
.visible .entry k(.param .u64 x)
.reqntid 128, 1, 1
{
  .reg .b32 %r<8>, %f<12>; .reg .b64 %d<8>;
  ld.param.u64 %d1, [x]; mov.u32 %r1, %tid.x; cvt.rn.f32.u32 %f1, %r1;
  mov.b32 %f2, 0x3f000000; mov.b32 %f3, 0x3f800000;
  mov.b32 %f4, %f1; mul.f32 %f5, %f1, %f1; mul.f32 %f6, %f5, %f1; mul.f32 %f7, %f6, %f1;
%BODY%
  add.f32 %f4, %f4, %f5; add.f32 %f4, %f4, %f6; add.f32 %f4, %f4, %f7;
  mul.wide.u32 %d2, %r1, 4; add.u64 %d2, %d2, %d1; st.global.b32 [%d2], %f4; ret;
}""".replace("%BODY%", "\n".join(f"  fma.rn.f32 %f{4 + i % 4}, %f{4 + i % 4}, %f2, %f3;" for i in range(WORK)))


@pytest.mark.parametrize(
    ("chain", "memory", "written", "least", "most"),
    (
        (100, 100, 0.5, 109, 109.1),
        (100, 100, 0.1, 103, 104),
        (100, 100, 0.0, 100, 100),
        (60, 100, 0.5, 100, 100.3),
        (100, 60, 0.5, 100, 100.3),
    ),
)
def test_a_chain_and_device_memory_that_take_as_long_disturb_each_other(chain, memory, written, least, most):
    """Reads alone do not: the chain has them at the rate of device memory."""
    assert least <= beside(chain, memory, written) <= most


def test_turns_of_short_loops_find_their_code():
    """Four warps. One long loop loses all of its code in every turn; if most turns are those of a loop of 500
    instructions within it, these are found; without the rest of it, nothing is lost."""
    long, short = np.full(LONG_CODE + 500, 4 * 10), np.full(500, 4 * 990)
    assert fetched_again(long, 4) == (1.0, LONG_CODE + 500)
    both = np.concatenate((long, short))
    assert fetched_again(both, 4) == (pytest.approx(40 * len(both) / both.sum()), LONG_CODE + 1000)
    assert fetched_again(np.concatenate((long // 10, short)), 4) == (0.0, 0)
    assert fetched_again(short, 4) == (0.0, 0)


def test_long_loops_are_issued_as_slowly_as_measured():
    """With eight warps, a loop of 3072 instructions needs 1.5 cycles for each, one of 4096 or more needs 2."""
    found = [issue_cycles(1.1, (1.0, n), 8) for n in (LONG_CODE, 3072, 4096, 9000)]
    assert found == pytest.approx([1.1, 1.5, 2.0, 2.0])
    assert issue_cycles(1.1, (0.5, 4096), 8) == pytest.approx(1.55)
    assert issue_cycles(1.1, (0.0, 0), 8) == pytest.approx(1.1)


@pytest.mark.parametrize(("turns", "wanted"), ((1, 4 * 32 * 16), (50, 32 * 8 + 3 * 32 * 16)))
def test_a_role_keeps_what_it_loads_again(turns, wanted):
    """16 bytes are spilled by four warps; one of them has a loop in which it loads 8 of them."""
    texts = {"STL": "[R1], R0", "STL.64": "[R1+0x8], R2", "LDL.64": "R2, [R1+0x8]", "LDL": "R0, [R1]"}
    instructions = [SimpleNamespace(opcode=op, text=text) for op, text in texts.items()]
    code = SimpleNamespace(instructions=instructions, spills=16, places={op: [n] for n, op in enumerate(texts)})
    other, looping = (SimpleNamespace(instructions=np.array([0, 1] + [2] * n + [3])) for n in (1, turns))
    assert spilled_bytes(SimpleNamespace(paths=[other, other, other, looping]), code) == wanted
    code.spills = 0
    assert spilled_bytes(SimpleNamespace(paths=[other]), code) == 0


@pytest.fixture(scope="module")
def predictions() -> dict:
    """Predictions by number of waves. There is no loop, so all code is fetched once; shared memory lets one CTA run on
    a multiprocessor."""
    out = {}
    for waves in (1, 10, 20):
        with softsm.timing("h200") as timer:
            softsm.load(KERNEL).launch(132 * waves, 128, [np.zeros(128, np.float32)], shared=200 << 10)
        out[waves] = timer.predictions[0]
    return out


@pytest.mark.compile
def test_an_engine_is_as_busy_as_its_work_is_of_the_predicted_time(predictions) -> None:
    for waves, p in predictions.items():
        assert p.resident == 1 and p.waves == waves
        least = waves * WORK * GPUS["h200"]["interval.fma"]  # cycles of a scheduler, which has one warp
        assert p.busy["fma"] * p.body_us == pytest.approx(least / p.clock / 1e3, rel=0.02)
        assert p.busy["issue"] * p.body_us == pytest.approx(p.roofline["issue"], rel=1e-6)


def test_only_the_first_cta_of_a_slot_begins_with_cold_code(predictions) -> None:
    one, ten, twenty = (predictions[waves].cycles for waves in (1, 10, 20))
    each = (twenty - ten) / 10  # a CTA in the middle of the grid, and the gap before it
    assert ten == pytest.approx(one + 9 * each, rel=0.02)
    assert one + GPUS["h200"]["cta.gap"] > 1.05 * each


def test_cycles_of_products_in_tensor_memory() -> None:
    """The cycles were measured on a B200 (SemiAnalysisAI/microbench-blackwell): SS and TS, one CTA and a pair."""
    cases = np.array([(128, 256, 0), (128, 64, 0), (128, 256, 2), (128, 256, 1), (256, 256, 1)])
    assert np.maximum(*mma_cycles(*cases.T)).tolist() == [128, 48, 128, 64, 128]


@pytest.mark.parametrize(("shared", "wanted"), ((113 << 10, 2), ((113 << 10) + 16, 1), (0, 16)))  # 16: threads
def test_every_cta_has_a_kilobyte_of_shared_memory_beside_its_own(shared, wanted) -> None:
    """228 KB are all there is. With that kilobyte counted twice, a prefill that fits twice was 43 % too slow."""
    with softsm.timing("h200") as timer:
        softsm.load(KERNEL).launch(132, 128, [np.zeros(128, np.float32)], shared=shared)
    assert occupancy(timer.predictions[0].trace, SimpleNamespace(registers=32)) == wanted


def test_reads_meet_others_as_often_as_memory_is_busy() -> None:
    assert crowd(0.5, written=0.0) == 0.5
    assert crowd(0.5, written=0.25) == 0.75
    assert crowd(0.5, written=0.5) == crowd(0.5, written=0.7) == 1.0
