"""Wavefronts of shared memory and sectors of global memory."""

import numpy as np
import pytest

import softsm
from softsm.timing_model import accesses, looks

LANES = np.arange(32)


@pytest.mark.parametrize(
    ("stride", "size", "wanted"),
    [
        (4, 4, 1),  # 32 banks
        (0, 4, 1),  # one word for all
        (8, 4, 2),
        (128, 4, 32),
        (16, 16, 4),  # 512 bytes, 128 a cycle
        (8, 8, 2),
        (1024, 16, 32),  # rows of a tile that is not swizzled
    ],
)
def test_wavefronts(stride, size, wanted) -> None:
    assert accesses.wavefronts(LANES[None] * stride, size).tolist() == [wanted]


@pytest.mark.parametrize(
    "stride, size, wanted", [(32, 4, 8), (64, 4, 16), (128, 4, 32), (132, 4, 8), (136, 8, 9), (516, 4, 8), (0, 4, 1)]
)
def test_loads_of_global_memory_have_conflicts_of_banks_or_of_tags(stride, size, wanted) -> None:
    """Measured with words that L1 holds: 8.1, 16.1, 32.1, 8.2, 9.0, 8.3, 1.1 cycles. Lanes a stride apart and lanes at
    any addresses are counted by two ways."""
    even = np.array([True, False, True])
    found = accesses.held_wavefronts(
        np.where(even, stride, 0), even, np.full(3, size), lambda those: LANES[None] * stride + 0 * those[:, None]
    )
    assert found.tolist() == [wanted] * 3


@pytest.mark.parametrize(("table", "measured"), [(1 << 11, 4.1), (1 << 13, 8.5), (1 << 15, 10.5), (1 << 16, 11.0)])
def test_lanes_at_random_meet_at_the_tags(table, measured) -> None:
    """Measured with two times 16 warps and words of 4 bytes in half of a table (benchmarks/microbench, gathers)."""
    addresses = np.random.default_rng(5).integers(0, table // 4, (4000, 32)) * 4
    assert accesses.held_wavefronts(
        np.zeros(4000, np.int64), np.zeros(4000, bool), np.full(4000, 4), lambda those: addresses[those]
    ).mean() == pytest.approx(measured, rel=0.06)


def test_a_sector_is_fetched_by_the_load_that_asks_first() -> None:
    sectors = np.array([[1, 2, 2, 3], [3, 4, 5, 5], [1, 2, 3, 4]])
    fresh = np.array([[True, True, False, True], [True, True, True, False], [True] * 4])
    assert accesses.first_asked(sectors, fresh)[0].tolist() == [3, 2, 0]


def test_a_row_longer_than_l1_that_is_read_again_is_no_new_row() -> None:
    """Else it would be taken for another part of the tensor, which L2 has got from device memory for all CTAs."""
    row = np.arange(0, 300 << 10, 1024) >> 5
    sectors = np.concatenate([row, row])[:, None] + np.arange(32)
    missed, near = accesses.first_asked(sectors, np.ones(sectors.shape, bool))
    assert missed.sum() == 32 * len(row) and near.sum() == 2 * 32 * len(row)


def test_what_was_asked_for_long_ago_is_told_from_what_was_lately(monkeypatch) -> None:
    monkeypatch.setattr(accesses, "NEAR_BYTES", 3 * 32)
    addresses = 32 * np.array([[1, 2], [3, 4], [1, 2], [1, 2]])
    every = accesses.sectors_of(None, lambda: addresses, np.zeros(4, bool), np.zeros(4, int), np.arange(4))
    assert [x.tolist() for x in every] == [[2] * 4, [2, 2, 0, 0], [0, 0, 2, 0], [1, 2, 1, 1]]


def test_the_load_that_the_machine_code_has_first_brings_the_line() -> None:
    """Two iterations of a block with three loads, which ptxas issues as 2, 3, 1, by two warps; then another block."""
    warps = np.array([0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1, 0])
    records = np.array([7, 8, 9, 7, 8, 9, 7, 8, 9, 7, 8, 9, 12])
    blocks, numbers = np.array([4] * 12 + [5]), np.array([42, 40, 41] * 4 + [39])
    found = accesses.in_machine_order(warps, records, blocks, numbers)
    assert found.tolist() == [1, 2, 0, 4, 5, 3, 7, 8, 6, 10, 11, 9, 12]


def test_warps_of_a_cta_ask_in_step() -> None:
    """The emulator runs warp after warp. On a GPU the first loads of all warps come before their second ones."""
    addresses = 32 * np.array([[1, 1], [2, 2], [2, 2], [1, 1]])  # warp 0 asks for 1, then 2; warp 1 for 2, then 1
    turn = accesses.turns_of(np.array([0, 0, 1, 1]))
    assert turn.tolist() == [0, 1, 0, 1]
    units, missed, _, _ = accesses.sectors_of(None, lambda: addresses, np.zeros(4, bool), np.zeros(4, int), turn)
    assert units.tolist() == [1, 1, 1, 1]
    assert missed.tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize("step", [0, 4, 16, 32, 64, -16, None])
def test_sectors_of_loads_side_by_side_and_of_others(step) -> None:
    """Counts are made one by one. Two warps request the same rows; a step of None means that there is none."""
    random = np.random.default_rng(3)
    starts = 4096 + 512 * random.integers(0, 6, 12)
    offsets = LANES * step if step is not None else 4 * random.integers(0, 400, (12, 32))
    addresses, turn = starts[:, None] + offsets, accesses.turns_of(np.arange(12) // 6)
    ends = addresses[:, [0, -1]] if step in (0, 4, 16, 32) else None
    store, cta = np.arange(12) == 5, np.zeros(12, int)
    units, missed, _, lines = accesses.sectors_of(ends, addresses.copy, store, cta, turn)
    asked: set[int] = set()
    for n in sorted(range(12), key=lambda n: int(turn[n])):
        mine = set((addresses[n] >> 5).tolist())
        assert (units[n], lines[n]) == (len(mine), len({s >> 2 for s in mine}))
        assert missed[n] == (len(mine) if n == 5 else len(mine - asked))  # 5 is a store
        asked |= mine if n != 5 else set()


@pytest.mark.parametrize("pages", [1, 5, 1000])
def test_the_first_places_of_values_on_few_pages_and_on_many(pages) -> None:
    values = np.random.default_rng(pages).integers(0, pages << accesses.PAGE, 4000)
    assert sorted(accesses.first_places(values)) == sorted(np.unique(values, return_index=True)[1])


@pytest.mark.parametrize("kept", [1, 3, 7, 1000])
def test_ranges_begin_anew_as_sectors_do_when_l1_is_full(monkeypatch, kept) -> None:
    monkeypatch.setattr(accesses, "NEAR_BYTES", 8 * 32 * kept)
    first = 8 * np.random.default_rng(kept).integers(0, 5, 40)
    sectors = first[:, None] + np.arange(8)
    wanted = accesses.first_asked(sectors, np.ones(sectors.shape, bool))
    found = accesses.ranges_first_asked(sectors[:, [0, -1]], np.full(40, 8))
    assert found is not None and [x.tolist() for x in found] == [x.tolist() for x in wanted]


ADD_VECTORS = """
.version 8.6 .target sm_90a .address_size 64
.visible .entry k(.param .u64 out)
{
    .reg .b32 %r<4>;
    .reg .b64 %rd<4>;
    .reg .f32 %f<2>;
    ld.param.u64 %rd1, [out];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 16;
    add.s64 %rd3, %rd1, %rd2;
    mov.f32 %f1, 0f3F800000;
    red.global.add.v4.f32 [%rd3], {%f1, %f1, %f1, %f1};
    red.release.gpu.global.add.f32 [%rd3], %f1;
    ret;
}
"""


@pytest.mark.compile
def test_atomic_operations_on_vectors_have_their_bytes() -> None:
    """They are not done by the interpreter, which notes the addresses of the others."""
    out = np.zeros(4 * 64, np.float32)
    with softsm.timing("h200") as timer:
        softsm.load(ADD_VECTORS).launch(1, 64, [out])
    assert max(s.atomic for s in timer.predictions[0].sources) == 2 * out.nbytes  # every sector twice


def test_warps_wait_for_what_one_of_them_fetches() -> None:
    """Two warps in a turn of a loop ask for the same sector, which one of them brings; in the next turn it is there."""
    cta, turn, sector = np.array([0, 0, 0, 0, 1]), np.array([0, 0, 1, 1, 0]), np.array([7, 7, 7, 9, 7])
    assert accesses.joins(cta, turn, sector, np.array([1, 0, 0, 2, 0])).tolist() == [True, True, False, True, False]


STRIDED = """
.version 8.6 .target sm_90a .address_size 64
.visible .entry k(.param .u64 x)
{
    .reg .b32 %r<5>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [x];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, %STEP%;
    add.s64 %rd3, %rd1, %rd2;
    ld.global.u32 %r2, [%rd3];
    ld.global.u32 %r3, [%rd3+32];
    add.u32 %r4, %r2, %r3;
    st.global.u32 [%rd3], %r4;
    ret;
}
"""


def predicted(source: str, **words: int):
    for word, value in words.items():
        source = source.replace(f"%{word.upper()}%", str(value))
    with softsm.timing("h200") as timer:
        softsm.load(source).launch(1, 32, [np.zeros(1 << 16, np.uint8)])
    return timer.predictions[0]


@pytest.mark.parametrize("step, blocks", [(160, 48), (128, 32)])
def test_sectors_of_a_block_that_two_loads_ask_for(step, blocks) -> None:
    """Two words are 32 bytes apart, in one block of 64 bytes in every second lane, or always."""
    (source,) = (s for s in predicted(STRIDED, step=step).sources if s.asked)
    assert source.scattered and source.blocks == blocks
    assert source.block == pytest.approx(32 * 64 / blocks, rel=0.02)


GUARDED = """
.version 8.6 .target sm_90a .address_size 64
.visible .entry k(.param .u64 x)
{
    .reg .b32 %r<3>;
    .reg .b64 %rd<4>;
    .reg .pred %p;
    ld.param.u64 %rd1, [x];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    setp.ge.u32 %p, %r1, %FIRST%;
    mov.u32 %r2, 1;
    @%p ld.global.u32 %r2, [%rd3];
    st.global.u32 [%rd3+256], %r2;
    ret;
}
"""


@pytest.mark.compile
def test_accesses_whose_predicate_no_lane_has_take_no_time() -> None:
    """A load that is never made must not be waited for."""
    made, never = (predicted(GUARDED, first=first).cycles for first in (8, 4096))
    assert made - never > 500


@pytest.mark.parametrize(
    ("words", "wanted"),
    [(range(32), 0), ([0] * 32, 31), ([0, 1] * 16, 15), ([0, 8] * 16, 30), ([0, 0, 0, 1, 1, *range(8, 35)], 2)],
)
def test_lanes_that_change_one_word_come_one_after_another(words, wanted) -> None:
    """Words of a sector are changed together; of eight lanes at one word seven wait."""
    addresses = 4 * np.array([list(words)])
    assert accesses.repeated(addresses, np.ones((1, 32), bool)).tolist() == [wanted]
    assert accesses.repeated(addresses, np.arange(32)[None] < 1).tolist() == [0]


def test_a_part_of_a_line_that_is_asked_for_later_is_in_l2() -> None:
    """Two warps of one CTA and one of another; lines 5 and 6."""
    cta, warp, turn = np.array([0, 0, 0, 0, 1]), np.array([0, 1, 0, 1, 2]), np.array([0, 0, 1, 1, 1])
    line = np.array([5, 5, 5, 6, 5])
    assert accesses.comes_later(cta, turn, warp, turn, line).tolist() == [False, False, True, False, False]
    assert accesses.comes_later(cta, 0 * turn, warp, turn, line).tolist() == [False, False, True, False, False]


def test_a_warp_that_does_not_store_is_not_ahead_of_one_that_does() -> None:
    """Two warps load the same 64 bytes in each of four turns, and the first one stores: each load is a new one."""
    turn, order = np.array([0, 1, 2, 3] * 2), np.array([0, 2, 4, 6, 0, 1, 2, 3])
    warp, line = np.array([0] * 4 + [1] * 4), np.array([0, 1, 2, 3] * 2)
    assert not accesses.comes_later(0 * warp, turn, warp, order, line).any()


def test_steps_of_an_instruction_are_those_of_one_warp() -> None:
    """Two instructions alternate: one advances by 2 KB, the other, with distant tiles, by 1 MB."""
    which = np.array([0, 1, 0, 1, 0, 1])
    first = np.array([0, 0, 2 << 10, 1 << 20, 4 << 10, 2 << 20])
    assert accesses.steps_of(which, first).tolist() == [0, 0, 2 << 10, 1 << 20, 2 << 10, 1 << 20]


COUNT = """
.version 8.3 .target sm_90a .address_size 64
.visible .entry k(.param .u64 out, .param .u64 which)
.reqntid 32, 1, 1
{
  .reg .b32 %r<4>; .reg .b64 %d<8>;
  ld.param.u64 %d1, [out]; ld.param.u64 %d2, [which]; mov.u32 %r1, %tid.x;
  mul.wide.u32 %d3, %r1, 4; add.u64 %d3, %d3, %d2; ld.global.u32 %r2, [%d3];
  mul.wide.u32 %d4, %r2, 4; add.u64 %d4, %d4, %d1; red.global.add.u32 [%d4], 1;
  ret;
}"""


def test_atomic_operations_here_and_there_use_slices_unevenly() -> None:
    def sectors(which: np.ndarray) -> int:
        with softsm.timing("h200") as timer:
            softsm.load(COUNT).launch(1, 32, [np.zeros(512, np.uint32), which.astype(np.uint32)])
        return next(a.units for a in timer.predictions[0].trace.access.values() if a.space == "atomic")

    assert sectors(LANES * 8) == 32  # in step
    assert sectors(np.random.default_rng(1).permutation(LANES * 8)) == 32 * looks.UNEVEN


IN_SHARED = """
.version 8.3 .target sm_90a .address_size 64
.visible .entry k(.param .u64 out, .param .u64 which)
.reqntid 32, 1, 1
{
  .reg .b32 %r<4>; .reg .b64 %d<8>; .shared .align 4 .b8 words[4096];
  mov.u32 %r1, %tid.x; mul.wide.u32 %d1, %r1, STRIDE; cvta.shared.u64 %d2, words; add.u64 %d3, %d1, %d2;
  atom.add.u32 %r2, [%d3], 1; ld.u32 %r3, [%d3]; st.u32 [%d3], %r3;
  ret;
}"""


@pytest.mark.compile
def test_generic_addresses_of_shared_memory_take_its_port_and_nothing_of_l2() -> None:
    def prediction(stride: int):
        with softsm.timing("h200") as timer:
            softsm.load(IN_SHARED.replace("STRIDE", str(stride))).launch(64, 32, [np.zeros(1), np.zeros(1)])
        return timer.predictions[0]

    one, many = prediction(4), prediction(128)
    assert one.roofline["atomics"] == one.roofline["L2"] == 0
    assert many.roofline["shared memory"] > 20 * one.roofline["shared memory"] > 0
