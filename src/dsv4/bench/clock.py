"""The clock of a multiprocessor, read on the stream that is timed."""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit
def clock():
    return tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["nanoseconds"])
def read_clock(out_ptr, nanoseconds):
    """Return (cycles, nanoseconds) now and as many nanoseconds later."""
    begin = globaltimer()
    tl.store(out_ptr, clock())
    tl.store(out_ptr + 1, begin)
    now = begin
    while now - begin < nanoseconds:
        now = globaltimer()
    tl.store(out_ptr + 2, clock())
    tl.store(out_ptr + 3, now)
