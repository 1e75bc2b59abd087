"""ldmatrix and stmatrix in the compiled loop: as the macro-operations do them, which report what is wrong."""

import numpy as np
import pytest

import softsm
from softsm.errors import Fault
from softsm.isa import matrix_moves

TEXT = """
.version 8.0 .target sm_90 .address_size 64
.visible .entry k(.param .u64 x)
{{
  .reg .b32 %r<32>; .reg .b64 %rd<4>; .shared .align 16 .b8 s[4096];
  ld.param.u64 %rd1, [x]; mov.u32 %r1, %tid.x; mov.u32 %r2, s; mul.wide.u32 %rd2, %r1, 16; add.u64 %rd3, %rd1, %rd2;
  ld.global.v4.u32 {{%r4, %r5, %r6, %r7}}, [%rd3]; shl.b32 %r3, %r1, 4; add.u32 %r8, %r2, %r3;
  st.shared.v4.u32 [%r8], {{%r4, %r5, %r6, %r7}}; add.u32 %r10, %r1, 9; and.b32 %r10, %r10, 31; xor.b32 %r10, %r10, 6;
  shl.b32 %r10, %r10, 4; add.u32 %r10, %r10, %r2; bar.sync 0;
  {body}
  bar.sync 0; ld.shared.v4.u32 {{%r20, %r21, %r22, %r23}}, [%r8+2048];
  xor.b32 %r4, %r4, %r20; xor.b32 %r5, %r5, %r21; xor.b32 %r6, %r6, %r22; xor.b32 %r7, %r7, %r23;
  st.global.v4.u32 [%rd3], {{%r4, %r5, %r6, %r7}}; ret;
}}"""
REGISTERS = {1: "{%r6}", 2: "{%r7, %r4}", 4: "{%r6, %r4, %r7, %r5}"}


def result(body: str, unique: str = "", **options) -> np.ndarray:
    x = np.random.default_rng(0).integers(0, 1 << 32, (32, 4), dtype=np.uint32)
    softsm.load(TEXT.format(body=body) + f"// {unique}").launch(1, 32, [x], **options)
    return x


BODIES = {
    f"{name}.x{count}{trans}": f"{name}.sync.aligned.m8n8.x{count}{trans}.shared.b16 "
    + (f"{REGISTERS[count]}, [%r10];" if name == "ldmatrix" else f"[%r10+2048], {REGISTERS[count]};")
    for name in ("ldmatrix", "stmatrix")
    for count in (1, 2, 4)
    for trans in ("", ".trans")
}
BODIES["into the register of the addresses"] = (
    "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r10, %r5}, [%r10]; xor.b32 %r4, %r4, %r10;"
)


@pytest.mark.parametrize("order", ["eager", "latest", "random"])
@pytest.mark.parametrize("body", BODIES)
def test_the_loop_does_it_under_every_order(body, order, monkeypatch):
    with monkeypatch.context() as without_loop:
        without_loop.setattr(matrix_moves, "in_loop", lambda *_: None)
        want = result(BODIES[body], "by macro-operations")
    for name in ("do_ldmatrix", "do_stmatrix"):
        monkeypatch.setattr(matrix_moves, name, lambda *_: pytest.fail("left the loop"))
    np.testing.assert_array_equal(result(BODIES[body], f"in the loop, {order}", order=order), want)


WRONG = [(8, "is not a multiple of 16"), (1 << 20, "ldmatrix of 16 bytes"), (-4096, "names CTA rank")]


@pytest.mark.parametrize(("shift", "words"), WRONG)
def test_wrong_addresses_are_told(shift, words):
    with pytest.raises(Fault, match=words):
        result(f"add.s32 %r10, %r10, {shift}; " + BODIES["ldmatrix.x1"])


def test_only_addresses_that_are_used_must_be_right():
    others = ".reg .pred %p; setp.lt.u32 %p, %r1, 8; selp.b32 %r10, %r10, 3, %p; "
    got = result(others + BODIES["ldmatrix.x1"])
    np.testing.assert_array_equal(got, result(BODIES["ldmatrix.x1"]))
