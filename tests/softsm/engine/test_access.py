"""Loads and stores of words, in runs, scattered and by part of a warp, against NumPy."""

import numpy as np
import pytest

import softsm

# out[tid] = what thread tid loads from the place given by where[tid], out of `data`, by way of shared memory or not.
KERNEL = """
.version 8.0 .target sm_90 .address_size 64
.visible .entry k(.param .u64 data, .param .u64 where, .param .u64 out, .param .u32 active)
{{
  .reg .b32 %r<40>; .reg .b64 %rd<12>; .reg .pred %p<4>; .shared .align 16 .b8 buffer[4096];
  ld.param.u64 %rd1, [data]; ld.param.u64 %rd2, [where]; ld.param.u64 %rd3, [out]; ld.param.u32 %r30, [active];
  mov.u32 %r1, %tid.x; mov.u32 %r20, 7; mov.u32 %r21, 7; mov.u32 %r22, 7; mov.u32 %r23, 7;
  shl.b32 %r31, 1, %r1; and.b32 %r31, %r31, %r30; setp.ne.u32 %p1, %r31, 0;
  mul.wide.u32 %rd4, %r1, 4; add.u64 %rd5, %rd2, %rd4; ld.global.u32 %r2, [%rd5];
  mul.wide.u32 %rd6, %r2, {size};
  {body}
  mul.wide.u32 %rd8, %r1, {size}; add.u64 %rd8, %rd3, %rd8;
  st.global{vector}.b32 [%rd8], {registers};
  ret;
}}"""
SHARED = """
  mov.u32 %r3, buffer; shl.b32 %r4, %r1, 7; add.u32 %r4, %r4, %r3; mul.wide.u32 %rd9, %r1, 128;
  add.u64 %rd9, %rd9, %rd1;
  mov.u32 %r5, 0;
COPY: ld.global.v4.b32 {{%r6, %r7, %r8, %r9}}, [%rd9]; st.shared.v4.b32 [%r4], {{%r6, %r7, %r8, %r9}};
  add.u64 %rd9, %rd9, 16; add.u32 %r4, %r4, 16; add.u32 %r5, %r5, 1; setp.lt.u32 %p2, %r5, 8; @%p2 bra COPY;
  bar.warp.sync -1; cvt.u32.u64 %r10, %rd6; add.u32 %r10, %r10, %r3;
  @%p1 ld.shared{vector}.b32 {registers}, [%r10];"""
GLOBAL = "add.u64 %rd7, %rd1, %rd6; @%p1 ld.global{vector}.b32 {registers}, [%rd7];"
PLACES = {
    "run": np.arange(32),
    "shifted": np.arange(32) + 5,
    "reversed": np.arange(32)[::-1].copy(),
    "same": np.full(32, 3),
    "scattered": np.random.default_rng(1).integers(0, 64, 32),
}


@pytest.mark.parametrize("words", [1, 2, 4])
@pytest.mark.parametrize("space", [SHARED, GLOBAL], ids=["shared", "global"])
def test_every_pattern_of_lanes(space, words):
    vector = "" if words == 1 else f".v{words}"
    names = [f"%r{20 + k}" for k in range(words)]
    registers = names[0] if words == 1 else "{" + ", ".join(names) + "}"
    body = space.format(vector=vector, registers=registers)
    kernel = softsm.load(KERNEL.format(body=body, vector=vector, registers=registers, size=4 * words))
    data = np.random.default_rng(0).integers(0, 1 << 32, 1024, np.uint32)
    for name, where in PLACES.items():
        for active in (0xFFFFFFFF, 0x0FF0F00F, 0):
            out = np.zeros((32, words), np.uint32)
            kernel.launch(1, 32, [data, where.astype(np.uint32), out, active])
            want = np.full((32, words), 7, np.uint32)
            for lane in range(32):
                if active >> lane & 1:
                    want[lane] = data.reshape(-1, words)[where[lane]]
            assert np.array_equal(out, want), (name, hex(active))


def test_a_load_may_overwrite_its_own_address():
    text = """
.version 8.0 .target sm_90 .address_size 64
.visible .entry k(.param .u64 x)
{
  .reg .b32 %r<8>; .reg .b64 %rd<4>; .shared .align 16 .b8 buffer[512];
  ld.param.u64 %rd1, [x]; mov.u32 %r1, %tid.x; mov.u32 %r2, buffer; shl.b32 %r3, %r1, 4; add.u32 %r3, %r3, %r2;
  add.u32 %r4, %r1, 100; add.u32 %r5, %r1, 200; st.shared.v4.b32 [%r3], {%r4, %r5, %r4, %r5};
  ld.shared.v4.b32 {%r3, %r4, %r5, %r6}, [%r3];
  add.u32 %r3, %r3, %r6; mul.wide.u32 %rd2, %r1, 4; add.u64 %rd1, %rd1, %rd2; st.global.b32 [%rd1], %r3; ret;
}"""
    x = np.zeros(32, np.uint32)
    softsm.load(text).launch(1, 32, [x])
    assert np.array_equal(x, 2 * np.arange(32) + 300)
