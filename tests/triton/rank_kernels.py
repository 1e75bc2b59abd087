"""Kernels of several ranks in Gluon, each with bugs that can be planted (BUG): an all-reduce, an all-to-all, and the
dispatch and combine steps of experts.

Ranks write into each other's symmetric memory and then count up a word there (`signal`), at which its owner waits. A
signal is a release at .sys scope by one thread behind a barrier of its CTA; the wait is an acquire by one thread, with
a barrier behind it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def peer(pointers, rank, dtype: gl.constexpr):
    return gl.load(pointers + rank).to(gl.pointer_type(dtype))


@gluon.jit
def signal(word, SCOPE: gl.constexpr):
    gl.atomic_add(word, 1, sem="release", scope=SCOPE)


@gluon.jit
def wait(word, count):
    while gl.atomic_add(word, 0, sem="acquire", scope="sys") < count:
        pass


@gluon.jit(do_not_specialize=["rank"])
def all_reduce(x, out, buffers, signals, rank, RANKS: gl.constexpr, N: gl.constexpr, BUG: gl.constexpr):
    """Each CTA puts its part of x into this rank's symmetric memory, tells the same CTA of all ranks, waits until all
    have told it, and adds up. BUG: "scope" tells at .gpu scope, "early" tells before the whole CTA has written."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    cta = gl.program_id(0)
    at = cta * N + gl.arange(0, N, layout)
    if BUG == "early":
        for r in gl.static_range(RANKS):
            signal(peer(signals, r, gl.int32) + cta, "sys")
    gl.store(peer(buffers, rank, gl.float32) + at, gl.load(x + at))
    barrier()
    if BUG != "early":
        for r in gl.static_range(RANKS):
            signal(peer(signals, r, gl.int32) + cta, "gpu" if BUG == "scope" else "sys")
    wait(peer(signals, rank, gl.int32) + cta, RANKS)
    barrier()
    total = gl.zeros([N], gl.float32, layout)
    for r in gl.static_range(RANKS):
        total += gl.load(peer(buffers, r, gl.float32) + at)
    gl.store(out + at, total)


@gluon.jit(do_not_specialize=["rank"])
def all_to_all(x, out, buffers, signals, rank, RANKS: gl.constexpr, N: gl.constexpr, BUG: gl.constexpr):
    """CTA r writes x[r] into row `rank` of rank r's symmetric memory and tells it; then it waits for row r of this
    rank's. BUG: "row" writes every part into the receiver's own row, "short" waits without a signal of the last."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    other = gl.program_id(0)
    at = gl.arange(0, N, layout)
    row = other if BUG == "row" else rank
    gl.store(peer(buffers, other, gl.float32) + row * N + at, gl.load(x + other * N + at))
    barrier()
    if BUG != "short" or other != RANKS - 1:
        signal(peer(signals, other, gl.int32) + rank, "sys")
    wait(peer(signals, rank, gl.int32) + other, 1)
    barrier()
    gl.store(out + other * N + at, gl.load(peer(buffers, rank, gl.float32) + other * N + at))


@gluon.jit(do_not_specialize=["rank"])
def experts(
    x, chosen, out, inbox, outbox, counts, signals, tokens, rank,
    RANKS: gl.constexpr, D: gl.constexpr, BUG: gl.constexpr,
):  # fmt: skip
    """One expert per rank, y = (rank + 1) * x. Each CTA dispatches tokens to the inbox of their expert's rank: it takes
    a slot there by an atomic, writes where the token came from and its row. All CTAs of all ranks meet; the CTAs of the
    expert's rank write y to the slot of the sender's outbox; all meet again; then tokens are taken from the outbox.
    BUG: "meet" leaves out the second meeting, "slot" takes the slot of another token."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    at = gl.arange(0, D, layout)
    cta, ctas = gl.program_id(0), gl.num_programs(0)
    for token in range(cta, tokens, ctas):
        expert = gl.load(chosen + token)
        slot = gl.atomic_add(peer(counts, expert, gl.int32), 1, sem="relaxed", scope="sys")
        if BUG == "slot":
            slot = token
        row = peer(inbox, expert, gl.float32) + slot * (D + 2)
        gl.store(row + at, gl.load(x + token * D + at))
        gl.store(row + D, rank.to(gl.float32))
        gl.store(row + D + 1, token.to(gl.float32))
    meet(signals, rank, ctas * RANKS, RANKS)
    received = gl.load(peer(counts, rank, gl.int32))
    for slot in range(cta, received, ctas):
        row = peer(inbox, rank, gl.float32) + slot * (D + 2)
        sender, token = gl.load(row + D).to(gl.int32), gl.load(row + D + 1).to(gl.int32)
        gl.store(peer(outbox, sender, gl.float32) + token * D + at, gl.load(row + at) * (rank + 1))
    if BUG != "meet":
        meet(signals, rank, 2 * ctas * RANKS, RANKS)
    for token in range(cta, tokens, ctas):
        gl.store(out + token * D + at, gl.load(peer(outbox, rank, gl.float32) + token * D + at))


@gluon.jit
def meet(signals, rank, count, RANKS: gl.constexpr):
    """Wait for all CTAs of all ranks, which must all be resident."""
    barrier()
    for r in gl.static_range(RANKS):
        signal(peer(signals, r, gl.int32), "sys")
    wait(peer(signals, rank, gl.int32), count)
    barrier()
