"""The scheduler of the looping kernel: which work tiles a CTA processes, and what they are.

In a dense batch CTA c processes work tiles c, c + CTAs, ... of a list. The list consists of blocks of several
(sequence, head), as many as causal_order.py chooses, or of one if nothing is causal and all tiles are alike. A block
lists tiles by their place in the sequence, those of all heads side by side; every other block is reversed, so that the
last begins with its longest causal tiles. So a CTA gets long and short tiles alternately, CTAs with one work tile more
than others get the shortest, and few heads have their keys read at the same time.

The host does not know the lengths of a varlen batch. A kernel lists its work tiles (varlen_order.py). The first two of
a CTA are fixed; it takes the others by tickets, in the order in which CTAs become ready. The load role takes the
tickets, one work tile ahead, and hands them to the attend roles::

shared memory   bytes     holds
tickets         2 x 4     [2, 1]: a ring of numbers of work tiles, each that of the tile after the current one

barrier         arrives       count       waits     means
tickets_ready   load          1           attend    the number is there
tickets_free    each attend   CONSUMERS   load      all have read it
"""

from dsv4.fmha.kernels.causal_order import dense_block
from dsv4.fmha.kernels.sm90.varlen_order import entry_of
from dsv4.fmha.kernels.tiles import DENSE, ROWS, end_key, first_key
from dsv4.kernels.compat import Value, aggregate, barrier, gl, gluon
from dsv4.kernels.division import divide
from dsv4.kernels.ring import init_barriers, new_ring


@aggregate
class TileScheduler:
    """The list of work tiles, and the problem."""

    order: Value  # causal_order.TileOrder, or varlen_order.SequenceOrder
    num_tiles: Value
    sizes: Value
    opts: Value


@aggregate
class TileCoord:
    """A work tile."""

    seq: Value  # dense
    head: Value  # KV head
    tile_row: Value
    first: Value  # key
    tiles: Value  # tiles of keys
    q_start: Value  # varlen: first row of the sequence
    tokens: Value
    k_start: Value  # varlen
    keys: Value


@gluon.jit
def locate(tile_id, scheduler, BN: gl.constexpr, M: gl.constexpr, KV_LOAD: gl.constexpr):
    """Return the TileCoord of a work tile."""
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
    return TileCoord(seq, head, tile_row, first, tiles, q_start, tokens, k_start, keys)


@gluon.jit
def course(scheduler, M: gl.constexpr):
    """Return (first, end, step) of the roles' loop: over turns with three attend roles, over work tiles with two, for
    which ptxas makes the better loops. Over work tiles, three roles get a softmax that processes the two rows of a
    thread one after the other, 1103 static cycles per step instead of 966; over turns, loops of two roles are
    slower."""
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
def ticket_slots():
    return gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def new_tickets(CONSUMERS: gl.constexpr):
    tickets = new_ring(ticket_slots(), CONSUMERS)
    init_barriers((tickets.ready, tickets.free))
    return tickets


@gluon.jit
def hand_out(tickets, stage, after):
    """Hand the number of the work tile after this one to the other roles (load role, one warp); return the next stage
    of the tickets."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    tickets.acquire(stage)
    tickets.slot(stage).store(gl.full([1], after, gl.int32, ONE))
    barrier()  # one lane arrives for all; Triton 3.6 inserts no barrier here
    tickets.commit(stage)
    return tickets.next(stage)


@gluon.jit
def take_ticket(tickets, stage):
    """Return (the work tile after this one, the next stage of the tickets); all roles but load."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    tickets.wait(stage)
    after = gl.max(tickets.slot(stage).load(ONE), 0)
    tickets.release(stage)
    return after, tickets.next(stage)
