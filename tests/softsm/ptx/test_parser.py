"""The PTX front end, one rule per test."""

from __future__ import annotations

import math

import pytest

from softsm.errors import PtxError, Unsupported
from softsm.ptx import parse
from softsm.ptx.ast import Address, Call, Imm, Label, Pair, Reg, Sink, Special, Symbol, Vector

HEAD = ".version 8.6\n.target sm_90a\n.address_size 64\n"
REGS = ".reg .pred %p<4>; .reg .b32 %r<8>; .reg .b64 %rd<4>; .reg .f32 %f<4>;"


def function(body: str, before: str = "", head: str = ".visible .entry k()"):
    return parse(f"{HEAD}{before}\n{head}\n{{ {REGS}\n{body}\nret;\n}}\n").functions["k"]


def first(body: str, **kw):
    return next(item for item in function(body, **kw).body if not isinstance(item, Label))


def operands(text: str, **kw) -> tuple:
    return first(text, **kw).operands


def error(body: str, **kw) -> PtxError:
    with pytest.raises(PtxError) as caught:
        function(body, **kw)
    return caught.value


def test_spaces_may_stand_before_a_modifier():
    """TileLang writes one before .L2::cache_hint."""
    found = first("ld.global .L2::cache_hint  .f32 %f1, [%rd1], %rd2;")
    assert (found.opcode, found.modifiers) == ("ld", ("global", "L2::cache_hint", "f32"))


# ---- the module ---------------------------------------------------------------------------------------------------


def test_version_and_target():
    module = parse(".version 9.4\n.target sm_100a, debug\n.address_size 64\n")
    assert (module.version, module.target) == ((9, 4), "sm_100a")


def test_version_comes_first():
    with pytest.raises(PtxError, match=r"line 1, column 1: expected '.version'"):
        parse(".target sm_90a")


def test_empty_text_is_an_error():
    with pytest.raises(PtxError, match="found the end of the text"):
        parse("")


def test_comments_of_both_kinds_keep_lines_and_columns():
    instruction = first("// one\n/* two\n lines */ mov.b32 %r1, /* here */ %r2; // end")
    assert (instruction.line, instruction.column) == (9, 11)
    assert instruction.text == "mov.b32 %r1, %r2;"


def test_comment_marks_inside_strings_are_text():
    module = parse(HEAD + '.global .b8 url[] = "http://x /*";\n')
    assert bytes(module.variables[0].initial) == b"http://x /*\0"


def test_extern_function_is_declared_only():
    module = parse(HEAD + ".extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b) .noreturn;\n")
    f = module.functions["vprintf"]
    assert not f.defined and [p.name for p in f.params] == ["a", "b"] and [p.size for p in f.returns] == [4]


def test_declaration_then_definition():
    f = parse(HEAD + ".func f(.param .b32 a);\n.func f(.param .b32 a)\n{\nret;\n}\n").functions["f"]
    assert f.defined and len(f.body) == 1


def test_function_defined_twice_names_the_first_line():
    with pytest.raises(PtxError, match="'f' is defined twice, first in line 4"):
        parse(HEAD + ".func f()\n{ret;}\n.func f()\n{ret;}\n")


def test_alias():
    module = parse(HEAD + ".func f()\n{ret;}\n.visible .func g();\n.alias g, f;\n")
    assert module.functions["g"] is module.functions["f"]


def test_debug_sections_are_skipped():
    module = parse(HEAD + "\t.section\t.debug_abbrev\n\t{\n.b8 1 // x\n.b8 17\n\t}\n.section .debug_macinfo\t{\t}\n")
    assert not module.functions


def test_unknown_directive_gets_a_suggestion():
    with pytest.raises(PtxError, match=r"line 4, column 10: softsm does not know the directive '.entri'.*'entry'"):
        parse(HEAD + ".visible .entri k() {ret;}")


# ---- functions and their parameters ---------------------------------------------------------------------------------


def test_kernel_parameters():
    head = """.visible .entry k(.param .align 64 .b8 map[128], .param .u64 .ptr .global .align 16 p,
        .param .u32 n, .param .f64 x)"""
    sizes = [(p.name, p.size, p.align) for p in function("", head=head).params]
    assert sizes == [("map", 128, 64), ("p", 8, 8), ("n", 4, 4), ("x", 8, 8)]


def test_performance_directives():
    head = ".entry k() .reqntid 128, 2 .maxnreg 168 .minnctapersm 1 .explicitcluster .reqnctapercluster 2, 1, 1"
    assert function("", head=head).directives == {
        "reqntid": (128, 2),
        "maxnreg": (168,),
        "minnctapersm": (1,),
        "explicitcluster": (),
        "reqnctapercluster": (2, 1, 1),
    }


def test_unknown_function_directive():
    with pytest.raises(PtxError, match=r"'.reqntidd' of a function \(did you mean 'reqntid'"):
        parse(HEAD + ".entry k() .reqntidd 128 {ret;}")


def test_register_parameters_of_a_func():
    module = parse(HEAD + ".func (.reg .u32 out) twice (.reg .u32 a)\n{ add.u32 out, a, a; ret; }\n")
    f = module.functions["twice"]
    assert [p.space for p in f.params] == ["reg"] and f.registers == {"out@twice": "u32", "a@twice": "u32"}
    assert f.body[0].operands == (Reg("out@twice"), Reg("a@twice"), Reg("a@twice"))


def test_names_of_a_func_do_not_meet_those_of_the_kernel():
    module = parse(
        HEAD + ".func f(.param .b32 n)\n{.reg .b32 %r<2>; ld.param.b32 %r1, [n]; ret;}\n"
        ".entry k(.param .b32 n)\n{.reg .b32 %r<2>; ld.param.b32 %r1, [n]; ret;}\n"
    )
    assert module.functions["f"].body[0].operands[1] == Address(Symbol("n@f"))
    assert module.functions["f"].params[0].name == "n@f"
    assert module.functions["k"].body[0].operands[1] == Address(Symbol("n"))


def test_registers_are_those_that_occur():
    assert function("mov.b32 %r1, %r2;").registers == {"%r1": "b32", "%r2": "b32"}


def test_several_registers_in_one_declaration():
    f = function(".reg .pred a, b; .reg .b16 %h<3>, solo;\nsetp.eq.b16 a|b, %h2, solo;")
    assert f.registers == {"a": "pred", "b": "pred", "%h2": "b16", "solo": "b16"}


def test_vector_registers():
    assert operands(".reg .v2 .f32 v; .reg .f32 x;\nmov.f32 v.y, 0f00000000;")[0] == Reg("v.y")
    assert operands(".reg .v2 .b32 v;\nst.global.v2.b32 [%rd1], v;")[1] == Vector((Reg("v.x"), Reg("v.y")))


def test_a_range_does_not_take_its_own_prefix():
    f = function(".reg .b32 a; .reg .f16 a<2>;\nmov.b32 {a0, a1}, a;")
    assert f.registers == {"a0": "f16", "a1": "f16", "a": "b32"}
    assert "'a1' is declared twice" in str(error(".reg .b32 a<2>; .reg .b32 a1;"))


def test_register_declared_twice():
    assert "'%r' is declared twice" in str(error(".reg .b32 %r<3>;"))


# ---- variables -------------------------------------------------------------------------------------------------------


def variable(text: str):
    return parse(HEAD + text).variables[0]


def test_extern_shared_array_has_no_size():
    v = variable(".extern .shared .align 16 .b8 global_smem[];")
    assert (v.space, v.align, v.size, v.extern) == ("shared", 16, 0, True)


def test_open_array_takes_its_size_from_the_values():
    assert variable(".global .u32 t[] = {1, 2, 3};").size == 12


def test_open_array_without_values_is_an_error():
    with pytest.raises(PtxError, match="'t' needs a size"):
        variable(".global .u32 t[];")


def test_nested_initialiser_is_filled_with_zeros():
    v = variable(".global .u32 t[2][3] = { {1}, {2, 3} };")
    assert v.initial == (1, 0, 0, 2, 3, 0) and v.size == 24


def test_too_many_initial_values():
    with pytest.raises(PtxError, match="3 initial values and room for fewer"):
        variable(".global .u32 t[2] = {1, 2, 3};")


def test_initial_value_may_be_an_address():
    v = parse(HEAD + ".global .u32 a; .global .u64 p[2] = {a, generic(a) + 4};").variables[1]
    assert v.initial == (Symbol("a"), Symbol("a", 4))


def test_alignment_must_be_a_power_of_two():
    with pytest.raises(PtxError, match="expected a power of two as alignment, found 3"):
        variable(".global .align 3 .b8 x;")


def test_several_variables_in_one_declaration():
    assert [v.name for v in parse(HEAD + ".global .f32 a, b[2], c;").variables] == ["a", "b", "c"]


def test_shared_variable_of_a_function():
    f = function(".shared .align 8 .b64 bar[2];\nmov.u32 %r1, bar;")
    assert [(v.name, v.space, v.size) for v in f.variables] == [("bar", "shared", 16)]


def test_textures_are_refused():
    with pytest.raises(Unsupported, match="no textures"):
        variable(".global .texref t;")


# ---- operands --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, value", [
    ("0", 0), ("-1", -1), ("0x1F", 31), ("0x10U", 16), ("017", 15), ("0b101", 5), ("12U", 12), ("-0x8", -8),
    ("1 << 4", 16), ("(2 + 3) * 4", 20), ("-7 / 2", -3), ("-7 % 2", -1), ("~0", -1), ("1 ? 2 : 3", 2),
    ("4 == 4", 1), ("6 & 3 | 8", 10), ("(.u64) -1", 2**64 - 1), ("WARP_SZ * 2", 64)])  # fmt: skip
def test_integer_literals_and_expressions(text, value):
    assert operands(f"mov.b64 %rd1, {text};")[1] == Imm(value)


def test_float_literals_keep_their_bits():
    assert operands("mov.f32 %f1, 0f3F800000;")[1] == Imm(1.0, "f32", 0x3F800000)
    assert operands("mov.f64 %rd1, 0dBFF0000000000000;")[1] == Imm(-1.0, "f64", 0xBFF0000000000000)
    assert operands("mov.f32 %f1, 1.5e1;")[1].value == 15.0
    nan = operands("mov.f32 %f1, 0f7FC00001;")[1]
    assert math.isnan(nan.value) and nan.bits == 0x7FC00001
    assert operands("mov.f32 %f1, -0f00000000;")[1].bits == 0x80000000


@pytest.mark.parametrize("text, expected", [
    ("[%rd1]", Address(Reg("%rd1"))), ("[%rd1+8]", Address(Reg("%rd1"), 8)), ("[%rd1+-8]", Address(Reg("%rd1"), -8)),
    ("[%rd1-8]", Address(Reg("%rd1"), -8)), ("[ %rd1 + 0 ]", Address(Reg("%rd1"))), ("[4096]", Address(Imm(4096))),
    ("[table]", Address(Symbol("table"))), ("[table+4]", Address(Symbol("table"), 4)),
    ("table[2]", Address(Symbol("table"), 8)), ("[%rd1 + 4*2]", Address(Reg("%rd1"), 8))])  # fmt: skip
def test_addresses(text, expected):
    assert operands(f"ld.global.u32 %r1, {text};", before=".global .u32 table[4];")[1] == expected


def test_tensor_operands():
    got = operands(
        "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd2, {%r3, 0}], [%r4];"
    )
    assert got[1] == Address(Reg("%rd2"), 0, (Reg("%r3"), Imm(0)))


def test_modifiers_keep_double_colons():
    instruction = first(
        "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd2, {%r3}], [%r4];"
    )
    assert instruction.opcode == "cp"
    assert instruction.modifiers == ("async", "bulk", "tensor", "2d", "shared::cta", "global",
                                     "mbarrier::complete_tx::bytes")  # fmt: skip


def test_vectors_pairs_sinks_and_specials():
    assert operands("mov.b64 %rd1, {%r1, %r2};")[1] == Vector((Reg("%r1"), Reg("%r2")))
    assert operands("elect.sync _|%p1, -1;") == (Pair(Sink(), Reg("%p1")), Imm(-1))
    assert operands("setp.lt.and.s32 %p1|%p2, %r1, %r2, !%p3;")[3] == Reg("%p3", True)
    assert operands("mov.u32 %r1, %tid.x;")[1] == Special("%tid.x")
    assert operands("mov.u32 %r1, %cluster_ctarank;")[1] == Special("%cluster_ctarank")


def test_guards():
    assert first("@%p1 bra L;\nL:").guard == Reg("%p1")
    assert first("@!%p1 bra L;\nL:").guard == Reg("%p1", True)
    assert first("@ ! %p1 bra L;\nL:").guard == Reg("%p1", True)


def test_symbols():
    assert operands("mov.u64 %rd1, table+8;", before=".global .u32 table[4];")[1] == Symbol("table", 8)
    assert operands("mov.u64 %rd1, f;", before=".func f() {ret;}")[1] == Symbol("f")


def test_instruction_without_operands():
    assert first("fence.mbarrier_init.release.cluster ;").operands == ()


def test_statement_over_several_lines():
    got = first("st.global.v4.b32\n [%rd1],\n {%r1, %r2,\n  %r3, %r4};")
    assert len(got.operands[1].items) == 4 and got.line == 7


# ---- scopes ----------------------------------------------------------------------------------------------------------


WAIT = """{
    .reg .pred complete;
    waitLoop:
    mbarrier.try_wait.parity.shared::cta.b64 complete, [%r1], %r2;
    @!complete bra.uni waitLoop;
}
"""


def test_scoped_names_are_renamed_and_may_repeat():
    body = function(WAIT + WAIT).body
    labels = [item.name for item in body if isinstance(item, Label)]
    branches = [item.operands[0].name for item in body if getattr(item, "opcode", "") == "bra"]
    assert labels == branches == ["waitLoop@1", "waitLoop@2"]
    assert body[2].guard == Reg("complete@1", True)


def test_scoped_register_is_gone_after_the_brace():
    assert "'inner' is not declared here" in str(error("{ .reg .b32 inner; }\nmov.b32 %r1, inner;"))


def test_inner_name_hides_the_outer_one():
    body = function("mov.b32 %r1, 1;\n{ .reg .b32 %r1; mov.b32 %r1, 2; }\nmov.b32 %r1, 3;").body
    assert [i.operands[0].name for i in body[:3]] == ["%r1", "%r1@1", "%r1"]


def test_branch_out_of_a_scope_and_forward():
    assert first("{ bra done; }\ndone:").operands == (Label("done"),)


def test_branch_into_a_scope_is_an_error():
    assert "there is no label 'inside' in this scope" in str(error("bra inside;\n{ inside: ret; }"))


def test_branch_targets():
    f = function("brx.idx %r1, table;\nA: ret;\nB: ret;\ntable: .branchtargets A,\n B, A;")
    assert f.branch_targets == {"table": ("A", "B", "A")} and f.body[0].operands == (Reg("%r1"), Label("table"))
    assert [item.name for item in f.body if isinstance(item, Label)] == ["A", "B"]


def test_call_with_parameters_in_a_scope():
    before = ".extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);"
    f = function(
        """{ .param .b64 param0; .param .b64 param1; .param .b32 retval0;
        st.param.b64 [param0], %rd1;
        call.uni (retval0), vprintf, (param0, param1);
        }""",
        before=before,
    )
    assert f.body[0].operands[0] == Address(Symbol("param0@1"))
    assert f.body[1].operands == (Call(("retval0@1",), Symbol("vprintf"), (Symbol("param0@1"), Symbol("param1@1"))),)
    assert [v.name for v in f.variables] == ["param0@1", "param1@1", "retval0@1"]


def test_calls_without_lists_and_indirect():
    assert operands("call f;", before=".func f() {ret;}") == (Call((), Symbol("f"), ()),)
    got = operands("proto: .callprototype (.param .b32 _) _ (.param .b64 _);\ncall (%r1), %rd1, (%rd2), proto;")
    assert got == (Call(("%r1",), Reg("%rd1"), (Reg("%rd2"),), "proto"),)


# ---- source locations ------------------------------------------------------------------------------------------------


def test_lines_of_inline_assembly_are_those_of_its_call():
    """LLVM puts a .loc with the next line number before each further line of the text."""
    body = """.loc 1 8 14
    // begin inline asm
    .loc 1 8 14
    mov.u32 %r3, 0x0;
    .loc 1 9 14
    ld.global.b32 { %r3 }, [ %rd2 + 0 ];

    // end inline asm
    .loc 1 10 5
    add.u32 %r1, %r1, %r2;"""
    found = [item for item in function(body, before='.file 1 "/src/a.py"').body if not isinstance(item, Label)]
    assert [x.loc.line for x in found] == [8, 8, 10, 10]


def test_loc_with_inlined_function():
    text = (
        HEAD
        + """.visible .entry k()
{
    .reg .b32 %r<3>;
    .loc 1 10 3
    mov.b32 %r1, 1;
    .loc 2 40 7, function_name $L__info_string0, inlined_at 1 12 5
    mov.b32 %r2, 2;
    .loc 1 0 5
    ret;
}
    .file 1 "/src/a.py"
    .file 2 "/src/b.py"
    .section .debug_str
    {
$L__info_string0:
.b8 115, 117
.b8 109 // string
.b8 0
    }
"""
    )
    one, two, three = parse(text).functions["k"].body
    assert (one.loc.file, one.loc.line, one.loc.column, one.loc.function) == ("/src/a.py", 10, 3, "k")
    assert (two.loc.file, two.loc.line, two.loc.function) == ("/src/b.py", 40, "sum")
    assert (two.loc.caller.file, two.loc.caller.line) == ("/src/a.py", 12)
    assert three.loc is None  # line 0: the compiler's own code


def test_a_function_that_is_inlined_twice_has_each_caller():
    """The same directive again, behind another one of the place it was inlined at: as Triton and clang write them."""
    wait = ".loc 2 40 7, function_name $L__info_string0, inlined_at 2 50 3\n    mov.b32 %r1, 1;\n"
    acquire = ".loc 2 50 3, function_name $L__info_string0, inlined_at 1 {} 5\n    "
    body = "".join(acquire.format(line) + wait for line in (10, 20, 10))
    text = HEAD + ".visible .entry k()\n{\n    .reg .b32 %r<3>;\n    " + body + "ret;\n}\n"
    text += '.file 1 "/src/a.py"\n.file 2 "/src/b.py"\n.section .debug_str\n{\n$L__info_string0:\n.b8 107, 0\n}\n'
    found = [x.loc for x in parse(text).functions["k"].body][:3]
    assert [(x.line, x.caller.line, x.caller.caller.line) for x in found] == [(40, 50, 10), (40, 50, 20), (40, 50, 10)]


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body, line, column, message",
    [
        ("add.s32 %r1, %r2, %r9;", 7, 19, "the register '%r9' is not declared here (declared are %r0 to %r7)"),
        ("mov.u32 %r1, %tidd.x;", 7, 14, "'%tidd.x' is not declared here (did you mean '%tid.x'?)"),
        ("mov.b32 %r1 %r2;", 7, 13, "expected ',' or ';' after an operand, found '%r2'"),
        ("mov.b32 %r1, ;", 7, 14, "expected an operand, found ';'"),
        ("mov.b32 %r1, %r2\nmov.b32 %r2, %r3;", 8, 1, "expected ',' or ';' after an operand, found 'mov.b32'"),
        ("ld.global.b32 %r1, [%rd1;", 7, 25, "expected ']' after an address, found ';'"),
        ("st.global.v2.b32 [%rd1], {%r1, %r2;", 7, 26, "expected ';' after 'st.global.v2.b32'"),
        ("bra Lopp;\nLoop:", 7, 5, "there is no label 'Lopp' in this scope (did you mean 'Loop'?)"),
        ("L: ret;\nL: ret;", 8, 1, "the label 'L' is defined in lines 7 and 8 of one scope"),
        ("mov.b32 %r1, 099;", 7, 14, "'099' is not a number that PTX can hold"),
        ("mov.b32 %r1, 1 / 0;", 7, 16, "this constant expression has no value"),
        (".regg .b32 x;", 7, 1, "softsm does not know the directive '.regg' in a function (did you mean 'reg'?)"),
        (".reg .b33 x;", 7, 6, "expected a type (such as .pred, .b32 or .f32), found '.b33'"),
        ("@7 bra L;\nL:", 7, 2, "expected an operand, found '7'"),
        ("add..s32 %r1, %r2, %r3;", 7, 1, "'add..s32' is not the name of an instruction"),
        ("?", 7, 1, "expected an instruction, a label, a declaration or '}', found '?'"),
    ],
)
def test_errors_name_line_column_and_what_was_expected(body, line, column, message):
    problem = error(body)
    assert message in str(problem)
    assert (problem.line, problem.column) == (line, column)


def test_missing_brace():
    with pytest.raises(PtxError, match="expected '}' to close the body opened in line 5, found the end"):
        parse(HEAD + ".entry k()\n{\nret;\n")


def test_unclosed_comment_and_string():
    with pytest.raises(PtxError, match="line 4, column 1: this comment has no closing"):
        parse(HEAD + "/* open")
    with pytest.raises(PtxError, match='line 4, column 19: this string has no closing "'):
        parse(HEAD + '.global .b8 s[] = "open\n;')


def test_a_body_without_instructions_is_a_return():
    """LLVM leaves such a kernel of undefined behaviour: the program would run beyond its end."""
    (only,) = parse(f"{HEAD}.visible .entry k()\n{{\n}}\n").functions["k"].body
    assert only.opcode == "ret"
