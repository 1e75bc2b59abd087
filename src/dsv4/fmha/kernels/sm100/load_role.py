"""The load role of forward.py: K and V tiles into the ring, in the order in which the mma role reads them."""

from dsv4.fmha.kernels import loads
from dsv4.kernels.compat import Value, aggregate, gl, gluon, mbarrier


@aggregate
class Filling:
    """Where the load role stands."""

    slot: Value
    phase: Value  # of that slot's barriers
    filled: Value  # slots so far
    landed_phase: Value


@gluon.jit
def advance(slot, phase, SLOTS: gl.constexpr):
    """The next ring slot and the phase of its barrier."""
    slot += 1
    wrapped = slot == SLOTS
    return gl.where(wrapped, 0, slot), gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def load_tile(desc, cells, memory, barriers, state, where, row, D: gl.constexpr, HOW: gl.constexpr):
    """One K or V tile: D // DS ring slots."""
    ring, slot_ready = memory.ring, barriers.slot_ready
    SLOTS: gl.constexpr = ring.shape[0]
    BN: gl.constexpr = ring.shape[1]
    DS: gl.constexpr = ring.shape[2]
    slot, phase, filled, landed_phase = state.slot, state.phase, state.filled, state.landed_phase
    for part in gl.static_range(D // DS):
        mbarrier.wait(barriers.slot_free.index(slot), phase ^ 1)
        if HOW == loads.CELLS:
            loads.copy_cells(cells, ring.index(slot), where, row, part * DS, BN, DS)
            if filled > 0:  # this slot's copies are under way while the one before is announced
                loads.announce(slot_ready.index(gl.where(slot == 0, SLOTS, slot) - 1), 1)
        else:
            landed_phase = loads.fill(desc, ring.index(slot), slot_ready.index(slot), barriers.landed, landed_phase,
                                      where, row, part * DS, BN, DS, HOW)  # fmt: skip
        slot, phase = advance(slot, phase, SLOTS)
        filled += 1
    return Filling(slot, phase, filled, landed_phase)


@gluon.jit
def load_k(state, source, memory, barriers, row, D: gl.constexpr, HOW: gl.constexpr):
    return load_tile(source.k_desc, source.k_cells, memory, barriers, state, source.where, row, D, HOW)


@gluon.jit
def load_v(state, source, memory, barriers, row, D: gl.constexpr, HOW: gl.constexpr):
    return load_tile(source.v_desc, source.v_cells, memory, barriers, state, source.where, row, D, HOW)


@gluon.jit
def load_role(source, memory, barriers, tiles, k_is_v, D: gl.constexpr, HOW: gl.constexpr):
    """Fills the ring in the order in which the mma role reads it: K0 K1 V0 K2 V1 .., or K0 K1 K2 .. when k is v."""
    SLOTS: gl.constexpr = memory.ring.shape[0]
    BN: gl.constexpr = memory.ring.shape[1]
    state = Filling(gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0))
    if tiles.begin < tiles.end:
        state = load_k(state, source, memory, barriers, tiles.first + tiles.begin * BN, D, HOW)
        mbarrier.wait(barriers.q_ready.index(0), 0)  # Q of the first tile before more keys: nothing starts without it
    for tile in range(tiles.begin, tiles.end):
        row = tiles.first + tile * BN
        if tile + 1 < tiles.end:
            state = load_k(state, source, memory, barriers, row + BN, D, HOW)
        if k_is_v == 0:
            state = load_v(state, source, memory, barriers, row, D, HOW)
    if HOW == loads.CELLS:
        if state.filled > 0:
            loads.announce(barriers.slot_ready.index(gl.where(state.slot == 0, SLOTS, state.slot) - 1), 0)
