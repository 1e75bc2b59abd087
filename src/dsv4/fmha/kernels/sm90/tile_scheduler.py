"""Which work tiles a CTA of the looping kernel takes, and what they are.

A dense batch: CTA c takes work tiles c, c + CTAs, ... of this list: blocks of some (sequence, head), as many as
causal_order.py chooses, or of one where nothing is causal and all tiles are alike; within a block, the tiles by their
place in the sequence, those of all heads side by side; every other block backwards, the last one from its longest
causal tiles on. So a CTA gets long and short tiles alternately, those that have one work tile more than others get the
shortest, and the heads whose keys are read at one time are few.

A varlen batch: the host does not know its lengths. A kernel lists its work tiles (varlen_order.py), and CTAs take them
by tickets, whoever is ready first; CTA c begins with tile c. The load role takes the tickets, one work tile ahead, and
hands them to the attend roles::

shared memory   bytes     holds
tickets         2 x 4     [2, 1]: a ring of numbers of work tiles, each that of the tile after the one at work

barrier         arrives       count       waits     means
tickets_ready   load          1           attend    the number is there
tickets_free    each attend   CONSUMERS   load      all have read it
"""

from dsv4.fmha.kernels.sm90.varlen_order import entry_of, next_ticket
from dsv4.fmha.kernels.tiles import DENSE, ROWS, end_key, first_key
from dsv4.kernels.compat import Value, aggregate, barrier, gl, gluon
from dsv4.kernels.division import divide
from dsv4.kernels.ring import init_barriers, new_ring


@aggregate
class TileScheduler:
    """What is walked over."""

    order: Value  # causal_order.TileOrder, or varlen_order.SequenceOrder
    num_tiles: Value
    sizes: Value
    opts: Value


@aggregate
class BlockCoord:
    """A work tile."""

    seq: Value  # dense
    head: Value  # of keys
    tile_row: Value
    first: Value  # key
    tiles: Value  # of keys
    q_start: Value  # varlen: first row of the sequence
    tokens: Value
    k_start: Value  # varlen
    keys: Value


@gluon.jit
def locate(tile_id, scheduler, BN: gl.constexpr, M: gl.constexpr, KV_LOAD: gl.constexpr):
    """-> BlockCoord"""
    sizes, opts = scheduler.sizes, scheduler.opts
    group, tokens, keys = sizes.group, sizes.tokens, sizes.keys
    seq, q_start, k_start = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    if KV_LOAD == ROWS:
        tile_row, head, q_start, tokens, k_start, keys = entry_of(tile_id, scheduler.order)
    else:
        tile_row, pair = dense_block(tile_id, scheduler.order, M)
    first = first_key(divide(tile_row, group), tokens, keys, opts.left)
    end = end_key(gl.minimum(divide(tile_row + M - 1, group), tokens - 1), tokens, keys, opts.right)
    if KV_LOAD == DENSE:
        seq = divide(pair, scheduler.order.kv_heads)
        head = pair - seq * scheduler.order.kv_heads.number
    tiles = gl.maximum(end - first + BN - 1, BN) // BN
    return BlockCoord(seq, head, tile_row, first, tiles, q_start, tokens, k_start, keys)


@gluon.jit
def dense_block(tile_id, order, M: gl.constexpr):
    """(first row, number of the sequence and KV head) of a work tile of a dense batch."""
    block = divide(tile_id, order.block)
    inner = tile_id - block * order.block.number
    last = block == order.last_block
    width = gl.where(last, order.rest.number, order.together.number)
    tile = gl.where(last, divide(inner, order.rest), divide(inner, order.together))
    pair = block * order.together.number + inner - tile * width
    tile_row = gl.where((order.last_block - block) % 2 == 0, order.row_tiles - 1 - tile, tile) * M
    return tile_row, pair


@gluon.jit
def course(scheduler, M: gl.constexpr):
    """(first, end, step) of what the roles count: with three attend roles turns, with two work tiles, since ptxas makes
    the better loops of these. Of the other ones it makes, with three, a softmax that takes the two rows of a thread one
    after the other, 1103 static cycles a step instead of 966; with two, loops that differ in their speed alone."""
    if M == 192:
        return 0, (scheduler.num_tiles - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0), 1
    else:
        return gl.program_id(0), scheduler.num_tiles, gl.num_programs(0)


@gluon.jit
def tile_id_at(at, M: gl.constexpr):
    if M == 192:
        return gl.program_id(0) + at * gl.num_programs(0)
    else:
        return at


@gluon.jit
def new_tickets(CONSUMERS: gl.constexpr):
    tickets = new_ring(gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])), CONSUMERS)
    init_barriers((tickets.ready, tickets.free))
    return tickets


@gluon.jit
def hand_out(tickets, stage, scheduler):
    """Load role, one warp -> the work tile after this one; where the tickets stand"""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    after = next_ticket(scheduler.order)
    tickets.acquire(stage)
    tickets.slot(stage).store(gl.full([1], after, gl.int32, ONE))
    barrier()  # one lane arrives for all; Triton 3.6 puts nothing between
    tickets.commit(stage)
    return after, tickets.next(stage)


@gluon.jit
def take_ticket(tickets, stage):
    """The same for an attend role."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    tickets.wait(stage)
    after = gl.max(tickets.slot(stage).load(ONE), 0)
    tickets.release(stage)
    return after, tickets.next(stage)
