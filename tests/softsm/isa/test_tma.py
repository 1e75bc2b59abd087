"""cp.async.bulk.tensor and cp.reduce.async.bulk.tensor against a walk over elements, under every order."""

import itertools

import numpy as np
import pytest
from launching import Map, aligned, ptx, run, wait, words
from tma_kernels import SHARED, image, load_kernel, store_kernel, strides, tensor

import softsm.engine.launch as engine
from softsm.errors import Deadlock, Fault, Unsupported
from softsm.memory.tensor_map import DataType, Fill, Swizzle

RNG = np.random.default_rng(5)
TO_SHARED = "shared::cluster.global.mbarrier::complete_tx::bytes"
LOADS = [
    # kind, dims, box, coords, options (dimensions innermost first)
    (DataType.UINT8, (304,), (64,), (16,), {}),
    (DataType.FLOAT32, (40, 9), (16, 4), (4, 2), {}),
    (DataType.BFLOAT16, (72, 20), (64, 8), (0, 5), dict(swizzle=Swizzle.B128)),
    (DataType.BFLOAT16, (72, 20), (64, 16), (-16, -3), dict(swizzle=Swizzle.B128)),
    (DataType.FLOAT16, (72, 20), (64, 8), (40, 15), dict(swizzle=Swizzle.B128, oob_fill=Fill.NAN)),
    (DataType.BFLOAT16, (72, 20), (64, 8), (0, 20), {}),  # wholly outside
    (DataType.FLOAT32, (72, 20), (32, 8), (64, -4), dict(oob_fill=Fill.NAN)),
    (DataType.FLOAT16, (48, 33), (32, 16), (8, 17), dict(swizzle=Swizzle.B64)),
    (DataType.FLOAT16, (48, 33), (16, 16), (8, 18), dict(swizzle=Swizzle.B32)),
    (DataType.FLOAT16, (48, 33), (16, 16), (8, 18), dict(swizzle=Swizzle.B128)),  # rows shorter than the span
    (DataType.FLOAT32, (32, 12), (16, 4), (0, 1), dict(swizzle=Swizzle.B128)),
    (DataType.INT64, (10, 7, 5), (4, 3, 2), (2, 5, 4), {}),
    (DataType.UINT16, (24, 5, 4, 3), (8, 2, 3, 2), (16, 4, -1, 2), {}),
    (DataType.UINT16, (24, 5, 4, 3, 2), (8, 2, 2, 2, 2), (8, 1, 3, 2, 1), {}),
    (DataType.UINT16, (40, 30), (16, 12), (8, -4), dict(element_strides=(1, 3))),
    (DataType.UINT16, (40, 30), (16, 11), (8, 7), dict(element_strides=(5, 2))),
    (DataType.UINT16, (40, 30, 6), (16, 7, 4), (24, 25, 2), dict(element_strides=(1, 4, 2), swizzle=Swizzle.B32)),
]


@pytest.mark.parametrize("kind, dims, box, coords, options", LOADS)
def test_load(kind, dims, box, coords, options):
    array = tensor(kind, dims)
    steps = options.get("element_strides")
    swizzle = options.get("swizzle", Swizzle.NONE)
    fill = int.from_bytes(b"\xf7\x7f" * (array.itemsize // 2), "little") if options.get("oob_fill") else 0
    wanted = image(array, box, coords, swizzle, steps, fill)
    nbytes = int(np.prod([-(-b // s) for b, s in zip(box, (1, *(steps or (1,) * 5)[1:]))])) * array.itemsize
    description = Map(2, kind, dims, strides(array), box, options)
    got = run(load_kernel(len(dims), coords, nbytes), [words(1024), description, array])[0]
    np.testing.assert_array_equal(got.view(np.uint8), wanted)


@pytest.mark.parametrize("swizzle", [Swizzle.B32, Swizzle.B64, Swizzle.B128])
@pytest.mark.parametrize("start", [128, 384, 896])
def test_swizzle_follows_the_shared_address(swizzle, start):
    array = tensor(DataType.UINT16, (64, 32))
    box = (swizzle.span // 2, 8)
    description = Map(2, DataType.UINT16, (64, 32), strides(array), box, dict(swizzle=swizzle))
    text = load_kernel(2, (0, 3), swizzle.span * 8, start=start)
    got = run(text, [words(1024), description, array])[0]
    np.testing.assert_array_equal(got.view(np.uint8), image(array, box, (0, 3), swizzle, start=start))


@pytest.mark.parametrize("swizzle", [Swizzle.B128_ATOM_32B, Swizzle.B128_ATOM_64B])
def test_wide_atoms(swizzle):
    array = tensor(DataType.FLOAT32, (32, 12))
    description = Map(2, DataType.FLOAT32, (32, 12), strides(array), (32, 8), dict(swizzle=swizzle))
    text = load_kernel(2, (0, 2), 1024, target="sm_100a", version="8.6")
    got = run(text, [words(1024), description, array])[0]
    np.testing.assert_array_equal(got.view(np.uint8), image(array, (32, 8), (0, 2), swizzle))


@pytest.mark.parametrize(
    "form",
    [
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes",
        "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes",
        "cp.async.bulk.tensor.2d.cta_group::1.shared::cluster.global.mbarrier::complete_tx::bytes",
    ],
)
def test_spellings_of_a_load(form):
    array = tensor(DataType.UINT16, (64, 32))
    description = Map(2, DataType.UINT16, (64, 32), strides(array), (64, 4))
    text = load_kernel(2, (0, 3), 512, form=form, target="sm_100a", version="8.6")
    got = run(text, [words(1024), description, array])[0]
    np.testing.assert_array_equal(got.view(np.uint8), image(array, (64, 4), (0, 3)))


def test_gather4():
    array = tensor(DataType.BFLOAT16, (80, 40))
    description = Map(2, DataType.BFLOAT16, (80, 40), strides(array), (64, 1), dict(swizzle=Swizzle.B128))
    form = "cp.async.bulk.tensor.2d.tile::gather4.shared::cta.global.mbarrier::complete_tx::bytes"
    text = load_kernel(2, (32, 5, 39, 40, 0), 512, form=form, target="sm_100a", version="8.6")
    got = run(text, [words(1024), description, array])[0].view(np.uint8)
    chosen = np.concatenate([array[[5, 39]], np.zeros((1, 80), array.dtype), array[[0]]])
    np.testing.assert_array_equal(got, image(chosen, (64, 4), (32, 0), Swizzle.B128))


def test_im2col():
    """At a 3x2 window position of a convolution, pixels walk through the box of the image, W first, then H, then N."""
    array = tensor(DataType.UINT16, (16, 6, 5, 3))  # C W H N
    options = dict(lower=(-1, -1), upper=(-1, 0), pixels=20)
    description = Map(2, DataType.UINT16, (16, 6, 5, 3), strides(array), (16,), options)
    form = "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
    more = ", {%rs1, %rs2}"
    text = load_kernel(4, (0, 2, 3, 0), 20 * 32, form=form, more=more)
    text = text.replace("FILL:", "mov.b16 %rs1, 1;\nmov.b16 %rs2, 0;\nFILL:", 1)
    got = run(text, [words(1024), description, array])[0].view(np.uint16)[: 20 * 16].reshape(20, 16)
    x, y, n = 2, 3, 0
    for pixel in range(20):
        inside = 0 <= x + 1 < 6 and 0 <= y < 5
        np.testing.assert_array_equal(got[pixel], array[n, y, x + 1] if inside else 0)
        x += 1
        if x >= 6 - 1:
            x, y = -1, y + 1
        if y >= 5:
            y, n = -1, n + 1


def tf32(word):
    """10 mantissa bits, to nearest, ties to even; every NaN is the same one."""
    return 0x7FFFE000 if word & 0x7FFFFFFF > 0x7F800000 else (word + 0xFFF + (word >> 13 & 1)) & 0xFFFFE000


@pytest.mark.parametrize(
    "kind, meaning",
    [
        (DataType.FLOAT32, lambda word: word),
        (DataType.FLOAT32_FTZ, lambda word: word),
        (DataType.TFLOAT32, tf32),
        (DataType.TFLOAT32_FTZ, tf32),  # neither type flushes on an H200
    ],
)
def test_loads_that_change_values(kind, meaning):
    edges = [0, 1, 0x80000001, 0x007FFFFF, 0x00800000, 0x3F801000, 0x3F800FFF, 0x3F803000, 0xBF801000, 0x7F7FFFFF,
             0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0x80000000, 0x3F800000]  # fmt: skip
    array = np.array(edges + RNG.integers(0, 1 << 32, 16, dtype=np.uint32).tolist(), np.uint32).reshape(2, 16)
    description = Map(2, kind, (16, 2), strides(array), (16, 2))
    got = run(load_kernel(2, (0, 0), 128), [words(1024), description, array])[0][:32]
    np.testing.assert_array_equal([hex(x) for x in got], [hex(meaning(int(x))) for x in array.ravel()])


def test_two_loads_on_one_barrier_and_a_ring_of_phases():
    """Eight tiles through two stages, full and empty barriers, producer and consumer warps; sums of all tiles."""
    array = tensor(DataType.INT32, (32, 64)).astype(np.int32)
    body = f"""mov.u32 %r2, data;
mov.u32 %r3, bar;
@%p1 mbarrier.init.shared::cta.b64 [%r3], 1;
@%p1 mbarrier.init.shared::cta.b64 [%r3+8], 1;
@%p1 mbarrier.init.shared::cta.b64 [%r3+16], 32;
@%p1 mbarrier.init.shared::cta.b64 [%r3+24], 32;
bar.sync 0;
mov.u32 %r10, 0;
mov.u32 %r11, 0;
setp.ge.u32 %p2, %r1, 32;
@%p2 bra CONSUME;
PRODUCE:
and.b32 %r4, %r10, 1;
shr.u32 %r5, %r10, 1;
and.b32 %r5, %r5, 1;
xor.b32 %r6, %r5, 1;
mad.lo.u32 %r7, %r4, 8, %r3;
add.u32 %r8, %r7, 16;
{wait("%r8", "%r6", "EMPTY")}
mad.lo.u32 %r9, %r4, 1024, %r2;
add.u32 %r14, %r9, 512;
shl.b32 %r12, %r10, 3;
add.u32 %r13, %r12, 4;
mov.u32 %r15, 0;
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r7], 1024;
@%p1 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r9], [%rd2, {{%r15, %r12}}], [%r7];
@%p1 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r14], [%rd2, {{%r15, %r13}}], [%r7];
add.u32 %r10, %r10, 1;
setp.lt.u32 %p3, %r10, 8;
@%p3 bra PRODUCE;
bra END;
CONSUME:
and.b32 %r4, %r10, 1;
shr.u32 %r5, %r10, 1;
and.b32 %r5, %r5, 1;
mad.lo.u32 %r7, %r4, 8, %r3;
{wait("%r7", "%r5", "FULL")}
mad.lo.u32 %r9, %r4, 1024, %r2;
and.b32 %r12, %r1, 31;
mad.lo.u32 %r9, %r12, 4, %r9;
mov.u32 %r13, 0;
SUM:
ld.shared.u32 %r14, [%r9];
add.u32 %r11, %r11, %r14;
add.u32 %r9, %r9, 128;
add.u32 %r13, %r13, 1;
setp.lt.u32 %p3, %r13, 8;
@%p3 bra SUM;
mbarrier.arrive.shared::cta.b64 _, [%r7+16];
add.u32 %r10, %r10, 1;
setp.lt.u32 %p3, %r10, 8;
@%p3 bra CONSUME;
mul.wide.u32 %rd5, %r12, 4;
add.s64 %rd5, %rd1, %rd5;
st.global.u32 [%rd5], %r11;
END:
"""
    shared = ".shared .align 8 .b8 bar[32]; .shared .align 1024 .b8 data[2048];"
    description = Map(2, DataType.INT32, (32, 64), strides(array), (32, 4))
    got = run(ptx(body, "out map! src", shared=shared), [words(32), description, array], block=64)[0]
    np.testing.assert_array_equal(got.view(np.int32), array.sum(0, dtype=np.int32))


# -- clusters --------------------------------------------------------------------------------------------------------

CLUSTER = """mov.u32 %r2, data;
mov.u32 %r3, bar;
mov.u32 %r10, %cluster_ctarank;
@%p1 mbarrier.init.shared::cta.b64 [%r3], 1;
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], {bytes};
@%p1 fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
mov.u32 %r30, 0;
mov.u32 %r31, 3;
{load}
{wait}
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
mad.lo.u32 %r4, %r1, 4, %r2;
ld.shared.u32 %r6, [%r4];
mad.lo.u32 %r7, %r10, 32, %r1;
mul.wide.u32 %rd5, %r7, 4;
add.s64 %rd5, %rd1, %rd5;
st.global.u32 [%rd5], %r6;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
"""


def test_multicast():
    array = tensor(DataType.UINT16, (64, 32))
    load = """setp.eq.u32 %p2, %r10, 0;
and.pred %p2, %p2, %p1;
mov.b16 %rs1, 3;
@%p2 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
    [%r2], [%rd2, {%r30, %r31}], [%r3], %rs1;"""
    text = ptx(
        CLUSTER.format(bytes=128, load=load, wait=wait("%r3", 0, "W")), "out map! src", shared=SHARED.format(size=1024)
    )
    description = Map(2, DataType.UINT16, (64, 32), strides(array), (64, 1))
    got = run(text, [words(64), description, array], grid=2, cluster=2)[0].view(np.uint16)
    np.testing.assert_array_equal(got.reshape(2, 64), np.stack([array[3], array[3]]))


def test_pair_of_ctas_signals_the_even_one():
    """.cta_group::2: each CTA loads into its own shared memory and both signal the barrier of the even CTA."""
    array = tensor(DataType.UINT16, (64, 32))
    load = f"""and.b32 %r8, %r3, 0xfeffffff;
add.u32 %r31, %r31, %r10;
@%p1 cp.async.bulk.tensor.2d.cta_group::2.shared::cluster.global.mbarrier::complete_tx::bytes
    [%r2], [%rd2, {{%r30, %r31}}], [%r8];
setp.ne.u32 %p3, %r10, 0;
@%p3 bra SKIP;
{wait("%r3", 0, "W")}
SKIP:"""
    text = ptx(
        CLUSTER.format(bytes=256, load=load, wait=""),
        "out map! src",
        shared=SHARED.format(size=1024),
        target="sm_100a",
        version="8.6",
    )
    description = Map(2, DataType.UINT16, (64, 32), strides(array), (64, 1))
    got = run(text, [words(64), description, array], grid=2, cluster=2)[0].view(np.uint16)
    np.testing.assert_array_equal(got.reshape(2, 64), array[3:5])


# -- stores and reductions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, dims, box, coords, options", LOADS)
def test_store(kind, dims, box, coords, options):
    """The inverse of the load, and nothing outside the tensor or between the elements is touched."""
    coords = tuple(max(c, 0) for c in coords)
    options = {k: v for k, v in options.items() if k != "oob_fill"}
    steps, swizzle = options.get("element_strides"), options.get("swizzle", Swizzle.NONE)
    old, new = tensor(kind, dims, 1), tensor(kind, dims, 2)
    values = image(new, box, coords, swizzle, steps)
    form = f"cp.async.bulk.tensor.{len(dims)}d.global.shared::cta.bulk_group"
    text = store_kernel(len(dims), coords, 4096, form)
    got = run(text, [old, Map(0, kind, dims, strides(old), box, options), values])[0]
    wanted = old.copy()
    steps = (1, *(steps or (1,) * 5)[1:])
    for index in itertools.product(*(range(-(-b // s)) for b, s in zip(box, steps))):
        at = [c + k * s for c, k, s in zip(coords, index, steps)]
        if all(0 <= a < n for a, n in zip(at, dims)):
            wanted[tuple(reversed(at))] = new[tuple(reversed(at))]
    np.testing.assert_array_equal(got, wanted)


def test_addresses_wrap_around():
    """Triton's ragged descriptors: two more dimensions whose strides add up to 2**64 put the end of any group of rows
    at the end of a dimension, where the hardware's bounds check cuts the box off."""
    old, new = tensor(DataType.BFLOAT16, (64, 24), 1), tensor(DataType.BFLOAT16, (64, 4), 2)
    first, count, row, most = 5, 7, 4, 1 << 30
    dims = (64, most, 0x7FFF0000, 0x7FFF0000)
    coords = (0, most - count + row, first + count, most)
    what = (DataType.BFLOAT16, dims, (128, 128, (1 << 35) - 128), (64, 4, 1, 1))
    got = run(load_kernel(4, coords, 512), [words(1024), Map(2, *what), old])[0].view(np.uint8)
    group = old[first : first + count]
    np.testing.assert_array_equal(got, image(group, (64, 4), (0, row)))
    form = "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group"
    got = run(store_kernel(4, coords, 512, form), [old, Map(0, *what), image(new, (64, 4), (0, 0))])[0]
    wanted = old.copy()
    wanted[first + row : first + count] = new[: count - row]
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("coords", [(10, 0), (-1, 0), (4, 3)])
def test_loads_of_sm_90_begin_at_sixteen_bytes(coords):
    """Illegal instructions on an H200, for all types and swizzles tried; sm_100 has not been tried."""
    array = aligned(tensor(DataType.UINT16, (64, 32)))
    description = Map(2, DataType.UINT16, (64, 32), strides(array), (64, 4)).encode(array.ctypes.data)
    with pytest.raises(Fault, match="multiples of 16 bytes") as caught:
        engine.load(load_kernel(2, coords, 512)).launch(1, 32, [words(1024), description, array])
    assert caught.value.code == "coordinate"
    text = load_kernel(2, coords, 512, target="sm_100a", version="8.6")
    out = words(1024)
    engine.load(text).launch(1, 32, [out, description, array])
    np.testing.assert_array_equal(out.view(np.uint8), image(array, (64, 4), coords))


def test_stores_of_sm_90_begin_inside_the_tensor():
    """A negative coordinate is an illegal instruction on an H200, in every dimension; loads take it."""
    array = aligned(tensor(DataType.UINT16, (64, 32)))
    description = Map(0, DataType.UINT16, (64, 32), strides(array), (64, 4)).encode(array.ctypes.data)
    text = store_kernel(2, (0, -1), 512, "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group")
    with pytest.raises(Fault, match="sm_90 stores no box") as caught:
        engine.load(text).launch(1, 32, [array, description, np.zeros(512, np.uint8)])
    assert caught.value.code == "coordinate"


def test_scatter4():
    old, new = tensor(DataType.BFLOAT16, (80, 40), 1), tensor(DataType.BFLOAT16, (80, 4), 2)
    description = Map(0, DataType.BFLOAT16, (80, 40), strides(old), (64, 1), dict(swizzle=Swizzle.B128))
    values = image(new, (64, 4), (0, 0), Swizzle.B128)
    form = "cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group"
    text = store_kernel(2, (16, 7, 41, 0, 39), 512, form, target="sm_100a", version="8.6")
    got = run(text, [old, description, values])[0]
    wanted = old.copy()
    for i, row in enumerate((7, None, 0, 39)):
        if row is not None:
            wanted[row, 16:80] = new[i, :64]
    np.testing.assert_array_equal(got, wanted)
    form = "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile::scatter4.bulk_group"
    text = store_kernel(2, (16, 7, 41, 0, 39), 512, form, target="sm_100a", version="8.6")
    got = run(text, [old, description, values])[0]
    for i, row in enumerate((7, None, 0, 39)):
        if row is not None:
            wanted[row, 16:80] = old[row, 16:80] + new[i, :64]
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(
    "kind, op, meaning",
    [
        (DataType.FLOAT32, "add", lambda a, b: a + b),
        (DataType.FLOAT16, "add", lambda a, b: a + b),
        (DataType.BFLOAT16, "add", lambda a, b: a + b),
        (DataType.FLOAT16, "max", np.maximum),
        (DataType.BFLOAT16, "min", np.minimum),
        (DataType.INT32, "min", np.minimum),
        (DataType.UINT64, "add", lambda a, b: a + b),
        (DataType.INT32, "xor", np.bitwise_xor),
    ],
)
def test_reduction(kind, op, meaning):
    old, new = tensor(kind, (32, 6), 1), tensor(kind, (16, 4), 2)
    description = Map(0, kind, (32, 6), strides(old), (16, 4))
    values = np.full(4096, 0, np.uint8)
    values[: new.nbytes] = new.view(np.uint8).reshape(-1)
    form = f"cp.reduce.async.bulk.tensor.2d.global.shared::cta.{op}.bulk_group"
    got = run(store_kernel(2, (8, 4), 4096, form), [old, description, values])[0]
    wanted = old.copy()
    wanted[4:6, 8:24] = meaning(old[4:6, 8:24], new[:2])
    np.testing.assert_array_equal(got, wanted)


def test_prefetch_changes_nothing():
    array = tensor(DataType.UINT16, (64, 32))
    body = """mov.u32 %r30, 0;
@%p1 cp.async.bulk.prefetch.tensor.2d.L2.global [%rd2, {%r30, %r30}];
@%p1 prefetch.tensormap [%rd2];
st.global.u32 [%rd1], 5;
"""
    description = Map(2, DataType.UINT16, (64, 32), strides(array), (64, 1))
    assert run(ptx(body, "out map! src"), [words(1), description, array])[0][0] == 5


# -- misuse ----------------------------------------------------------------------------------------------------------


def fails(text, description, code, match, array=None, error=Fault, order="eager"):
    array = tensor(DataType.UINT16, (64, 32)) if array is None else array
    with pytest.raises(error, match=match) as caught:
        engine.load(text).launch(1, 32, [words(1024), description.encode(array.ctypes.data), array], order=order)
    assert caught.value.code == code
    assert "PTX line" in str(caught.value)


def test_misuse_is_named():
    array = tensor(DataType.UINT16, (64, 32))
    good = Map(2, DataType.UINT16, (64, 32), strides(array), (64, 4))
    fails(load_kernel(3, (0, 0, 0), 512), good, "tensor-map", "3-D copy with a map of 2")
    fails(load_kernel(2, (0, 0), 512, start=16), good, "misaligned", "multiple of 128")
    fails(load_kernel(2, (0, 0), 512, start=3840), good, "out-of-bounds", "TMA load")
    fails(load_kernel(2, (0, 0), 500), good, "deadlock", "already copied", error=Deadlock)
    fails(load_kernel(2, (0, 0), 1024), good, "deadlock", "512 byte", error=Deadlock)
    longer = Map(2, DataType.UINT16, (64, 4096), strides(array), (64, 4))
    for order in ("eager", "latest"):
        fails(load_kernel(2, (0, 30), 512), longer, "out-of-bounds", "src", array, order=order)
    form = "cp.async.bulk.tensor.2d.tile::gather4.shared::cta.global.mbarrier::complete_tx::bytes"
    text = load_kernel(2, (0, 0, 0, 0, 0), 512, form=form, target="sm_100a", version="8.6")
    fails(text, good, "tensor-map", r"box_dim\[1\] = 1")


def test_padded_fp4_is_not_stored():
    array = np.zeros((4, 64), np.uint8)
    padded = Map(2, DataType.U4_ALIGN16B, (128, 4), (64,), (128, 4))
    form = "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group"
    text = store_kernel(2, (0, 0), 256, form, target="sm_100a", version="8.6")
    fails(text, padded, "tensor-map", "not stored", aligned(array))


def test_map_that_is_none():
    class Junk:
        def encode(self, address):
            return bytes(range(128))

    fails(load_kernel(2, (0, 0), 512), Junk(), "tensor-map", "not a tensor map")


@pytest.mark.parametrize(
    "instruction, why",
    [
        (f"cp.async.bulk.tensor.2d.{TO_SHARED} [%r2], [%rd2, {{%r3}}], [%r3];", "coordinates"),
        (f"cp.async.bulk.tensor.6d.{TO_SHARED} [%r2], [%rd2, {{%r3}}], [%r3];", "dimension"),
        ("cp.async.bulk.tensor.2d.shared::cluster.global.bulk_group [%r2], [%rd2, {%r3, %r3}], [%r3];", "modifiers"),
        ("cp.reduce.async.bulk.tensor.1d.global.shared::cta.bulk_group [%rd2, {%r3}], [%r2];", "modifiers"),
    ],
)
def test_unknown_forms_are_refused_when_loaded(instruction, why):
    with pytest.raises(Unsupported, match=why):
        engine.load(ptx(instruction, "out map!", shared=SHARED.format(size=1024)))
