"""K and V in e4m3: tiles of keys in the form that the tensor core reads, converted to the dtype of q in registers.

TMA and cp.async copy bytes unchanged, so a load role of several warps replaces them: a thread loads 16 codes of a row,
converts them to 16-bit values, which is exact, and stores these in the swizzled panels that loads.py describes. Rows
that no query sees are zeros. scores.py applies the scales of keys and values.

Four threads have 64 codes of a row, and eight such groups have eight rows, so that their stores have no bank conflicts.
"""

from dsv4.kernels.compat import Value, aggregate, barrier, fence_async_shared, gl, gluon, mbarrier, reinterpret_as

AT_A_TIME = gl.constexpr(64)  # codes of a thread


@gluon.constexpr_function
def in_codes(pointer_type):
    """Return whether K and V are bytes."""
    return pointer_type.element_ty == gl.uint8


@gluon.constexpr_function
def _layout(warps):
    """Return the layout of [keys, panels of 64 columns, words]."""
    return gl.BlockedLayout([1, 1, 4], [8, 1, 4], [warps, 1, 1], [0, 2, 1])


@gluon.constexpr_function
def keys_at_a_time(keys, columns, warps):
    """Return how many keys of a tile are converted at a time."""
    return min(keys, AT_A_TIME.value * 32 * warps // columns)


# Put the four codes of a word, each S EEEE MMM, in pairs below eight copies of their signs; shift and mask them to
# S 0000EEEE MMM0000, as bf16 the value times 2^-120, or S 0EEEE MMM0000000, as fp16 times 2^-8, subnormals too. A code
# that means NaN becomes 480: what no query sees is finite, and vanishes with its P of 0.
def _to(shift: int, mask: str, kind: str, factor: str) -> str:
    return f"""{{ .reg .b32 low, high, factor;
    prmt.b32 low, $2, 0, 0x9180;
    prmt.b32 high, $2, 0, 0xb3a2;
    shl.b32 low, low, {shift};
    shl.b32 high, high, {shift};
    and.b32 low, low, {mask};
    and.b32 high, high, {mask};
    mov.b32 factor, {factor};
    mul.rn.{kind} $0, low, factor;
    mul.rn.{kind} $1, high, factor; }}"""


TO_BF16 = _to(4, "0x87f087f0", "bf16x2", "0x7b807b80")
TO_FP16 = _to(7, "0xbf80bf80", "f16x2", "0x5c005c00")


@gluon.constexpr_function
def _conversion(dtype):
    return TO_FP16 if dtype == gl.float16 else TO_BF16


@gluon.jit
def converted(x, like):
    """Return codes as the dtype of a tile; a thread has four consecutive codes of a row in a register."""
    return gl.inline_asm_elementwise(_conversion(like.dtype), "=&r,=&r,r", [x], dtype=like.dtype, is_pure=True, pack=4)


@aggregate
class RowCoords:
    """The places of keys: their pages or sequence, their rows in these, and whether a query sees them."""

    page: Value
    row: Value
    visible: Value


@gluon.jit
def find(where, pages, first_row, end, KEYS: gl.constexpr, PAGED: gl.constexpr):
    """Return the RowCoords of KEYS keys from first_row on; those from ``end`` on are invisible. pages: number of all
    pages."""
    L: gl.constexpr = _layout(gl.num_warps())
    key = first_row + gl.arange(0, KEYS, layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))
    visible = (key >= where.visible_first) & (key < end)
    if PAGED:
        page = gl.load(where.table_ptr + key // where.page_size, mask=visible, other=-1)
        return RowCoords(page, key % where.page_size, visible & (page >= 0) & (page < pages))
    else:
        return RowCoords(gl.to_tensor(where.outer), where.k_start + key, visible)


@gluon.jit
def load_codes(kv_rows, head, coords, column, KEYS: gl.constexpr, C: gl.constexpr):
    """Return C codes of each key from ``column`` on: int32 [KEYS, C / 64, 16]; 0 for keys that no query sees."""
    L: gl.constexpr = _layout(gl.num_warps())
    offset = coords.page.to(gl.int64) * kv_rows.page_stride + coords.row.to(gl.int64) * kv_rows.row_stride
    offset = offset + head.to(gl.int64) * kv_rows.head_stride
    panel = gl.arange(0, C // 64, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    word = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    words_ptr = kv_rows.ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    pointers = words_ptr + offset[:, None, None] * 4 + (column // 4 + panel * 16 + word)
    return gl.load(pointers, mask=coords.visible[:, None, None], other=0)


@gluon.jit
def put(x, tile, FIRST: gl.constexpr):
    """Store codes from load_codes, converted, in the rows of a ring slot from FIRST on."""
    KEYS: gl.constexpr = x.shape[0]
    PANELS: gl.constexpr = x.shape[1]
    BN: gl.constexpr = tile.shape[0]
    PANEL: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=3)
    a, b = gl.inline_asm_elementwise(
        _conversion(tile.dtype), "=&r,=&r,r", [x], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    panels = reinterpret_as(tile, gl.int32, [1, PANELS, BN, 32], PANEL).index(0)
    panels.permute((1, 0, 2)).slice(FIRST, KEYS, dim=0).store(gl.join(a, b).reshape([KEYS, PANELS, 32]))


@gluon.jit
def fill(kv_rows, tile, ready, where, first_row, column, PAGED: gl.constexpr):
    """Fill one ring slot; ``ready`` completes when it may be read."""
    BN: gl.constexpr = tile.shape[0]
    C: gl.constexpr = tile.shape[1]
    KEYS: gl.constexpr = keys_at_a_time(BN, C, gl.num_warps())
    x = load_codes(kv_rows, where.head, find(where, kv_rows.pages, first_row, where.keys, KEYS, PAGED), column, KEYS, C)
    for i in gl.static_range(BN // KEYS):
        if i + 1 < BN // KEYS:
            coords = find(where, kv_rows.pages, first_row + (i + 1) * KEYS, where.keys, KEYS, PAGED)
            after = load_codes(kv_rows, where.head, coords, column, KEYS, C)
        put(x, tile, i * KEYS)
        if i + 1 < BN // KEYS:
            x = after
    fence_async_shared()  # generic stores -> tensor-core reads
    barrier()
    mbarrier.arrive(ready, count=1)


@gluon.jit
def announce(ready):
    """Arrive at ``ready`` after all stores, without a fence, which would wait for loads in flight: its waiters
    fence."""
    barrier()
    mbarrier.arrive(ready, count=1)
