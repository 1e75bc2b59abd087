"""Compute, once per query row, delta = dO . O and the exponent that the gradient kernels subtract.

The kernels that follow know neither the sink nor the gradient of the LSE: the two numbers of a row include both. With L
the LSE (sink excluded) and L' = log(e^L + e^sink)::

    P  = 2^(s - lse2),  lse2 = L' / ln 2      +inf where the row sees nothing: P is 0 without a branch
    dS = P (dP - delta),  delta = dO . O - dL e^(L' - L)

The last factor must stay finite, and its product with P, which is e^(s - L) dL, must not depend on the sink. So if dL
is not 0, both stop at L' = L + 60: with a sink that is farther above the LSE, dO's own terms are e^-60 of their size
rather than less.

lse2 is an fp32 number, so P is off by a factor of up to 2^(lse2 2^-23). From 2^28 on that is 2^32, and lse2 is NaN.
"""

from typing import NamedTuple

from dsv4.kernels import dependent
from dsv4.kernels.compat import Value, gl, gluon
from dsv4.kernels.softmax import LARGE, LOG2E

FARTHEST = gl.constexpr(60.0)


@gluon.constexpr_function
def row_layout(d):
    """Return the layout of [rows, d] of 16-bit numbers, with 16 bytes per thread and four warps."""
    lanes = min(d // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def terms(dot, lse, sink, dlse):
    """Compute from dO . O, LSE, sink (-inf: none) and the LSE's gradient of some rows -> lse2, delta, dO . O or 0 where
    the row sees nothing, and the sink's share of the softmax."""
    empty = lse == -float("inf")
    plain = gl.where(empty, 0.0, dot)
    lse = gl.where(empty, 0.0, lse)
    over = sink - lse
    # L' - L = log(1 + e^over), also where e^over overflows
    small = gl.minimum(over, FARTHEST)
    beyond = gl.where(over > FARTHEST, over, gl.log2(1.0 + gl.exp2(small * LOG2E)) / LOG2E)
    near = gl.minimum(beyond, FARTHEST)
    lse2 = gl.where(empty, float("inf"), (lse + gl.where(dlse == 0.0, beyond, near)) * LOG2E)
    lse2 = gl.where(gl.abs(lse) * LOG2E < (1 << LARGE), lse2, float("nan"))
    delta = plain - gl.where(empty, 0.0, dlse) * gl.exp2(near * LOG2E)
    share = gl.where(empty, 0.0, gl.where(over > FARTHEST, 1.0, gl.exp2((small - beyond) * LOG2E)))
    return lse2, delta, plain, share


class RowTensors(NamedTuple):
    any_alignment = ("lse_ptr", "dlse_ptr", "sink_ptr")

    out_ptr: Value
    dout_ptr: Value
    lse_ptr: Value
    dlse_ptr: Value
    sink_ptr: Value
    lse2_ptr: Value  # outputs, from here on
    delta_ptr: Value
    plain_ptr: Value
    zero_ptr: Value  # fp32, or unused
    ticket_ptr: Value  # int32 [1], to be zeroed


class RowSizes(NamedTuple):
    tokens: Value
    q_heads: Value
    group: Value
    has_sink: Value
    has_dlse: Value
    has_plain: Value
    zeros: Value  # blocks of TOKENS x D to be zeroed: the sums


class RowStrides(NamedTuple):
    """The strides of out and dout, in units of 8 elements."""

    out_batch: Value
    out_token: Value
    out_head: Value
    dout_batch: Value
    dout_token: Value
    dout_head: Value
    lse_batch: Value
    lse_head: Value
    lse_token: Value
    dlse_batch: Value
    dlse_head: Value
    dlse_token: Value


@gluon.jit
def backward_rows(tensors, sizes, strides, D: gl.constexpr, TOKENS: gl.constexpr):
    """Process consecutive tokens of a head: they fill the sectors of everything that has one number per row, and
    neighbouring programs have neighbouring heads. Results lie by (sequence, KV head, token, head of the group). Strides
    of out and dout are in units of 8 elements. plain: dO . O, for dsink."""
    L: gl.constexpr = row_layout(D)
    dependent.launch_dependents()
    piece = gl.program_id(0) // sizes.q_heads
    head = (gl.program_id(0) - piece * sizes.q_heads).to(gl.int64)
    spans = (sizes.tokens + TOKENS - 1) // TOKENS
    batch = (piece // spans).to(gl.int64)
    first = piece % spans * TOKENS
    gl.store(tensors.ticket_ptr, 0, mask=gl.program_id(0) == 0)

    column = gl.arange(0, D, layout=gl.SliceLayout(0, L))[None, :]
    token = (first + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, L))).to(gl.int64)[:, None]
    there = token < sizes.tokens
    out_ptr = tensors.out_ptr + (batch * strides.out_batch + head * strides.out_head) * 8
    dout_ptr = tensors.dout_ptr + (batch * strides.dout_batch + head * strides.dout_head) * 8
    o = gl.load(out_ptr + token * (strides.out_token * 8) + column, mask=there, other=0.0)
    do = gl.load(dout_ptr + token * (strides.dout_token * 8) + column, mask=there, other=0.0)

    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])  # a thread has one row
    token = (first + gl.arange(0, TOKENS, layout=ONE)).to(gl.int64)
    there = token < sizes.tokens
    lse_ptr = tensors.lse_ptr + batch * strides.lse_batch + head * strides.lse_head
    lse = gl.load(lse_ptr + token * strides.lse_token, mask=there, other=-float("inf"))
    sink = gl.load(tensors.sink_ptr + head, mask=sizes.has_sink != 0, other=-float("inf"))
    dlse_ptr = tensors.dlse_ptr + batch * strides.dlse_batch + head * strides.dlse_head
    dlse = gl.load(dlse_ptr + token * strides.dlse_token, mask=there & (sizes.has_dlse != 0), other=0.0)
    dot = gl.convert_layout(gl.sum(o.to(gl.float32) * do.to(gl.float32), 1), ONE)
    lse2, delta, plain, _ = terms(dot, lse, sink, dlse)
    packed = head // sizes.group
    place = (batch * (sizes.q_heads // sizes.group) + packed) * sizes.tokens * sizes.group
    place += token * sizes.group + (head - packed * sizes.group)
    gl.store(tensors.lse2_ptr + place, lse2, mask=there)
    gl.store(tensors.delta_ptr + place, delta, mask=there)
    gl.store(tensors.plain_ptr + place, plain, mask=there & (sizes.has_plain != 0))
    line = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, L))[:, None] * D + column
    for block in range(gl.program_id(0), sizes.zeros, gl.num_programs(0)):
        gl.store(tensors.zero_ptr + block.to(gl.int64) * (TOKENS * D) + line, gl.zeros([TOKENS, D], gl.float32, L))
