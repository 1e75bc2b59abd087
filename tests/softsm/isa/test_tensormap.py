"""tensormap.replace, tensormap.cp_fenceproxy and the fence between them and the copy."""

import numpy as np
import pytest
from launching import Map, aligned, ptx, run, scratch, wait, words

import softsm.engine.launch as engine
from softsm.errors import Fault, Unsupported
from softsm.memory.tensor_map import DataType, Swizzle

SHARED = ".shared .align 128 .b8 map[128]; .shared .align 8 .b8 bar[8]; .shared .align 1024 .b8 data[1024];"
LOAD = f"""mov.u32 %r2, data;
mov.u32 %r3, bar;
@%p1 mbarrier.init.shared::cta.b64 [%r3], 1;
@%p1 fence.proxy.async.shared::cta;
bar.sync 0;
mov.u32 %r30, 0;
mov.u32 %r31, 2;
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 512;
@%p1 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [MAP, {{%r30, %r31}}], [%r3];
{wait("%r3", 0, "W")}
mad.lo.u32 %r4, %r1, 16, %r2;
ld.shared.v4.u32 {{%r6, %r7, %r8, %r9}}, [%r4];
mul.wide.u32 %rd5, %r1, 16;
add.s64 %rd5, %rd1, %rd5;
st.global.v4.u32 [%rd5], {{%r6, %r7, %r8, %r9}};
"""


def source():
    return np.arange(64 * 32, dtype=np.uint16).reshape(32, 64)


def replaced(field, *values, space="shared::cta", at="%r10", width="b32"):
    return f"@%p1 tensormap.replace.tile.{field}.{space}.b1024.{width} [{at}], {', '.join(map(str, values))};\n"


def test_a_map_made_by_the_kernel():
    """Zeros in shared memory, every field replaced, published to global memory, then used."""
    body = "mov.u32 %r10, map;\nmad.lo.u32 %r11, %r1, 4, %r10;\nst.shared.u32 [%r11], 0;\nbar.warp.sync -1;\n"
    body += "mov.u32 %r12, 64;\nmov.b64 %rd6, 128;\n"
    body += replaced("global_address", "%rd3", width="b64") + replaced("rank", 1)
    body += replaced("box_dim", 0, 64) + replaced("box_dim", 1, 4)
    body += replaced("global_dim", 0, "%r12") + replaced("global_dim", 1, 32)
    body += replaced("global_stride", 0, "%rd6", width="b64")
    body += replaced("element_stride", 0, 1) + replaced("element_stride", 1, 1)
    body += (
        replaced("elemtype", 1)
        + replaced("interleave_layout", 0)
        + replaced("swizzle_mode", 3)
        + replaced("fill_mode", 0)
    )
    body += """bar.warp.sync -1;
tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%rd2], [%r10], 128;
fence.proxy.tensormap::generic.acquire.gpu [%rd2], 128;
bar.sync 0;
"""
    text = ptx(body + LOAD.replace("MAP", "%rd2"), "out scratch src", shared=SHARED, version="8.3")
    data = source()
    out = run(text, [words(128), scratch(128), data])[0]
    rows = data[2:6].view(np.uint8).reshape(4, 8, 16)
    wanted = np.stack([rows[r, np.arange(8) ^ r] for r in range(4)])
    np.testing.assert_array_equal(out.view(np.uint8).reshape(4, 8, 16), wanted)


def test_fields_of_a_map_are_replaced():
    """A map is encoded by the host, copied to shared memory and changed there: another address, another box."""
    description = Map(2, DataType.UINT16, (64, 32), (128,), (64, 1), dict(swizzle=Swizzle.B128))
    body = """mul.wide.u32 %rd6, %r1, 4;
add.s64 %rd6, %rd2, %rd6;
ld.u32 %r12, [%rd6];
mov.u32 %r10, map;
mad.lo.u32 %r11, %r1, 4, %r10;
st.shared.u32 [%r11], %r12;
bar.warp.sync -1;
add.s64 %rd6, %rd3, 1024;
"""
    body += replaced("global_address", "%rd6", width="b64") + replaced("box_dim", 1, 4) + replaced("swizzle_mode", 0)
    body += """bar.warp.sync -1;
tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%rd4], [%r10], 128;
fence.proxy.tensormap::generic.acquire.gpu [%rd4], 128;
bar.sync 0;
"""
    text = ptx(body + LOAD.replace("MAP", "%rd4"), "out given! src scratch", shared=SHARED, version="8.3")
    data = source()
    out = run(text, [words(128), description, data, scratch(128)])[0]
    np.testing.assert_array_equal(out.view(np.uint16).reshape(4, 64), data[10:14])


def test_a_map_in_global_memory_is_replaced_in_place():
    data = source()
    body = "add.s64 %rd6, %rd3, 1024;\n"
    body += replaced("global_address", "%rd6", space="global", at="%rd2", width="b64")
    body += replaced("rank", 1, space="global", at="%rd2")
    for i, (box, dim) in enumerate(((64, 64), (4, 32))):
        body += replaced("box_dim", i, box, space="global", at="%rd2")
        body += replaced("global_dim", i, dim, space="global", at="%rd2")
        body += replaced("element_stride", i, 1, space="global", at="%rd2")
    body += "mov.b64 %rd7, 128;\n" + replaced("global_stride", 0, "%rd7", space="global", at="%rd2", width="b64")
    for name, value in (("elemtype", 1), ("interleave_layout", 0), ("swizzle_mode", 0), ("fill_mode", 0)):
        body += replaced(name, value, space="global", at="%rd2")
    body += "fence.proxy.tensormap::generic.release.gpu;\nbar.sync 0;\n"
    body += "fence.proxy.tensormap::generic.acquire.gpu [%rd2], 128;\n"
    text = ptx(body + LOAD.replace("MAP", "%rd2"), "out maps src", shared=SHARED, version="8.3")
    out = run(text, [words(128), scratch(128), data])[0]
    np.testing.assert_array_equal(out.view(np.uint16).reshape(4, 64), data[10:14])


def test_atoms_need_the_wide_swizzle():
    text = ptx(
        "mov.u32 %r10, map;\nmad.lo.u32 %r11, %r1, 4, %r10;\nst.shared.u32 [%r11], 0;\nbar.warp.sync -1;\n"
        + replaced("swizzle_atomicity", 1),
        shared=SHARED,
        target="sm_100a",
        version="8.6",
    )
    run(text, [words(1)])


@pytest.mark.parametrize("field, value", [("rank", 5), ("swizzle_mode", 9), ("elemtype", 16), ("fill_mode", 2)])
def test_values_out_of_range_name_the_field(field, value):
    body = "mov.u32 %r10, map;\nmad.lo.u32 %r11, %r1, 4, %r10;\nst.shared.u32 [%r11], 0;\nbar.warp.sync -1;\n"
    with pytest.raises(Fault, match=field) as caught:
        engine.load(ptx(body + replaced(field, value), shared=SHARED)).launch(1, 32, [words(1)])
    assert caught.value.code == "tensor-map"


def test_unfinished_map_names_the_field():
    body = "mov.u32 %r10, map;\nmad.lo.u32 %r11, %r1, 4, %r10;\nst.shared.u32 [%r11], 0;\nbar.warp.sync -1;\n"
    body += replaced("rank", 1) + "bar.warp.sync -1;\n"
    body += "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned "
    body += "[%rd2], [%r10], 128;\n"
    text = ptx(body + LOAD.replace("MAP", "%rd2"), "out scratch", shared=SHARED, version="8.3")
    with pytest.raises(Fault, match=r"global_dim\[0\]"):
        engine.load(text).launch(1, 32, [words(128), aligned(scratch(128))])


@pytest.mark.parametrize(
    "instruction",
    [
        "tensormap.replace.tile.colour.shared::cta.b1024.b32 [%r10], 1;",
        "tensormap.replace.tile.rank.shared::cta.b1024.b64 [%r10], 1;",
        "tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [%r10], 1;",
        "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%rd1], [%r10], 64;",
    ],
)
def test_unknown_forms_are_refused_when_loaded(instruction):
    with pytest.raises(Unsupported):
        engine.load(ptx(instruction, shared=SHARED))
