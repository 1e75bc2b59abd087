"""The load role of forward.py: K and V tiles into the ring, in the order in which the mma role reads them."""

from dsv4.fmha.kernels import e4m3_rows, loads
from dsv4.fmha.kernels.e4m3_rows import in_codes
from dsv4.kernels.compat import Value, aggregate, gl, gluon
from dsv4.kernels.ring import Stage, producer_stage


@aggregate
class Filling:
    """The progress of the load role."""

    stage: Stage
    filled: Value  # slots so far
    landed_phase: Value


@gluon.jit
def announce_before(ring, stage, PENDING: gl.constexpr):
    """Announce the slot before this stage, once all but the newest PENDING groups of cp.async have landed."""
    SLOTS: gl.constexpr = ring.slots.shape[0]
    loads.announce(ring.ready.at(gl.where(stage.index == 0, SLOTS, stage.index) - 1), PENDING)


@gluon.jit
def load_tile(desc, kv_rows, memory, state, where, row, D: gl.constexpr, KV_LOAD: gl.constexpr):
    """Load one K or V tile into D // DS ring slots."""
    ring = memory.ring
    BN: gl.constexpr = ring.slots.shape[1]
    DS: gl.constexpr = ring.slots.shape[2]
    stage, filled, landed_phase = state.stage, state.filled, state.landed_phase
    for part in gl.static_range(D // DS):
        ring.acquire(stage)
        if in_codes(kv_rows.ptr.dtype):
            e4m3_rows.fill(
                kv_rows, ring.slot(stage), ring.ready_at(stage), where, row, part * DS, KV_LOAD >= loads.PAGES
            )
        elif KV_LOAD == loads.CP_ASYNC:
            loads.cp_async_rows(kv_rows, ring.slot(stage), where, row, part * DS, BN, DS)
            if filled > 0:  # this slot's copies are in flight while the previous slot is announced
                announce_before(ring, stage, 1)
        else:
            landed_phase = loads.fill(
                desc,
                ring.slot(stage),
                ring.ready_at(stage),
                memory.landed.at(0),
                landed_phase,
                where,
                row,
                part * DS,
                BN,
                DS,
                KV_LOAD,
            )
        stage = ring.next(stage)
        filled += 1
    return Filling(stage, filled, landed_phase)


@gluon.jit
def load_k(state, source, memory, row, D: gl.constexpr, KV_LOAD: gl.constexpr):
    return load_tile(source.k_desc, source.k_rows, memory, state, source.where, row, D, KV_LOAD)


@gluon.jit
def load_v(state, source, memory, row, D: gl.constexpr, KV_LOAD: gl.constexpr):
    return load_tile(source.v_desc, source.v_rows, memory, state, source.where, row, D, KV_LOAD)


@gluon.jit
def load_role(source, memory, tiles, k_is_v, D: gl.constexpr, KV_LOAD: gl.constexpr):
    state = Filling(producer_stage(), gl.to_tensor(0), gl.to_tensor(0))
    state = load_keys(state, source, memory, tiles, k_is_v, True, D, KV_LOAD)
    if KV_LOAD == loads.CP_ASYNC and not in_codes(source.k_rows.ptr.dtype):
        if state.filled > 0:
            announce_before(memory.ring, state.stage, 0)


@gluon.jit
def load_keys(state, source, memory, tiles, k_is_v, is_first, D: gl.constexpr, KV_LOAD: gl.constexpr):
    """Fill the ring in the order in which the mma role reads it: K0 K1 V0 K2 V1 .., or K0 K1 K2 .. if k is v.
    is_first: these are the CTA's first keys."""
    BN: gl.constexpr = memory.ring.slots.shape[1]
    if tiles.begin < tiles.end:
        state = load_k(state, source, memory, tiles.first + tiles.begin * BN, D, KV_LOAD)
        if is_first:
            memory.q_ready.wait(0, 0)  # Q of the first tile before more keys: nothing starts without it
    for tile in range(tiles.begin, tiles.end):
        row = tiles.first + tile * BN
        if tile + 1 < tiles.end:
            state = load_k(state, source, memory, row + BN, D, KV_LOAD)
        if k_is_v == 0:
            state = load_v(state, source, memory, row, D, KV_LOAD)
    return state
