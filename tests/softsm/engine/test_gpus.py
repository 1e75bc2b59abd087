"""Several GPUs' launches at the same time: they meet through each other's memory."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import softsm
from softsm.errors import Deadlock

# GPU r writes 10 + r to its own word, raises its flag, waits for the peer's, and reads the peer's word.
MEET = """
.version 8.0
.target sm_90a
.address_size 64
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


def meet(scope: str = "sys", ranks=(0, 1), **options):
    kernel = softsm.load(MEET.replace("SCOPE", scope))
    words, outs = np.zeros((2, CTAS, 2), np.uint32), np.zeros((2, CTAS), np.uint32)
    with softsm.gpus(2) as gpu:
        for r in ranks:
            with gpu(r):
                kernel.launch(CTAS, 1, [words[r], words[1 - r], outs[r], r], sms=1, **options)
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


def test_what_does_not_fit_together_is_refused():
    with pytest.raises(ValueError, match=r"different numbers of kernels: \[1, 0\]"):
        meet(ranks=(0,))
    with pytest.raises(ValueError, match="outside of `with gpu"), softsm.gpus(2):
        softsm.load(MEET.replace("SCOPE", "sys")).launch(1, 1, [0, 0, 0, 0])
    with pytest.raises(ValueError, match="accepted are ints from 0 to 1"), softsm.gpus(2) as gpu, gpu(2):
        pass
    with pytest.raises(ValueError, match="count: got 0"), softsm.gpus(0):
        pass
    with pytest.raises(ValueError, match="inside of softsm.checking"), softsm.gpus(1) as gpu, softsm.checking(), gpu(0):
        softsm.load(MEET.replace("SCOPE", "sys")).launch(1, 1, [0, 0, 0, 0])


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


def exchanged(kernel) -> torch.Tensor:
    buffers, outs = torch.zeros(2, 64), torch.zeros(2, 64)
    flags = torch.zeros(2, dtype=torch.int32)
    with softsm.use("sm_90a"), softsm.checking() as report:
        pointers = torch.tensor([b.data_ptr() for b in buffers])
        with softsm.gpus(2) as gpu:
            for rank in range(2):
                with gpu(rank):
                    kernel[(1,)](pointers, flags, outs[rank], rank, 64, num_warps=1)
    assert not report, report
    return outs


def test_triton_kernels_of_two_ranks_meet_in_symmetric_memory():
    outs = exchanged(triton.jit(exchange, do_not_specialize=["rank"]))
    assert torch.equal(outs, (3.0 * torch.arange(64)).expand(2, 64))


def test_a_kernel_compiled_anew_for_each_rank_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match="do_not_specialize"):
        exchanged(triton.jit(exchange))
