"""cp: an instruction that is not a copy is rejected when it is loaded."""

import pytest
from copy_texts import DATA
from launching import ptx

import softsm.engine.launch as engine
from softsm.errors import Unsupported


@pytest.mark.parametrize(
    "instruction, why",
    [
        ("cp.async.cg.shared.global [%r3], [%rd4], 8;", "cp-size"),
        ("cp.async.bulk.shared::cluster.global.bulk_group [%r3], [%rd4], 16;", "completes by"),
        ("cp.async.bulk.global.global.bulk_group [%rd4], [%rd4], 16;", "no copy from"),
        ("cp.reduce.async.bulk.global.shared::cta.bulk_group.min.f32 [%rd4], [%r3], 16;", "not defined"),
        ("cp.async.sideways;", "expected cp.async"),
    ],
)
def test_unknown_forms_are_refused_when_loaded(instruction, why):
    with pytest.raises(Unsupported, match=why):
        engine.load(ptx(instruction, shared=DATA))
