"""The kernel of rows.py for large dense problems: one CTA per multiprocessor, which loops over row tiles.

The load warp runs ahead into the next row tile while the attend roles write their output. Role chart::

    load      1 warp    | K, V of tile a ...          | K, V of tile b ...
    attend w  4 warps   | Q | S, softmax, O += P V ...| write O | Q | S (K already there) ...

There are two attend roles, or three. Shared memory and barriers are those of rows.py; the ring's slot and phase carry
over from tile to tile.

CTA c takes items c, c + CTAs, ... of this list: blocks of as many (sequence, head) as have about one tile for every
CTA; within a block, the tiles by their place in the sequence, those of all heads side by side; every other block
backwards, the last one from its longest causal tiles on. So a CTA gets long and short tiles by turns, those that have
one item more than others get the shortest, and the heads whose keys are read at one time are few.
"""

from dsv4.kernels.compat import Value, aggregate, gl, gluon
from dsv4.kernels.shared.fmha import loads
from dsv4.kernels.shared.fmha.arguments import Problem, Share, Source, Strides, Tensors, Tiles
from dsv4.kernels.shared.fmha.tiles import DENSE, Pages, end_key, first_key
from dsv4.kernels.sm90.fmha import rows, work


@aggregate
class Scan:
    """What is walked over."""

    row_tiles: Value  # of a (sequence, KV head)
    pairs: Value  # (sequence, KV head)
    together: Value  # of these in a block
    items: Value
    kv_heads: Value
    group: Value
    tokens: Value
    keys: Value
    left: Value
    right: Value


@aggregate
class Keys:
    """Where K and V of all sequences come from."""

    k_desc: Value
    v_desc: Value
    k_cells: loads.Cells
    v_cells: loads.Cells
    pages: Pages


@gluon.jit
def scan_of(sequences, kv_heads, group, tokens, keys, left, right, M: gl.constexpr):
    row_tiles = (tokens * group + M - 1) // M
    pairs = sequences * kv_heads
    together = gl.minimum(gl.maximum((gl.num_programs(0) + row_tiles // 2) // row_tiles, 1), pairs)
    return Scan(row_tiles, pairs, together, row_tiles * pairs, kv_heads, group, tokens, keys, left, right)


@gluon.jit
def locate(item, scan, BN: gl.constexpr, M: gl.constexpr):
    """(sequence, KV head, first row, first key, key tiles) of an item."""
    row_tiles, together, group, tokens, keys = scan.row_tiles, scan.together, scan.group, scan.tokens, scan.keys
    block = item // (row_tiles * together)
    width = gl.minimum(together, scan.pairs - block * together)
    inner = item - block * row_tiles * together
    tile = inner // width
    pair = block * together + inner - tile * width
    tile_row = gl.where(((scan.pairs - 1) // together - block) % 2 == 0, row_tiles - 1 - tile, tile) * M
    first = first_key(tile_row // group, tokens, keys, scan.left)
    end = end_key(gl.minimum((tile_row + M - 1) // group, tokens - 1), tokens, keys, scan.right)
    return pair // scan.kv_heads, pair % scan.kv_heads, tile_row, first, (gl.maximum(end - first, 0) + BN - 1) // BN


@gluon.jit
def load_role(source, ring, landed, scan, M: gl.constexpr, SAME_KV: gl.constexpr):
    BN: gl.constexpr = ring.k.shape[1]
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)  # the first wait on an untouched barrier passes
    landed_phase = gl.to_tensor(0)
    for item in range(gl.program_id(0), scan.items, gl.num_programs(0)):
        seq, head, tile_row, first, tiles = locate(item, scan, BN, M)
        where = loads.Where(seq, head, 0, scan.keys, 0, scan.keys, source.pages.table_ptr, source.pages.page_size)
        here = Source(source.k_desc, source.v_desc, source.k_cells, source.v_cells, where)
        slot, phase, landed_phase = rows.load_tiles(slot, phase, landed_phase, here, ring, landed,
                                                    Tiles(first, 0, tiles, 0), SAME_KV, DENSE)  # fmt: skip


@gluon.jit
def attend_role(q, tensors, ring, strides, scale, want_lse, scan, pages, W: gl.constexpr, M: gl.constexpr,
                SAME_KV: gl.constexpr, SIGN: gl.constexpr):  # fmt: skip
    """Rows 64 W to 64 W + 63 of each tile of M."""
    group, tokens, keys = scan.group, scan.tokens, scan.keys
    BN: gl.constexpr = ring.k.shape[1]
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for item in range(gl.program_id(0), scan.items, gl.num_programs(0)):
        seq, head, tile_row, first, tiles = locate(item, scan, BN, M)
        n = seq.to(gl.int64)
        lse_ptr = tensors.lse_ptr + n * strides.lb
        here = Tensors(tensors.q_ptr + n * strides.qb * 8, tensors.out_ptr + n * strides.ob * 8, lse_ptr,
                       tensors.sink_ptr, tensors.part_ptr, tensors.part_lse_ptr)  # fmt: skip
        problem = Problem(head, group, scan.kv_heads * group, tokens * group, tokens, keys, scan.left, scan.right,
                          scale, want_lse)  # fmt: skip
        share = Share(here, strides, problem, Tiles(first, 0, tiles, 0), pages)
        slot, phase = rows.attend(slot, phase, q, tile_row + 64 * W, ring, share, SAME_KV, False, DENSE, SIGN)


@gluon.jit(do_not_specialize=work.NOT_SPECIALIZED)
def fmha_rows_loop(q_ptr, k_desc, v_desc, out_ptr, lse_ptr, sink_ptr, cu_q_ptr, cu_k_ptr, lengths_ptr, table_ptr,
                   part_ptr, part_lse_ptr, k_ptr, v_ptr, scale, want_lse, total_q, total_k, tokens, keys, kv_heads,
                   group, page_size, table_stride, left, right, num_splits, tiles_per_split, stride_qb, stride_qt,
                   stride_qh, stride_ob, stride_ot, stride_oh, stride_lb, stride_lt, stride_lh, stride_kp, stride_kr,
                   stride_kh, stride_vp, stride_vr, stride_vh,
                   D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, HOW: gl.constexpr,
                   SIGN: gl.constexpr, SAME_KV: gl.constexpr, SPLIT: gl.constexpr, CONSUMER_REGS: gl.constexpr,
                   PRODUCER_REGS: gl.constexpr):  # fmt: skip
    gl.static_assert(HOW == DENSE and not SPLIT)
    M: gl.constexpr = 64 * CONSUMERS
    tensors = Tensors(q_ptr, out_ptr, lse_ptr, sink_ptr, part_ptr, part_lse_ptr)
    strides = Strides(stride_qt, stride_qh, stride_ot, stride_oh, stride_lt, stride_lh, stride_qb, stride_ob,
                      stride_lb)  # fmt: skip
    pages = Pages(table_ptr, page_size, total_k)
    source = Keys(k_desc, v_desc, loads.Cells(k_ptr, total_k, stride_kp, stride_kr, stride_kh),
                  loads.Cells(v_ptr, total_k, stride_vp, stride_vr, stride_vh), pages)  # fmt: skip
    q, ring, landed = rows.make_ring(k_desc.dtype, D, BN, STAGES, CONSUMERS, SAME_KV, HOW)
    scan = scan_of(total_q // tokens, kv_heads, group, tokens, keys, left, right, M)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (attend_role, (q.index(0), tensors, ring, strides, scale, want_lse, scan, pages, 0, M, SAME_KV, SIGN)),
            (attend_role, (q.index(1), tensors, ring, strides, scale, want_lse, scan, pages, 1, M, SAME_KV, SIGN)),
            (load_role, (source, ring, landed, scan, M, SAME_KV)),
        ], [4, 1], [CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip
    else:
        gl.static_assert(CONSUMERS == 3)
        gl.warp_specialize([
            (attend_role, (q.index(0), tensors, ring, strides, scale, want_lse, scan, pages, 0, M, SAME_KV, SIGN)),
            (attend_role, (q.index(1), tensors, ring, strides, scale, want_lse, scan, pages, 1, M, SAME_KV, SIGN)),
            (attend_role, (q.index(2), tensors, ring, strides, scale, want_lse, scan, pages, 2, M, SAME_KV, SIGN)),
            (load_role, (source, ring, landed, scan, M, SAME_KV)),
        ], [4, 4, 1], [CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip
