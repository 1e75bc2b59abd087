"""Functions that the kernels of this folder share: a CTA's share of the problem, masks, and the output of finished
rows.

A kernel groups its arguments (fmha/kernels/arguments.py), asks `block_coord` for its rows and tiles of keys, and
`make_work_tile` for what its roles need: WorkTile for those who compute, Source for those who load.
"""

from dsv4.fmha.kernels import loads
from dsv4.fmha.kernels.arguments import RowTensors, Source, Tiles, WorkTile, kv_rows, output_rows, problem_of
from dsv4.fmha.kernels.loads import Where
from dsv4.fmha.kernels.scores import capped, of_values
from dsv4.fmha.kernels.sm90 import columns
from dsv4.fmha.kernels.tiles import PAGES, ROWS, Pages, first_key, key_tiles, mask_pages, sequence, token_and_head
from dsv4.kernels import softmax
from dsv4.kernels.combine import clear_rows, end_of_sequences
from dsv4.kernels.compat import Value, aggregate, gl, gluon

# SPLIT of a kernel: False, True, or that it writes fp16 partial results
FP16_PARTIALS = gl.constexpr(2)


@aggregate
class BlockCoord:
    """Rows and tiles of keys of a CTA."""

    tile_row: Value  # first row of the tile
    rows: Value  # rows of the sequence and KV head
    seq: Value
    head: Value
    split: Value
    q_start: Value
    tokens: Value
    k_start: Value
    keys: Value
    first: Value  # key of tile 0
    begin: Value  # tiles of keys [begin, end)
    end: Value


@aggregate
class GridCoord:
    tile: Value  # row tile
    tiles: Value  # row tiles of all sequences and heads
    head: Value  # KV head, and split
    seq: Value
    sequences: Value


@gluon.jit
def grid_coord(sizes):
    """Return the place of this CTA in the grid (row tiles, KV heads x splits, sequences), or (KV heads x splits,
    sequences, row tiles)."""
    last = sizes.tiles_last != 0
    x, y, z = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    tiles = gl.where(last, gl.num_programs(2), gl.num_programs(0))
    sequences = gl.where(last, gl.num_programs(1), gl.num_programs(2))
    return GridCoord(gl.where(last, z, x), tiles, gl.where(last, x, y), gl.where(last, y, z), sequences)


@gluon.jit
def block_coord(tensors, sizes, opts, BOX_ROWS: gl.constexpr, M: gl.constexpr, BN: gl.constexpr, KV_LOAD: gl.constexpr):
    """Return this CTA's M rows and its tiles of keys."""
    VARLEN: gl.constexpr = KV_LOAD == ROWS
    grid = grid_coord(sizes)
    seq = grid.seq
    head = grid.head % sizes.kv_heads
    split = grid.head // sizes.kv_heads
    q_start, tokens, k_start, keys = sequence(seq, VARLEN, tensors, sizes, KV_LOAD)
    rows = tokens * sizes.group.number
    tile_row = (grid.tiles - 1 - grid.tile) * M  # causal: the longest tiles start first
    first, begin, end = key_tiles(tile_row, tokens, keys, split, sizes, opts, BOX_ROWS, M, BN, KV_LOAD)
    return BlockCoord(tile_row, rows, seq, head, split, q_start, tokens, k_start, keys, first, begin, end)


@gluon.jit
def clear_rest(tensors, sizes, strides, opts, D: gl.constexpr, KV_LOAD: gl.constexpr, SPLIT: gl.constexpr):
    """Clear a CTA's share of the rows of a varlen batch that no sequence has, with the same grid: a separate launch
    would take 2 us, and a batch seldom has such rows. SPLIT: the combine kernel does it."""
    if KV_LOAD == ROWS and not SPLIT:
        grid = grid_coord(sizes)
        begin = end_of_sequences(tensors.cu_q_ptr, grid.sequences, sizes.total_q) + grid.seq * grid.tiles + grid.tile
        step = grid.tiles * grid.sequences
        head = grid.head * sizes.group.number
        end_head = head + sizes.group.number
        clear_rows(tensors, strides, begin, sizes.total_q, step, head, end_head, opts.want_lse, D, D)


@gluon.jit
def make_work_tile(coord, tensors, sizes, strides, opts, k_desc, v_desc, KV_LOAD: gl.constexpr):
    """Return (WorkTile, Source)."""
    seq, head, tokens, keys = coord.seq, coord.head, coord.tokens, coord.keys
    # The tensors of this sequence. Offsets have 64 bits: a batch may be larger than 2^31 elements.
    q_ptr = tensors.q_ptr + (seq.to(gl.int64) * strides.q_batch + coord.q_start.to(gl.int64) * strides.q_token) * 8
    out_ptr = (
        tensors.out_ptr + (seq.to(gl.int64) * strides.out_batch + coord.q_start.to(gl.int64) * strides.out_token) * 8
    )
    lse_ptr = tensors.lse_ptr + (seq.to(gl.int64) * strides.lse_batch + coord.q_start.to(gl.int64) * strides.lse_token)
    table_ptr = tensors.table_ptr + seq.to(gl.int64) * sizes.table_stride
    # The row of the partial results: split-major, then in the order of q's rows (token, head).
    part_row = coord.split.to(gl.int64) * sizes.total_q + coord.q_start
    outer = 0
    if KV_LOAD != ROWS:
        part_row += seq.to(gl.int64) * tokens
        outer = seq
    here = RowTensors(q_ptr, out_ptr, lse_ptr, tensors.sink_ptr, tensors.part_ptr, tensors.part_lse_ptr)
    problem = problem_of(head, tokens, keys, sizes, opts)
    tiles = Tiles(coord.first, coord.begin, coord.end, part_row)
    pages = Pages(table_ptr, sizes.page_size, sizes.total_k)
    where = Where(
        outer, head, coord.k_start, keys, first_key(0, tokens, keys, opts.left), keys, table_ptr, sizes.page_size
    )
    k_rows, v_rows = kv_rows(tensors, sizes, strides)
    return WorkTile(here, strides, problem, tiles, pages), Source(k_desc, v_desc, k_rows, v_rows, where)


@gluon.jit
def finish_scores(s, column, bounds, KV_LOAD: gl.constexpr, APART: gl.constexpr = False, EVEN: gl.constexpr = False):
    """Return, from products q . k [M, BN] of keys from ``column`` on, the scores without their factor: capped, and -inf
    where a row does not see a key. EVEN: every row sees every key."""
    L: gl.constexpr = s.type.layout
    s = capped(s, bounds.scale)
    if not EVEN:
        if (column < bounds.full_first) | (column + s.shape[1] > bounds.full_end):
            if APART:
                s = softmax.apply_mask_by_register(s, column, bounds.row_first, bounds.row_end, L)
            else:
                s = softmax.apply_mask(s, column, bounds.row_first, bounds.row_end, L)
    if KV_LOAD >= PAGES:
        if bounds.bad:
            s = mask_pages(s, column, bounds.keys, bounds.pages, L)
    return s


@gluon.constexpr_function
def has_limit(d):
    """Return whether scores must be below 2^30, 2^27 in fp16: at head dim 64 softmax.row_scale costs 3 to 4 %."""
    return d == 64


@gluon.jit
def step(s, m, scale, D: gl.constexpr):
    """Run softmax.step for head dim D: a maximum stays where it would grow by no more than RESCALE_ABOVE."""
    if has_limit(D):
        return softmax.step_below_limit(s, m, scale, softmax.RESCALE_ABOVE)
    else:
        return softmax.step(s, m, scale, softmax.RESCALE_ABOVE)


@gluon.jit
def add_sums(l, alpha, p):
    """Return each thread's share of the row sums of P and of what came before."""
    added = softmax.partial_sums(p)
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, added.type.layout))
    return softmax.pin(l * alpha[:, None] + added)


@gluon.jit
def write(o, m, l, smem, tile_row, work_tile, COLUMN: gl.constexpr, D: gl.constexpr, SPLIT: gl.constexpr):
    """Normalise O [M, C], columns from COLUMN on of D, and write it through smem; with column 0 also the LSE."""
    tensors, strides, tiles = work_tile.tensors, work_tile.strides, work_tile.tiles
    head, group, rows = work_tile.problem.head, work_tile.problem.group, work_tile.problem.rows
    scale = work_tile.problem.score_scale
    if not has_limit(D):
        m = softmax.true_maximum(m, work_tile.problem.scale)
    RS: gl.constexpr = m.type.layout
    LO: gl.constexpr = o.type.layout
    RO: gl.constexpr = gl.SliceLayout(1, LO)
    M: gl.constexpr = o.shape[0]
    C: gl.constexpr = o.shape[1]
    row = tile_row + gl.arange(0, M, layout=RS)
    token, q_head = token_and_head(row, head, group)
    if SPLIT == FP16_PARTIALS:
        write_fp16_partials(o, m, l, tile_row, work_tile, COLUMN, D)
    elif SPLIT:  # normalised partial result and its LSE in base 2; the combine kernel applies the sink
        factor, lse = softmax.finish(m, l, gl.full([M], -float("inf"), gl.float32, RS))
        part = (tiles.part_row + token.to(gl.int64)) * work_tile.problem.q_heads + q_head
        if COLUMN == 0:
            gl.store(tensors.part_lse_ptr + part, lse, mask=row < rows)
        if tiles.begin < tiles.end:
            o = o * gl.convert_layout(of_values(factor, scale), RO)[:, None]
            column = COLUMN + gl.arange(0, C, layout=gl.SliceLayout(0, LO))
            gl.store(
                tensors.part_ptr + gl.convert_layout(part, RO)[:, None] * D + column[None, :],
                o,
                mask=gl.convert_layout(row < rows, RO)[:, None],
            )
    else:
        sink = softmax.sink_of(tensors.sink_ptr, q_head, row < rows)
        factor, lse = softmax.finish(m, l, sink)
        if COLUMN == 0:
            loads.store_lse(
                lse * softmax.LN2,
                tensors.lse_ptr,
                token,
                q_head,
                strides,
                (row < rows) & (work_tile.problem.want_lse != 0),
            )
        o = o * gl.convert_layout(of_values(factor, scale), RO)[:, None]
        smem.store(o.to(smem.dtype))
        loads.store_rows(output_rows(work_tile), smem, tile_row, COLUMN, M, C)


def _transposition() -> str:
    """Return PTX that transposes lane and j: words $8 + 2 j + r of four lanes, j = 0 .. 3, become $2 j + r."""
    lines = [".reg .pred odd, upper", ".reg .b32 lane, give, got, a0, a1, a2, a3", "mov.u32 lane, %laneid",
             "and.b32 got, lane, 1", "setp.ne.u32 odd, got, 0", "and.b32 got, lane, 2",
             "setp.ne.u32 upper, got, 0"]  # fmt: skip

    def change(first: str, second: str, mask: int, which: str) -> None:
        lines.extend(
            [
                f"selp.b32 give, {first}, {second}, {which}",
                f"shfl.sync.bfly.b32 got, give, {mask}, 0x1f, 0xffffffff",
                f"selp.b32 {first}, got, {first}, {which}",
                f"selp.b32 {second}, {second}, got, {which}",
            ]
        )

    for row in range(2):
        lines.extend(f"mov.b32 a{j}, ${8 + 2 * j + row}" for j in range(4))
        for first, second, mask, which in ((0, 1, 1, "odd"), (2, 3, 1, "odd"), (0, 2, 2, "upper"), (1, 3, 2, "upper")):
            change(f"a{first}", f"a{second}", mask, which)
        lines.extend(f"mov.b32 ${2 * j + row}, a{j}" for j in range(4))
    return "{ " + "; ".join(lines) + "; }"


TRANSPOSITION = gl.constexpr(_transposition())
WORDS = gl.constexpr(",".join(["=r"] * 8 + ["r"] * 8))


@gluon.constexpr_function
def pieces(columns):
    """Return the register layout of [64, columns] 16-bit values that in_pieces makes."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], *([0, 1 << bit] for bit in range(5, columns.bit_length() - 1)), [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, columns],
    )


@gluon.jit
def in_pieces(x):
    """Return 16-bit x [64, D], an accumulator, in a layout in which a thread has 16 bytes of a row, four lanes 64.

    Gluon would use shared memory, for which there may be no room. A thread's 16 values in a row of registers
    are two rows, of which it has two columns of each eight: with j the eight among 32 and t the lane among four, column
    8 j + 2 t + e. The exchange puts column 8 t + 2 j + e there, and the names of the dimensions follow.
    """
    M: gl.constexpr = x.shape[0]
    D: gl.constexpr = x.shape[1]
    x = gl.inline_asm_elementwise(TRANSPOSITION, WORDS, [x], dtype=x.dtype, is_pure=True, pack=16)
    x = x.reshape([M, D // 32, 4, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([M, D])
    return gl.convert_layout(x, pieces(D))


@gluon.jit
def write_at_once(o, m, l, tile_row, work_tile, C: gl.constexpr, D: gl.constexpr):
    """Normalise O, the accumulators of C columns of tiles of D (columns.py), and write it and the LSE, from registers
    and without a barrier."""
    tensors, strides, problem = work_tile.tensors, work_tile.strides, work_tile.problem
    if not has_limit(D):
        m = softmax.true_maximum(m, problem.scale)
    RS: gl.constexpr = m.type.layout
    row = tile_row + gl.arange(0, 64, layout=RS)
    token, q_head = token_and_head(row, problem.head, problem.group)
    sink = softmax.sink_of(tensors.sink_ptr, q_head, row < problem.rows)
    factor, lse = softmax.finish(m, l, sink)
    loads.store_lse(
        lse * softmax.LN2, tensors.lse_ptr, token, q_head, strides, (row < problem.rows) & (problem.want_lse != 0)
    )
    factor = of_values(factor, problem.score_scale)
    for i in gl.static_range(len(o)):
        _write_piece(o[i], factor, tile_row, work_tile, columns.value_piece(C, D, i, 0), C, D)


@gluon.jit
def _write_piece(o, factor, tile_row, work_tile, FIRST: gl.constexpr, C: gl.constexpr, D: gl.constexpr):
    rows = output_rows(work_tile)
    o = o * gl.convert_layout(factor, gl.SliceLayout(1, o.type.layout))[:, None]
    x = in_pieces(o.to(rows.ptr.dtype.element_ty))
    LW: gl.constexpr = x.type.layout
    row = tile_row + gl.arange(0, 64, layout=gl.SliceLayout(1, LW))
    offset = loads.row_offsets(row, rows)
    col = FIRST + gl.arange(0, o.shape[1], layout=gl.SliceLayout(0, LW))
    there = loads.here(row < rows.count, col, C, D)
    gl.store(rows.ptr + offset[:, None] + col[None, :], x, mask=there)


@gluon.jit
def part_rows(tile_row, work_tile, R: gl.constexpr):
    """Return (the rows of the partial results of the 64 rows from tile_row on, which of these exist)."""
    problem = work_tile.problem
    row = tile_row + gl.arange(0, 64, layout=R)
    token, q_head = token_and_head(row, problem.head, problem.group)
    return (work_tile.tiles.part_row + token.to(gl.int64)) * problem.q_heads + q_head, row < problem.rows


@gluon.jit
def half_to_fp16(o, norm):
    """Return (values in pieces, the inverse factor of each row) of half of the columns, O [64, D / 2], times norm, as
    an fp16 partial result: see combine.py."""
    # The exponent field e + 127 of the largest value, from 15 on, so that 2^(14 - e) and 2^(e - 14) are normal.
    exponent = gl.maximum((gl.max(gl.abs(o), 1) * norm).to(gl.int32, bitcast=True) >> 23, 15)
    up = ((268 - exponent) << 23).to(gl.float32, bitcast=True)
    return in_pieces((o * (norm * up)[:, None]).to(gl.float16)), ((exponent - 14) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def write_fp16_partials(o, m, l, tile_row, work_tile, COLUMN: gl.constexpr, D: gl.constexpr):
    """Write half of the columns, O [64, D / 2], normalised, as an fp16 partial result."""
    tensors, tiles = work_tile.tensors, work_tile.tiles
    RS: gl.constexpr = m.type.layout
    RO: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    part, there = part_rows(tile_row, work_tile, RS)
    factor, lse = softmax.finish(m, l, gl.full([64], -float("inf"), gl.float32, RS))
    if COLUMN == 0:
        gl.store(tensors.part_lse_ptr + part * 4, lse, mask=there)
    if tiles.begin < tiles.end:
        x, down = half_to_fp16(o, gl.convert_layout(of_values(factor, work_tile.problem.score_scale), RO))
        down = gl.convert_layout(down, RS)
        gl.store(tensors.part_lse_ptr + part * 4 + 1 + COLUMN // (D // 2), down, mask=there)
        LW: gl.constexpr = x.type.layout
        to, written = part_rows(tile_row, work_tile, gl.SliceLayout(1, LW))
        column = COLUMN + gl.arange(0, D // 2, layout=gl.SliceLayout(0, LW))
        values_ptr = tensors.part_ptr.to(gl.pointer_type(gl.float16), bitcast=True)
        gl.store(values_ptr + to[:, None] * D + column[None, :], x, mask=written[:, None])
