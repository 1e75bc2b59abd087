"""Kernels around tcgen05 instructions: shared memory filled from `in`, columns allocated, and freed in the end."""

from softsm.engine.launch import load

HEAD = """.version 8.7
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 in, .param .u64 out) {directives}
{{
.reg .b16 %rs<4>; .reg .b32 %r<300>; .reg .b64 %rd<32>; .reg .pred %p<12>;
.shared .align 1024 .b8 buf[{size}];
.shared .align 8 .b8 bar[16];
.shared .align 4 .b8 slot[4];
ld.param.u64 %rd1, [in];
ld.param.u64 %rd2, [out];
mov.u32 %r0, %tid.x;
setp.eq.u32 %p1, %r0, 0;
setp.lt.u32 %p2, %r0, 32;
mov.u32 %r1, buf;
mov.u32 %r2, bar;
mov.u32 %r3, slot;
cvt.u64.u32 %rd3, %r1;
shr.u64 %rd3, %rd3, 4;
and.b64 %rd3, %rd3, 0x3FFF;
and.b32 %r4, %r0, 0x60;
shl.b32 %r4, %r4, 16;
"""
FILL = """mov.u32 %r5, %r0;
FILL: setp.ge.u32 %p3, %r5, {words};
@%p3 bra FILLED;
mul.wide.u32 %rd4, %r5, 4;
add.s64 %rd4, %rd1, %rd4;
ld.global.u32 %r6, [%rd4];
mad.lo.u32 %r7, %r5, 4, %r1;
st.shared.u32 [%r7], %r6;
add.u32 %r5, %r5, 128;
bra FILL;
FILLED:
@%p1 mbarrier.init.shared::cta.b64 [%r2], 1;
fence.proxy.async;
bar.sync 0;
"""
ALLOC = """@!%p2 bra ALLOCATED;
tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [%r3], {columns};
ALLOCATED:
bar.sync 0;
tcgen05.fence::after_thread_sync;
ld.shared.u32 %r8, [%r3];
add.u32 %r9, %r8, %r4;
"""
FREE = """tcgen05.fence::before_thread_sync;
bar.sync 0;
@!%p2 bra FREED;
tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %r8, {columns};
tcgen05.relinquish_alloc_permit.cta_group::{group}.sync.aligned;
FREED:
"""
WAIT = """WAIT{n}: mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r2], {parity};
@!%p4 bra WAIT{n};
tcgen05.fence::after_thread_sync;
"""
COMMIT = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r2];\n"


def names(first, count):
    return "{" + ", ".join(f"%r{first + i}" for i in range(count)) + "}"


def kernel(body, *, size=1024, words=0, columns=128, group=1, free=True, directives=""):
    text = HEAD.format(size=size, directives=directives) + FILL.format(words=words)
    text += ALLOC.format(group=group, columns=columns) + body
    return text + (FREE.format(group=group, columns=columns) if free else "") + "ret;\n}\n"


def words_in(count, first=100):
    """Registers %r{first}.. of each thread = in[tid * count ..]."""
    text = f"mul.wide.u32 %rd5, %r0, {4 * count};\nadd.s64 %rd5, %rd1, %rd5;\n"
    return text + "".join(f"ld.global.u32 %r{first + i}, [%rd5+{4 * i}];\n" for i in range(count))


def words_out(count, first=100):
    text = f"mul.wide.u32 %rd6, %r0, {4 * count};\nadd.s64 %rd6, %rd2, %rd6;\n"
    return text + "".join(f"st.global.u32 [%rd6+{4 * i}], %r{first + i};\n" for i in range(count))


def launch(text, *arrays, block=128, **options):
    return load(text).launch(1, block, list(arrays), **options)
