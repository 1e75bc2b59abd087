"""Launches of several ranks at the same time: they meet through each other's memory."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import softsm
from softsm.errors import Deadlock

# GPU r writes 10 + r to its own word, raises its flag, waits for the peer's, and reads the peer's word.
MEET = """
.version 8.0 .target sm_90a .address_size 64
.visible .entry meet(.param .u64 mine, .param .u64 theirs, .param .u64 out, .param .u32 rank)
{
  .reg .b32 %r<8>; .reg .b64 %rd<8>; .reg .pred %p<2>;
  ld.param.u64 %rd1, [mine]; ld.param.u64 %rd2, [theirs]; ld.param.u64 %rd3, [out]; ld.param.u32 %r1, [rank];
  mov.u32 %r6, %ctaid.x; mul.wide.u32 %rd4, %r6, 8; add.u64 %rd1, %rd1, %rd4; add.u64 %rd2, %rd2, %rd4;
  mul.wide.u32 %rd5, %r6, 4; add.u64 %rd3, %rd3, %rd5;
  add.u32 %r2, %r1, 10; st.global.u32 [%rd1], %r2; mov.u32 %r3, 1; st.release.SCOPE.global.u32 [%rd1+4], %r3;
WAIT:
  ld.acquire.SCOPE.global.u32 %r4, [%rd2+4]; setp.eq.u32 %p1, %r4, 0; @%p1 bra WAIT;
  ld.global.u32 %r5, [%rd2]; st.global.u32 [%rd3], %r5; ret;
}"""
CTAS = 6


def meet(scope: str = "sys", launching=(0, 1), **options):
    kernel = softsm.load(MEET.replace("SCOPE", scope))
    words, outs = np.zeros((2, CTAS, 2), np.uint32), np.zeros((2, CTAS), np.uint32)

    def program(r):
        if r in launching:
            kernel.launch(CTAS, 1, [words[r], words[1 - r], outs[r], r], sms=1, **options)

    softsm.ranks(2, program)
    return outs


@pytest.mark.parametrize("order", ["eager", "latest", "random"])
def test_gpus_wait_for_each_other(order):
    outs = meet(order=order)
    assert (outs == [[11], [10]]).all()


def test_one_gpu_alone_waits_for_ever():
    kernel = softsm.load(MEET.replace("SCOPE", "sys"))
    words, out = np.zeros((2, CTAS, 2), np.uint32), np.zeros(CTAS, np.uint32)
    with pytest.raises(Deadlock):
        kernel.launch(CTAS, 1, [words[0], words[1], out, 0])


def test_a_flag_of_sys_scope_orders_gpus():
    with softsm.checking() as report:
        meet()
    assert not report, report


def test_a_flag_of_gpu_scope_does_not():
    with softsm.checking() as report:
        meet("gpu")
    assert set(report.codes()) == {"race"}
    found = next(iter(report))
    assert ".sys scope" in found.fix
    assert sorted(p.who.split(" of GPU ")[1][0] for p in found.parties) == ["0", "1"]


@pytest.mark.parametrize("fence", ["fence.acq_rel.sys", "fence.sc.sys", "membar.sys", "fence.sc.gpu", "membar.gl"])
@pytest.mark.parametrize("flag", ["relaxed.sys", "volatile"])
def test_fences_beside_a_flag_need_sys_scope(fence, flag):
    text = MEET.replace("st.release.SCOPE", f"{fence}; st.{flag}").replace("ld.acquire.SCOPE", f"ld.{flag}")
    kernel = softsm.load(text.replace("ld.global.u32 %r5", f"{fence}; ld.global.u32 %r5"))
    words, outs = np.zeros((2, CTAS, 2), np.uint32), np.zeros((2, CTAS), np.uint32)
    with softsm.checking() as report:
        softsm.ranks(2, lambda r: kernel.launch(CTAS, 1, [words[r], words[1 - r], outs[r], r], sms=1))
    assert report.codes() == ([] if fence.endswith("sys") else ["race"]), str(report)


# Lane 5 writes to the other GPU, all others to their own; lane 0 raises the other's flag when all have met.
ONE_CROSSES = """
.version 8.0 .target sm_90a .address_size 64
.visible .entry mixed(.param .u64 mine, .param .u64 theirs, .param .u64 flag, .param .u64 other, .param .u64 out)
{
  .reg .b32 %r<6>; .reg .b64 %rd<8>; .reg .pred %p<3>;
  ld.param.u64 %rd1, [mine]; ld.param.u64 %rd2, [theirs]; ld.param.u64 %rd3, [flag]; ld.param.u64 %rd4, [other];
  ld.param.u64 %rd5, [out]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd7, %r1, 4; add.u64 %rd5, %rd5, %rd7;
  setp.eq.u32 %p1, %r1, 5; selp.b64 %rd6, %rd2, %rd1, %p1; add.u64 %rd6, %rd6, %rd7; add.u64 %rd1, %rd1, %rd7;
  add.u32 %r2, %r1, 10; st.global.u32 [%rd6], %r2; bar.warp.sync -1;
  setp.ne.u32 %p2, %r1, 0; @%p2 bra WAIT; mov.u32 %r3, 1; st.release.SCOPE.global.u32 [%rd4], %r3;
WAIT:
  ld.acquire.SCOPE.global.u32 %r4, [%rd3]; setp.eq.u32 %p1, %r4, 0; @%p1 bra WAIT;
  ld.global.u32 %r5, [%rd1]; st.global.u32 [%rd5], %r5; ret;
}"""


@pytest.mark.parametrize("scope", ["sys", "gpu"])
def test_one_lane_of_a_store_that_crosses_is_followed(scope):
    kernel = softsm.load(ONE_CROSSES.replace("SCOPE", scope))
    data, out = [[np.zeros(32, np.uint32) for _ in "01"] for _ in "01"]
    flags = [np.zeros(1, np.uint32) for _ in "01"]
    with softsm.checking() as report:
        softsm.ranks(2, lambda r: kernel.launch(1, 32, [data[r], data[1 - r], flags[r], flags[1 - r], out[r]]))
    assert all((x == np.arange(10, 42)).all() for x in out)
    crossing = [d for d in report if any("st.global.u32 [%rd6]" in p.instruction for p in d.parties)]
    assert len(crossing) == (scope == "gpu") and bool(report) == (scope == "gpu"), str(report)


COUNT = """
.version 8.0 .target sm_90a .address_size 64
.visible .entry count(.param .u64 word)
{
  .reg .b32 %r<3>; .reg .b64 %rd<2>;
  ld.param.u64 %rd1, [word]; atom.add.relaxed.SCOPE.global.u32 %r1, [%rd1], 1;
  ret;
}"""


@pytest.mark.parametrize("ranks, scope, codes", [(2, "sys", []), (2, "gpu", ["race"]), (1, "gpu", [])])
def test_atomics_of_two_gpus_need_sys_scope(ranks, scope, codes):
    """They race with each other though no other data depends on them; CTAs of one GPU do not."""
    kernel, word = softsm.load(COUNT.replace("SCOPE", scope)), np.zeros(1, np.uint32)
    with softsm.checking() as report:
        softsm.ranks(ranks, lambda rank: kernel.launch(2, 1, [word]))
    assert word == 2 * ranks and report.codes() == codes, str(report)
    assert all(".sys scope" in d.fix for d in report)


TORN = """
.version 8.6 .target sm_90a .address_size 64
.visible .entry k(.param .u64 signal, .param .u32 rank, .param .u64 out)
{
.reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .pred %p<5>;
ld.param.u64 %rd1, [signal]; ld.param.u32 %r1, [rank]; ld.param.u64 %rd4, [out];
setp.eq.u32 %p1, %r1, 1;
@%p1 bra READ;
RAISE
bra END;
READ:
ld.relaxed.sys.global.u64 %rd2, [%rd1];
setp.eq.u64 %p2, %rd2, 0;
@%p2 bra READ;
st.global.u64 [%rd4], %rd2;
END:
ret;
}
"""
WHOLE = "mov.u64 %rd3, 0x500000007; st.relaxed.sys.global.u64 [%rd1], %rd3;"
HALVES = "st.relaxed.sys.global.u32 [%rd1], 7; st.relaxed.sys.global.u32 [%rd1+4], 5;"


@pytest.mark.parametrize("raise_, codes", [(WHOLE, []), (HALVES, ["race"])], ids=["whole", "in halves"])
def test_a_signal_that_is_read_whole_is_written_whole(raise_, codes):
    kernel, signal, out = softsm.load(TORN.replace("RAISE", raise_)), np.zeros(1, np.uint64), np.zeros(1, np.uint64)
    with softsm.checking() as report:
        softsm.ranks(2, lambda rank: kernel.launch(1, 1, [signal, rank, out]))
    assert sorted({*report.codes()}) == codes, str(report)
    assert all("half of what is written" in d.fix for d in report)


def test_a_deadlock_says_how_far_each_rank_has_come():
    """Rank 1 does not launch: the CTAs of rank 0 poll for ever."""
    with pytest.raises(Deadlock) as error:
        meet(launching=(0,))
    text = str(error.value)
    assert "GPU 0: 0 of 6 CTAs have ended, 6 are resident, 0 have not started" in text and "GPU 1" not in text


FEW = """
.version 8.0 .target sm_90a .address_size 64
.visible .entry few(.param .u64 count, .param .u32 all)
{
  .reg .b32 %r<4>; .reg .b64 %rd<2>; .reg .pred %p<2>; .shared .align 16 .b8 tile[131072];
  ld.param.u64 %rd1, [count]; ld.param.u32 %r1, [all]; atom.add.acq_rel.sys.global.u32 %r2, [%rd1], 1;
WAIT:
  ld.acquire.sys.global.u32 %r3, [%rd1]; setp.lt.u32 %p1, %r3, %r1; @%p1 bra WAIT;
  ret;
}"""


def test_a_barrier_of_all_grids_needs_all_ctas_resident():
    kernel, count = softsm.load(FEW), np.zeros(1, np.uint32)
    softsm.ranks(2, lambda rank: kernel.launch(4, 1, [count, 8], sms=4))
    count[:] = 0
    with pytest.raises(Deadlock) as error:
        softsm.ranks(2, lambda rank: kernel.launch(4, 1, [count, 8], sms=3))
    text = str(error.value)
    assert "GPU 1: 0 of 4 CTAs have ended, 3 are resident, 1 have not started" in text
    assert "3 fit on 3 SMs (sms=), the grid has 4" in text
    assert "warp 0 of CTA (0, 0, 0) of GPU 1 polls" in text and "and so in 2 more CTAs" in text


def test_launches_of_some_ranks_run_without_the_others():
    kernel, count = softsm.load(FEW), np.zeros(1, np.uint32)

    def program(rank):
        if rank != 1:
            kernel.launch(2, 1, [count, 4])
        return rank

    assert softsm.ranks(3, program) == [0, 1, 2]
    assert count == 4


def test_what_does_not_fit_together_is_refused():
    kernel = softsm.load(FEW)
    with pytest.raises(ValueError, match=r"different kernels: rank 0 launches few with grid 1.*rank 1 .* grid 2"):
        softsm.ranks(2, lambda rank: kernel.launch(1 + rank, 32, [0, 0]))
    with pytest.raises(ValueError, match="cannot be nested"):
        softsm.ranks(2, lambda rank: softsm.ranks(2, int))

    def checked(rank):
        with softsm.checking():
            kernel.launch(1, 32, [0, 0])

    with pytest.raises(ValueError, match=r"open softsm.checking\(\) around ranks"):
        softsm.ranks(2, checked)


def test_an_error_of_one_rank_ends_all():
    ended = []

    def program(rank):
        try:
            if rank == 2:
                raise KeyError("of rank 2")
            softsm.load(FEW).launch(1, 32, [np.zeros(1, np.uint32), 1])
        finally:
            ended.append(rank)

    with pytest.raises(KeyError, match="of rank 2"):
        softsm.ranks(4, program)
    assert sorted(ended) == [0, 1, 2]  # the last one had not begun


def exchange(buffers, flags, out, rank, N: tl.constexpr):
    """Write the own buffer, tell the peer, wait for it, add both."""
    i = tl.arange(0, N)
    mine = tl.load(buffers + rank).to(tl.pointer_type(tl.float32))
    theirs = tl.load(buffers + 1 - rank).to(tl.pointer_type(tl.float32))
    tl.store(mine + i, (rank + 1.0) * i)
    tl.debug_barrier()
    tl.atomic_xchg(flags + rank, 1, sem="release", scope="sys")
    while tl.atomic_add(flags + 1 - rank, 0, sem="acquire", scope="sys") == 0:
        pass
    tl.debug_barrier()
    tl.store(out + i, tl.load(mine + i) + tl.load(theirs + i))


@pytest.mark.parametrize("options", [{"do_not_specialize": ["rank"]}, {}], ids=["one kernel", "one for each rank"])
def test_triton_kernels_of_two_ranks_meet_in_symmetric_memory(options):
    kernel = triton.jit(exchange, **options)
    buffers, outs = torch.zeros(2, 64), torch.zeros(2, 64)
    flags = torch.zeros(2, dtype=torch.int32)
    with softsm.use("sm_90a", ranks=2) as world, softsm.checking() as report:
        pointers = torch.tensor([b.data_ptr() for b in buffers])
        world.run(lambda rank: kernel[(1,)](pointers, flags, outs[rank], rank, 64, num_warps=1))
    assert not report, report
    assert torch.equal(outs, (3.0 * torch.arange(64)).expand(2, 64))
