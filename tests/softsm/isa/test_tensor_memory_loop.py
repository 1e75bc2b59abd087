"""tcgen05.ld and st that the compiled loop does itself, and those that it must leave to the macro-operation."""

import numpy as np
import pytest
from tensor_kernels import kernel, launch, names, words_in, words_out

from softsm.errors import Fault
from softsm.isa import tensor_memory

ST = "tcgen05.st.sync.aligned.32x32b.x{count}.b32 [{at}], {registers};\ntcgen05.wait::st.sync.aligned;\n"
LD = "tcgen05.ld.sync.aligned.32x32b.x{count}.b32 {registers}, [{at}];\ntcgen05.wait::ld.sync.aligned;\n"
DATA = np.random.default_rng(0).integers(0, 1 << 32, (128, 4), dtype=np.uint32)


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """Names of the macro-operations that were executed, of kernels loaded from here on."""
    called = []

    def watched(name):
        function = getattr(tensor_memory, name)

        def do(w, mask, o):
            called.append(name)
            return function(w, mask, o)

        monkeypatch.setattr(tensor_memory, name, do)

    watched("do_ld")
    watched("do_st")
    return called


def copied(body: str, unique: str, **options) -> np.ndarray:
    """What a kernel makes of DATA, which is in four registers of each thread from 100 on."""
    out = np.zeros_like(DATA)
    text = kernel(words_in(4) + body + words_out(4, 200), **options.pop("made", {}))
    launch(text + f"// {unique}", DATA, out, **options)
    return out


def there_and_back(at: str = "%r9 + 7") -> str:
    return ST.format(count=4, at=at, registers=names(100, 4)) + LD.format(count=4, at=at, registers=names(200, 4))


@pytest.mark.parametrize(("order", "macros"), [("eager", 0), ("latest", 8), ("random", 8)])
def test_where_nothing_is_in_flight_the_loop_does_it(order, macros, asked):
    np.testing.assert_array_equal(copied(there_and_back(), f"in the loop, {order}", order=order), DATA)
    assert len(asked) == macros


def test_registers_may_be_in_any_order(asked):
    body = ST.format(count=4, at="%r9", registers="{%r102, %r100, %r103, %r101}")
    body += LD.format(count=4, at="%r9", registers="{%r203, %r200, %r201, %r202}")
    np.testing.assert_array_equal(copied(body, "any order"), DATA[:, [0, 3, 1, 2]])
    assert not asked


def test_the_first_and_the_last_columns(asked):
    for at in ("%r9", "%r9 + 124"):
        np.testing.assert_array_equal(copied(there_and_back(at), f"edge {at}"), DATA)
    assert not asked


@pytest.mark.parametrize("at", ["%r9 + 125", "%r9 + 128", "%r9 + 65000"])
def test_columns_that_are_not_allocated_are_told(at, asked):
    with pytest.raises(Fault, match="touches column"):
        copied(there_and_back(at), f"outside {at}")
    assert asked == ["do_st"]


def test_columns_that_were_freed_are_told(asked):
    freed = "bar.sync 0;\n@!%p2 bra A;\ntcgen05.dealloc.cta_group::1.sync.aligned.b32 %r8, 128;\nA:\nbar.sync 0;\n"
    body = there_and_back("%r9") + freed + LD.format(count=4, at="%r9", registers=names(200, 4))
    with pytest.raises(Fault, match="column 0, which is not allocated"):
        copied(body, "freed", made={"free": False})
    assert asked == ["do_ld"]


def test_an_earlier_allocation_goes_on_to_work(asked):
    """The loop knows the last one only."""
    second = "@!%p2 bra A;\ntcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3], 32;\nA:\nbar.sync 0;\n"
    free = "@!%p2 bra B;\nld.shared.u32 %r20, [%r3];\ntcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 32;\nB:\n"
    np.testing.assert_array_equal(copied(second + there_and_back() + free, "two allocations"), DATA)
    assert len(asked) == 8


def test_lanes_of_another_warp_are_told(asked):
    with pytest.raises(Fault, match="may access lanes"):
        copied(there_and_back("%r8 + 0x200000"), "another warp's")


def test_no_lanes_are_the_warps_own(asked):
    np.testing.assert_array_equal(copied(there_and_back("%r8"), "no lanes"), DATA)
    assert not asked


def test_stores_and_loads_by_turns(asked):
    turn = "add.u32 %r100, %r100, 1;\n" + ST.format(count=1, at="%r9", registers="{%r100}") + "bar.sync 0;\n"
    turn += LD.format(count=1, at="%r9", registers="{%r100}")
    body = turn * 5 + "".join(f"mov.u32 %r{200 + i}, %r{100 + i};\n" for i in range(4))
    want = DATA.copy()
    want[:, 0] += np.uint32(5)
    np.testing.assert_array_equal(copied(body, "by turns"), want)
    assert not asked
