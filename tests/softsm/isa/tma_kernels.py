"""Kernels that load or store one box by TMA, and what shared memory then holds, element by element."""

import itertools

import ml_dtypes
import numpy as np
from launching import ptx, wait

from softsm.memory.tensor_map import DataType, Swizzle

SHARED = ".shared .align 8 .b8 bar[8]; .shared .align 1024 .b8 data[{size}];"
DTYPE = {
    DataType.UINT8: np.uint8,
    DataType.UINT16: np.uint16,
    DataType.FLOAT16: np.float16,
    DataType.BFLOAT16: ml_dtypes.bfloat16,
    DataType.FLOAT32: np.float32,
    DataType.INT32: np.int32,
    DataType.INT64: np.int64,
    DataType.UINT64: np.uint64,
}


def tensor(kind, dims, seed=0):
    """Elements of a dense tensor, outermost dimension first; rows are multiples of 16 bytes."""
    dtype = DTYPE[kind]
    nbytes = int(np.prod(dims)) * np.dtype(dtype).itemsize
    raw = np.random.default_rng(seed).integers(0, 255, nbytes, dtype=np.uint8)
    if np.dtype(dtype).kind not in "ui":
        raw = np.random.default_rng(seed).standard_normal(int(np.prod(dims))).astype(dtype).view(np.uint8)
    return raw.view(dtype).reshape(dims[::-1])


def strides(array):
    return tuple(reversed(array.strides))[1:]


def where(address, swizzle):
    line, byte = divmod(address, 128)
    match swizzle:
        case Swizzle.B32:
            return address ^ (line % 2) << 4
        case Swizzle.B64:
            return address ^ (line % 4) << 4
        case Swizzle.B128:
            return address ^ (line % 8) << 4
        case Swizzle.B128_ATOM_32B:
            return address ^ (line % 4) << 5
        case Swizzle.B128_ATOM_64B:
            return address ^ (line % 2) << 6
    return address


def image(array, box, coords, swizzle=Swizzle.NONE, steps=None, fill=0, size=4096, start=0):
    """Bytes of shared memory after the load; 0xEE where nothing lands. Boxes and coordinates innermost first."""
    out = np.full(size, 0xEE, np.uint8)
    item, rank = array.itemsize, array.ndim
    steps = (1, *(steps or (1,) * rank)[1:])
    counts = [-(-b // s) for b, s in zip(box, steps)]
    pitch = max(counts[0] * item, swizzle.span)
    for row, outer in enumerate(itertools.product(*(range(c) for c in reversed(counts[1:])))):
        for i in range(counts[0]):
            at = [c + k * s for c, k, s in zip(coords, (i, *reversed(outer)), steps)]
            inside = all(0 <= a < n for a, n in zip(at, array.shape[::-1]))
            value = array[tuple(reversed(at))].tobytes() if inside else fill.to_bytes(item, "little")
            for b in range(item):
                out[where(start + row * pitch + i * item + b, swizzle)] = value[b]
    return out


def load_kernel(rank, coords, nbytes, size=4096, start=0, form=None, target="sm_90a", version="8.0", more=""):
    numbers = "".join(f"mov.u32 %r{30 + i}, {c};\n" for i, c in enumerate(coords))
    listed = ", ".join(f"%r{30 + i}" for i in range(len(coords)))
    form = form or f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes"
    body = f"""mov.u32 %r2, data;
mov.u32 %r3, bar;
mad.lo.u32 %r4, %r1, 4, %r2;
mov.u32 %r5, {size};
add.u32 %r5, %r5, %r2;
FILL:
st.shared.u32 [%r4], 0xeeeeeeee;
add.u32 %r4, %r4, 128;
setp.lt.u32 %p2, %r4, %r5;
@%p2 bra FILL;
@%p1 mbarrier.init.shared::cta.b64 [%r3], 1;
fence.proxy.async.shared::cta;
bar.sync 0;
{numbers}
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], {nbytes};
@%p1 {form} [%r2+{start}], [%rd2, {{{listed}}}], [%r3]{more};
{wait("%r3", 0, "W")}
mad.lo.u32 %r4, %r1, 4, %r2;
mul.wide.u32 %rd5, %r1, 4;
add.s64 %rd5, %rd1, %rd5;
DUMP:
ld.shared.u32 %r6, [%r4];
st.global.u32 [%rd5], %r6;
add.u32 %r4, %r4, 128;
add.s64 %rd5, %rd5, 128;
setp.lt.u32 %p2, %r4, %r5;
@%p2 bra DUMP;
"""
    return ptx(body, "out map! src", shared=SHARED.format(size=size), target=target, version=version)


def store_kernel(rank, coords, source_bytes, form, *, target="sm_90a", version="8.0"):
    """Fills shared memory from `values` (word by word), then stores the box."""
    numbers = "".join(f"mov.u32 %r{30 + i}, {c};\n" for i, c in enumerate(coords))
    listed = ", ".join(f"%r{30 + i}" for i in range(len(coords)))
    body = f"""mov.u32 %r2, data;
mad.lo.u32 %r4, %r1, 4, %r2;
add.u32 %r5, %r2, {source_bytes};
mul.wide.u32 %rd5, %r1, 4;
add.s64 %rd5, %rd3, %rd5;
FILL:
ld.global.u32 %r6, [%rd5];
st.shared.u32 [%r4], %r6;
add.u32 %r4, %r4, 128;
add.s64 %rd5, %rd5, 128;
setp.lt.u32 %p2, %r4, %r5;
@%p2 bra FILL;
fence.proxy.async.shared::cta;
bar.sync 0;
{numbers}
@!%p1 bra END;
{form} [%rd2, {{{listed}}}], [%r2];
cp.async.bulk.commit_group;
cp.async.bulk.wait_group.read 0;
st.shared.u32 [%r2], 0;
cp.async.bulk.wait_group 0;
END:
"""
    return ptx(body, "out map! values", shared=SHARED.format(size=4096), target=target, version=version)
