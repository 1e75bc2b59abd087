# ruff: noqa: E501  PTX text
"""The frame of a microbenchmark kernel: registers, stamps at both ends of the measured part, and a use for results.

Registers that every body may use: %thread %lane %warp %cta %n %m %i (32 bits), %src %out (64 bits), %r0.. %f0.. (32 bits
both), %d0.. (64 bits), %h0.. (16 bits), %p0.. (predicates). `sm` is the first address of dynamic shared memory.
"""

from __future__ import annotations

HEAD = """.version 8.3 .target sm_90a .address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry k(.param .u64 p_out, .param .u64 p_src, .param .u32 p_n, .param .u32 p_m, .param .align 64 .b8 p_map[128])
.reqntid {threads}, 1, 1
{{
  .reg .b32 %thread, %lane, %warp, %cta, %n, %m, %i, %sm, %acc;
  .reg .b32 %r<64>, %f<320>; .reg .b64 %src, %out, %map, %d<32>, %t<8>; .reg .b16 %h<16>; .reg .pred %p<16>;
  ld.param.u64 %out, [p_out]; ld.param.u64 %src, [p_src]; ld.param.u32 %n, [p_n]; ld.param.u32 %m, [p_m];
  mov.b64 %map, p_map; cvta.param.u64 %map, %map;
  mov.u32 %thread, %tid.x; and.b32 %lane, %thread, 31; shr.u32 %warp, %thread, 5; mov.u32 %cta, %ctaid.x;
  shfl.sync.idx.b32 %warp, %warp, 0, 31, -1;
  mov.u32 %sm, smem; mov.b32 %acc, 0;
"""

BEGIN = """
  mov.u64 %t0, %clock64; mov.u64 %t1, %globaltimer;
"""

TAIL = """
FINISH:
  mov.u64 %t2, %clock64; mov.u64 %t3, %globaltimer;
  setp.eq.u32 %p0, %acc, 0x7fedcba9;
  @%p0 st.global.u32 [%out], %acc;
  setp.eq.u32 %p0, %lane, 0;
  mad.lo.u32 %r0, %cta, 32, %warp; mul.wide.u32 %d0, %r0, 32; add.u64 %d0, %d0, %out;
  @%p0 st.global.v2.u64 [%d0], {%t0, %t1};
  @%p0 st.global.v2.u64 [%d0+16], {%t2, %t3};
  ret;
}
"""


def frame(threads: int, body: str, setup: str = "", sync: bool = True) -> str:
    """setup runs before the clock, and the CTA meets behind it. A body may jump to FINISH."""
    meet = "  bar.sync 0;\n" if sync else ""
    return HEAD.format(threads=threads) + setup + meet + BEGIN + body + TAIL


def loop(text: str, label: str = "L", counter: str = "%i", count: str = "%n") -> str:
    return f"""  mov.u32 {counter}, 0;
{label}:
{text}
  add.u32 {counter}, {counter}, 1; setp.lt.u32 %p1, {counter}, {count}; @%p1 bra {label};
"""


def fill_shared(nbytes: int, threads: int, zero: bool = False) -> str:
    """Random bf16 of either sign between 1 and 2 (or zeros) into shared memory, and the fence wgmma wants."""
    value = (
        "mov.u32 %r3, 0;"
        if zero
        else (
            "mul.lo.u32 %r3, %r1, 0x9E3779B1; shr.u32 %r4, %r3, 15; xor.b32 %r3, %r3, %r4; mul.lo.u32 %r3, %r3, 0x85EBCA77;"
            " and.b32 %r3, %r3, 0x807f807f; or.b32 %r3, %r3, 0x3f803f80;"
        )
    )
    return f"""  shl.b32 %r1, %thread, 2;
FILL: {value} add.u32 %r2, %sm, %r1; st.shared.u32 [%r2], %r3; add.u32 %r1, %r1, {4 * threads};
  setp.lt.u32 %p1, %r1, {nbytes}; @%p1 bra FILL;
  fence.proxy.async;
"""


def wait(address: str, parity: str, label: str) -> str:
    return f"""{label}: mbarrier.try_wait.parity.shared::cta.b64 %p2, [{address}], {parity}; @!%p2 bra {label};
"""


def init_barriers(first: int, count: int, arrivals: int = 1) -> str:
    """By thread 0: `count` mbarriers of 8 bytes from offset `first` of shared memory on."""
    text = "  setp.ne.u32 %p0, %thread, 0; @%p0 bra READY;\n"
    for k in range(count):
        text += f"  mbarrier.init.shared::cta.b64 [%sm+{first + 8 * k}], {arrivals};\n"
    return text + "  fence.mbarrier_init.release.cluster;\nREADY:\n"
