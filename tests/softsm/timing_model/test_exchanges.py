"""Stores to addresses whose loads are under way."""

from types import SimpleNamespace

import pytest

from softsm.timing_model.accesses import Access
from softsm.timing_model.exchanges import exchanges_of, held_up_ns
from softsm.timing_model.parameters import GPUS
from softsm.timing_model.sources import Source

SCAN = """$L__BB0_2:
	ld.global.v2.b32 { %r1, %r2 }, [ %rd5 + 0 ];
	st.global.v2.b32 [ %rd5 + 0 ], { %r3, %r4 };
	add.f32 	%r3, %r3, %r1;
"""


@pytest.mark.parametrize(
    "change, lines",
    [
        (("", ""), {2}),
        (("st.global", "mul.f32 %r3, %r1, %r1;\n\tst.global"), set()),  # it waits for the load
        (("st.global", "$L__BB0_3:\n\tst.global"), set()),
        (("st.global.v2.b32 [ %rd5", "st.global.v2.b32 [ %rd6"), set()),
    ],
)
def test_a_store_that_does_not_wait_for_the_load_of_its_address(change, lines) -> None:
    assert exchanges_of(SCAN.replace(*change)) == lines


def test_loads_wait_the_longer_the_more_lines_are_exchanged_in_device_memory() -> None:
    access = Access(looks=4, ran=4, lines=16, space="load")
    access.tensors[0] = 64
    trace = SimpleNamespace(source=SCAN, threads=128, access={2: access})
    far, near = (Source("state", 1 << 28, device=share) for share in (1.0, 0.0))
    h200 = GPUS["h200"]
    one, many = (held_up_ns(trace, [far], h200, running) for running in (1, 1000))
    assert one == h200["exchange"] + 16 * h200["exchange.line"] < many
    assert held_up_ns(trace, [near], h200, 1000) == 0.0
    assert held_up_ns(SimpleNamespace(source="ret;", threads=128, access={}), [], h200, 1) == 0.0
