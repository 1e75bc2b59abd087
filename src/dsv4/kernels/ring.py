"""Rings of buffers between a producer and its consumers, in the words of CUTLASS's pipelines.

A Ring has slots and two mbarriers for each: `ready` (CUTLASS: full) completes when the slot is filled, `free` (empty)
when all consumers have read it. Both sides walk over the slots in the same order, each with a Stage of its own::

    producer                                        consumer
    stage = producer_stage()                        stage = consumer_stage()
    for ...:                                        for ...:
        ring.acquire(stage)       waits for free        ring.wait(stage)       waits for ready
        fill ring.slot(stage)                           read ring.slot(stage)
        ring.commit(stage)        arrives at ready      ring.release(stage)    arrives at free
        stage = ring.next(stage)                        stage = ring.next(stage)

TMA does not commit: it gets the barrier, `ring.ready_at(stage)`, and its bytes complete the phase. A tensor core that
reads a slot (tcgen05) releases it when the products issued so far are complete: `release_after_mma`.

The phase is the parity of a round over the slots. A wait on a barrier that nothing has arrived at yet passes for
parity 1, so a producer that begins with 1 finds every slot free. A Stage is a value: it changes only by `next`. Kernels
with a few slots in a fixed order make their own (`Stage(2, phase)`), which costs no instruction.

Barriers without slots are `new_barriers`. A kernel makes all of its barriers and rings, then calls `init_barriers`.
"""

from triton.experimental.gluon.language.nvidia.blackwell import tcgen05_commit

from dsv4.kernels.compat import Value, aggregate, gl, gluon, mbarrier


@aggregate
class Barriers:
    """mbarriers of one kind."""

    bars: Value
    count: Value  # arrivals that complete a phase

    @gluon.jit
    def at(self, i):
        return self.bars.index(i)

    @gluon.jit
    def arrive(self, i, pred=True):
        mbarrier.arrive(self.bars.index(i), count=1, pred=pred)

    @gluon.jit
    def arrive_once(self, i, pred=True):
        """Arrive for all warps, which have met at a barrier of theirs. The compiler takes an `arrive` for an access to
        all of shared memory, and puts a barrier of warps before and after it; not with this."""
        mbarrier.expect(self.bars.index(i), 0, pred=pred)

    @gluon.jit
    def arrive_after_mma(self, i, pred=True):
        """Arrive once the products of the tensor core (tcgen05) that this thread has issued are complete."""
        tcgen05_commit(self.bars.index(i), pred=pred)

    @gluon.jit
    def wait(self, i, phase, pred=True):
        mbarrier.wait(self.bars.index(i), phase, pred=pred)


@gluon.jit
def new_barriers(N: gl.constexpr, COUNT: gl.constexpr = 1):
    """Return N barriers of COUNT arrivals, to be initialised by init_barriers.

    Only barriers that are used may be made: the compiler gives the place of others away, and nothing orders their
    initialisation before what is written there.
    """
    return Barriers(gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout()), COUNT)


@gluon.jit
def new_pair_barriers(N: gl.constexpr, COUNT: gl.constexpr = 1, TWO_CTAS: gl.constexpr = False):
    """Return the same for a pair of CTAs: one in each, or with TWO_CTAS one for both, in the first."""
    return Barriers(mbarrier.allocate_mbarrier(batch=N, two_ctas=TWO_CTAS), COUNT)


@gluon.constexpr_function
def _most(kinds):
    return max(x.bars.shape[0] for x in kinds)


@gluon.jit
def init_barriers(kinds):
    """Initialise barriers of all kinds together: the first of each, then the second of each and so on. The compiler
    puts a barrier of all threads between two initialisations in one allocation."""
    for i in gl.static_range(_most(kinds)):
        for kind in gl.static_range(len(kinds)):
            if i < kinds[kind].bars.shape[0]:
                mbarrier.init(kinds[kind].bars.index(i), count=kinds[kind].count)


@aggregate
class Stage:
    """Where one side stands: a slot, and the parity of the phase that it waits for."""

    index: Value
    phase: Value


@gluon.jit
def producer_stage():
    return Stage(gl.to_tensor(0), gl.to_tensor(1))


@gluon.jit
def consumer_stage():
    return Stage(gl.to_tensor(0), gl.to_tensor(0))


@gluon.jit
def next_stage(stage, SLOTS: gl.constexpr):
    index = stage.index + 1
    wrapped = index == SLOTS
    return Stage(gl.where(wrapped, 0, index), gl.where(wrapped, stage.phase ^ 1, stage.phase))


@aggregate
class Ring:
    slots: Value
    ready: Barriers
    free: Barriers

    @gluon.jit
    def slot(self, stage):
        return self.slots.index(stage.index)

    @gluon.jit
    def ready_at(self, stage):
        return self.ready.at(stage.index)

    @gluon.jit
    def acquire(self, stage):
        self.free.wait(stage.index, stage.phase)

    @gluon.jit
    def commit(self, stage):
        self.ready.arrive(stage.index)

    @gluon.jit
    def wait(self, stage, pred=True):
        self.ready.wait(stage.index, stage.phase, pred)

    @gluon.jit
    def release(self, stage, pred=True):
        self.free.arrive(stage.index, pred)

    @gluon.jit
    def release_after_mma(self, stage, pred=True):
        self.free.arrive_after_mma(stage.index, pred)

    @gluon.jit
    def next(self, stage):
        return next_stage(stage, self.slots.shape[0])


@gluon.jit
def new_ring(slots, CONSUMERS: gl.constexpr = 1, PRODUCERS: gl.constexpr = 1):
    """Return a ring over the first dimension of ``slots``. CONSUMERS release a slot; PRODUCERS commit it, TMA being
    one.
    """
    N: gl.constexpr = slots.shape[0]
    return Ring(slots, new_barriers(N, PRODUCERS), new_barriers(N, CONSUMERS))
