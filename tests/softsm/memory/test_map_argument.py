"""softsm.tensor_map: a tensor map over an array, as an argument."""

import numpy as np
import pytest

import softsm
from softsm.memory.tensor_map import DataType, Fill, Swizzle
from softsm.memory.tensor_map_image import from_image
from softsm.museum import text as t

SHARED = ".shared .align 1024 .b8 a[4096]; .shared .align 8 .b64 bar;"
COPY = t.only("%p0", t.expect("bar", 1024) + t.tma_load("a", "%rd2", "8, 2", "bar")) + t.wait("bar", 0)
READ = "mov.u32 %r10, a;\nmad.lo.u32 %r10, %r0, 8, %r10;\nld.shared.b64 %rd10, [%r10];\n"
KERNEL = t.kernel(
    t.init("bar") + COPY + READ + "mad.wide.u32 %rd11, %r0, 8, %rd1;\nst.global.b64 [%rd11], %rd10;\n",
    "out map!",
    shared=SHARED,
)


def test_a_copy_of_a_box():
    """The kernel gets the map alone, and may read what it points to."""
    x, out = np.arange(24 * 64, dtype=np.float32).reshape(24, 64), np.zeros((16, 16), np.float32)
    with softsm.checking() as report:
        softsm.load_ptx(KERNEL)[1, 128](out, softsm.tensor_map(x, (16, 16)))
    assert not report and np.array_equal(out, x[2:18, 8:24])


def test_fields_follow_the_array():
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(4, 6, 64, dtype=torch.bfloat16)[:, :, :32]
    made = softsm.tensor_map(tensor, (1, 2, 32), swizzle=64, element_strides=(1, 2, 1), fill_nan=True)
    found = from_image(bytes(made))
    assert (found.data_type, found.base) == (DataType.BFLOAT16, tensor.data_ptr())
    assert (found.dims, found.strides, found.box) == ((32, 6, 4), (128, 768), (32, 2, 1))
    assert (found.element_strides, found.swizzle, found.oob_fill) == ((1, 2, 1), Swizzle.B64, Fill.NAN)


@pytest.mark.parametrize(
    ("array", "box", "options", "name"),
    [
        ([1, 2], (1,), {}, "array"),
        (np.zeros(4, complex), (4,), {}, "array"),
        (np.zeros((64, 64), np.float32).T, (4, 4), {}, "array"),
        (np.zeros((64, 64), np.float32), (4,), {}, "box"),
        (np.zeros((64, 64), np.float32), (4, 4), dict(element_strides=(1,)), "element_strides"),
        (np.zeros((64, 64), np.float32), (4, 4), dict(swizzle=16), "swizzle"),
        (np.zeros((64, 64), np.float32), (4, 3), {}, "box_dim"),
    ],
)
def test_what_has_no_map_is_named(array, box, options, name):
    with pytest.raises(ValueError, match=f"^{name}"):
        softsm.tensor_map(array, box, **options)
