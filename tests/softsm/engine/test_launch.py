"""Launching: arguments, limits, memory safety, module variables."""

import contextlib
import gc
import weakref

import numpy as np
import pytest
import torch

import softsm
from softsm.checks import accesses, checker
from softsm.engine import launch, scheduler
from softsm.errors import Fault, PtxError

COPY = """
.version 8.0 .target sm_90a .address_size 64
.visible .entry copy(.param .u64 x, .param .u64 y, .param .u32 offset)
{
  .reg .b32 %r<8>; .reg .b64 %rd<8>;
  ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [y]; ld.param.u32 %r1, [offset];
  mov.u32 %r2, %tid.x; add.u32 %r2, %r2, %r1; mul.wide.u32 %rd3, %r2, 4;
  add.s64 %rd4, %rd1, %rd3; add.s64 %rd5, %rd2, %rd3;
  ld.global.b32 %r3, [%rd4]; st.global.b32 [%rd5], %r3; ret;
}"""


def test_numpy_arrays_and_torch_tensors_are_pointers():
    x, y = np.arange(32, dtype=np.float32), torch.zeros(32)
    softsm.load(COPY).launch(1, 32, [x, y, 0])
    assert np.array_equal(y.numpy(), x)


def test_the_whole_storage_of_a_view_may_be_touched():
    x, y = torch.arange(64.0), torch.zeros(64)
    softsm.load(COPY).launch(1, 32, [x[32:], y[32:], 0])
    assert torch.equal(y[32:], x[32:]) and not y[:32].any()


def test_an_address_outside_all_allocations_names_the_nearest():
    x, y = np.zeros(32, np.float32), np.zeros(32, np.float32)
    with pytest.raises(Fault, match=r"out-of-bounds: load by lane 1 of 4 bytes .* past the end of") as error:
        softsm.load(COPY).launch(1, 32, [x, y, 31])
    assert "ld.global.b32" in str(error.value)


def test_a_null_pointer_is_an_error_not_a_crash():
    with pytest.raises(Fault, match="out-of-bounds"):
        softsm.load(COPY).launch(1, 32, [0, np.zeros(32, np.float32), 0])


def test_a_misaligned_access_is_named():
    x, y = np.zeros(64, np.uint8), np.zeros(64, np.float32)
    with pytest.raises(Fault, match="misaligned"):
        softsm.load(COPY).launch(1, 4, [x[1:], y, 0])


@pytest.mark.parametrize(
    "change, message",
    [({"block": 2048}, "block"), ({"grid": (1, 1, 1, 1)}, "grid"), ({"args": [1]}, "args"),
     ({"shared": 1 << 20}, "shared"), ({"order": "soon"}, "order"), ({"cluster": (2, 1, 1)}, "grid")],
)  # fmt: skip
def test_a_bad_launch_names_the_argument(change, message):
    x = np.zeros(32, np.float32)
    call = {"grid": 1, "block": 32, "args": [x, x, 0]} | change
    with pytest.raises(ValueError, match=message):
        softsm.load(COPY).launch(**call)


def test_an_instruction_without_semantics_is_refused_when_loaded():
    with pytest.raises(PtxError, match="line 7, column 3: frobnicate.b32"):
        softsm.load(COPY.replace("mov.u32 %r2, %tid.x", "frobnicate.b32 %r2, %tid.x"))


def test_an_unknown_modifier_is_refused_when_loaded():
    with pytest.raises(PtxError, match="quickly"):
        softsm.load(COPY.replace("ld.global.b32", "ld.global.quickly.b32"))


@pytest.mark.parametrize(
    "instruction, message",
    [("ld.global.b32 5, [%rd1]", "destination must be a register, got 5"),
     ("mov.b32 0f3F800000, %r2", "destination must be a register, got 0f3F800000"),
     ("mov.b32 [%rd1+8], %r2", r"destination must be a register, got \[%rd1\+8\]"),
     ("ld.global.b32 %r2, %rd1", "expected an address in brackets, got %rd1"),
     ("ld.global.b32 %r2, {%r2, 1}", r"expected an address in brackets, got \{%r2, 1\}"),
     ("add.u32 %r2, %r2, [%rd1-4]", r"operand \[%rd1-4\] cannot be read here")],
)  # fmt: skip
def test_an_operand_that_does_not_fit_is_spelled_as_in_ptx(instruction, message):
    with pytest.raises(PtxError, match=f"{message} \\(in `"):
        softsm.load(COPY.replace("mov.u32 %r2, %tid.x", instruction))


def test_a_kernel_is_assembled_for_the_runs_that_it_has(monkeypatch):
    """Once with checks and once without, as it is launched; both have the same module variables."""
    count = COPY.replace(".visible", ".global .align 4 .u32 n;\n.visible").replace("mov.u32 %r2, %tid.x;", """
  atom.global.add.u32 %r3, [n], 1; mov.u32 %r2, %tid.x;""").replace("st.global.b32 [%rd5], %r3;", """
  ld.global.b32 %r3, [n]; st.global.b32 [%rd5], %r3;""")  # fmt: skip
    made, assemble = [], launch.Assembler.assemble
    monkeypatch.setattr(launch.Assembler, "assemble", lambda self: (made.append(self.checking), assemble(self))[1])
    x, y = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
    softsm.load.cache_clear()
    for turn, checked in enumerate((True, False, True, False)):
        with softsm.checking() if checked else contextlib.nullcontext():
            softsm.load(count).launch(1, 1, [x, y, 0])
        assert made == [True, False][: turn + 1] and y[0] == turn + 1


def test_module_variables_keep_their_initial_values():
    ptx = """
.version 8.0 .target sm_90a .address_size 64
.global .align 4 .u32 table[4] = {10, 20, 30, 40};
.visible .entry k(.param .u64 x)
{
  .reg .b32 %r<8>; .reg .b64 %rd<8>;
  ld.param.u64 %rd1, [x]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd1, %rd1, %rd2;
  mov.u64 %rd3, table; add.s64 %rd3, %rd3, %rd2; ld.global.u32 %r2, [%rd3]; st.global.u32 [%rd1], %r2; ret;
}"""
    x = np.zeros(4, np.uint32)
    softsm.load(ptx).launch(1, 4, [x])
    assert x.tolist() == [10, 20, 30, 40]


def test_a_table_of_functions_stops_nobody_who_does_not_call_them():
    ptx = """
.version 8.0 .target sm_90a .address_size 64
.func (.param .b32 result) twice(.param .b32 x)
{
  ret;
}
.global .align 8 .u64 table[3] = {0, 0, twice};
.visible .entry k(.param .u64 x)
{
  .reg .b32 %r<2>; .reg .b64 %rd<4>;
  .param .b32 result;
  ld.param.u64 %rd1, [x]; mov.u64 %rd2, table; ld.global.u64 %rd3, [%rd2+16]; CALL st.global.u32 [%rd1], %rd3; ret;
}"""
    x = np.zeros(1, np.uint32)
    softsm.load(ptx.replace("CALL", "").replace("st.global.u32", "st.global.u64")).launch(
        1, 1, [np.zeros(1, np.uint64)]
    )
    with pytest.raises(PtxError, match="calls through a register are not supported"):
        softsm.load(ptx.replace("CALL", "P: .callprototype (.param .b32 _) _ (); call (result), %rd3, (), P;")).launch(
            1, 1, [x]
        )


def test_shared_memory_starts_as_nan_and_is_private_to_the_cta():
    ptx = """
.version 8.0 .target sm_90a .address_size 64
.extern .shared .align 16 .b8 dynamic[];
.visible .entry k(.param .u64 x)
{
  .reg .b32 %r<8>; .reg .b64 %rd<8>; .shared .align 4 .b32 own;
  ld.param.u64 %rd1, [x]; mov.u32 %r1, %ctaid.x; mul.wide.u32 %rd2, %r1, 8; add.s64 %rd1, %rd1, %rd2;
  ld.shared.u32 %r2, [own]; st.global.u32 [%rd1], %r2;
  st.shared.u32 [own], %r1; mov.u32 %r3, dynamic; st.shared.u32 [%r3], 5;
  ld.shared.u32 %r4, [own]; st.global.u32 [%rd1+4], %r4; ret;
}"""
    x = np.zeros((4, 2), np.uint32)
    softsm.load(ptx).launch(4, 1, [x], shared=64)
    assert x.tolist() == [[0xFFFFFFFF, i] for i in range(4)]


def test_static_shared_memory_is_what_the_kernel_reaches():
    """A module of several kernels (FlashMLA's dense decode and its sums): each has its own variables, and those of the
    functions that it calls, as ptxas allocates them. What is declared in its body counts always."""
    ptx = """
.version 8.0 .target sm_90a .address_size 64
.shared .align 4 .b8 mine[1024];
.shared .align 4 .b8 others[200000];
.shared .align 4 .b8 called[64];
.extern .shared .align 16 .b8 dynamic[];
.func f() { .reg .b32 %r<2>; mov.u32 %r1, 5; st.shared.u32 [called], %r1; ret; }
.func g() { st.shared.u32 [others], 5; ret; }
.visible .entry k(.param .u64 x)
{
  .reg .b32 %r<8>; .reg .b64 %rd<8>; .shared .align 4 .b8 unused[128];
  ld.param.u64 %rd1, [x]; mov.u32 %r2, mine; st.shared.u32 [%r2], 1; call.uni f, ();
  mov.u32 %r1, dynamic; st.shared.u32 [%r1+99996], 7; ld.shared.u32 %r3, [called]; sub.u32 %r1, %r1, %r2;
  st.global.v2.u32 [%rd1], {%r1, %r3}; ret;
}
.visible .entry other() { call.uni g, (); ret; }"""
    x = np.zeros(2, np.uint32)
    softsm.load(ptx, "k").launch(1, 1, [x], shared=100000)
    assert x.tolist() == [1024 + 64 + 128, 5]
    softsm.load(ptx, "other").launch(1, 1, [])
    with pytest.raises(ValueError, match="200000 static ones"):
        softsm.load(ptx, "other").launch(1, 1, [], shared=100000)


def test_printf_of_hexadecimal_floats():
    """tl.device_print(..., hex=True) of floats."""
    from softsm.isa.control import c_format

    raw = np.array([0.0, -0.0, 1.0, -1.5, 2.0**-1074, float("inf"), float("nan"), 1.0, -1.5]).tobytes()
    text = c_format("%a " * 6 + "%a %8a|%A", lambda at, n: raw[at : at + n], str)
    assert text == "0x0p+0 -0x0p+0 0x1p+0 -0x1.8p+0 0x0.0000000000001p-1022 inf nan   0x1p+0|-0X1.8P+0"
    raw = np.array([1.0]).tobytes() + np.array([7], np.uint64).tobytes()
    assert c_format("%a %s", lambda at, n: raw[at : at + n], "string at {}".format) == "0x1p+0 string at 7"


def test_printf_of_strings(capsys):
    ptx = """.version 8.0\n.target sm_90a\n.address_size 64
.extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);
.global .align 1 .b8 form[] = {37, 115, 32, 61, 32, 37, 45, 54, 46, 50, 115, 37, 100, 10, 0};
.global .align 1 .b8 name[] = {119, 97, 114, 112, 0};
.visible .entry k()
{
  .reg .b64 %rd<4>; .local .align 8 .b8 list[24];
  mov.u64 %rd1, name; st.local.u64 [list], %rd1; st.local.u64 [list+8], %rd1; st.local.u32 [list+16], 3;
  mov.u64 %rd1, form; mov.u64 %rd2, list; cvta.local.u64 %rd2, %rd2;
  { .param .b64 p0; .param .b64 p1; .param .b32 r0;
    st.param.b64 [p0], %rd1; st.param.b64 [p1], %rd2; call.uni (r0), vprintf, (p0, p1); }
  ret;
}"""
    softsm.load(ptx).launch(1, 1, [])
    assert capsys.readouterr().out == "warp = wa    3\n"  # "%s = %-6.2s%d"


IN_FLIGHT = """.version 8.0\n.target sm_90a\n.address_size 64
.visible .entry k(.param .u64 x)
{ .reg .b32 %r<4>; .reg .b64 %rd<4>; .shared .align 16 .b8 own[16]; .shared .align 8 .b8 bar[8];
  ld.param.u64 %rd1, [x]; mov.u32 %r1, own; mov.u32 %r2, bar;
  mbarrier.init.shared::cta.b64 [%r2], 1; fence.mbarrier_init.release.cluster;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 16;
  cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], 16, [%r2];
  cp.async.ca.shared.global [%r1], [%rd1], 16; cp.async.commit_group; WAIT ret;
}"""


@pytest.fixture
def no_collector():
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("end", ["", "cp.async.wait_all;", "trap;"])
def test_a_launch_leaves_nothing_to_the_garbage_collector(no_collector, monkeypatch, checked, end):
    """Machines, CTAs and warps hold large arrays, which Python's collector does not count."""
    made = []
    for kind in (scheduler.Machine, scheduler.Warp, *((checker.Checker, accesses.MemoryAccesses) if checked else ())):

        def init(self, *arguments, plain=kind.__init__):
            made.append(weakref.ref(self))
            plain(self, *arguments)

        monkeypatch.setattr(kind, "__init__", init)
    kernel = softsm.load(IN_FLIGHT.replace("WAIT", end))
    with softsm.checking() if checked else contextlib.nullcontext():
        for _ in range(2):
            with contextlib.suppress(Fault):
                kernel.launch(12, 1, [np.zeros(16, np.uint32)])
    assert len(made) > 2 and not [x() for x in made if x() is not None]


def test_a_kernel_keeps_few_register_files_between_launches(monkeypatch):
    kernel = softsm.load(COPY)
    x = np.zeros(32 * 64, np.uint32)
    kernel.launch(1, 1024, [x, x, 0])
    files = kernel.spare_files
    assert len(files) == 32  # small ones: all
    monkeypatch.setattr(launch, "SPARE_BYTES", 3 * sum(part.nbytes for part in files[0]) + 1)
    kernel.launch(1, 1024, [x, x, 0])
    assert len(kernel.spare_files) == 3


def test_of_a_cta_that_is_over_only_little_stays(monkeypatch):
    """The checker remembers asynchronous operations, and they their CTAs: not with megabytes for each of these."""
    kept = []
    plain = checker.Checker.closed

    def close(self):
        kept.extend(self.operations.by_number.values())
        plain(self)

    monkeypatch.setattr(checker.Checker, "closed", close)
    with softsm.checking():
        kernel = softsm.load(IN_FLIGHT.replace("WAIT", "cp.async.wait_all;"))
        kernel.launch(40, 1, [np.zeros(16, np.uint32)], processes=1)
    ctas = {op.warp.cta for op in kept}
    assert len(ctas) == 40
    assert all(op.warp.cta.view is None and op.warp.R is None for op in kept)


def test_where_races_are_not_looked_for_what_only_orders_does_nothing():
    body = COPY.replace(
        "ld.global.b32 %r3",
        "fence.mbarrier_init.release.cluster; fence.acq_rel.gpu; griddepcontrol.wait; ld.acquire.gpu.global.b32 %r3",
    )
    x, y = np.arange(32, dtype=np.float32), np.zeros(32, np.float32)
    with softsm.checking(races=False) as report:
        softsm.load(body).launch(1, 32, [x, y, 0])
    assert np.array_equal(x, y) and not report
