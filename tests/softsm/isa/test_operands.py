"""What macro-operations of many chapters need: active lanes, registers that agree, places in shared memory."""

import numpy as np
import pytest
from launching import ptx

from softsm.engine.launch import load
from softsm.errors import Fault
from softsm.isa.operands import lanes, uniform

DATA = ".shared .align 16 .b8 data[64];"


@pytest.mark.parametrize(("mask", "expected"), [(1 << 31, [31]), (0b1010, [1, 3]), (2**32 - 1, list(range(32)))])
def test_lanes_are_those_of_the_mask(mask, expected):
    assert lanes(mask) == expected


def test_a_register_is_uniform_if_all_lanes_have_its_value():
    values = np.full(32, 7, np.uint32)
    assert uniform(values) == 7
    values[31] = 8
    assert uniform(values) is None


@pytest.mark.parametrize(
    ("address", "code", "message"),
    [
        ("mov.u32 %r2, data; add.u32 %r2, %r2, 4;", "misaligned", "shared address 0x[0-9a-f]+ is not a multiple of 8"),
        ("mov.u32 %r2, 4096;", "out-of-bounds", "of 8 bytes at shared offset 0x1000"),
    ],
)
def test_a_wrong_place_in_shared_memory_is_named_with_its_instruction(address, code, message):
    text = ptx(f"{address}\nmbarrier.init.shared.b64 [%r2], 1;", shared=DATA)
    with pytest.raises(Fault, match=message) as caught:
        load(text).launch(1, 32, [np.zeros(32, np.uint32)])
    assert caught.value.code == code
    assert "mbarrier.init" in str(caught.value)


def test_a_generic_address_outside_shared_memory_is_out_of_bounds():
    text = ptx("mov.u64 %rd2, 4096;\nmbarrier.init.b64 [%rd2], 1;", shared=DATA)
    with pytest.raises(Fault, match="generic address 0x1000 of lane 0 is not in shared memory") as caught:
        load(text).launch(1, 32, [np.zeros(32, np.uint32)])
    assert caught.value.code == "out-of-bounds"
