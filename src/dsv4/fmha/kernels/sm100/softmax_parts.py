"""Functions that the roles of forward.py share: they load queries, mask scores, store P, and store finished rows."""

import struct

from triton.language import PropagateNan

from dsv4.fmha.kernels import loads
from dsv4.fmha.kernels.arguments import output_rows, query_rows
from dsv4.fmha.kernels.scores import capped, of_values
from dsv4.fmha.kernels.tiles import mask_pages_by_bits, token_and_head
from dsv4.kernels import softmax
from dsv4.kernels.compat import fence_async_shared, gl, gluon, mbarrier

KEEP_NAN = gl.constexpr(PropagateNan.ALL)


FACTORS = (0.05500895, 0.24221101, 0.69328293, 1.0)  # coefficients of exp2_by_fma


def _by_both(by_unit: int, count: int) -> str:
    """Return the PTX of exp2_by_both: 2^x of `count` values, the first `by_unit` by the exponential unit."""
    constants = dict(zip(("big", "less", "minus", "k3", "k2", "k1", "k0"), (12582912.0, -12582912.0, -1.0, *FACTORS)))
    lines = [".reg .b64 x, r, f, y, " + ", ".join(constants), ".reg .f32 a, b", ".reg .b32 c, d, e, g"]
    lines += [f"mov.b64 {k}, 0x{2 * struct.pack('>f', x).hex()}" for k, x in constants.items()]
    for i in range(by_unit, count, 2):
        lines += [
            f"max.NaN.f32 a, ${count + i}, 0fC2FC0000", f"max.NaN.f32 b, ${count + i + 1}, 0fC2FC0000",
            "mov.b64 x, {a, b}", "add.rn.f32x2 r, x, big", "add.rn.f32x2 f, r, less", "fma.rn.f32x2 f, f, minus, x",
            "fma.rn.f32x2 y, f, k3, k2", "fma.rn.f32x2 y, y, f, k1", "fma.rn.f32x2 y, y, f, k0", "mov.b64 {c, d}, r",
            "mov.b64 {e, g}, y", "shl.b32 c, c, 23", "shl.b32 d, d, 23", f"add.s32 ${i}, c, e",
            f"add.s32 ${i + 1}, d, g",
        ]  # fmt: skip
    lines += [f"ex2.approx.ftz.f32 ${i}, ${count + i}" for i in range(by_unit)]
    return "{ " + "; ".join(lines) + "; }"


BY_BOTH = gl.constexpr(_by_both(10, 16))
REGISTERS = gl.constexpr(",".join(["=&r"] * 16 + ["r"] * 16))


@gluon.jit
def load_queries(memory, work_tile, tile_row, sign, TILE: gl.constexpr, D: gl.constexpr, AT_A_TIME: gl.constexpr):
    """Load the query rows of one tile into shared memory."""
    q = memory.q
    BM: gl.constexpr = q.shape[1]
    DS: gl.constexpr = q.shape[2]
    PARTS: gl.constexpr = D // DS
    for part in gl.static_range(PARTS):
        part_of_q = q.index(TILE * PARTS + part)
        loads.load_rows(query_rows(work_tile), part_of_q, tile_row, part * DS, BM, DS, AT_A_TIME, sign)
    fence_async_shared()  # generic stores -> tensor-core reads
    memory.q_ready.arrive(TILE)


@gluon.jit
def scores(s, first_column, masked, bounds, L: gl.constexpr, KV_LOAD: gl.constexpr):
    """Return some columns of S from tensor memory; keys that a row does not see are -inf."""
    x = capped(s.load(), bounds.scale)
    if masked:
        x = softmax.apply_mask(x, first_column, bounds.row_first, bounds.row_end, L)
        if KV_LOAD >= loads.PAGES:
            if bounds.bad:
                x = mask_pages_by_bits(x, first_column, bounds.keys, bounds.pages, L)
    return x


@gluon.jit
def exp2_by_fma(x):
    """Return 2^x for x up to 127, with a relative error of 1.1e-4, by plain arithmetic: the exponential unit of an SM
    computes only 16 per cycle. Below -126 the result is 2^-126.

    Adding and subtracting 2^23 + 2^22 leaves the nearest integer, which is in the low bits of the sum. 2^f of the
    remainder f, from -1/2 to 1/2, is the polynomial with the smallest maximum relative error.
    """
    x = gl.maximum(x, -126.0, propagate_nan=KEEP_NAN)
    rounded = x + 12582912.0
    f = x - (rounded - 12582912.0)
    y = ((0.05500895 * f + 0.24221101) * f + 0.69328293) * f + 1.0
    return (y.to(gl.int32, bitcast=True) + (rounded.to(gl.int32, bitcast=True) << 23)).to(gl.float32, bitcast=True)


@gluon.jit
def exp2_by_both(x):
    """Return 2^x for x up to 127: of 16 columns 10 by the exponential unit, 6 by FMA as in exp2_by_fma, in pairs."""
    return gl.inline_asm_elementwise(BY_BOTH, REGISTERS, [x], dtype=gl.float32, is_pure=True, pack=16)


@gluon.jit
def halves(x):
    """Return the first half of the columns and the second."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()


@gluon.jit
def whole(a, b):
    """Return the columns of a, then those of b."""
    return gl.join(a, gl.convert_layout(b, a.type.layout)).permute((0, 2, 1)).reshape([a.shape[0], 2 * a.shape[1]])


@gluon.jit
def store_p(x, factor, m, p):
    """Store P = exp2(x factor - m) of some columns where the tensor core reads it; return P before rounding."""
    y = gl.exp2(x * factor[:, None] - m[:, None])
    p.store(y.to(p.dtype))
    return y


@gluon.jit
def store_rows(work_tile, o, pv_done, m, l, tile_row, n, before, split, D: gl.constexpr, C: gl.constexpr):
    """Store O of one tile, normalised, C columns at a time, and its LSE. n: tiles of keys, all in O at pv_done; before:
    phases of pv_done before them."""
    tensors, strides, problem = work_tile.tensors, work_tile.strides, work_tile.problem
    BM: gl.constexpr = o.shape[0]
    LO: gl.constexpr = o.slice(0, C).get_reg_layout()
    RO: gl.constexpr = gl.SliceLayout(1, LO)
    m = gl.convert_layout(m, RO)
    l = gl.convert_layout(l, RO)
    row = tile_row + gl.arange(0, BM, layout=RO)
    token, q_head = token_and_head(row, problem.head, problem.group)
    here = row < problem.rows
    part = (work_tile.tiles.part_row + token.to(gl.int64)) * problem.q_heads + q_head
    target = loads.row_offsets(row, output_rows(work_tile))
    sink = softmax.sink_of(tensors.sink_ptr, q_head, here & (split == 0))
    factor, lse = softmax.finish(softmax.true_maximum(m, problem.scale), l, sink)
    factor = of_values(factor, problem.score_scale)
    if split != 0:  # normalised partial result and its LSE in base 2; the combine kernel applies the sink
        gl.store(tensors.part_lse_ptr + part, lse, mask=here)
    else:
        loads.store_lse(lse * softmax.LN2, tensors.lse_ptr, token, q_head, strides, here & (problem.want_lse != 0))
    if n > 0:
        mbarrier.wait(pv_done, (before + n - 1) % 2)
    for c in gl.static_range(D // C):
        column = c * C + gl.arange(0, C, layout=gl.SliceLayout(0, LO))
        x = gl.zeros([BM, C], gl.float32, LO)
        if n > 0:  # without a tile, O was never written
            x = o.slice(c * C, C).load() * factor[:, None]
        if split != 0:
            gl.store(tensors.part_ptr + (part * D)[:, None] + column[None, :], x, mask=here[:, None])
        else:
            y = x.to(tensors.out_ptr.dtype.element_ty)
            gl.store(tensors.out_ptr + target[:, None] + column[None, :], y, mask=here[:, None])
