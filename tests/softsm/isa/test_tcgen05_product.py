"""tcgen05.mma as a function on memories: every kind, layout and option against a plain matrix product. Values are small
multiples of 1/2, so every sum is exact and results must be equal."""

from types import SimpleNamespace

import layouts
import numpy as np
import pytest
from sparse_matrices import draw_codes, drawn, meant, put_metadata

from softsm.errors import Fault
from softsm.isa import instruction_descriptor as idesc
from softsm.isa import tcgen05_product as tcgen05
from softsm.memory import swizzle
from softsm.memory.tensor_memory import TensorMemory

A_AT, B_AT = 1024, 65536


def new_cta():
    return SimpleNamespace(shared=np.zeros(200 * 1024, np.uint8), tmem=TensorMemory())


def place(cta, tile, name, mode, k_major, start):
    lbo, sbo = layouts.place(cta.shared, tile, name, mode, k_major, start)
    return swizzle.decode(layouts.descriptor(start, lbo, sbo, mode, True), True)


def where(m, n, rows, columns, ws, pair):
    """Lane and column of D's element (m, n) within one CTA."""
    if rows == 128:
        return m, n
    if rows == 32:
        return m + 32 * (n // (columns // 4)), n % (columns // 4)
    if ws or pair:
        return m + 64 * (n // (columns // 2)), n % (columns // 2)
    return 32 * (m // 16) + m % 16, n


def read_d(cta, rows, columns, d, column=0, lane=0, ws=False, pair=False):
    out = np.zeros((rows, columns), np.uint32)
    for m in range(rows):
        for n in range(columns):
            at, c = where(m, n, rows, columns, ws, pair)
            out[m, n] = cta.tmem.cells[column + c, lane + at]
    if d == "f16":
        return out.astype(np.uint16).view(np.float16).astype(np.float32)
    return out.view(np.int32) if d == "s32" else out.view(np.float32)


CASES = [
    # kind, A, B, D, M, N, A K-major, B K-major, swizzles
    ("f16", "bf16", "bf16", "f32", 128, 256, True, True, layouts.SW128),
    ("f16", "f16", "f16", "f32", 128, 64, True, False, layouts.SW128),
    ("f16", "f16", "f16", "f16", 128, 32, False, True, layouts.SW64),
    ("f16", "bf16", "bf16", "f32", 64, 128, False, False, layouts.SW128),
    ("f16", "bf16", "bf16", "f32", 64, 24, True, True, layouts.SW32),
    ("f16", "bf16", "bf16", "f32", 128, 48, True, True, layouts.NONE),
    ("f16", "bf16", "bf16", "f32", 128, 64, False, False, layouts.NONE),
    ("f16", "bf16", "bf16", "f32", 64, 64, False, True, layouts.SW32),
    ("tf32", "tf32", "tf32", "f32", 128, 64, True, True, layouts.SW128),
    ("tf32", "tf32", "tf32", "f32", 64, 64, False, False, layouts.ATOM32),
    ("f8f6f4", "e4m3", "e5m2", "f32", 128, 64, True, True, layouts.SW128),
    ("f8f6f4", "e4m3", "e4m3", "f16", 64, 64, False, False, layouts.SW64),
    ("f8f6f4", "e2m1", "e3m2", "f32", 128, 32, True, True, layouts.SW128),
    ("f8f6f4", "e2m3", "e2m1", "f32", 128, 32, True, True, layouts.NONE),
    ("i8", "s8", "u8", "s32", 128, 32, True, True, layouts.SW128),
    ("i8", "u8", "s8", "s32", 64, 24, True, True, layouts.SW128),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
def test_products_from_shared_memory(case):
    kind, a_type, b_type, d_type, m, n, a_k, b_k, mode = case
    rng = np.random.default_rng(1)
    k = idesc.K_OF_KIND[kind]
    a, b = layouts.values(rng, (m, k), a_type), layouts.values(rng, (n, k), b_type)
    cta = new_cta()
    a_desc, b_desc = place(cta, a, a_type, mode, a_k, A_AT), place(cta, b, b_type, mode, b_k, B_AT)
    value = idesc.encode(kind, m, n, a_type, b_type, d_type, a_mn=not a_k, b_mn=not b_k)
    p = tcgen05.Product(idesc.decode(value, kind), False, False, 0, 32, a_desc, 0, b_desc, add=False)
    tcgen05.perform(p, [cta])
    want = a @ b.T
    np.testing.assert_array_equal(read_d(cta, m, n, d_type, 32), want)
    tcgen05.perform(p._replace(add=True), [cta])
    np.testing.assert_array_equal(read_d(cta, m, n, d_type, 32), 2 * want)
    if kind in ("f16", "tf32"):
        tcgen05.perform(p._replace(add=True, scale_exponent=1), [cta])
        np.testing.assert_array_equal(read_d(cta, m, n, d_type, 32), 2 * want)


def pack_tensor(cta, a, name, lanes, column):
    """Store A in tensor memory: 32 bytes of k in each lane."""
    code = layouts.bits(a, name)
    if name == "e2m1":
        code = code << 2  # 4-bit values sit in bits 2-5 of their container
    words = np.ascontiguousarray(code.reshape(len(a), -1)).view(np.uint32)
    for row, lane in enumerate(lanes):
        cta.tmem.cells[column : column + words.shape[1], lane] = words[row]


@pytest.mark.parametrize(
    ("kind", "name", "m", "ws", "lane"),
    [("f16", "bf16", 128, False, 0), ("f16", "f16", 64, False, 0), ("f16", "bf16", 64, False, 16),
     ("tf32", "tf32", 128, False, 0), ("f8f6f4", "e4m3", 128, False, 0), ("f8f6f4", "e2m1", 128, False, 0),
     ("f8f6f4", "e3m2", 64, False, 0), ("i8", "s8", 128, False, 0), ("f16", "bf16", 128, True, 0),
     ("f16", "bf16", 64, True, 0), ("f16", "bf16", 32, True, 0), ("i8", "u8", 32, True, 0)],
)  # fmt: skip
def test_products_with_a_in_tensor_memory(kind, name, m, ws, lane):
    rng = np.random.default_rng(2)
    n, k = 64, idesc.K_OF_KIND[kind]
    a, b = layouts.values(rng, (m, k), name), layouts.values(rng, (n, k), name)
    cta = new_cta()
    b_desc = place(cta, b, name, layouts.SW128, True, B_AT)
    repeat = 128 // m if ws else 1  # every part of D reads its own copy of A
    for r in range(repeat):
        lanes = [r * m + i if m == 128 or ws else 32 * (i // 16) + i % 16 + lane for i in range(m)]
        pack_tensor(cta, a, name, lanes, 300)
    d = "s32" if kind == "i8" else "f32"
    shape = idesc.decode(idesc.encode(kind, m, n, name, name, d), kind, 1, ws)
    tcgen05.perform(tcgen05.Product(shape, ws, False, lane, 0, None, 300, b_desc, add=False), [cta])
    np.testing.assert_array_equal(read_d(cta, m, n, d, 0, lane, ws), a @ b.T)


def test_the_row_of_f32_ones_is_half_zeros_as_bf16():
    """This is a museum exhibit: A stored as f32 instead of packed bf16 makes the product 8 instead of 16."""
    cta = new_cta()
    b_desc = place(cta, np.ones((64, 16), np.float32), "bf16", layouts.SW128, True, B_AT)
    cta.tmem.cells[300:308] = 0x3F800000
    shape = idesc.decode(idesc.encode("f16", 128, 64, "bf16", "bf16"), "f16")
    p = tcgen05.Product(shape, False, False, 0, 0, None, 300, b_desc, add=False)
    tcgen05.perform(p, [cta])
    assert (read_d(cta, 128, 64, "f32") == 8).all()
    cta.tmem.cells[300:308] = 0x3F803F80
    tcgen05.perform(p, [cta])
    assert (read_d(cta, 128, 64, "f32") == 16).all()


@pytest.mark.parametrize("m", [64, 32])
def test_ws_layouts_from_shared_memory(m):
    rng = np.random.default_rng(3)
    a, b = layouts.values(rng, (m, 16), "bf16"), layouts.values(rng, (128, 16), "bf16")
    cta = new_cta()
    a_desc = place(cta, a, "bf16", layouts.SW128, True, A_AT)
    b_desc = place(cta, b, "bf16", layouts.SW128, True, B_AT)
    shape = idesc.decode(idesc.encode("f16", m, 128, "bf16", "bf16"), "f16", 1, True)
    tcgen05.perform(tcgen05.Product(shape, True, False, 0, 0, a_desc, 0, b_desc, add=False), [cta])
    np.testing.assert_array_equal(read_d(cta, m, 128, "f32", ws=True), a @ b.T)


@pytest.mark.parametrize("m", [256, 128])
@pytest.mark.parametrize("from_tensor", [False, True])
def test_a_pair_of_ctas_splits_rows_of_a_and_columns_of_b(m, from_tensor):
    rng = np.random.default_rng(4)
    n, half = 64, m // 2
    a, b = layouts.values(rng, (m, 16), "bf16"), layouts.values(rng, (n, 16), "bf16")
    ctas = [new_cta(), new_cta()]
    for c, cta in enumerate(ctas):
        part = a[c * half : (c + 1) * half]
        a_desc = place(cta, part, "bf16", layouts.SW128, True, A_AT)
        b_desc = place(cta, b[c * n // 2 : (c + 1) * n // 2], "bf16", layouts.SW128, True, B_AT)
        for copy in range(128 // half):
            pack_tensor(cta, part, "bf16", [copy * half + i for i in range(half)], 300)
    shape = idesc.decode(idesc.encode("f16", m, n, "bf16", "bf16"), "f16", 2)
    p = tcgen05.Product(shape, False, True, 0, 0, None if from_tensor else a_desc, 300, b_desc, add=False)
    tcgen05.perform(p, ctas)
    got = np.concatenate([read_d(cta, half, n, "f32", pair=True) for cta in ctas])
    np.testing.assert_array_equal(got, a @ b.T)


def test_disabled_lanes_and_negation():
    rng = np.random.default_rng(5)
    a, b = layouts.values(rng, (128, 16), "f16"), layouts.values(rng, (32, 16), "f16")
    cta = new_cta()
    a_desc, b_desc = (place(cta, x, "f16", layouts.SW128, True, at) for x, at in ((a, A_AT), (b, B_AT)))
    skipped = (0x0000FFFF, 0, 0xFFFFFFFF, 0x80000001)
    for d in ("f32", "f16"):
        cta.tmem.cells[:] = 7
        shape = idesc.decode(idesc.encode("f16", 128, 32, "f16", "f16", d, negate_b=True), "f16")
        tcgen05.perform(tcgen05.Product(shape, False, False, 0, 0, a_desc, 0, b_desc, False, 0, skipped), [cta])
        got = read_d(cta, 128, 32, d)
        for lane in range(128):
            if skipped[lane // 32] >> lane % 32 & 1:
                assert (cta.tmem.cells[:32, lane] == 7).all()
            else:
                np.testing.assert_array_equal(got[lane], -(a @ b.T)[lane])


def test_integer_sums_wrap_or_saturate():
    cta = new_cta()
    ones = np.full((128, 32), 127, np.float32)
    a_desc = place(cta, ones, "s8", layouts.SW128, True, A_AT)
    b_desc = place(cta, ones[:8], "s8", layouts.SW128, True, B_AT)
    for saturate, want in ((True, 2**31 - 1), (False, 2**31 - 1 + 32 * 127 * 127 - 2**32)):
        cta.tmem.cells[:8] = 2**31 - 1
        shape = idesc.decode(idesc.encode("i8", 128, 8, "s8", "s8", "s32", saturate=saturate), "i8")
        tcgen05.perform(tcgen05.Product(shape, False, False, 0, 0, a_desc, 0, b_desc, True), [cta])
        assert (cta.tmem.cells[:8].view(np.int32) == want).all()


def put_scales(cta, codes, column, first):
    """codes [rows, blocks] -> row i in lane i%32 of column i/32, bytes first.., in all four lane quarters."""
    cells = cta.tmem.cells.view(np.uint8).reshape(512, 128, 4)
    for i in range(codes.shape[0]):
        for quarter in range(4):
            cells[column + i // 32, i % 32 + 32 * quarter, first : first + codes.shape[1]] = codes[i]


def place_fp4(cta, tile, at):
    """Packed fp4, two codes in a byte, K-major with the 128B swizzle."""
    code = layouts.bits(tile, "e2m1")[..., 0] & 15
    packed = (code[:, 0::2] | code[:, 1::2] << 4).astype(np.uint8)
    for r in range(len(tile)):
        for i in range(packed.shape[1]):
            cta.shared[layouts.element_address(layouts.SW128, True, at, 0, 1024, r, i, 1)] = packed[r, i]
    return swizzle.decode(layouts.descriptor(at, 0, 1024, layouts.SW128, True), True)


@pytest.mark.parametrize(
    ("kind", "a_type", "b_type", "blocks", "scale", "ids"),
    [
        ("mxf8f6f4", "e4m3", "e2m1", 1, "ue8m0", (1, 3)),
        ("mxf8f6f4", "e5m2", "e4m3", 1, "ue8m0", (0, 0)),
        ("mxf4", "e2m1", "e2m1", 2, "ue8m0", (0, 2)),
        ("mxf4nvf4", "e2m1", "e2m1", 4, "ue4m3", (0, 0)),
        ("mxf4nvf4", "e2m1", "e2m1", 2, "ue8m0", (2, 0)),
        ("mxf4nvf4", "e2m1", "e2m1", 4, "ue8m0", (0, 0)),
    ],
)
@pytest.mark.parametrize("wide", [False, True])
def test_block_scaled_products(kind, a_type, b_type, blocks, scale, ids, wide):
    rng = np.random.default_rng(6)
    n, k = 64, idesc.K_OF_KIND[kind]
    a, b = layouts.values(rng, (128, k), a_type), layouts.values(rng, (n, k), b_type)
    cta = new_cta()
    if k == 64:  # packed fp4: two codes in a byte
        a_desc, b_desc = place_fp4(cta, a, A_AT), place_fp4(cta, b, B_AT)
    else:
        a_desc = place(cta, a, a_type, layouts.SW128, True, A_AT)
        b_desc = place(cta, b, b_type, layouts.SW128, True, B_AT)
    if scale == "ue8m0":
        low, high = (60, 70) if wide else (124, 131)
        sa, sb = rng.integers(low, high, (128, blocks)), rng.integers(low, high, (n, blocks))
        if wide:
            sb = sb + 124
        fa, fb = 2.0 ** (sa - 127.0), 2.0 ** (sb - 127.0)
    else:
        sa, sb = rng.choice([0x30, 0x38, 0x40], (128, blocks)), rng.choice([0x30, 0x38, 0x40], (n, blocks))
        lookup = {0x30: 0.5, 0x38: 1.0, 0x40: 2.0}
        fa, fb = np.vectorize(lookup.get)(sa), np.vectorize(lookup.get)(sb)
    put_scales(cta, sa.astype(np.uint8), 256, ids[0])
    put_scales(cta, sb.astype(np.uint8), 264, ids[1])
    value = idesc.encode(kind, 128, n, a_type, b_type, scale=scale, a_scale_id=ids[0], b_scale_id=ids[1])
    shape = idesc.decode(value, kind)
    p = tcgen05.Product(shape, False, False, 0, 0, a_desc, 0, b_desc, False, 0, (), (256, 264), blocks)
    tcgen05.perform(p, [cta])
    want = (a * np.repeat(fa, k // blocks, 1)) @ (b * np.repeat(fb, k // blocks, 1)).T
    np.testing.assert_array_equal(read_d(cta, 128, n, "f32"), want.astype(np.float32))


def test_scale_factors_change_no_other_column():
    """Rows without a reader may have any scale factors: a last tile that is not full has any bytes there."""
    rng = np.random.default_rng(7)
    n, k = 64, 32
    a = layouts.values(rng, (128, k), "e4m3")
    b = layouts.values(rng, (n, k), "e4m3")
    found = []
    start = rng.standard_normal((n, 128)).astype(np.float32).view(np.uint32)
    for odd in (127, 250):
        cta = new_cta()
        descriptors = place(cta, a, "e4m3", layouts.SW128, True, A_AT), place(cta, b, "e4m3", layouts.SW128, True, B_AT)
        put_scales(cta, np.full((128, 1), 127, np.uint8), 256, 0)
        scales = np.full((n, 1), 127, np.uint8)
        scales[5] = odd
        put_scales(cta, scales, 264, 0)
        cta.tmem.cells[:n] = start
        shape = idesc.decode(idesc.encode("mxf8f6f4", 128, n, "e4m3", "e4m3", scale="ue8m0"), "mxf8f6f4")
        p = tcgen05.Product(shape, False, False, 0, 0, descriptors[0], 0, descriptors[1], True, 0, (), (256, 264), 1)
        tcgen05.perform(p, [cta])
        found.append(read_d(cta, 128, n, "f32"))
    others = np.arange(n) != 5
    np.testing.assert_array_equal(found[0][:, others], found[1][:, others])
    want = np.ldexp(a @ b[5], 250 - 127) + start.view(np.float32)[5].astype(np.float64)
    np.testing.assert_array_equal(found[1][:, 5], want.astype(np.float32))


SPARSE = [
    # kind, A, B, D, A K-major, B K-major, swizzle of A, of B, selector
    ("f16", "bf16", "bf16", "f32", True, True, layouts.SW128, layouts.SW128, 0),
    ("f16", "f16", "f16", "f16", False, False, layouts.SW64, layouts.SW32, 1),
    ("f16", "f16", "f16", "f32", True, True, layouts.NONE, layouts.NONE, 0),
    ("tf32", "tf32", "tf32", "f32", True, True, layouts.SW32, layouts.SW64, 1),
    ("f8f6f4", "e4m3", "e5m2", "f32", True, True, layouts.SW128, layouts.SW64, 0),
    ("f8f6f4", "e2m1", "e3m2", "f16", True, True, layouts.SW128, layouts.SW128, 0),
    ("i8", "s8", "u8", "s32", True, False, layouts.SW128, layouts.SW128, 0),
]


def sparse_case(kind, a_type, b_type, d_type, a_k, b_k, a_mode, b_mode, selector, n=64, seed=3):
    rng = np.random.default_rng(seed)
    k = 2 * idesc.K_OF_KIND[kind]
    given, codes, a = drawn(rng, 128, k, a_type)
    b = layouts.values(rng, (n, k), b_type)
    cta = new_cta()
    cta.tmem.cells[400:404] = rng.integers(0, 1 << 32, (4, 128), dtype=np.uint32)
    put_metadata(cta.tmem.cells, codes, 400 + selector)
    a_desc, b_desc = place(cta, given, a_type, a_mode, a_k, A_AT), place(cta, b, b_type, b_mode, b_k, B_AT)
    value = idesc.encode(
        kind, 128, n, a_type, b_type, d_type, a_mn=not a_k, b_mn=not b_k, sparse=True, selector=selector
    )
    shape = idesc.decode(value, kind, sparse=True)
    return cta, tcgen05.Product(shape, False, False, 0, 32, a_desc, 0, b_desc, False, metadata=400), given, a, b


@pytest.mark.parametrize("case", SPARSE, ids=lambda c: "-".join(map(str, c)))
def test_sparse_products(case):
    cta, p, given, a, b = sparse_case(*case)
    tcgen05.perform(p, [cta])
    want = a @ b.T
    np.testing.assert_array_equal(read_d(cta, 128, 64, case[3], 32), want)
    tcgen05.perform(p._replace(add=True), [cta])
    np.testing.assert_array_equal(read_d(cta, 128, 64, case[3], 32), 2 * want)


def test_sparse_a_in_tensor_memory():
    cta, p, given, a, b = sparse_case(*SPARSE[0])
    words = layouts.bits(given, "bf16").reshape(128, 8, 4).copy().view(np.uint32)[..., 0]
    cta.tmem.cells[300:308] = words.T
    tcgen05.perform(p._replace(a=None, a_column=300), [cta])
    np.testing.assert_array_equal(read_d(cta, 128, 64, "f32", 32), a @ b.T)


def test_sparse_products_of_a_pair():
    """Each CTA holds 128 rows of A with their metadata, and half of the columns of B."""
    rng = np.random.default_rng(4)
    given, codes, a = drawn(rng, 256, 32, "bf16")
    b = layouts.values(rng, (64, 32), "bf16")
    ctas = [new_cta(), new_cta()]
    for i, cta in enumerate(ctas):
        put_metadata(cta.tmem.cells, codes[128 * i : 128 * i + 128], 400)
        a_desc = place(cta, given[128 * i : 128 * i + 128], "bf16", layouts.SW128, True, A_AT)
        b_desc = place(cta, b[32 * i : 32 * i + 32], "bf16", layouts.SW128, True, B_AT)
    shape = idesc.decode(idesc.encode("f16", 256, 64, "bf16", "bf16", sparse=True), "f16", 2, sparse=True)
    tcgen05.perform(tcgen05.Product(shape, False, True, 0, 0, a_desc, 0, b_desc, False, metadata=400), ctas)
    got = np.concatenate([read_d(cta, 128, 64, "f32") for cta in ctas])
    np.testing.assert_array_equal(got, a @ b.T)


@pytest.mark.parametrize(("kind", "name", "m", "ws", "lane", "in_tensor_memory"), [
    ("f16", "bf16", 64, False, 0, False), ("f16", "f16", 64, False, 16, True), ("tf32", "tf32", 64, False, 16, False),
    ("f8f6f4", "e4m3", 64, False, 16, True), ("i8", "s8", 64, False, 0, False),
    ("f16", "bf16", 128, True, 0, False), ("f16", "bf16", 64, True, 0, True), ("f16", "f16", 32, True, 0, False),
    ("tf32", "tf32", 32, True, 0, True), ("f8f6f4", "e5m2", 64, True, 0, False), ("i8", "u8", 32, True, 0, True),
])  # fmt: skip
def test_sparse_products_of_fewer_rows_and_ws(kind, name, m, ws, lane, in_tensor_memory):
    """Metadata lie in the lanes of D; where D is folded each part has its own, here with another choice of columns."""
    rng = np.random.default_rng(8)
    n, k, parts = 64, 2 * idesc.K_OF_KIND[kind], 128 // m if ws else 1
    cta = new_cta()
    cta.tmem.cells[:] = rng.integers(0, 1 << 32, cta.tmem.cells.shape, dtype=np.uint32)
    d, selector = "s32" if kind == "i8" else "f32", int(kind in ("f16", "tf32"))
    b = layouts.values(rng, (n, k), name)
    b_desc = place(cta, b, name, layouts.SW128, True, B_AT)
    given, want = layouts.values(rng, (m, k // 2), name), np.zeros((m, n), np.float32)
    for part in range(parts):
        codes = draw_codes(rng, m, k, name)
        lanes = [part * m + i if ws else 32 * (i // 16) + i % 16 + lane for i in range(m)]
        put_metadata(cta.tmem.cells, codes, 400 + selector, lanes)
        pack_tensor(cta, given, name, lanes, 300)
        columns = slice(part * n // parts, (part + 1) * n // parts)
        want[:, columns] = meant(given, codes, name) @ b[columns].T
    value = idesc.encode(kind, m, n, name, name, d, sparse=True, selector=selector)
    a_desc = None if in_tensor_memory else place(cta, given, name, layouts.SW128, True, A_AT)
    shape = idesc.decode(value, kind, 1, ws, True)
    p = tcgen05.Product(shape, ws, False, lane, 32, a_desc, 300, b_desc, add=False, metadata=400)
    before = cta.tmem.cells.copy()
    tcgen05.perform(p, [cta])
    np.testing.assert_array_equal(read_d(cta, m, n, d, 32, lane, ws), want)
    assert (cta.tmem.cells != before).sum() <= m * n
    tcgen05.perform(p._replace(add=True), [cta])
    np.testing.assert_array_equal(read_d(cta, m, n, d, 32, lane, ws), 2 * want)


def test_sparse_products_of_a_pair_with_64_rows_in_each():
    """Layout C has 16 rows in each lane quarter, like those of one CTA, and all columns of D."""
    rng = np.random.default_rng(9)
    given, codes, a = drawn(rng, 128, 32, "bf16")
    b = layouts.values(rng, (32, 32), "bf16")
    ctas, lanes = [new_cta(), new_cta()], [32 * (i // 16) + i % 16 + 16 for i in range(64)]
    for i, cta in enumerate(ctas):
        put_metadata(cta.tmem.cells, codes[64 * i : 64 * i + 64], 400, lanes)
        a_desc = place(cta, given[64 * i : 64 * i + 64], "bf16", layouts.SW128, True, A_AT)
        b_desc = place(cta, b[16 * i : 16 * i + 16], "bf16", layouts.SW128, True, B_AT)
    shape = idesc.decode(idesc.encode("f16", 128, 32, "bf16", "bf16", sparse=True), "f16", 2, sparse=True)
    tcgen05.perform(tcgen05.Product(shape, False, True, 16, 0, a_desc, 0, b_desc, False, metadata=400), ctas)
    got = np.concatenate([read_d(cta, 64, 32, "f32", lane=16) for cta in ctas])
    np.testing.assert_array_equal(got, a @ b.T)


@pytest.mark.parametrize(
    ("kind", "a_type", "b_type", "blocks", "scale"),
    [
        ("mxf8f6f4", "e4m3", "e2m1", 1, "ue8m0"),
        ("mxf4", "e2m1", "e2m1", 2, "ue8m0"),
        ("mxf4nvf4", "e2m1", "e2m1", 4, "ue4m3"),
    ],
)
@pytest.mark.parametrize("wide", [False, True])
def test_sparse_block_scaled_products(kind, a_type, b_type, blocks, scale, wide):
    """A scale factor is for K / blocks columns: 64 of mxf8f6f4 and mxf4, 32 of scale_vec::4X."""
    rng = np.random.default_rng(7)
    n, k, packed = 64, 2 * idesc.K_OF_KIND[kind], kind != "mxf8f6f4"
    given, codes, a = drawn(rng, 128, k, a_type, packed)
    b = layouts.values(rng, (n, k), b_type)
    cta = new_cta()
    put_metadata(cta.tmem.cells, codes, 400)
    if packed:
        a_desc, b_desc = place_fp4(cta, given, A_AT), place_fp4(cta, b, B_AT)
    else:
        a_desc, b_desc = (
            place(cta, tile, name, layouts.SW128, True, at)
            for tile, name, at in ((given, a_type, A_AT), (b, b_type, B_AT))
        )
    if scale == "ue8m0":
        low = 60 if wide else 124
        sa, sb = (rng.integers(low, low + 6, (rows, blocks)) for rows in (128, n))
        sb = sb + (124 if wide else 0)
        fa, fb = 2.0 ** (sa - 127.0), 2.0 ** (sb - 127.0)
    else:
        sa, sb = (rng.choice([0x30, 0x38, 0x40], (rows, blocks)) for rows in (128, n))
        fa, fb = 2.0 ** ((sa - 0x38) / 8), 2.0 ** ((sb - 0x38) / 8)
    put_scales(cta, sa.astype(np.uint8), 256, 0)
    put_scales(cta, sb.astype(np.uint8), 264, 0)
    shape = idesc.decode(idesc.encode(kind, 128, n, a_type, b_type, scale=scale, sparse=True), kind, sparse=True)
    p = tcgen05.Product(shape, False, False, 0, 0, a_desc, 0, b_desc, False, 0, (), (256, 264), blocks, metadata=400)
    tcgen05.perform(p, [cta])
    want = (a * np.repeat(fa, k // blocks, 1)) @ (b * np.repeat(fb, k // blocks, 1)).T
    np.testing.assert_array_equal(read_d(cta, 128, n, "f32"), want.astype(np.float32))


@pytest.mark.parametrize("d_type", ["f32", "f16"])
def test_elements_of_b_that_meet_no_element_of_a_do_not_take_part(d_type):
    cta, p, given, a, b = sparse_case("f16", "f16", "f16", d_type, True, True, layouts.SW128, layouts.SW128, 0)
    chosen = np.zeros(a.shape, bool)
    np.put_along_axis(chosen, tcgen05.given_columns(p, cta, tcgen05.lane_plan(128, 64, False, 0)), True, 1)
    b[5, 9], b[6, 17] = np.nan, np.inf
    place(cta, b, "f16", layouts.SW128, True, B_AT)
    tcgen05.perform(p, [cta])
    with np.errstate(invalid="ignore"):
        want = np.stack([b[:, chosen[i]] @ a[i, chosen[i]] for i in range(128)])
    assert 0 < np.isnan(want[:, 5]).sum() < 128
    np.testing.assert_array_equal(read_d(cta, 128, 64, d_type, 32), want)


def test_metadata_without_a_meaning():
    cta, p, *_ = sparse_case(*SPARSE[0])
    cta.tmem.cells[400, 17] = 0x44444440  # row 17, columns 0 to 3: position 0 twice
    with pytest.raises(Fault, match="row 17, columns 0 to 3: the positions are 0 and 0") as error:
        tcgen05.perform(p, [cta])
    assert error.value.code == "metadata"


def test_scale_factors_must_be_in_all_lane_quarters():
    cta = new_cta()
    a_desc = place(cta, np.ones((128, 32), np.float32), "e4m3", layouts.SW128, True, A_AT)
    put_scales(cta, np.full((128, 1), 127, np.uint8), 256, 0)
    cta.tmem.cells[257, 70] = 0
    shape = idesc.decode(idesc.encode("mxf8f6f4", 128, 64, "e4m3", "e4m3"), "mxf8f6f4")
    p = tcgen05.Product(shape, False, False, 0, 0, a_desc, 0, a_desc, False, 0, (), (256, 256), 1)
    with pytest.raises(Fault, match="lane 6 differs from its copy in lane 70") as error:
        tcgen05.perform(p, [cta])
    assert error.value.code == "scale-copies"


@pytest.mark.parametrize(
    ("m", "fields", "want"),
    [  # start counts, first spans, non-zero, skip, use -> the PTX ISA's own examples, lowest column first
        (128, ((0, 0, 0, 0), (0, 0, 0, 0), 0, 4, 3), ["0000000"]),
        (128, ((0, 0, 0, 0), (0, 0, 0, 0), 1, 2, 3), ["00001110000111"]),
        (64, ((0, 0, 0, 0), (1, 0, 0, 0), 1, 2, 3), ["11100001110000111", "00001110000111"]),
        (32, ((0, 1, 2, 1), (1, 1, 0, 0), 1, 2, 3), ["1110000111", "110000111", "001110000111", "0001110000111"]),
    ],
)
def test_zero_column_masks(m, fields, want):
    starts, firsts, nonzero, skip, use = fields
    mask = sum(s << 8 * i for i, s in enumerate(starts)) | sum(f << 32 + i for i, f in enumerate(firsts))
    mask |= nonzero << 39 | skip << 40 | use << 48 | 2 << 56
    zero, shift = tcgen05.zero_columns(mask, m, 128)
    assert shift == 2
    part = m  # columns in each sub-mask: 128 / (128 / m)
    for i, text in enumerate(want):
        got = "".join(str(int(x)) for x in zero[i * part : i * part + len(text)])
        assert got == text
