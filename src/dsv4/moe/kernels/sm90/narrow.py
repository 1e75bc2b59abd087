"""Tiles of few rows of activations on sm_90a: four compute roles, each with 64 rows of weights of every tile.

With so few rows, a step is a chain of waits: for codes, for decoding, for a product that the tensor core finishes at
once. Two roles of 128 rows would leave the SM idle meanwhile, and one token has too few tiles for all SMs. A thread
of wgmma has rows r and r + 8: in product 1 they are gate and up of one channel, so role G has channels 32 G to
32 G + 31; in product 2 they are the rows stored there.
"""

from dsv4.kernels.compat import gl, gluon, warpgroup_mma, warpgroup_mma_wait
from dsv4.kernels.ring import next_stage
from dsv4.moe.kernels.schedule import scale_of
from dsv4.moe.kernels.sm90.outputs import hidden_values, number, with_factors, write_slots
from dsv4.moe.kernels.sm90.sums import ROWS, as_e4m3, bases, decoded, fetched, product_layout, scale_of_part, zeros

NARROW = gl.constexpr(4)  # roles


@gluon.jit
def by_eights(gate, up):
    """Interleave two [32, 4, 4, 2] by eight rows -> [64, 4, 4, 2]."""
    both = gl.join(gate, up).reshape((4, 8, 4, 4, 2, 2))
    return both.permute((0, 5, 1, 2, 3, 4)).reshape((64, 4, 4, 2))


@gluon.jit
def gate_and_up(x):
    """Split [64, N] into two [32, N], the inverse of by_eights."""
    N: gl.constexpr = x.shape[1]
    low, high = gl.split(x.reshape((4, 2, 8, N)).permute((0, 2, 3, 1)))
    return low.reshape((32, N)), high.reshape((32, N))


@gluon.jit
def narrow_sums(stages, stage, steps, factors, G: gl.constexpr, FIRST: gl.constexpr):
    """Return (sums of 64 rows of weights, the stage after the tile)."""
    N: gl.constexpr = stages.x.shape[1]
    LA: gl.constexpr = gl.DotOperandLayout(0, product_layout(gl.num_warps(), N), 4)
    if FIRST:
        base0, base1 = bases(factors, G, 32), bases(factors, NARROW + G, 32)
    else:
        base0 = bases(factors, G, 64)
        base1 = base0
    sums = zeros(N)
    for _ in range(steps):
        at = stage.index
        stages.ready.wait(at, stage.phase)
        if FIRST:
            gate, up = fetched(stages, at, G, 32), fetched(stages, at, NARROW + G, 32)
            scales = scale_of_part(stages, at, 0, N, 0)
            a, b = decoded(gate, base0), decoded(up, base1)
            words = by_eights(gl.join(a[0], a[1]), gl.join(b[0], b[1]))
        else:
            rows = fetched(stages, at, G, 64)
            scales = scale_of_part(stages, at, 0, N, 0)
            a = decoded(rows, base0)
            words = gl.join(a[0], a[1])
        operand = gl.convert_layout(as_e4m3(words), LA, assert_trivial=True)
        x = stages.x.index(at).permute((1, 0))
        product = warpgroup_mma(operand, x, zeros(N), use_acc=False, is_async=True)
        product = warpgroup_mma_wait(num_outstanding=0, deps=(product,))
        stages.free.arrive(at)
        sums += product * scales[None, :]
        stage = next_stage(stage, stages.values.shape[0])
    return sums, stage


@gluon.jit
def write_narrow(sums, x, factors, columns, turn, amax, told, out, G: gl.constexpr, FIRST: gl.constexpr):
    """Write the sums of a tile (outputs.py). x: its numbers."""
    N: gl.constexpr = sums.shape[1]
    block, first, stop = number(x, 1), number(x, 2), number(x, 3)
    if FIRST:
        gate, up = gate_and_up(sums)
        gate, up = with_factors(gate, factors, G), with_factors(up, factors, NARROW + G)
        LN: gl.constexpr = gl.SliceLayout(0, gate.type.layout)
        weight = columns.slice(0, N).load(LN)
        h = hidden_values(gate, up, weight.to(gl.float32, bitcast=True)[None, :], out)
        amax.index(turn * NARROW + G).slice(0, N).store(gl.max(gl.abs(h), 0))
        told.arrive(0)
        told.wait(0, turn)
        largest = amax.index(turn * NARROW).slice(0, N).load(LN)
        for role in gl.static_range(1, NARROW):
            largest = gl.maximum(largest, amax.index(turn * NARROW + role).slice(0, N).load(LN))
        exponent = scale_of(largest)
        inverse = ((254 - exponent) << 23).to(gl.float32, bitcast=True)
        row = gl.arange(0, N, layout=LN)
        there = row < stop - first
        if G == 0:
            scale = (exponent << 23).to(gl.float32, bitcast=True)
            gl.store(out.scale_ptr + block * out.scale_line + number(x, 6) + row, scale, mask=there)
        codes = (h * inverse[None, :]).to(gl.float8e4nv)
        n = gl.arange(0, 32, layout=gl.SliceLayout(1, h.type.layout))
        place = block * 128 + G * 32 + n // 16 * 16 + n % 8 * 2 + n // 8 % 2  # formats.FRAGMENT
        at = ((number(x, 4) + row).to(gl.int64) * out.width)[None, :] + place[:, None]
        gl.store(out.ptr + at, codes, mask=there[None, :])
    else:
        slots = columns.slice(0, N)
        write_slots(with_factors(sums, factors, G), slots, block * ROWS + G * 64, first, stop, out)
