"""The steps of sparse.py's left and right: S, softmax and both products of two blocks of 64 rows.

There are two orders. Right may update O with left's P0 while it waits for its own S; that frees all of block 0 early,
which matters if the rows of the next step have to be loaded from memory::

    left    | S0 = Q K0^T | softmax 0 -> P0 | O_L += P0 V0_L |            wait P1 | O_L += P1 V1_L
    right   | S1 = Q K1^T |         wait P0 | O_R += P0 V0_R | softmax 1 -> P1    | O_R += P1 V1_R

If rows lie in L2 (`resident`), the tensor cores count. Left issues the next S0 behind its last product, so that
it runs alongside right's products, and only the maximum of softmax 0 is waited for; P0 is handed over at the maximum of
both blocks, so that right rescales O once::

    left    softmax 0 -> m0 | O_L += P0 V0_L |       wait m1, P0 -> | O_L += P1 V1_L | S0 of the next step
    right   S1 | wait m0 | softmax 1 -> m1 | O_R += P1 V1_R, P1 -> | O_R += P0 V0_R |

A maximum moves only if it grew by more than 8, so that most factors are 1 and warps skip the rescaling of O.
"""

from dsv4.kernels import softmax
from dsv4.kernels.compat import fence_async_shared, gl, gluon, reinterpret, warpgroup_mma, warpgroup_mma_wait
from dsv4.kernels.opaque import zero
from dsv4.kernels.ring import Stage

SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))


@gluon.jit
def landed(memory, phase, SLOT: gl.constexpr):
    if SLOT % 2 == 1:
        memory.odd_ready.wait(SLOT, phase)
    else:
        memory.kv.wait(Stage(SLOT, phase))
    fence_async_shared()


@gluon.constexpr_function
def half_slot(dtype):
    """Return the layout of [64, 128]: a slot with SPLIT_SLOTS, whose other columns lie in kv_right."""
    return gl.NVMMASharedLayout.get_default_for([64, 128], dtype)


@gluon.jit
def half_scores(s, memory, phase, step, SLOT: gl.constexpr, FIRST: gl.constexpr, SPLIT_SLOTS: gl.constexpr = False):
    """Add Q K^T over the half of the head dim in a slot to S [64, 64]: one group issued, or two, not waited for."""
    opaque = zero(step)  # else all 64 wgmma descriptors of a fixed slot would be kept in registers, and spilled
    landed(memory, phase, SLOT)
    if SPLIT_SLOTS:
        q = reinterpret(memory.q, [4, 64, 128], half_slot(memory.q.dtype))
        k = memory.kv.slots.index(opaque + SLOT).permute((1, 0))
        s = warpgroup_mma(q.index(opaque + SLOT % 2 * 2), k, s, use_acc=not FIRST, is_async=True)
        k = memory.kv_right.index(opaque + SLOT).permute((1, 0))
        return warpgroup_mma(q.index(opaque + SLOT % 2 * 2 + 1), k, s, is_async=True)
    else:
        q, k = memory.q.index(opaque + SLOT % 2), memory.kv.slots.index(opaque + SLOT).permute((1, 0))
        return warpgroup_mma(q, k, s, use_acc=not FIRST, is_async=True)


@gluon.jit
def scores(memory, phase, step, FIRST: gl.constexpr, SECOND: gl.constexpr, SPLIT_SLOTS: gl.constexpr = False):
    """Return S of a block, its slots in this order: two groups issued, SPLIT_SLOTS four, not waited for."""
    s = half_scores(gl.zeros([64, 64], gl.float32, SCORES), memory, phase, step, FIRST, True, SPLIT_SLOTS)
    return half_scores(s, memory, phase, step, SECOND, False, SPLIT_SLOTS)


@gluon.jit
def add(p, memory, slot, o, SPLIT_SLOTS: gl.constexpr):
    """Add P V with the rows of a slot to O [64, 256]: one group issued, SPLIT_SLOTS two; `added` waits for them."""
    if SPLIT_SLOTS:
        L: gl.constexpr = o.type.layout
        a, b = gl.split(o.reshape([64, 2, 128]).permute((0, 2, 1)))  # moves no registers
        a = warpgroup_mma(p, memory.kv.slots.index(slot), gl.convert_layout(a, L), is_async=True)
        b = warpgroup_mma(p, memory.kv_right.index(slot), gl.convert_layout(b, L), is_async=True)
        return a, b
    else:
        return warpgroup_mma(p, memory.kv.slots.index(slot), o, is_async=True)


@gluon.jit
def added(o, SPLIT_SLOTS: gl.constexpr):
    """Wait for all products -> O."""
    if SPLIT_SLOTS:
        a, b = o
        a, b = warpgroup_mma_wait(num_outstanding=0, deps=(a, b))
        L: gl.constexpr = a.type.layout
        return gl.convert_layout(gl.join(a, b).permute((0, 2, 1)).reshape([64, 256]), L)
    else:
        return warpgroup_mma_wait(num_outstanding=0, deps=(o,))


@gluon.jit
def left_step(o, m, l, memory, phase, step, blocks, scale, SIGN: gl.constexpr, SPLIT_SLOTS: gl.constexpr):
    """Compute the softmax of block 0, then O[:, :256] with both blocks."""
    kv, p_ready = memory.kv, memory.p_ready
    RS: gl.constexpr = m.type.layout
    RP: gl.constexpr = gl.SliceLayout(1, l.type.layout)
    LA: gl.constexpr = gl.DotOperandLayout(0, o.type.layout, 2)
    s = scores(memory, phase, step, 0, 1, SPLIT_SLOTS)
    bias = memory.bias.index(0).load(gl.SliceLayout(0, SCORES))
    s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
    if 2 * step + 2 >= blocks:
        memory.q_free.arrive(0)
    s = softmax.biased(s, bias[None, :], SIGN)
    p, m0, a0 = softmax.step(s, m, scale, softmax.RESCALE_ABOVE)
    l = l * gl.convert_layout(a0, RP)[:, None] + softmax.partial_sums(p)
    pb = p.to(memory.q.dtype)
    memory.p0.store(pb)
    memory.m0.store(m0)
    memory.a0.store(a0)
    fence_async_shared()
    p_ready.arrive(0)
    o = softmax.rescale(o, a0)
    o = add(gl.convert_layout(pb, LA), memory, zero(step), o, SPLIT_SLOTS)
    landed(memory, phase, 2)
    o = added(o, SPLIT_SLOTS)
    kv.free.arrive(0)
    p_ready.wait(1, phase)
    m = memory.m1.load(RS)
    a1 = memory.a1.load(RS)
    l = l * gl.convert_layout(a1, RP)[:, None]
    o = softmax.rescale(o, a1)
    o = added(add(memory.p1, memory, zero(step) + 2, o, SPLIT_SLOTS), SPLIT_SLOTS)
    kv.free.arrive(2)
    return o, m, l


@gluon.jit
def right_step(o, l, memory, phase, step, blocks, scale, SIGN: gl.constexpr, SPLIT_SLOTS: gl.constexpr):
    """Compute O[:, 256:] with block 0 while S of block 1 is computed, then its softmax, then O with block 1."""
    kv, p_ready = memory.kv, memory.p_ready
    RS: gl.constexpr = gl.SliceLayout(1, SCORES)
    RO: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    RP: gl.constexpr = gl.SliceLayout(1, l.type.layout)
    LA: gl.constexpr = gl.DotOperandLayout(0, o.type.layout, 2)
    s = scores(memory, phase, step, 2, 3, SPLIT_SLOTS)
    bias = memory.bias.index(1).load(gl.SliceLayout(0, SCORES))
    landed(memory, phase, 1)
    p_ready.wait(0, phase)
    m0 = memory.m0.load(RS)
    a0 = memory.a0.load(RS)
    # O is complete, but the assembler does not see it across the loop, and would wait for S, too: also in front of a
    # jump over the products.
    o = warpgroup_mma_wait(num_outstanding=4 if SPLIT_SLOTS else 2, deps=(o,))
    o = o * gl.convert_layout(a0, RO)[:, None]
    o = add(memory.p0, memory, zero(step) + 1, o, SPLIT_SLOTS)
    s = warpgroup_mma_wait(num_outstanding=2 if SPLIT_SLOTS else 1, deps=(s,))
    if 2 * step + 2 >= blocks:
        memory.q_free.arrive(0)
    s = softmax.biased(s, bias[None, :], SIGN)
    p, m, a1 = softmax.step(s, m0, scale, softmax.RESCALE_ABOVE)
    l = softmax.pin(l * gl.convert_layout(a0 * a1, RP)[:, None] + softmax.partial_sums(p))
    pb = p.to(memory.q.dtype)
    memory.p1.store(pb)
    memory.m1.store(m)
    memory.a1.store(a1)
    fence_async_shared()
    p_ready.arrive(1)
    o = added(o, SPLIT_SLOTS)
    kv.free.arrive(1)
    o = softmax.rescale(o, a1)
    o = added(add(gl.convert_layout(pb, LA), memory, zero(step) + 3, o, SPLIT_SLOTS), SPLIT_SLOTS)
    kv.free.arrive(3)
    return o, m, l


@gluon.jit
def resident_scores(s, memory, phase, step, SIGN: gl.constexpr):
    """Return the second half of S of block 0, whose first half is issued; masked."""
    s = half_scores(s, memory, phase, step, 1, False)
    bias = memory.bias.index(0).load(gl.SliceLayout(0, SCORES))
    s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
    return softmax.biased(s, bias[None, :], SIGN)


@gluon.jit
def left_begin(memory, phase, steps, SIGN: gl.constexpr):
    """Return S of the first block 0 of a work tile."""
    s = gl.zeros([64, 64], gl.float32, SCORES)
    if steps > 0:
        s = half_scores(s, memory, phase, steps, 0, True)
        s = resident_scores(s, memory, phase, steps, SIGN)
    if steps <= 1:
        memory.q_free.arrive(0)
    return s


@gluon.jit
def left_resident(o, s, m, l, memory, phase, step, steps, scale, SIGN: gl.constexpr):
    """Compute the softmax of block 0, whose S is complete, O[:, :256] with both blocks, and S of the next block 0."""
    kv, p_ready, m_ready = memory.kv, memory.p_ready, memory.m_ready
    RS: gl.constexpr = m.type.layout
    RP: gl.constexpr = gl.SliceLayout(1, l.type.layout)
    LA: gl.constexpr = gl.DotOperandLayout(0, o.type.layout, 2)
    p, m0, a0 = softmax.step(s, m, scale, softmax.RESCALE_ABOVE)
    memory.m0.store(m0)
    m_ready.arrive(0)
    l = l * gl.convert_layout(a0, RP)[:, None] + softmax.partial_sums(p)
    o = softmax.rescale(o, a0)
    o = warpgroup_mma(gl.convert_layout(p.to(memory.q.dtype), LA), kv.slots.index(zero(step)), o, is_async=True)
    landed(memory, phase, 2)
    o = warpgroup_mma_wait(num_outstanding=0, deps=(o,))
    kv.free.arrive(0)
    m_ready.wait(1, phase)
    m = memory.m1.load(RS)
    a1 = gl.exp2(m0 - m)
    memory.p0.store((p * a1[:, None]).to(memory.q.dtype))
    fence_async_shared()
    p_ready.arrive(0)
    a1 = softmax.pin(a1)  # P0 first, then O
    l = l * gl.convert_layout(a1, RP)[:, None]
    o = softmax.rescale(o, a1)
    p_ready.wait(1, phase)
    # The product is issued in either branch: the assembler would not let O under way cross into one.
    if step + 1 < steps:
        o = warpgroup_mma(memory.p1, kv.slots.index(zero(step) + 2), o, is_async=True)
        s = half_scores(s, memory, phase ^ 1, step, 0, True)
        o = warpgroup_mma_wait(num_outstanding=1, deps=(o,))
        kv.free.arrive(2)
        s = resident_scores(s, memory, phase ^ 1, step, SIGN)
        if step + 2 == steps:
            memory.q_free.arrive(0)
    else:
        o = warpgroup_mma(memory.p1, kv.slots.index(zero(step) + 2), o, is_async=True)
        o = warpgroup_mma_wait(num_outstanding=0, deps=(o,))
        kv.free.arrive(2)
    return o, s, m, l


@gluon.jit
def right_resident(o, m, l, memory, phase, step, steps, scale, SIGN: gl.constexpr):
    """Compute S and softmax of block 1, then O[:, 256:] with its own P, then with left's."""
    kv, p_ready, m_ready = memory.kv, memory.p_ready, memory.m_ready
    RS: gl.constexpr = gl.SliceLayout(1, SCORES)
    RP: gl.constexpr = gl.SliceLayout(1, l.type.layout)
    LA: gl.constexpr = gl.DotOperandLayout(0, o.type.layout, 2)
    s = scores(memory, phase, step, 3, 2)
    bias = memory.bias.index(1).load(gl.SliceLayout(0, SCORES))
    s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
    if step + 1 == steps:
        memory.q_free.arrive(0)
    s = softmax.biased(s, bias[None, :], SIGN)
    m_ready.wait(0, phase)
    p, m1, _ = softmax.step(s, memory.m0.load(RS), scale, softmax.RESCALE_ABOVE)
    memory.m1.store(m1)
    m_ready.arrive(1)
    a = gl.exp2(m - m1)
    l = l * gl.convert_layout(a, RP)[:, None] + softmax.partial_sums(p)
    o = softmax.rescale(o, a)
    pb = p.to(memory.q.dtype)
    o = warpgroup_mma(gl.convert_layout(pb, LA), kv.slots.index(zero(step) + 3), o, is_async=True)
    kv.wait(Stage(1, phase))
    memory.p1.store(pb)
    fence_async_shared()  # makes P1 and the rows in slot 1 visible
    p_ready.arrive(1)
    p_ready.wait(0, phase)
    o = warpgroup_mma(memory.p0, kv.slots.index(zero(step) + 1), o, is_async=True)
    o = warpgroup_mma_wait(num_outstanding=1, deps=(o,))
    kv.free.arrive(3)
    o = warpgroup_mma_wait(num_outstanding=0, deps=(o,))
    kv.free.arrive(1)
    return o, m1, l
