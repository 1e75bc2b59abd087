"""The gathering warps of sparse.py if a list names packed rows that are only codes, at multiples of 16 bytes.

Four threads have a row, eight neighbours eight rows, so that their stores have no bank conflicts. Half a block is
loaded at once, 16 bytes a thread per 64 of a row, and stored at once: a slot has one store, and the compiler needs only
the barrier of warps before its arrival. packed_blocks in gather.py handles every format, table and address.
"""

from dsv4.caches.kernels.unpack import QUICK, panel_scale_bytes
from dsv4.kernels.compat import Value, aggregate, gl, gluon
from dsv4.kernels.opaque import behind
from dsv4.kernels.ring import Stage
from dsv4.v4.kernels.pool_rows import entries, row_addresses
from dsv4.v4.kernels.sm90.row_numbers import numbers_of, pool_of
from dsv4.v4.kernels.sm90.smem_store import announce_once, panels_in, write_bias
from dsv4.v4.kernels.tile_scheduler import TABLE


@gluon.constexpr_function
def reads_codes(window_format, compressed_format, unit, kv_index, split):
    """Return whether codes_blocks reads the rows of both pools: it does where it was faster than packed_blocks."""
    whole = not split and kv_index != TABLE and compressed_format.code_bits == 4
    return whole and unit >= 16 and window_format.coded_panels == 8 and compressed_format.coded_panels == 8


@gluon.constexpr_function
def row_layout(warps):
    """Return the layout of [rows, pieces of 16 bytes]."""
    return gl.BlockedLayout([1, 1], [8, 4], [warps, 1], [0, 1])


@gluon.constexpr_function
def half_layout(warps, panel_words):
    """Return the layout of [rows, panels of a half, words], with the threads of row_layout."""
    return gl.BlockedLayout([1, 1, 4], [8, 16 // panel_words, panel_words // 4], [warps, 1, 1], [0, 2, 1])


@aggregate
class Rows:
    """Addresses of a block's rows, those of their scales, and whether the rows are there. An absent row is read at
    `spare`: with its scale of 0 any bytes are finite numbers, and its bias masks them."""

    row: Value
    at: Value
    there: Value


@aggregate
class Half:
    """Half a block in flight: codes [64, 4, words], scales, and a word that is loaded with the others."""

    words: Value
    scales: Value
    came: Value


@gluon.jit
def find(pool, number, spare, UNIT: gl.constexpr, FORMAT: gl.constexpr):
    row, at, there = row_addresses(pool, number, spare, UNIT, FORMAT)
    return Rows(row, at, there)


@gluon.constexpr_function
def _loads(first, pieces):
    """Return PTX that loads 16 bytes of each of some pieces of 64 bytes, from byte `first` on."""
    to = [", ".join(f"${4 * i + word}" for word in range(4)) for i in range(pieces)]
    return " ".join(f"ld.global.L2::256B.v4.b32 {{{to[i]}}}, [${4 * pieces}+{first + 64 * i}];" for i in range(pieces))


@gluon.constexpr_function
def _constraints(pieces):
    return ",".join(["=&r"] * (4 * pieces) + ["l"])


@gluon.jit
def _in_a_row(a, b, c, d):
    """Join the words of a piece, four tensors [rows, 4] -> [rows, 16]."""
    return gl.join(gl.join(a, c), gl.join(b, d)).reshape([a.shape[0], 16])


@gluon.jit
def load_half(rows, delay, HALF: gl.constexpr, FORMAT: gl.constexpr):
    """Load half a block. delay: None, or 0 for each row and piece (opaque.behind)."""
    N: gl.constexpr = FORMAT.panel_words
    L: gl.constexpr = half_layout(gl.num_warps(), N)
    piece = gl.arange(0, 4, layout=gl.SliceLayout(0, row_layout(gl.num_warps()))).to(gl.uint64)
    pointers = rows.row[:, None] + (piece * 16)[None, :]
    if delay is not None:
        pointers += delay.to(gl.uint32, bitcast=True).to(gl.uint64)
    FIRST: gl.constexpr = HALF * 16 * N
    if N == 8:
        a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
            _loads(FIRST, 2), _constraints(2), [pointers], dtype=(gl.int32,) * 8, is_pure=False, pack=1
        )
        words = gl.join(_in_a_row(a, b, c, d), _in_a_row(e, f, g, h)).permute((0, 2, 1))
    else:
        gl.static_assert(N == 16)
        a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p = gl.inline_asm_elementwise(
            _loads(FIRST, 4), _constraints(4), [pointers], dtype=(gl.int32,) * 16, is_pure=False, pack=1
        )
        even = gl.join(_in_a_row(a, b, c, d), _in_a_row(i, j, k, l))
        words = gl.join(even, gl.join(_in_a_row(e, f, g, h), _in_a_row(m, n, o, p))).permute((0, 2, 3, 1))
    words = gl.convert_layout(words.reshape([64, 4, N]), L, assert_trivial=True)
    EACH: gl.constexpr = panel_scale_bytes(FORMAT)
    at = gl.convert_layout(rows.at + HALF * 4 * EACH, gl.SliceLayout(1, gl.SliceLayout(2, L)), assert_trivial=True)
    there = gl.convert_layout(rows.there, gl.SliceLayout(1, gl.SliceLayout(2, L)), assert_trivial=True)
    if EACH == 4:  # a word for each panel
        panel = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, L))).to(gl.uint64)
        scales_ptr = (at[:, None] + (panel * 4)[None, :]).to(gl.pointer_type(gl.int32), bitcast=True)
        scales = gl.load(scales_ptr, mask=there[:, None], other=0)[:, :, None]
    else:
        gl.static_assert(EACH == 2)
        scales = gl.load(at.to(gl.pointer_type(gl.int64), bitcast=True), mask=there, other=0)
    return Half(words, scales, a)


@gluon.jit
def put(half, tile, FORMAT: gl.constexpr):
    panels_in(tile, 0, 4).store(FORMAT.unpack(half.words, half.scales, 0, QUICK, FORMAT))


@gluon.jit
def first_numbers(lists, block, end, pools, KV_INDEX: gl.constexpr):
    return numbers_of(lists, block, block < end, pools.compressed, entries(row_layout(gl.num_warps())), KV_INDEX)


@gluon.jit
def codes_blocks(
    rows,
    left,
    spare,
    lists,
    pools,
    memory,
    first,
    end,
    phase,
    KV_INDEX: gl.constexpr,
    UNIT: gl.constexpr,
    FORMAT: gl.constexpr,
):
    """Load blocks [first, end). rows, left: of the first."""
    kv, bias = memory.kv, memory.bias
    for block in range(first, end):
        slot = block % 2 * 2
        # No fences here: they would wait for the loads in flight. The roles that wait for a half block issue them.
        kv.acquire(Stage(slot, phase))
        # Not before the first half has arrived: the assembler has one scoreboard for both.
        right = load_half(rows, behind(left.came, phase), 1, FORMAT)
        number = first_numbers(lists, block + 1, end, pools, KV_INDEX)
        put(left, kv.slots.index(slot), FORMAT)
        announce_once(kv.ready.at(slot))

        kv.acquire(Stage(slot + 1, phase))
        write_bias(bias.index(block % 2), rows.there)
        rows = find(pool_of(pools, block + 1 < lists.window_blocks), number, spare, UNIT, FORMAT)
        left = load_half(rows, behind(right.came, phase), 0, FORMAT)
        put(right, kv.slots.index(slot + 1), FORMAT)
        announce_once(kv.ready.at(slot + 1))
        phase = phase ^ (block % 2)
    return phase


@gluon.jit
def window_end(lists, first, end, FORMATS: gl.constexpr):
    """Return where the blocks of the first format end: at the end of the window, or nowhere."""
    if FORMATS[0] == FORMATS[1]:
        return end
    else:
        return gl.minimum(gl.maximum(first, lists.window_blocks), end)


@gluon.jit
def ask_codes(lists, pools, spare, first, end, KV_INDEX: gl.constexpr, UNIT: gl.constexpr, FORMATS: gl.constexpr):
    """Request the first half of the first block of the first format, if there is one."""
    number = first_numbers(lists, first, window_end(lists, first, end, FORMATS), pools, KV_INDEX)
    rows = find(pool_of(pools, first < lists.window_blocks), number, spare, UNIT, FORMATS[0])
    return rows, load_half(rows, None, 0, FORMATS[0])


@gluon.jit
def mixed_codes(
    rows,
    left,
    spare,
    lists,
    pools,
    memory,
    first,
    end,
    phase,
    KV_INDEX: gl.constexpr,
    UNIT: gl.constexpr,
    FORMATS: gl.constexpr,
):
    """Load blocks [first, end), those of the window first. rows, left: what ask_codes found."""
    middle = window_end(lists, first, end, FORMATS)
    phase = codes_blocks(rows, left, spare, lists, pools, memory, first, middle, phase, KV_INDEX, UNIT, FORMATS[0])
    if FORMATS[0] != FORMATS[1]:
        number = first_numbers(lists, middle, end, pools, KV_INDEX)
        rows = find(pools.compressed, number, spare, UNIT, FORMATS[1])
        left = load_half(rows, None, 0, FORMATS[1])
        phase = codes_blocks(rows, left, spare, lists, pools, memory, middle, end, phase, KV_INDEX, UNIT, FORMATS[1])
    return phase
