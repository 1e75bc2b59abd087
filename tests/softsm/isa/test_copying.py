"""What goes wrong in a copy is the fault of the instruction that issued it."""

import pytest
from copy_texts import DATA, THREAD, bulk_load, fails
from launching import ptx


@pytest.mark.parametrize("order", ["eager", "latest"])
def test_faults_name_the_instruction(order):
    fails(ptx(bulk_load(512), "out src", shared=DATA), "out-of-bounds", "cp.async.bulk", order)
    fails(ptx(bulk_load(24), "out src", shared=DATA), "copy-size", "multiple of 16", order)
    body = THREAD.format(size=16) + "add.s64 %rd4, %rd4, 4;\ncp.async.cg.shared.global [%r3], [%rd4], 16;"
    fails(ptx(body, "out src", shared=DATA), "misaligned", None, order)
    body = THREAD.format(size=16) + "cp.async.cg.shared.global [%r3], [%rd4], 16;"
    fails(ptx(body, "out src", shared=DATA), "out-of-bounds", None, order)
    body = THREAD.format(size=4) + "cp.async.ca.shared.global [%r3], [%rd4], 4, 5;"
    fails(ptx(body, "out src", shared=DATA), "copy-size", "src-size 5", order)
