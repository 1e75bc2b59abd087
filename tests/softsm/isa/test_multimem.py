"""multimem instructions against plain NumPy, on one GPU and between several."""

import ml_dtypes
import numpy as np
import pytest
from launching import aligned, ptx

import softsm
from softsm.errors import Fault, Unsupported

BF16 = ml_dtypes.bfloat16
GPUS = 3
LOADS = [
    # modifiers after .ld_reduce, dtype of the elements, elements of a thread, kind of register
    ("global.add.u32", np.uint32, 1, "b32"), ("relaxed.sys.global.add.u64", np.uint64, 1, "b64"),
    ("acquire.gpu.add.s32", np.int32, 1, "b32"), ("weak.global.min.s64", np.int64, 1, "b64"),
    ("global.max.s32", np.int32, 1, "b32"), ("global.xor.b32", np.uint32, 1, "b32"),
    ("global.and.b64", np.uint64, 1, "b64"), ("relaxed.sys.global.add.f32", np.float32, 1, "b32"),
    ("relaxed.sys.global.add.v4.f32", np.float32, 4, "b32"), ("global.add.f64", np.float64, 1, "b64"),
    ("global.add.v4.f16x2", np.float16, 8, "b32"), ("global.add.acc::f32.v4.bf16x2", BF16, 8, "b32"),
    ("global.max.v2.bf16x2", BF16, 4, "b32"), ("global.min.v8.f16", np.float16, 8, "b16"),
]  # fmt: skip
MEANING = {
    "add": sum,
    "min": min,
    "max": max,
    "xor": lambda x: int(x[0]) ^ int(x[1]) ^ int(x[2]),
    "and": lambda x: int(x[0]) & int(x[1]) & int(x[2]),
}


def drawn(rng, shape, dtype):
    """Sums of floats are exact, those of unsigned integers wrap."""
    if np.dtype(dtype).kind in "iu":
        info = np.iinfo(dtype)
        low, high = (info.min // 4, info.max // 4) if info.min else (0, info.max)
        return rng.integers(low, high, shape, dtype, endpoint=True)
    return (rng.integers(-40, 40, shape) / 2).astype(dtype)


def members_of(arrays):
    arrays = [aligned(x) for x in arrays]
    return arrays, softsm.multicast(arrays)


def registers(count, kind):
    name = {"b16": "%rs", "b32": "%r", "b64": "%rd"}[kind]
    listed = [f"{name}{i + (8 if kind != 'b16' else 0)}" for i in range(count)]
    return listed, listed[0] if count == 1 else "{" + ", ".join(listed) + "}"


def kernel(body, params, **options):
    return ptx(body, params, **options).replace(".reg .b16 %rs<4>", ".reg .b16 %rs<12>")


@pytest.mark.parametrize("modifiers, dtype, count, kind", LOADS)
def test_loads_reduce_over_all_gpus(modifiers, dtype, count, kind):
    op = next(m for m in modifiers.split(".") if m in MEANING)
    rng = np.random.default_rng(len(modifiers))
    arrays, address = members_of(drawn(rng, (GPUS, 32, count), dtype))
    size = arrays[0].itemsize * count
    each = size // (4 if kind == "b32" else 8 if kind == "b64" else 2)
    listed, operand = registers(each, kind)
    body = f"mul.wide.u32 %rd5, %r1, {size};\nadd.s64 %rd6, %rd2, %rd5;\nadd.s64 %rd7, %rd1, %rd5;\n"
    body += f"multimem.ld_reduce.{modifiers} {operand}, [%rd6];\n"
    body += "".join(f"st.global.{kind} [%rd7+{i * size // each}], {r};\n" for i, r in enumerate(listed))
    out = np.full((32, count), 77, dtype)
    softsm.load(kernel(body, "out from", version="8.2")).launch(1, 32, [out, address.multicast_ptr])
    for at in np.ndindex(out.shape):
        values = [x[at] for x in arrays]
        if np.dtype(dtype).kind in "iu":
            want = np.array(MEANING[op]([int(v) for v in values]) % (1 << 8 * out.itemsize), np.uint64).astype(dtype)
        else:
            want = dtype(MEANING[op]([float(v) for v in values]))
        assert out[at] == want, at


def test_precision_of_sums():
    """2048 + 1 + 1: an f16 sum loses both ones, one that is kept as f32 neither."""
    arrays, address = members_of(np.full((GPUS, 2), 1, np.float16))
    arrays[0][:] = 2048
    for name, want in (("add", 2048), ("add.acc::f32", 2050)):
        out = np.zeros(2, np.float16)
        body = f"multimem.ld_reduce.global.{name}.f16x2 %r8, [%rd2];\nst.global.b32 [%rd1], %r8;\n"
        softsm.load(kernel(body, "out from", version="8.2")).launch(1, 1, [out, address.multicast_ptr])
        assert (out == want).all()


def test_stores_go_to_all_gpus():
    arrays, address = members_of(np.full((GPUS, 100), 0xEEEEEEEE, np.uint32))
    body = "mul.wide.u32 %rd5, %r1, 8;\nadd.s64 %rd6, %rd1, %rd5;\nadd.u32 %r8, %r1, 1000;\n"
    body += "multimem.st.release.sys.global.v2.f32 [%rd6+16], {%r1, %r8};\n"
    softsm.load(kernel(body, "to", version="8.1")).launch(1, 32, [address.multicast_ptr])
    wanted = np.full(100, 0xEEEEEEEE, np.uint32)
    wanted[4:68:2], wanted[5:68:2] = np.arange(32), np.arange(1000, 1032)
    for array in arrays:
        np.testing.assert_array_equal(array, wanted)


@pytest.mark.parametrize(
    "modifiers, dtype, value, want",
    [
        ("add.u32", np.uint32, "%r1", 10 + 496),
        ("relaxed.gpu.global.max.s32", np.int32, "%r1", 31),
        ("release.sys.global.xor.b32", np.uint32, "%r1", 10),
        ("global.add.v2.bf16x2", BF16, "{%r9, %r9}", 74),
    ],
)
def test_reductions_change_the_memory_of_all_gpus(modifiers, dtype, value, want):
    arrays, address = members_of(np.full((GPUS, 16), 10, dtype))
    body = f"mov.b32 %r9, 0x40004000;\nmultimem.red.{modifiers} [%rd1], {value};\n"
    softsm.load(kernel(body, "to", version="8.1")).launch(1, 32, [address.multicast_ptr])
    touched = 4 if "v2" in modifiers else 1
    for array in arrays:
        assert (array[:touched] == want).all() and (array[touched:] == 10).all()


# Every GPU fills its own part, tells all of them, waits until all have told it, and adds up.
ALL_REDUCE = f"""mul.wide.u32 %rd7, %r1, 4;
add.s64 %rd8, %rd2, %rd7;
cvt.u32.u64 %r9, %rd6;
mad.lo.u32 %r8, %r9, 100, %r1;
st.global.u32 [%rd8], %r8;
bar.sync 0;
mov.u32 %r10, 1;
@%p1 multimem.red.ORDER.SCOPE.global.add.u32 [%rd4], %r10;
WAITING: ld.acquire.sys.global.u32 %r11, [%rd3];
setp.lt.u32 %p2, %r11, {GPUS};
@%p2 bra WAITING;
add.s64 %rd8, %rd5, %rd7;
multimem.ld_reduce.weak.global.add.u32 %r12, [%rd8];
add.s64 %rd8, %rd1, %rd7;
st.global.u32 [%rd8], %r12;
"""


def all_reduced(order, scope):
    body = ALL_REDUCE.replace("ORDER", order).replace("SCOPE", scope)
    program = softsm.load(kernel(body, "out mine flag flags data rank", version="8.1"))
    buffers, data = members_of(np.zeros((GPUS, 32), np.uint32))
    counts, flags = members_of(np.zeros((GPUS, 4), np.uint32))
    out = np.zeros((GPUS, 32), np.uint32)

    def of_rank(rank):
        program.launch(1, 32, [out[rank], buffers[rank], counts[rank], flags.multicast_ptr, data.multicast_ptr, rank])

    with softsm.checking() as report:
        softsm.ranks(GPUS, of_rank)
    return out, report


def test_an_all_reduce():
    out, report = all_reduced("release", "sys")
    assert not report, str(report)
    np.testing.assert_array_equal(out, np.tile(300 + 3 * np.arange(32), (GPUS, 1)))


@pytest.mark.parametrize("order, scope", [("relaxed", "sys"), ("release", "gpu")])
def test_who_does_not_release_to_all_races(order, scope):
    assert "race" in all_reduced(order, scope)[1].codes()


@pytest.mark.parametrize(
    "instruction, offset, code, what",
    [
        ("ld.global.u32 %r8, [%rd5];", 0, "out-of-bounds", "outside every known allocation"),
        ("multimem.st.global.u32 [%rd5], %r1;", 64, "out-of-bounds", "not an address of softsm.multicast"),
        ("multimem.st.global.v4.f32 [%rd5], {%r1, %r1, %r1, %r1};", 4, "misaligned", "a multiple of 16"),
    ],
)
def test_addresses_that_cannot_be_meant(instruction, offset, code, what):
    _, address = members_of(np.zeros((2, 16), np.uint32))
    text = kernel(f"add.s64 %rd5, %rd1, {offset};\n{instruction}\n", "at", version="8.1")
    with pytest.raises(Fault, match=what) as error:
        softsm.load(text).launch(1, 1, [address.multicast_ptr])
    assert error.value.code == code


@pytest.mark.parametrize(
    "instruction, why",
    [
        ("multimem.ld_reduce.global.add.b32 %r8, [%rd1];", ".add is not defined for .b32"),
        ("multimem.red.acquire.sys.global.add.u32 [%rd1], %r8;", "unknown modifier .acquire"),
        ("multimem.red.global.min.f16x2 [%rd1], %r8;", "is .add"),
        ("multimem.ld_reduce.global.add.v4.f64 {%rd2, %rd3, %rd4, %rd5}, [%rd1];", "4 elements of .f64"),
        ("multimem.ld_reduce.global.add.f16 %rs1, [%rd1];", "1 elements of .f16"),
        ("multimem.ld_reduce.global.add.e4m3x4 %r8, [%rd1];", "does not say what they do"),
        ("multimem.ld.global.u32 %r8, [%rd1];", "expected multimem.ld_reduce"),
    ],
)
def test_what_does_not_exist_is_refused(instruction, why):
    with pytest.raises(Unsupported, match=why):
        softsm.load(kernel(instruction, "at", version="8.6"))
