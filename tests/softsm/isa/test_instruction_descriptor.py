"""The instruction descriptor of tcgen05.mma: fields, and what is wrong with them."""

import pytest

from softsm.errors import Fault
from softsm.isa import instruction_descriptor as idesc


@pytest.mark.parametrize(
    ("kind", "value", "group", "words"),
    [
        ("f16", idesc.encode("f16", 128, 64, "f16", "f16") | 4, 1, "sparse"),
        ("f16", idesc.encode("f16", 32, 64, "f16", "f16"), 1, "accepts M 64 or 128"),
        ("f16", idesc.encode("f16", 128, 256, "f16", "f16") + (1 << 17), 1, "N 8..256"),
        ("f16", idesc.encode("f16", 64, 64, "f16", "f16"), 2, "accepts M 128 or 256"),
        ("f16", idesc.encode("f16", 256, 24, "f16", "f16"), 2, "steps of 16"),
        ("f16", idesc.encode("f16", 128, 64, "bf16", "bf16", "f16"), 1, "D f16"),
        ("tf32", idesc.encode("f16", 128, 64, "f16", "f16"), 1, "type 0 of A"),
        ("i8", idesc.encode("i8", 128, 40, "s8", "s8", "s32"), 1, "kind::i8 accepts N"),
        ("mxf8f6f4", idesc.encode("mxf8f6f4", 128, 64, "e4m3", "e4m3", scale="ue4m3"), 1, "ue4m3"),
        ("mxf4", idesc.encode("mxf4", 128, 64, "e2m1", "e2m1", a_scale_id=1), 1, "accepted: 0 and 2"),
        ("mxf4", idesc.encode("mxf4", 128, 64, "e2m1", "e2m1", a_mn=True), 1, "K-major"),
    ],
)
def test_bad_instruction_descriptors_are_named(kind, value, group, words):
    with pytest.raises(Fault, match=words) as error:
        idesc.decode(value, kind, group)
    assert error.value.code == "idesc"


def test_the_documented_descriptor():
    assert idesc.encode("f16", 128, 256, "bf16", "bf16") == 0x08400490
