"""Whatever the text, the parser answers with a module or a PtxError: never another exception, and never a hang, which
pytest would end."""

from __future__ import annotations

import re
import string

from hypothesis import given, settings
from hypothesis import strategies as st

from softsm.errors import PtxError
from softsm.ptx import parse

PTX = """// a module with a bit of everything
.version 8.6
.target sm_90a, debug
.address_size 64
.extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b) .noreturn;
.global .align 4 .u32 table[2][3] = { {1, 2}, {0x3, -4, 5U} };
.global .align 1 .b8 text[] = "hi /* */ //";
.global .u64 pointers[2] = { table, generic(text) + 1 };
.extern .shared .align 16 .b8 global_smem[];
.func (.reg .u32 out) twice (.reg .u32 a) { add.u32 out, a, a; ret; }
.visible .entry k(.param .align 64 .b8 map[128], .param .u64 .ptr .global .align 16 p, .param .f32 x)
.reqntid 128, 1, 1 .maxnreg 168 .pragma "nounroll";
{
    .reg .pred %p<4>; .reg .b32 %r<8>; .reg .b64 %rd<4>; .reg .v2 .f32 v;
    .shared .align 8 .b64 bar[2];
    .loc 1 10 3
    ld.param.b64 %rd1, [p];
    .loc 2 40 7, function_name $L__info_string0, inlined_at 1 12 5
    mov.u32 %r1, %tid.x;
    ld.global.v4.b32 {%r1, %r2, %r3, _}, [%rd1+16];
    setp.lt.and.s32 %p1|%p2, %r1, (1 << 4) - 3, !%p3;
    @!%p1 bra $L1;
    cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd2, {%r3, 0}], [%r4];
    {
        .reg .pred complete;
        waitLoop: mbarrier.try_wait.parity.shared::cta.b64 complete, [%r1], %r2;
        @!complete bra.uni waitLoop;
    }
    { .param .b64 param0; .param .b32 retval0; st.param.b64 [param0+0], %rd1;
      call.uni (retval0), vprintf, (param0, param0); }
    brx.idx %r1, targets;
    targets: .branchtargets $L1, $L2;
$L1: mov.f32 v.x, 0f3F800000;
$L2: mov.f64 %rd1, -1.5e3;
    ret;
}
    .file 1 "/src/a.py"
    .section .debug_str { $L__info_string0: .b8 115,117,109,0 }
"""

PIECES = sorted(set(re.findall(r"[\w$%.:]+|\S", PTX)))
WHOLE = PTX.split("\n")
# All of Unicode takes seconds to set up.
CHARACTERS = string.printable + "\0\x1b\x7f\xa0\xe9\u0660\u2028\ufeff\U0001d518"


def answers(text: str) -> None:
    try:
        parse(text)
    except PtxError as problem:
        assert str(problem)


def test_the_text_itself_parses():
    module = parse(PTX)
    assert {f.name for f in module.functions.values() if f.defined} == {"twice", "k"}


edits = st.lists(
    st.tuples(
        st.integers(0, len(PTX)),
        st.integers(0, 12),  # characters taken out
        st.one_of(
            st.sampled_from(PIECES),
            st.text(CHARACTERS, max_size=4),
            st.sampled_from(["{", "}", ";", "(", '"', "/*", "\n"]),
        ),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=100)
@given(edits)
def test_edited_text(changes):
    text = PTX
    for at, out, put in changes:
        text = text[:at] + put + text[at + out :]
    answers(text)


@settings(max_examples=100)
@given(st.permutations(range(len(WHOLE))))
def test_shuffled_lines(order):
    answers("\n".join(WHOLE[:4] + [WHOLE[i] for i in order]))


@settings(max_examples=100)
@given(st.lists(st.sampled_from(PIECES), max_size=60))
def test_soup_of_tokens(pieces):
    answers(".version 8.6 .target sm_90a .entry k() { " + " ".join(pieces))
    answers(".version 8.6 .target sm_90a " + " ".join(pieces))


def test_hostile_depth_and_size():
    head = ".version 8.6 .target sm_90a .entry k() { .reg .b32 %r<9>;"
    answers(head + "{" * 5000)
    answers(head + "mov.b32 %r1, " + "(" * 5000 + "1;")
    answers(head + "mov.b32 %r1, " + "-" * 5000 + "1;")
    answers(head + "mov.b32 %r1, " + "9" * 5000 + ";")
    answers(head + "mov.b32 %r1, 1 << 99999999999999;}")
    answers(head + "mov.b32 %r1, " + "{" * 5000 + ";")
    answers(head + ".reg .b32 %x<999999999>; mov.b32 %x12345678, 0; ret;}")
    answers(".version 8.6 .target sm_90a .global .u32 a[99999999][99999999] = {{" + "{" * 3000)
    answers(".version 8.6 .target sm_90a .global .u32 a[2][99999999] = {{1}};")
